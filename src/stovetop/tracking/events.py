"""The one stream of events of a run: what an event is, the end that writes and the end that reads.

The writing end, `EventStream`, has the methods of the usual machine-learning logger (log_hparams, log_metrics,
log_long_text, ...); each of them makes an event of a fixed name. The reading end is a `Sink`: a file, a terminal, a
tracking service. So a logger is a stream with sinks, and a new backend says in one method, `receive`, what it does with
an event. Nothing here touches a disk or a terminal.
"""

import json
import logging
import math
import numbers
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

from stovetop.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import JsonValue

log = logging.getLogger(__name__)

# The names that the stream itself gives. All others (`training.step`, `stage.start`, ...) are the caller's.
CONFIG = "run.config"  # values and labels: every field of the config, nested ones with dots
METRICS = "run.metrics"  # values: the numbers of one step
TEXT = "run.text"  # labels: title, and text in Markdown


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened. Numbers are in `values`, words in `labels`."""

    name: str  # noun and verb with a dot between: "training.step"
    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    time: float = 0.0  # seconds since 1970

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+", self.name):
            raise InvalidRequest(f"an event is named with a dot, in lower case, like 'training.step': {self.name!r}")


class Sink(Protocol):
    """Reads the stream. Events that mean nothing to a sink are its to skip."""

    def receive(self, event: Event) -> None: ...
    def sync(self) -> None:
        """Returns when all that was received lies where it belongs."""
        ...

    def close(self) -> None:
        """Nothing is received afterwards. A second call does nothing."""
        ...

    def get_logger_url(self) -> str | None:
        """Where a person can look at it."""
        ...


class Recorder:
    """A sink that keeps every event: for tests, and for a look at a run from within."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def receive(self, event: Event) -> None:
        self.events.append(event)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_logger_url(self) -> str | None:
        return None


class EventStream:
    """Hands each event to the sinks of the `record`, then to the others, in order. What a sink of the record raises is
    raised: a run that is not recorded must not go on. One of the others that fails is reported once, and what it lost
    is counted when the stream closes; the rest, and the training, go on."""

    def __init__(
        self, sinks: Sequence[Sink], *, record: Sequence[Sink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self._record = tuple(record)
        self._sinks = [_Attached(sink) for sink in sinks]
        self._clock = clock

    def attach(self, sink: Sink, wanted: Callable[[Event], bool] | None = None) -> None:
        """From now on the sink receives the events too that are `wanted`; None: all. It is closed with the stream."""
        self._sinks.append(_Attached(sink, wanted))

    def detach(self, sink: Sink) -> None:
        """From now on it receives nothing, and is not closed with the stream. One that is not attached is refused."""
        found = next((each for each in self._sinks if each.sink is sink), None)
        if found is None:
            raise InvalidRequest(f"this sink is not attached to the stream: {sink!r}")
        self._sinks.remove(found)

    def emit(self, name: str, /, *, step: int | None = None, **fields: SupportsFloat | str) -> None:
        """`emit("training.step", step=3, loss=0.5, dataset="chats")`: numbers become values, strings labels."""
        values = {key: as_number(key, value) for key, value in fields.items() if not isinstance(value, str)}
        labels = {key: value for key, value in fields.items() if isinstance(value, str)}
        self.publish(Event(name, step, values, labels, self._clock()))

    def publish(self, event: Event) -> None:
        self._for_each_sink(lambda sink: sink.receive(event), event)

    def log_hparams(self, config: "Mapping[str, JsonValue]") -> None:
        values: dict[str, float] = {}
        labels: dict[str, str] = {}
        for key, value in _flattened(config).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[key] = value
            else:
                labels[key] = value if isinstance(value, str) else json.dumps(value)
        self.publish(Event(CONFIG, None, values, labels, self._clock()))

    def log_metrics(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        values = {key: as_number(key, value) for key, value in metrics.items()}
        if "step" in values:
            raise InvalidRequest("a metric cannot be called 'step', rows are numbered by that; rename it")
        self.publish(Event(METRICS, step, values, {}, self._clock()))

    def log_long_text(self, title: str, text: str) -> None:
        """`text` is Markdown."""
        self.publish(Event(TEXT, None, {}, {"title": title, "text": text}, self._clock()))

    def get_logger_url(self) -> str | None:
        """That of the first sink that has one."""
        urls: list[str | None] = []
        self._for_each_sink(lambda sink: urls.append(sink.get_logger_url()))
        return next((url for url in urls if url is not None), None)

    def sync(self) -> None:
        self._for_each_sink(lambda sink: sink.sync())

    def close(self) -> None:
        try:
            self._for_each_sink(lambda sink: sink.close())
        finally:
            for each in self._sinks:
                if each.num_failures:
                    log.warning("%s failed %d times in this run", type(each.sink).__name__, each.num_failures)

    def _for_each_sink(self, call: Callable[[Sink], None], event: Event | None = None) -> None:
        for sink in self._record:
            call(sink)
        for each in list(self._sinks):
            try:
                if event is None or each.wanted is None or each.wanted(event):
                    call(each.sink)
            except Exception:
                if each.num_failures == 0:
                    log.exception("%s failed; the others go on, this is reported once", type(each.sink).__name__)
                each.num_failures += 1


@dataclass(slots=True, eq=False)
class _Attached:
    """A sink of a stream that is not of its record."""

    sink: Sink
    wanted: Callable[[Event], bool] | None = None
    num_failures: int = 0


def as_number(key: str, value: SupportsFloat) -> float:
    """A plain int or float of whatever counts as a number: numpy's, a tensor of one element."""
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{key!r} must be a number, got {type(value).__name__}: {value!r}") from error


# ---- rows of JSON ----------------------------------------------------------------------------------------------------


def encode_number(number: float) -> float | str:
    """JSON has no word for what is not finite: it becomes "NaN", "Infinity" or "-Infinity", which `float` reads."""
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def decode_number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


def event_to_row(event: Event) -> dict[str, Any]:
    values = {key: encode_number(value) for key, value in event.values.items()}
    row = {"time": event.time, "name": event.name, "step": event.step, "values": values, "labels": dict(event.labels)}
    return {key: value for key, value in row.items() if value not in (None, {})}


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event of a row of events.jsonl. A row that is none is refused by its key."""
    name, time_s, labels = row.get("name"), row.get("time"), row.get("labels", {})
    step = None if row.get("step") is None else step_of_row(row)
    if not isinstance(name, str):
        raise InvalidRequest(f"an event needs a name, a string: {name!r}")
    if not isinstance(time_s, int | float) or isinstance(time_s, bool):
        raise InvalidRequest(f"an event needs a time, in seconds since 1970: {time_s!r}")
    if not isinstance(labels, dict) or not all(isinstance(word, str) for word in labels.values()):  # pyright: ignore[reportUnknownVariableType]  what json gives
        raise InvalidRequest(f"the labels of an event are an object of strings: {labels!r}")
    return Event(name, step, numbers_of_row(row.get("values", {})), labels, time_s)  # pyright: ignore[reportUnknownArgumentType]  as above


def metrics_from_row(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, the step among them. A row that is none is refused by its key."""
    step_of_row(row)
    return numbers_of_row(row)


def step_of_row(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    if type(step) is not int or step < 0:
        raise InvalidRequest(f"a row needs a step, an integer of at least 0: {step!r}")
    return step


def numbers_of_row(values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise InvalidRequest(f"the values of an event are an object of numbers: {values!r}")
    numbers_by_key: dict[str, float] = {}
    for key, value in values.items():  # pyright: ignore[reportUnknownVariableType]  what json gives
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and value not in ("NaN", "Infinity", "-Infinity"):
            raise InvalidRequest(f'{key!r} must be a number, or "NaN", "Infinity" or "-Infinity": {value!r}')
        numbers_by_key[key] = decode_number(value)  # pyright: ignore[reportUnknownArgumentType]  as above
    return numbers_by_key


def _flattened(config: "Mapping[str, JsonValue]", prefix: str = "") -> "dict[str, JsonValue]":
    flat: dict[str, JsonValue] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat

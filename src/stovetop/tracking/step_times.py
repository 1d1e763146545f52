"""Where the time of a step went, as metrics: what the calls of the service took, and what the engines did meanwhile.

All keys begin with `time/`: two runs whose other numbers are equal to the bit may differ in these. Each is of what
happened since the row before, or since the loop began.

    time/step                    seconds since the row before: what a step takes, where several overlap
    time/VERB:total              of calls that were answered, from when each was made, so with its time in the queue;
    time/VERB:count :mean :max   and of several of one verb, how many, and how long one took
    time/engine/...              see `_engine`; there where an engine runs in this process
"""

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from stovetop.calls import AnsweredCall
from stovetop.client import ServiceClient
from stovetop.tracking.trace import current_tracer


class StepTimes:
    """Those of a loop. Made by `listening`."""

    def __init__(self, service: ServiceClient | None) -> None:
        """Without a service it measures whole steps alone."""
        self._service = service
        self._tracer = current_tracer()
        self._last_row_s = time.perf_counter()
        self._figures = self._figures_now()
        self._answered: list[AnsweredCall] = []
        self._lock = threading.Lock()  # protects it: calls are answered in other threads

    def heard(self, call: AnsweredCall) -> None:
        """A call was answered."""
        if self._tracer is not None:
            self._tracer.call(call)
        with self._lock:
            self._answered.append(call)

    def since_last_row(self) -> dict[str, float]:
        """The metrics of a row that is logged now."""
        before_s, self._last_row_s = self._last_row_s, time.perf_counter()
        step_s = self._last_row_s - before_s
        with self._lock:
            answered, self._answered = self._answered, []
        before, self._figures = self._figures, self._figures_now()
        done = {name: value - before.get(name, 0) for name, value in self._figures.items()}
        return {"time/step": step_s, **_calls(answered), **_engine(answered, done, step_s)}

    def _figures_now(self) -> Mapping[str, float]:
        return {} if self._service is None else self._service.engine_figures()


@contextmanager
def listening(service: ServiceClient | None) -> Generator[StepTimes]:
    """Within, the calls of the service are counted. Enter it before the first step."""
    times = StepTimes(service)
    if service is None:
        yield times
        return
    with service.listening(times.heard):
        yield times


def _calls(answered: list[AnsweredCall]) -> dict[str, float]:
    """By verb."""
    took_s: dict[str, list[float]] = {}
    for call in answered:
        took_s.setdefault(call.verb, []).append(call.ended_s - call.begun_s)
    metrics: dict[str, float] = {}
    for verb, seconds in took_s.items():
        metrics[f"time/{verb}:total"] = sum(seconds)
        if len(seconds) > 1:
            metrics[f"time/{verb}:count"] = len(seconds)
            metrics[f"time/{verb}:mean"] = sum(seconds) / len(seconds)
            metrics[f"time/{verb}:max"] = max(seconds)
    return metrics


def _engine(answered: list[AnsweredCall], done: Mapping[str, float], step_s: float) -> dict[str, float]:
    """What the engines did: their shares of the time of the step; tokens of the calls that were answered, read and
    drawn, a second; the share of prompts that earlier ones had computed; passes and steps; adapters that were moved."""
    if not done or step_s <= 0:
        return {}
    read = sum(call.tokens.computed for call in answered)
    cached = sum(call.tokens.cached for call in answered)
    prompts = sum(call.tokens.computed for call in answered if call.verb == "sample")
    metrics = {f"time/engine/{what}_share": done[f"{what}_s"] / step_s for what in ("training", "sampling", "waiting")}
    metrics |= {
        "time/engine/tokens_in_per_s": read / step_s,
        "time/engine/tokens_out_per_s": sum(call.tokens.drawn for call in answered) / step_s,
        "time/engine/training_passes": done["num_training_passes"],
        "time/engine/sampling_steps": done["num_sampling_steps"],
        "time/engine/adapters_moved": done["num_adapters_moved"],
    }
    if prompts:
        metrics["time/engine/cached_share"] = cached / prompts
    return metrics

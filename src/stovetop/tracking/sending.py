"""Brings the record of a run to a tracker: what its files hold and the tracker has not got yet.

A run's files are the record, and a thread of its own sends what is new in them: training never waits for a network. A
tracker that is down is reported once. How far it has got is in `tracker-NAME.json` in the run's folder, so that it goes
on there when it is back, when the run goes on, and with `stovetop sync`.

    {"key": of the run at the tracker, "folder": of the run here, "url": ..., "step": the last one that was sent,
     "num_others": how many texts and files were}
"""

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stovetop.durable import parse_rows
from stovetop.errors import StovetopError
from stovetop.tracking.events import CONFIG, METRICS, TEXT, Event, event_from_row, metrics_from_row
from stovetop.tracking.rollout_rows import PAGES_FOLDER
from stovetop.tracking.trackers import Place, Tracker, TrackerChoice, open_tracker

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_AFTER_S = 60.0  # of a tracker that is down
OPEN_WITHIN_S = 60.0  # for who asks for its address
END_WITHIN_S = 60.0  # for what is left when a run is complete
STOP_WITHIN_S = 5.0  # and when it is interrupted or fails
SHOWN = (".png", ".html")  # files that a tracker gets, where an event names one as its `path`


class Opens(Protocol):
    """What `trackers.open_tracker` does."""

    def __call__(self, choice: TrackerChoice, place: Place, /) -> Tracker: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """How far a tracker has got."""

    key: str
    folder: str
    url: str | None = None
    step: int = -1
    num_others: int = 0


class Sender:
    """Of one run and one tracker; for one thread at a time."""

    def __init__(
        self, run: Path, choice: TrackerChoice, *, metrics: Path, events: Path, opens: Opens = open_tracker
    ) -> None:
        self.name = choice.name
        self._run = run
        self._choice = choice
        self._opens = opens
        self._file = run / f"tracker-{choice.name}.json"
        self._tracker: Tracker | None = None
        self._has_config = False  # the tracker has it
        self._metrics, self._events = _Tail(metrics), _Tail(events)
        self._num_passed = 0  # texts and files in the events, up to where they were read
        self.sent = _sent(self._file, run)

    def send(self) -> None:
        """All that the tracker has not got. What goes wrong there is raised, and what was sent is not sent again."""
        if self._tracker is None:
            self._tracker = self._open()
        if not self._has_config:
            for event in parse_rows(self._events.path, event_from_row):
                if event.name == CONFIG:
                    self._tracker.log_hparams({**event.values, **event.labels})
            self._update(replace(self.sent, url=self._tracker.get_logger_url()))
            self._has_config = True
        for row in self._metrics.rows(metrics_from_row):
            step = int(row.pop("step"))
            if step > self.sent.step:
                self._tracker.log_metrics(row, step)
                for page in sorted((self._run / PAGES_FOLDER.format(step=step)).glob("*.html")):
                    self._tracker.log_file(page)
                self._update(replace(self.sent, step=step))
        for event in self._events.rows(event_from_row):
            if is_other(event):
                self._send_other(self._tracker, event)
        self._tracker.sync()

    def _open(self) -> Tracker:
        """The key is known here before it is there. One with which nothing was sent is given up where opening fails:
        libraries may take it for in use until the process ends."""
        self._update(self.sent)
        try:
            return self._opens(self._choice, Place(self._choice.project, self._run.name, self.sent.key, self._run))
        except BaseException:
            if (self.sent.step, self.sent.num_others) == (-1, 0):
                self._update(replace(self.sent, key=new_key()))
            raise

    def close(self, *, failed: bool = False) -> None:
        """Ends the run at the tracker, as far as it was opened there."""
        tracker, self._tracker, self._has_config = self._tracker, None, False
        if tracker is not None:
            tracker.close(failed=failed)

    def _send_other(self, tracker: Tracker, event: Event) -> None:
        if self._num_passed >= self.sent.num_others:
            path = _file_of(event)
            if path is None:
                tracker.log_long_text(event.labels.get("title", "text"), event.labels.get("text", ""))
            elif path.is_file():
                tracker.log_file(path)
            self._update(replace(self.sent, num_others=self._num_passed + 1))
        self._num_passed += 1

    def _update(self, sent: Sent) -> None:
        """Whole or as it was. Not synced, for it is written at every step: a loss of power has rows sent twice."""
        fresh = self._file.with_name(f".{self._file.name}.new")
        fresh.write_text(json.dumps(asdict(sent)), encoding="utf-8")
        fresh.replace(self._file)
        self.sent = sent


def new_key() -> str:
    """Of a run, as trackers take it."""
    return secrets.token_hex(4)


def is_other(event: Event) -> bool:
    """Whether a tracker gets it, though it is no row of metrics: a text, or one that names a plot or a page."""
    return event.name == TEXT or _file_of(event) is not None


def _file_of(event: Event) -> Path | None:
    path = event.labels.get("path", "")
    return Path(path) if path.endswith(SHOWN) else None


def _sent(file: Path, run: Path) -> Sent:
    """As it is written; a run that was copied is another one at the tracker, as long as the first is there."""
    try:
        sent = Sent(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Sent(new_key(), str(run))
    if sent.folder != str(run) and Path(sent.folder).is_dir():
        return Sent(new_key(), str(run))
    return replace(sent, folder=str(run))


class _Tail:
    """The rows of a log that were not read yet. A log that was written anew is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_number: int | None = None
        self._position = 0

    def rows(self, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Each counts as read when the next one is asked for."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file_number or status.st_size < self._position:
                self._file_number, self._position = status.st_ino, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                yield parse(json.loads(line))
                self._position += len(line)


class TrackerSink:
    """A reader of the stream that has a sender send, in a thread of its own, whenever there is something new.

    Consumes: events, as a sign that the files have grown. Waits for: the tracker. Stopped by: `close`.
    """

    def __init__(self, sender: Sender, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        self._sender = sender
        self._retry_after_s = retry_after_s
        self._wake, self._was_tried = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_down = self._has_failed = self._was_said = False

    def receive(self, event: Event) -> None:
        if event.name == "run.stop":
            self._has_failed = event.labels.get("outcome") != "completed"
        if event.name in (CONFIG, METRICS) or is_other(event):
            self._begin()
            self._wake.set()

    def sync(self) -> None:
        """Waits for nothing: the record is in the files."""
        self._wake.set()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_closing = True
        self._wake.set()
        thread.join(STOP_WITHIN_S if self._has_failed else END_WITHIN_S)
        if thread.is_alive():
            log.warning("%s is slow, and is left. %s", self._sender.name, self._next_step())

    def get_logger_url(self) -> str | None:
        """Waits until the tracker has the run, or is found to be down."""
        if self._thread is not None:
            self._was_tried.wait(OPEN_WITHIN_S)
        return self._sender.sent.url

    def _begin(self) -> None:
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._keep, name=f"sends to {self._sender.name}", daemon=True)
            self._thread.start()

    def _keep(self) -> None:
        try_at_s = 0.0
        while True:
            self._wake.wait(max(0.0, try_at_s - time.monotonic()) if self._is_down else None)
            self._wake.clear()
            is_last = self._is_closing
            is_worth_a_last_try = is_last and not self._has_failed
            if not self._is_down or is_worth_a_last_try or time.monotonic() >= try_at_s:
                self._try(self._sender.send)
                try_at_s = time.monotonic() + self._retry_after_s
            if is_last:
                self._try(lambda: self._sender.close(failed=self._has_failed))
                return

    def _try(self, do: Callable[[], None]) -> None:
        was_open = self._was_tried.is_set()
        try:
            do()
        except BaseException as error:  # of the tracker's library: anything; one that ends its thread would say nothing
            self._report(error)
        else:
            self._is_down = False
            if not was_open and self._sender.sent.url is not None:
                log.info("%s shows this run: %s", self._sender.name, self._sender.sent.url)
        self._was_tried.set()

    def _report(self, error: BaseException) -> None:
        self._is_down = True
        if not self._was_said:
            kind = "" if isinstance(error, StovetopError) else f"{type(error).__name__}: "
            log.warning(
                "%s does not take this run, which goes on (%s%s). It is tried again, and nothing is lost. %s",
                self._sender.name, kind, error, self._next_step(),
            )  # fmt: skip
        self._was_said = True

    def _next_step(self) -> str:
        return f"What it lacks in the end is sent by: stovetop sync RUN --to {self._sender.name}"

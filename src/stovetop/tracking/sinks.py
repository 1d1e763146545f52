"""Readers of the stream that write files into the run directory: its record. The terminal's is in `console.py`.

Each row of metrics is synced to the disk at once: a power cut costs none. Other events are synced when a row of metrics
comes, but at most once a second, and when the stream is synced or closed: a power cut costs those since then. The end
of the process, however it comes, costs neither.
"""

import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from stovetop.durable import LOCAL_DISK, append_row, cut_torn_row, writing
from stovetop.tracking.events import METRICS, Event, encode_number, event_to_row

SYNC_EVERY_S = 1.0  # a sync takes 4 ms, so this is 0.4 % of a run at most; every row: most of a run of fast steps


class MetricsFile:
    """metrics.jsonl: one flat row a step, `{"step": 3, "loss": 0.5}`. Each is on the disk when `receive` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def receive(self, event: Event) -> None:
        if event.name == METRICS:
            numbers = {key: encode_number(value) for key, value in event.values.items()}
            append_row(self._path, {"step": event.step, **numbers})

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_logger_url(self) -> str | None:
        return None


class EventsFile:
    """events.jsonl: every event but the rows of metrics, which have a file of their own. It stays open: a step has some
    twenty events, and to open a file costs more than to write a line into it."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._synced_s = clock()
        self._is_synced = True
        self._file: FileIO | None = None

    def receive(self, event: Event) -> None:
        if event.name != METRICS:
            with writing(self._path), self._opened() as file:
                write_all(file, json.dumps(event_to_row(event), allow_nan=False).encode() + b"\n")
            self._is_synced = False
        elif self._clock() - self._synced_s >= SYNC_EVERY_S:
            self.sync()

    def sync(self) -> None:
        if not self._is_synced:
            with writing(self._path):
                LOCAL_DISK.sync(self._path)
            self._synced_s, self._is_synced = self._clock(), True

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._leave()

    def get_logger_url(self) -> str | None:
        return None

    @contextmanager
    def _opened(self) -> Generator[FileIO]:
        """What a failure or an earlier process has left of a row is cut off when it is opened again, as it is where an
        editor has put another file in its place."""
        try:
            if self._file is not None and not self._is_in_place(self._file):
                self._leave()
            if self._file is None:
                cut_torn_row(self._path)
                self._file = self._path.open("ab", buffering=0)
            yield self._file
        except OSError:
            self._leave()
            raise

    def _is_in_place(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _leave(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def write_all(file: FileIO, data: bytes) -> None:
    """A nearly full disk takes a part, and refuses the rest."""
    while data:
        data = data[file.write(data) :]

"""Readers of the stream that write files into the run directory: its record. The terminal's is in `console.py`.

Each row of metrics is synced to the disk at once: a power cut costs none. Other events are synced when a row of metrics
comes, but at most once a second, and when the stream is synced or closed: a power cut costs those since then. The end
of the process, however it comes, costs neither.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stovetop.durable import LOCAL_DISK, append_row, writing
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
    """events.jsonl: every event but the rows of metrics, which have a file of their own."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._synced_s = clock()
        self._is_synced = True
        self._ends_whole = False

    def receive(self, event: Event) -> None:
        if event.name != METRICS:
            self._append(event_to_row(event))
            self._is_synced = False
        elif self._clock() - self._synced_s >= SYNC_EVERY_S:
            self.sync()

    def _append(self, row: Mapping[str, Any]) -> None:
        """A row that was cut off is looked for only where there may be one: before the first, and after a failure."""
        if self._ends_whole:
            self._ends_whole = False
            with writing(self._path):
                LOCAL_DISK.append(self._path, json.dumps(row, allow_nan=False).encode() + b"\n")
        else:
            append_row(self._path, row, synced=False)
        self._ends_whole = True

    def sync(self) -> None:
        if not self._is_synced:
            with writing(self._path):
                LOCAL_DISK.sync(self._path)
            self._synced_s, self._is_synced = self._clock(), True

    def close(self) -> None:
        self.sync()

    def get_logger_url(self) -> str | None:
        return None

"""Readers of the stream that write files into the run directory. The terminal's is in `console.py`."""

from pathlib import Path

from stovetop.durable import append_row
from stovetop.tracking.events import METRICS, Event, encode_number, event_to_row


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

    def __init__(self, path: Path) -> None:
        self._path = path

    def receive(self, event: Event) -> None:
        if event.name != METRICS:
            append_row(self._path, event_to_row(event))

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_logger_url(self) -> str | None:
        return None

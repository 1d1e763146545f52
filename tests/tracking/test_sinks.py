"""What holds for every sink, and what each file holds."""

import io
import json
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from stovetop.durable import LocalDisk, read_rows
from stovetop.errors import WriteFailed
from stovetop.tracking import sinks
from stovetop.tracking.console import ConsoleSink
from stovetop.tracking.events import METRICS, TEXT, Event, EventStream, Recorder, Sink
from stovetop.tracking.sinks import EventsFile, MetricsFile, write_all

EVENTS = [
    Event("stage.start", labels={"stage": "évaluation"}),
    Event(METRICS, 0, {"loss": 0.5, "num_tokens": 7}),
    Event(METRICS, 2, {"loss": float("nan"), "low": float("-inf")}),
    Event(METRICS, 3),
    Event(TEXT, labels={"title": "sample", "text": "| a |\n| --- |\n| 1 |"}),
]

SINKS: dict[str, Callable[[Path], Sink]] = {
    "recorder": lambda folder: Recorder(),
    "metrics": lambda folder: MetricsFile(folder / "metrics.jsonl"),
    "events": lambda folder: EventsFile(folder / "events.jsonl"),
    "console": lambda folder: ConsoleSink(Console(file=io.StringIO(), width=80)),
}


@pytest.fixture(params=SINKS)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    return SINKS[request.param](tmp_path)


def test_a_sink_takes_every_event(sink: Sink):
    for event in EVENTS:
        sink.receive(event)
    sink.sync()


def test_a_sink_can_be_closed_twice_and_without_events(sink: Sink):
    sink.close()
    sink.close()


def test_the_address_of_a_sink_is_a_web_address_or_none(sink: Sink):
    url = sink.get_logger_url()
    assert url is None or url.startswith("http")


def test_metrics_are_one_flat_row_of_valid_json_a_step(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    for event in EVENTS:
        MetricsFile(file).receive(event)
    assert [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()] == [
        {"step": 0, "loss": 0.5, "num_tokens": 7},
        {"step": 2, "loss": "NaN", "low": "-Infinity"},
        {"step": 3},
    ]


def test_a_row_that_a_crash_cut_off_costs_that_row_alone(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file).receive(Event(METRICS, 0, {"loss": 1.0}))
    with file.open("a") as opened:
        opened.write('{"step": 1, "lo')
    MetricsFile(file).receive(Event(METRICS, 1, {"loss": 0.5}))
    assert read_rows(file) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]


def test_events_are_kept_without_the_metrics_that_have_a_file_of_their_own(tmp_path: Path):
    stream = EventStream([EventsFile(tmp_path / "events.jsonl")], clock=lambda: 1.0)
    stream.emit("training.step", step=0, loss=0.5)
    stream.log_metrics({"loss": 0.5}, 0)
    assert read_rows(tmp_path / "events.jsonl") == [
        {"time": 1.0, "name": "training.step", "step": 0, "values": {"loss": 0.5}}
    ]


def test_events_are_synced_with_a_row_of_metrics_once_a_second_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[str] = []
    monkeypatch.setattr(LocalDisk, "sync", lambda _, path: synced.append(path.name))
    now = 0.0
    file = EventsFile(tmp_path / "events.jsonl", clock=lambda: now)
    stream = EventStream([], record=[MetricsFile(tmp_path / "metrics.jsonl"), file])
    for step in range(30):
        stream.emit("training.step", step=step)
        assert len(read_rows(tmp_path / "events.jsonl")) == step + 1  # the end of the process costs none
        stream.log_metrics({"loss": 0.5}, step)
        now += 0.1
    assert synced.count("metrics.jsonl") == 30
    assert synced.count("events.jsonl") == 2
    stream.close()
    stream.close()
    assert synced.count("events.jsonl") == 3


def test_a_row_that_a_full_disk_cut_off_is_removed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"name": "torn')
    file = EventsFile(path)
    file.receive(Event("a.b", 1))
    file.receive(Event("a.b", 2))

    def full(file: FileIO, data: bytes) -> None:
        file.write(data[:5])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(sinks, "write_all", full)
        with pytest.raises(WriteFailed):
            file.receive(Event("a.b", 3))
    file.receive(Event("a.b", 4))
    assert [row["step"] for row in read_rows(path)] == [1, 2, 4]


def test_events_go_to_the_file_that_is_in_place_when_another_has_taken_it(tmp_path: Path) -> None:
    """As an editor does that writes a file anew."""
    path = tmp_path / "events.jsonl"
    file = EventsFile(path)
    file.receive(Event("a.b", 1))
    (tmp_path / "other").write_bytes(path.read_bytes())
    (tmp_path / "other").rename(path)
    file.receive(Event("a.b", 2))
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    path.unlink()
    file.receive(Event("a.b", 3))
    file.close()
    assert [row["step"] for row in read_rows(path)] == [3]


def test_a_disk_that_takes_a_part_of_a_row_is_given_the_rest() -> None:
    class Slow:
        taken = b""

        def write(self, data: bytes) -> int:
            self.taken += data[:3]
            return len(data[:3])

    file = Slow()
    write_all(cast(FileIO, file), b"0123456789")
    assert file.taken == b"0123456789"

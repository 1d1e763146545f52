"""What holds for every tracker, with its library: each runs without a network, and what it wrote is read back.

They bring many packages, so .ci/run installs them in a folder of their own; without it these are skipped.
"""

import asyncio
import json
import logging
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kitchen.stages.configs import SupervisedConfig, write_chats
from processes import run_python
from stovetop.backends import recording
from stovetop.cli import main
from stovetop.errors import InvalidRequest, MissingExtra, UnknownName
from stovetop.kitchen.workflows import SUPERVISED
from stovetop.recipes import sl_basic, sl_loop
from stovetop.runs import load, open_run
from stovetop.tracking.events import EventStream
from stovetop.tracking.plots import Line, plot_lines
from stovetop.tracking.sending import Sender, TrackerSink
from stovetop.tracking.sinks import EventsFile, MetricsFile
from stovetop.tracking.trackers import (
    TRACKERS,
    Place,
    Tracker,
    TrackerChoice,
    TrackerKind,
    check_trackers,
    open_tracker,
    parse_trackers,
)

NAN, INFINITY = float("nan"), float("inf")
ROWS = [
    {"train/loss": 1.0, "num_tokens": 7},
    {"train/loss": 0.5, "odd": NAN},
    {"train/loss": 0.25, "env/all/by_group/frac_mixed": INFINITY},
]
TEXT_OF_A_ROW = "| a |\n| --- |\n| <b>1</b> |"


class Found(NamedTuple):
    """What a tracker has of a run."""

    metrics: dict[str, list[tuple[int, float]]]
    config: dict[str, str]
    texts: list[str]
    num_images: int
    pages: list[str]


# ---- reading back ----------------------------------------------------------------------------------------------------


def read_tensorboard(run: Path, key: str) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    read.Reload()
    metrics = {name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]}
    texts = {
        name.removesuffix("/text_summary"): read.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name in read.Tags()["tensors"]
    }
    rows = [line.split(" | ") for line in texts.pop("config").splitlines()[2:]]
    config = {name.removeprefix("| "): value.removesuffix(" |") for name, value in rows}
    pages = [text for text in texts.values() if text.endswith(".html`")]
    return Found(metrics, config, [t for t in texts.values() if t not in pages], len(read.Tags()["images"]), pages)


def read_mlflow(run: Path, key: str) -> Found:
    import mlflow

    client = mlflow.MlflowClient()
    (found,) = client.search_runs(
        [client.get_experiment_by_name("tests").experiment_id], f"tags.`stovetop.key` = '{key}'"
    )
    name = found.info.run_id
    largest = sys.float_info.max  # what MLflow makes of an infinite number
    metrics = {
        each: [(m.step, INFINITY if m.value == largest else m.value) for m in client.get_metric_history(name, each)]
        for each in found.data.metrics
    }
    config = dict(found.data.params) | {
        tag.removeprefix("changed."): value for tag, value in found.data.tags.items() if tag.startswith("changed.")
    }
    files = [each.path for each in client.list_artifacts(name)]
    texts = [
        Path(client.download_artifacts(name, each.path)).read_text() for each in client.list_artifacts(name, "texts")
    ]
    pages = [Path(client.download_artifacts(name, each)).read_text() for each in files if each.endswith(".html")]
    assert found.info.status == "FINISHED"
    return Found(metrics, config, texts, sum(each.endswith(".png") for each in files), pages)


def read_trackio(run: Path, key: str) -> Found:
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import TRACKIO_DIR

    name = f"run-{key}"
    metrics: dict[str, list[tuple[int, float]]] = {}
    texts, images, pages = list[str](), list[str](), list[str]()
    for row in SQLiteStorage.get_logs("tests", name):
        for each, value in row.items():
            match value:
                case {"_type": "trackio.markdown", "_value": text}:
                    texts.append(text)
                case {"_type": "trackio.image", "file_path": path}:
                    images.append(path)
                case {"_type": "trackio.html", "file_path": path}:
                    pages.append(next(Path(TRACKIO_DIR).rglob(Path(path).name)).read_text())
                case float() | int() if each != "step":
                    metrics.setdefault(each, []).append((row["step"], value))
                case _:
                    pass
    config = {each: str(value) for each, value in SQLiteStorage.get_run_config("tests", name).items()}
    return Found(metrics, config, texts, len(images), pages)


def read_wandb(run: Path, key: str) -> Found:
    """Of all processes of a run, in order: each has written a file of its own."""
    metrics: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, str] = {}
    texts, images, pages = list[str](), list[str](), list[str]()
    for file in sorted((run / "wandb").glob(f"offline-run-*/run-{key}.wandb")):
        for record in finished(file):
            for update in (*record.run.config.update, *record.config.update):
                if not update.key.startswith("_"):
                    config[update.key] = str(json.loads(update.value_json))
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *of_media = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                row[name] = {**row.get(name, {}), of_media[0]: value} if of_media else value
            for name, value in row.items():
                match value:
                    case {"_type": "html-file", "path": path}:
                        text = (file.parent / "files" / path).read_text()
                        (texts if name.startswith("text/") else pages).append(text)
                    case {"_type": "image-file", "path": path}:
                        images.append(path)
                    case _ if not name.startswith("_"):
                        number = float(value) if isinstance(value, str) else value
                        metrics.setdefault(name, []).append((row["_step"], number))
                    case _:
                        pass
    texts = [unescape(text.removeprefix("<pre>").removesuffix("</pre>")) for text in texts]
    return Found(metrics, config, texts, len(images), pages)


def finished(file: Path) -> list[Any]:
    """The records of a process, once its end is there: W&B's own program writes on when `finish` has returned."""
    give_up_s = time.monotonic() + 30
    while True:
        records = list(wandb_records(file))
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def wandb_records(file: Path) -> Iterator[Any]:
    """Those of a log of LevelDB: blocks of 32 KiB, in which a record is whole or in pieces (first, middle, last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, pieces = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):  # it is being written
            return
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(pieces)
            pieces = b""


READERS: dict[str, Callable[[Path, str], Found]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


# ---- a run that is sent ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trackio and MLflow read where they write when they are imported."""
    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("HOME", str(folder))
        patched.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patched.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture(params=TRACKERS)
def choice(request: pytest.FixtureRequest) -> TrackerChoice:
    kind = TRACKERS[request.param]
    if any(find_spec(module) is None for module in kind.modules):
        pytest.skip(f"needs {', '.join(kind.modules)}: pip install 'stovetop[{kind.extra}]'")
    return TrackerChoice(request.param, None if request.param == "tensorboard" else "tests")


def begin(run: Path, choice: TrackerChoice, **config: Any) -> EventStream:
    """The stream of a run with its record, and with the tracker."""
    run.mkdir(exist_ok=True)
    metrics, events = run / "metrics.jsonl", run / "events.jsonl"
    sink = TrackerSink(Sender(run, choice, metrics=metrics, events=events))
    stream = EventStream([sink], record=[MetricsFile(metrics), EventsFile(events)])
    stream.log_hparams({"learning_rate": 1e-4, "nested": {"a": "b"}, "absent": None, **config})
    return stream


def end(stream: EventStream, outcome: str = "completed") -> None:
    stream.emit("run.stop", seconds=1.0, outcome=outcome)
    stream.close()


def found_in(run: Path, choice: TrackerChoice) -> Found:
    return READERS[choice.name](run, json.loads((run / f"tracker-{choice.name}.json").read_text())["key"])


def same(found: Mapping[str, list[tuple[int, float]]], rows: list[dict[str, float]]) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for step, row in enumerate(rows):
        for name, value in row.items():
            expected.setdefault(name, []).append((step, value))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], nan_ok=True)


def test_what_a_run_logs_is_there_and_what_it_logs_when_it_goes_on_is_behind_it(
    choice: TrackerChoice, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stream = begin(run, choice)
    for step, row in enumerate(ROWS):
        stream.log_metrics(row, step)
    stream.log_long_text("What was learnt", TEXT_OF_A_ROW)
    plot = plot_lines(run / "loss.png", [Line("a", [0, 1], [1.0, 0.5])], title="t", x_label="x", y_label="y")
    (run / "page.html").write_text("<h1>rollouts</h1>")
    stream.emit("run.plot", path=str(plot))
    stream.emit("rollouts.page", path=str(run / "page.html"))
    end(stream)
    found = found_in(run, choice)
    same(found.metrics, ROWS)
    assert {"learning_rate": "0.0001", "nested.a": "b"}.items() <= found.config.items()
    assert found.texts == [TEXT_OF_A_ROW]
    assert found.num_images == 1
    assert found.pages == [f"`{run / 'page.html'}`" if choice.name == "tensorboard" else "<h1>rollouts</h1>"]
    stream = begin(run, choice, learning_rate=2e-4)
    stream.log_metrics({"train/loss": 0.125}, 3)
    end(stream)
    found = found_in(run, choice)
    same(found.metrics, [*ROWS, {"train/loss": 0.125}])
    assert found.config["learning_rate"] == "0.0002"
    assert (len(found.texts), found.num_images, len(found.pages)) == (1, 1, 1)


def test_a_tracker_is_opened_and_closed_without_a_row_and_has_an_address_or_none(
    choice: TrackerChoice, tmp_path: Path
) -> None:
    tracker = open_tracker(choice, Place(choice.project, "run", "0123abcd", tmp_path))
    tracker.log_hparams({})
    tracker.sync()
    url = tracker.get_logger_url()
    assert url is None or url.startswith("http")
    tracker.close(failed=True)


# ---- without a library -----------------------------------------------------------------------------------------------


def test_the_field_names_trackers_and_their_projects() -> None:
    assert parse_trackers("") == []
    assert parse_trackers("wandb:mine tensorboard mlflow:http://host:5000") == [
        TrackerChoice("wandb", "mine"), TrackerChoice("tensorboard", None), TrackerChoice("mlflow", "http://host:5000"),
    ]  # fmt: skip


def test_what_is_no_tracker_is_refused_by_name_and_so_is_one_that_has_ended() -> None:
    with pytest.raises(UnknownName, match="wandb"):
        parse_trackers("wanbd")
    with pytest.raises(InvalidRequest, match=r"Neptune was shut down on 5 March 2026.*choose wandb"):
        parse_trackers("tensorboard neptune:mine")
    with pytest.raises(InvalidRequest, match="wandb is named twice"):
        parse_trackers("wandb:a wandb:b")


def test_a_library_that_is_missing_is_named_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stovetop.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="wandb"):
        check_trackers("wandb")


@dataclass
class Fake:
    """A tracker in memory, which may be down."""

    got: list[object] = field(default_factory=list[object])
    is_down: bool = False
    num_opened: int = 0
    after: int | None = None  # so many calls it is down

    def __call__(self, choice: TrackerChoice, place: Place, /) -> Tracker:
        self._require_up()
        self.num_opened += 1
        return self

    def _require_up(self) -> None:
        if self.after is not None and len(self.got) >= self.after:
            self.is_down = True
        if self.is_down:
            raise ConnectionError("no route to host")

    def log_hparams(self, config: Mapping[str, float | str]) -> None:
        self._require_up()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._require_up()
        self.got.append(step)

    def log_long_text(self, title: str, text: str) -> None:
        self._require_up()
        self.got.append(title)

    def log_file(self, path: Path) -> None:
        self._require_up()
        self.got.append(path.name)

    def sync(self) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        self.got.append("failed" if failed else "closed")

    def get_logger_url(self) -> str | None:
        return "https://tracker.example/run"


FAKE = TrackerChoice("wandb", None)
SHARED = Fake()


def open_shared(place: Place) -> Tracker:
    """For runs that open their trackers by name."""
    return SHARED(FAKE, place)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setitem(TRACKERS, "wandb", TrackerKind(f"{__name__}:open_shared", "wandb", ()))
    SHARED.__init__()
    return SHARED


def stream_to(fake: Fake, run: Path, retry_after_s: float = 60.0) -> tuple[EventStream, TrackerSink]:
    run.mkdir(exist_ok=True)
    metrics, events = run / "metrics.jsonl", run / "events.jsonl"
    sender = Sender(run, FAKE, metrics=metrics, events=events, opens=fake)
    sink = TrackerSink(sender, retry_after_s=retry_after_s)
    return EventStream([sink], record=[MetricsFile(metrics), EventsFile(events)]), sink


def log_steps(stream: EventStream, *steps: int) -> None:
    stream.log_hparams({"learning_rate": 1.0})
    for step in steps:
        stream.log_metrics({"loss": 1.0}, step)
        stream.log_long_text(f"text {step}", "said")


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_tracker_that_is_down_is_reported_once_and_gets_the_rest_when_the_run_goes_on(
    after: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake, run = Fake(after=after), tmp_path / "run"
    stream, sink = stream_to(fake, run)
    log_steps(stream, 0, 1, 2)
    sink.get_logger_url()
    end(stream)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "ConnectionError: no route to host" in said[0]
    assert "stovetop sync RUN --to wandb" in said[0]
    fake.after, fake.is_down = None, False
    stream, _ = stream_to(fake, run)
    log_steps(stream, 3)
    end(stream)
    for kind in (int, str):
        got = [each for each in fake.got if isinstance(each, kind) and each != "closed"]
        assert got == ([0, 1, 2, 3] if kind is int else [f"text {step}" for step in range(4)])


def test_a_tracker_that_comes_back_during_the_run_gets_all(tmp_path: Path) -> None:
    fake = Fake(is_down=True)
    stream, sink = stream_to(fake, tmp_path / "run", retry_after_s=0.01)
    log_steps(stream, 0, 1)
    assert sink.get_logger_url() is None
    fake.is_down = False
    log_steps(stream, 2)
    end(stream)
    assert [each for each in fake.got if isinstance(each, int)] == [0, 1, 2]
    assert fake.got[-1] == "closed"


def test_the_config_that_a_tracker_did_not_take_at_first_is_sent_again(tmp_path: Path) -> None:
    class Forgets(Fake):
        configs = 0

        def log_hparams(self, config: Mapping[str, float | str]) -> None:
            self.configs += 1
            if self.configs == 1:
                raise ConnectionError("no route to host")

    fake = Forgets()
    stream, sink = stream_to(fake, tmp_path / "run", retry_after_s=0.01)
    log_steps(stream, 0, 1)
    sink.get_logger_url()
    end(stream)
    assert (fake.num_opened, fake.configs) == (1, 2)
    assert sink.get_logger_url() == "https://tracker.example/run"


def test_a_library_that_ends_its_thread_is_reported_and_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaves(Fake):
        def __call__(self, choice: TrackerChoice, place: Place, /) -> Tracker:
            raise SystemExit("no terminal to log in on")

    stream, sink = stream_to(Leaves(), tmp_path / "run")
    log_steps(stream, 0)
    assert sink.get_logger_url() is None
    end(stream)
    assert "wandb does not take this run, which goes on (SystemExit: no terminal to log in on)" in caplog.text


def test_a_run_that_could_not_be_opened_is_opened_under_another_key(tmp_path: Path) -> None:
    keys, run = list[str](), tmp_path / "run"
    run.mkdir()

    def fails(choice: TrackerChoice, place: Place, /) -> Tracker:
        keys.append(place.key)
        raise ConnectionError

    sender = Sender(run, FAKE, metrics=run / "metrics.jsonl", events=run / "events.jsonl", opens=fails)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.send()
    assert len(set(keys)) == 2
    assert json.loads((run / "tracker-wandb.json").read_text())["key"] == sender.sent.key


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: pip install 'stovetop[wandb]'")
def test_without_a_key_wandb_is_refused_with_the_next_step_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from pathlib import Path; from stovetop.tracking.trackers import Place, TrackerChoice, open_tracker;"
        "open_tracker(TrackerChoice('wandb', None), Place(None, 'run', '0123abcd', Path.cwd()))"
    )
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))  # the process has another folder
    ended = run_python("-c", program, cwd=tmp_path)
    assert "W&B has no key of yours; run `wandb login`" in ended.stderr


def test_rows_that_a_resumed_run_logs_again_are_not_sent_again(tmp_path: Path) -> None:
    fake, run = Fake(), tmp_path / "run"
    stream, _ = stream_to(fake, run)
    log_steps(stream, 0, 1, 2)
    end(stream, "KeyboardInterrupt")
    assert fake.got[-1] == "failed"
    rows = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    fresh = run / "fresh"
    fresh.write_bytes(rows[0])
    fresh.replace(run / "metrics.jsonl")
    stream, _ = stream_to(fake, run)
    for step in (1, 2, 3):
        stream.log_metrics({"loss": 1.0}, step)
    end(stream)
    assert [each for each in fake.got if isinstance(each, int)] == [0, 1, 2, 3]


def test_the_pages_of_a_step_are_sent_with_its_row(tmp_path: Path) -> None:
    fake, run = Fake(), tmp_path / "run"
    stream, _ = stream_to(fake, run)
    for step in (0, 1):
        (run / f"iteration_{step:06d}").mkdir()
        (run / f"iteration_{step:06d}" / "train.html").write_text("<h1>said</h1>")
    stream.log_metrics({"loss": 1.0}, 1)
    end(stream)
    assert fake.got == [1, "train.html", "closed"]


def test_the_address_is_said_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream, sink = stream_to(Fake(), tmp_path / "run")
    log_steps(stream, 0, 1)
    assert sink.get_logger_url() == stream.get_logger_url() == "https://tracker.example/run"
    end(stream)
    assert caplog.text.count("wandb shows this run: https://tracker.example/run") == 1
    kept = json.loads((tmp_path / "run" / "tracker-wandb.json").read_text())
    assert (kept["url"], kept["step"], kept["num_others"]) == ("https://tracker.example/run", 1, 2)


def test_a_copy_of_a_run_is_another_run_at_the_tracker_and_a_moved_one_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stream, _ = stream_to(Fake(), run)
    log_steps(stream, 0)
    end(stream)

    def sent_of(folder: Path) -> Any:
        return Sender(folder, FAKE, metrics=folder / "metrics.jsonl", events=folder / "events.jsonl").sent

    before = sent_of(run)
    copy = tmp_path / "copy"
    copy.mkdir()
    os.link(run / "tracker-wandb.json", copy / "tracker-wandb.json")
    assert sent_of(copy).key != before.key
    assert sent_of(copy).step == -1
    moved = run.rename(tmp_path / "moved")
    assert sent_of(moved) == replace(before, folder=str(moved))


# ---- runs ------------------------------------------------------------------------------------------------------------


def supervised(folder: Path, trackers: str) -> SupervisedConfig:
    run = str(folder / "run")
    chats = write_chats(folder / "chats.jsonl")
    return SupervisedConfig(dataset=chats, log_path=run, num_epochs=1, save_every=0, trackers=trackers)


def train(config: SupervisedConfig) -> list[Mapping[str, str] | None]:
    """Returns the metadata of its training clients."""
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False, **config.run_options()) as run,
    ):
        asyncio.run(SUPERVISED.run(config, service=service, run=run))
        run.table("What was learnt", ["what"], [["it"]])
        run.plot("loss", {"training": "train_mean_nll"}, title="t", y_label="y")
        runs = service.create_rest_client().list_training_runs().result().training_runs
        return [each.user_metadata for each in runs]


def test_a_run_is_sent_as_its_config_says_and_its_client_says_where_it_is_shown(shared: Fake, tmp_path: Path) -> None:
    config = supervised(tmp_path, "wandb:mine")
    assert train(config) == [{"url": "https://tracker.example/run"}]
    steps = [int(row["step"]) for row in load(config.log_path).metrics]
    assert [each for each in shared.got if isinstance(each, int)] == steps == [0, 1, 2, 3, 4]
    assert [each for each in shared.got if isinstance(each, str)] == ["What was learnt", "loss.png", "closed"]


def test_a_run_without_trackers_has_no_metadata_and_is_sent_later(
    shared: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = supervised(tmp_path, "")
    assert train(config) == [{}]
    shared.after = 2
    assert main(["sync", config.log_path, "--to", "wandb"]) == 1
    assert "it has the steps up to 1, and the same command goes on behind them" in capsys.readouterr().err
    shared.after, shared.is_down = None, False
    assert main(["sync", config.log_path, "--to", "wandb"]) == 0
    said = capsys.readouterr().out
    assert "wandb has the run up to step 4, with 2 texts and files. New from step 2 on." in said
    assert "https://tracker.example/run" in said
    assert [each for each in shared.got if isinstance(each, int)] == [0, 1, 2, 3, 4]
    assert main(["sync", config.log_path, "--to", "wandb"]) == 0
    assert "It had all of it before." in capsys.readouterr().out


def test_the_command_refuses_what_cannot_be_sent(shared: Fake, tmp_path: Path) -> None:
    with open_run(tmp_path / "run", supervised(tmp_path, ""), console=False):
        assert main(["sync", str(tmp_path / "run"), "--to", "wandb"]) == 1  # it is being written
    assert main(["sync", str(tmp_path / "run"), "--to", "wandb wandb"]) == 2
    assert main(["sync", str(tmp_path / "run"), "--to", "neptune"]) == 2
    assert main(["sync", str(tmp_path), "--to", "wandb"]) == 2


def test_a_config_of_no_tracker_is_refused_as_it_is_made() -> None:
    with pytest.raises(InvalidRequest, match="Neptune was shut down"):
        sl_loop.Config(trackers="neptune")
    with pytest.raises(UnknownName, match="tensorboard"):
        sl_basic.Config(trackers="tensorbord")

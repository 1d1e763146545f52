"""Fixtures that every folder of tests may use."""

import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from browser import CHROMIUM
from missing import reason_to_skip
from processes import signal_after
from stovetop.backends import recording
from stovetop.client import ServiceClient, TrainingClient
from stovetop.model_store import find_model

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # what servers are put through is used by both

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conversations", type=int, default=10, help="on how many chats each property of a renderer is tried"
    )
    parser.addoption("--examples", type=int, default=25, help="on how many examples each other property is tried")
    parser.addoption(
        "--require-all", action="store_true", help="what needs a missing extra or model fails, and is not skipped"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The same examples on every machine, however slow it is."""
    examples: int = config.getoption("--examples")
    hypothesis.settings.register_profile("stovetop", deadline=None, derandomize=True, max_examples=examples)
    hypothesis.settings.load_profile("stovetop")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there once tests are collected, modules above all, stays to the end: no garbage collection needs to go
    through it, then or meanwhile, which would take most of half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _skipped_if_missing((yield), call, item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _skipped_if_missing(report, report.call, collector)  # the call is pytest's, and not in its stubs


def _skipped_if_missing(report: Report, call: pytest.CallInfo[None], node: pytest.Item | pytest.Collector) -> Report:
    reason = reason_to_skip(call.excinfo.value) if report.failed and call.excinfo else None
    if reason is not None and not node.config.getoption("--require-all"):
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: {reason}")
    return report


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is put into the system's temporary folder, as by a recording backend without `storage`, goes too."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceClient]:
    """The recording backend, saving under tmp_path."""
    with recording.open_service(tmp_path) as opened:
        yield opened


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("some/model", rank=4, seed=0).result()


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    """The folder of SmolLM2-135M-Instruct. `make test` fetches it first; without it, tests that need it are skipped."""
    folder = find_model("smollm2")
    if folder is None:
        give_up = pytest.fail if request.config.getoption("--require-all") else pytest.skip
        give_up("SmolLM2 is not on this machine; run: stovetop fetch smollm2")
    return folder


@pytest.fixture(scope="session")
def needs_browser() -> None:
    """Tests of pages are skipped on a machine without a browser, with --require-all too: not every machine can have
    one."""
    if CHROMIUM is None:
        pytest.skip("no browser is on this machine; on Debian: apt-get install chromium")


@pytest.fixture(scope="session")
def kill_after() -> Callable[..., str]:
    """Runs a Python script and sends it a signal so many seconds after its first line of output, which says that it is
    under way; returns what it had printed. A script that ends before is an error of the test."""

    def run(script: Path, arguments: list[str], seconds: float, by: signal.Signals = signal.SIGKILL) -> str:
        ended = signal_after([str(script), *arguments], seconds, by)
        assert ended.code == -by, f"it ended by itself: {ended.code} {ended.errors}"
        return ended.printed

    return run

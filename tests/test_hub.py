"""Without a network what is only on the hub is refused within two seconds."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import transformers.models.auto.image_processing_auto  # noqa: F401  the second that it takes is not the hub's
from huggingface_hub import constants

from stovetop import hub
from stovetop.datasets import load_rows, stream_rows
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.hub import ANSWERS_WITHIN_S, why_unreachable
from stovetop.model_store import check_model_name, hub_download, require_model
from stovetop.renderers.images import get_image_processor
from stovetop.tokenizer import get_tokenizer


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and says nothing, which is slower to notice than one that refuses them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.usefixtures("silent")
def test_a_hub_that_says_nothing_is_given_up_in_time() -> None:
    # two seconds: that is the limit under test
    began_s = time.monotonic()
    said = why_unreachable()
    assert said is not None
    assert "cannot be reached" in said
    assert time.monotonic() - began_s < ANSWERS_WITHIN_S + 1


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (lambda: load_rows("someone/none"), "pass FILE.jsonl, FILE.parquet or a downloaded folder"),
        (lambda: next(stream_rows("someone/none")), "pass FILE.jsonl, FILE.parquet or a downloaded folder"),
        (lambda: require_model("someone/none", hub_download), "stovetop fetch smollm2"),
        (lambda: get_tokenizer("someone/none"), "fetch the model first"),
        (lambda: get_image_processor("someone/none"), "Pass the folder of a model"),
    ],
)
@pytest.mark.usefixtures("gone")
def test_what_is_only_on_the_hub_is_refused_at_once_with_what_to_do(asked: Callable[[], object], refusal: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest) as refused:
        asked()
    assert time.monotonic() - began_s < 2
    assert "cannot be reached" in str(refused.value)
    assert refusal in str(refused.value)


def test_a_hub_that_answers_anything_is_there_and_one_that_is_switched_off_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        assert why_unreachable() is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_unreachable() == "HF_HUB_OFFLINE is set"


def test_a_model_is_checked_with_one_question_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(hub, "why_unreachable", lambda: asked.append(None) or "no network")
    with pytest.raises(UnknownName, match="no network; nor is it in its cache"):
        check_model_name("someone/none")
    assert len(asked) == 1


@pytest.mark.usefixtures("gone")
def test_what_is_in_a_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(name: str, **_: object) -> str:
        assert constants.HF_HUB_OFFLINE
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert require_model("someone/small", hub_download) == tmp_path
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: [{"a": cached(name)}])
    assert load_rows("someone/rows") == [{"a": str(tmp_path)}]
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("gone")
def test_two_that_ask_at_once_leave_the_libraries_switch_as_it_was() -> None:
    entered = threading.Event()

    def ask(linger_s: float) -> None:
        with hub.asking() as problem:
            assert problem is not None
            entered.set()
            time.sleep(linger_s)

    first, second = (threading.Thread(target=ask, args=(linger_s,)) for linger_s in (0.05, 0.15))
    first.start()
    assert entered.wait(30)
    second.start()
    for thread in (first, second):
        thread.join(30)
    assert constants.HF_HUB_OFFLINE is False

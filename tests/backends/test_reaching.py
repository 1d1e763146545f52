"""What a client of a server does where nobody answers: at the first call, while calls wait, and at the end."""

import gc
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from examples import datum

from server.running import KEY, open_recording, running
from stovetop.backends import remote
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.backends.remote.reaching import Silence, require_answering, why_silent
from stovetop.errors import APIConnectionError


def connected(url: str) -> Any:
    return remote.open_service(url, api_key=KEY, tokenizer=lambda _: ByteTokenizer())


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port that is nobody else's, and at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def listener(answer: bytes, num_answered: int) -> Iterator[str]:
    """Answers so many connections with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(num_answered):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "stovetop.backends.remote.reaching"]


def until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_an_address_at_which_nobody_answers_is_refused_at_once(nobody: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(APIConnectionError, match=rf"check that it runs.*{nobody} \(Connection refused\)"):
        connected(nobody).create_lora_training_client("tiny")
    assert time.monotonic() - began_s < 5
    with pytest.raises(APIConnectionError, match=r"no-such-host\.invalid \("):
        connected("http://no-such-host.invalid").create_rest_client().get_server_capabilities().result()


def test_a_port_that_ends_every_connection_or_does_not_speak_http_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stovetop.backends.remote.reaching._PAUSE_S", 0.01)
    with (
        listener(b"220 mail ready\r\n", 3) as url,
        pytest.raises(APIConnectionError, match="what listens there ends the connection"),
    ):
        require_answering(url)
    with listener(b"", 1) as url:
        monkeypatch.setattr("stovetop.backends.remote.reaching._TRIES", 1)
        with pytest.raises(APIConnectionError, match="ends the connection"):
            require_answering(url)


def test_any_answer_is_one_and_a_server_that_starts_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with listener(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", 2) as url:
        require_answering(url)
        assert why_silent(url) is None
    assert told(caplog) == []
    with listener(b"HTTP/1.1 503 Later\r\ncontent-length: 7\r\n\r\nloading", 2) as url:
        require_answering(url)
        assert why_silent(url) == "it starts"
    assert told(caplog) == [f"the server at {url} is not ready and is waited for: loading"]


def test_that_calls_wait_for_a_server_that_has_gone_is_told_now_and_then_and_so_is_its_return(
    nobody: str, caplog: pytest.LogCaptureFixture
) -> None:
    silence, handed = Silence(nobody), queue.SimpleQueue[Callable[[], None]]()
    for _ in range(2):
        silence.look(lambda: 3, handed.put)
        silence.look(lambda: 3, handed.put)  # one at a time
        handed.get(timeout=10)()
    assert handed.empty()
    assert told(caplog) == [
        f"the server at {nobody} does not answer (Connection refused): 3 calls wait, and go on when it is back; check "
        "that it runs"
    ]
    silence.ended()
    silence.ended()
    assert [message.rpartition(",")[0] for message in told(caplog)[1:]] == [f"the server at {nobody} answers again"]


@pytest.mark.slow
def test_leaving_a_service_whose_server_has_gone_does_not_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stovetop.backends.remote.connection.LOOK_AFTER_S", 0.05)
    with running(tmp_path) as server:
        service = connected(server.url)
        service.create_lora_training_client("tiny/model", rank=4).result()
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        service.close()
    assert time.monotonic() - began_s < 5
    assert "was not told that the session is over" in caplog.text


@pytest.mark.slow
def test_a_service_that_nobody_has_any_more_does_not_tell_its_server_that_it_lives(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        service = connected(server.url)
        trainer = service.create_lora_training_client("tiny/model", rank=4).result()
        result = trainer.forward([datum()], "cross_entropy")
        holder = vars(service.connection.sdk())["_session_holder"]
        heartbeat = holder._session_heartbeat_task
        del service, trainer
        result.result()
        del result
        gc.collect()
        until(heartbeat.done)


@pytest.mark.slow
def test_a_call_goes_on_when_its_server_is_back_and_it_was_told_that_it_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stovetop.backends.remote.connection.LOOK_AFTER_S", 0.2)
    with running(tmp_path) as first:
        port, service = int(first.url.rpartition(":")[2]), connected(first.url)
        trainer = service.create_lora_training_client("tiny/model", rank=4).result()
        expected = trainer.forward([datum()], "cross_entropy").result().metrics
    waits = trainer.forward([datum()], "cross_entropy")
    until(lambda: "1 calls wait" in caplog.text)
    with running(tmp_path, open_recording, port=port), service:
        assert waits.result(60).metrics == expected
        until(lambda: "answers again" in caplog.text)

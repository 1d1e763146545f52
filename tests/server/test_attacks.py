"""Nobody gets in: every attack of the catalogue is answered as it should be, at once and with no word about the disk,
and the server goes on serving its owners."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from attacks import ATTACKS, NOT_THEIRS, Attack, Hers, learn, sample
from running import MODELS, Running, running

from stovetop.server import protocol
from stovetop.server.connections import ConnectionLimits, bounded
from stovetop.server.keys import Keys, add_key
from stovetop.server.ports import listen
from stovetop.server.uploads import UploadLimits

AT_ONCE_S = 2.0  # on a machine that is busy with other tests; a few milliseconds otherwise


class Besieged:
    """A server with two owners: hers are under attack, bob attacks."""

    def __init__(self, server: Running, alice: str, bob: str) -> None:
        self.server = server
        self.bob = server.http(bob)
        self.bob_key = bob
        self.own = self.bob.post("create_session", json={}).json()["session_id"]
        with server.http(alice) as http:
            session = http.post("create_session", json={}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": MODELS[0]}
            model = http.post("create_model", json=body).json()["model_id"]
            sampling = {"session_id": session, "sampling_session_seq_id": 1, "base_model": MODELS[0]}
            sampler = http.post("create_sampling_session", json=sampling).json()["sampling_session_id"]
            saved = http.post("save_weights", json={"model_id": model, "seq_id": 1, "path": "hers"}).json()
            path = http.post("retrieve_future", json={"request_id": saved["request_id"]}).json()["path"]
        (folder,) = server.storage.glob("checkpoints/*/weights/hers.*")
        self.hers = Hers(alice, session, model, sampler, path, f"{model}:1", str(folder))

    def try_it(self, attack: Attack) -> httpx.Response:
        url = f"{self.server.url}/api/v1/{attack.path.format(hers=self.hers)}"
        headers = {"X-API-Key": self.bob_key, **attack.headers}
        return self.bob.request(
            attack.method, url, content=attack.content(self.hers, self.own), headers=headers, follow_redirects=False
        )

    def raw(self, data: bytes, *, wait_s: float = 1.5) -> bytes:
        """What comes back for these bytes, until the connection is closed or nothing comes for so long."""
        host, port = self.server.url.removeprefix("http://").split(":")
        received = b""
        with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
            connection.sendall(data)
            while True:
                try:
                    piece = connection.recv(65536)
                except (TimeoutError, ConnectionResetError):
                    break
                if not piece:
                    break
                received += piece
        return received


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    storage = tmp_path_factory.mktemp("besieged")
    alice, bob = add_key(storage, "alice"), add_key(storage, "bob")
    keys = Keys(storage)
    limits = UploadLimits(max_bytes=2 * 2**20, stall_s=0.3, within_s=1.0)
    connections = ConnectionLimits(headers_s=0.3, reading_s=0.3)
    with running(
        storage, owner_of=keys.owner_of, limits_of=keys.limits_of, limits=limits, connections=connections
    ) as server:
        besieged = Besieged(server, alice, bob)
        yield besieged
        besieged.bob.close()


def test_there_are_sixty_attacks_and_each_has_a_name_of_its_own() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_is_refused(besieged: Besieged, attack: Attack) -> None:
    begun_s = time.monotonic()
    answer = besieged.try_it(attack)
    assert time.monotonic() - begun_s < AT_ONCE_S
    assert answer.status_code in attack.allowed, answer.text
    assert str(besieged.server.storage) not in answer.text.replace(besieged.hers.folder, "")
    assert besieged.hers.key not in answer.text
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.get(f"{besieged.server.url}/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize("attack", NOT_THEIRS, ids=[attack.name for attack in NOT_THEIRS])
def test_what_is_hers_reads_like_what_is_not_there(besieged: Besieged, attack: Attack) -> None:
    hers = besieged.hers
    nothing = hers._replace(
        session="none", model="none:train:0", sampler="none:sample:0", path="tinker://none", request="none:train:0:1"
    )
    there = besieged.try_it(attack).json()["detail"]
    besieged.hers = nothing
    try:
        not_there = besieged.try_it(attack).json()["detail"]
    finally:
        besieged.hers = hers
    words = [(mine, none) for mine, none in zip(hers, nothing, strict=True) if mine != none]
    for mine, none in sorted(words, key=lambda pair: -len(pair[0])):
        there = there.replace(mine, none)
    assert there == not_there


def request(*headers: str, body: bytes = b"") -> bytes:
    lines = ["POST /api/v1/client/config HTTP/1.1", "Host: 127.0.0.1", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="a connection without a word"),
        pytest.param(b"POST /api/v1/client/config HTTP/1.1\r\nHost: 127.0.0.1\r\n", id="headers that do not end"),
        pytest.param(b"GET /" + b"a" * 100_000, id="a path that does not end"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, id="headers that are too large"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"\0" * 1000, id="zeros"),
        pytest.param(request("Content-Length: -1"), id="a length below zero"),
        pytest.param(request("Content-Length: 1", "Content-Length: 2", body=b"{}"), id="two lengths"),
        pytest.param(request("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), id="two framings"),
        pytest.param(request("Transfer-Encoding: chunked", body=b"ffffffffffffffffff\r\n"), id="a chunk without end"),
        pytest.param(b"POST /api/v1/client/config HTTP/1.1\r\n\r\n", id="no Host"),
    ],
)
def test_bytes_that_are_no_request_end_their_connection(besieged: Besieged, data: bytes) -> None:
    begun_s = time.monotonic()
    received = besieged.raw(data)
    assert time.monotonic() - begun_s < 4.0
    assert received == b"" or received.startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{besieged.server.url}/healthz").status_code == 200


def test_an_upload_that_stalls_is_ended(besieged: Besieged) -> None:
    key = f"X-API-Key: {besieged.bob_key}"
    received = besieged.raw(request(key, "Content-Length: 100", body=b"{"))
    assert received.startswith(b"HTTP/1.1 408")


def test_an_upload_that_drips_is_ended(besieged: Besieged) -> None:
    host, port = besieged.server.url.removeprefix("http://").split(":")
    begun_s = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=3.0) as connection:
        connection.sendall(request(f"X-API-Key: {besieged.bob_key}", "Content-Length: 100"))
        connection.settimeout(0.1)
        received = b""
        while not received and time.monotonic() - begun_s < 4.0:
            connection.sendall(b"{")
            with suppress(TimeoutError):
                received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 408")


async def much(_scope: Any, _receive: Any, send: Any) -> None:
    """An application whose answer is larger than what the system holds for a connection."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100000000")]})
    await send({"type": "http.response.body", "body": bytes(100_000_000)})


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    config = uvicorn.Config(much, http=bounded(ConnectionLimits(reading_s=0.2)), lifespan="off", log_level="error")
    listening, http = listen("127.0.0.1", 0), uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[listening])))
    thread.start()
    try:
        with socket.create_connection(listening.getsockname(), timeout=5.0) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.6)
            num_bytes = 0
            with suppress(ConnectionResetError):
                while piece := connection.recv(2**20):
                    num_bytes += len(piece)
        assert num_bytes < 100_000_000
    finally:
        http.should_exit = True
        thread.join(10)


def test_a_body_that_says_that_it_is_too_large_is_not_read(besieged: Besieged) -> None:
    received = besieged.raw(request(f"X-API-Key: {besieged.bob_key}", "Content-Length: 1000000000000"))
    assert received.startswith(b"HTTP/1.1 413")


# ---- mutations -----------------------------------------------------------------------------------------------------


def mutated(data: bytes, random_: random.Random) -> bytes:
    """With some bytes changed, removed, doubled, or put elsewhere."""
    result = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(result) + 1)
        piece = result[at : at + random_.randint(1, 8)]
        match random_.randrange(5):
            case 0:
                result[at:at] = random_.randbytes(random_.randint(1, 4))
            case 1:
                del result[at : at + len(piece)]
            case 2:
                result[at:at] = piece * random_.randint(1, 5)
            case 3 if at < len(result):
                result[at] ^= 1 << random_.randrange(8)
            case _:
                result[at : at + len(piece)] = random_.choice(
                    [b"-1", b"null", b"1e999", b"{}", b"[", b"\xff\xff\xff\x7f"]
                )
    return bytes(result)


def requests_of(besieged: Besieged, sampler: str, model: str) -> list[tuple[str, bytes]]:
    """One good request a path."""
    own = besieged.own
    bodies = {
        "create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "x"},
        "create_model": {"session_id": own, "model_seq_id": 30, "base_model": "tiny/model", "lora_config": {"rank": 4}},
        "optim_step": {"model_id": model, "seq_id": 900, "adam_params": {"learning_rate": 0.1}},
        "save_weights": {"model_id": model, "seq_id": 901, "path": "a"},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 902, "sampling_session_seq_id": 70},
        "load_weights": {"model_id": model, "seq_id": 903, "path": besieged.hers.path, "optimizer": True},
        "create_sampling_session": {"session_id": own, "sampling_session_seq_id": 80, "base_model": "tiny/model"},
        "asample": sample(sampler, num_samples=2),
        "retrieve_futures": {"target": {"sampling_session_id": sampler}, "timeout": 0, "retrieved_request_ids": ["a"]},
        "join_sampling_session": {"sampling_session_id": sampler},
        "cancel_future": {"request_id": "sample-1"},
        "get_info": {"model_id": model},
    }
    return [("forward_backward", learn(model)), *((path, json.dumps(body).encode()) for path, body in bodies.items())]


def try_mutations(besieged: Besieged, number: int) -> None:
    """The first byte that answers otherwise is found again by its seed."""
    made = {"session_id": besieged.own, "sampling_session_seq_id": 50, "base_model": MODELS[0]}
    sampler = besieged.bob.post("create_sampling_session", json=made).json()["sampling_session_id"]
    body = {"session_id": besieged.own, "model_seq_id": 20, "base_model": MODELS[0]}
    model = besieged.bob.post("create_model", json=body).json()["model_id"]
    good = requests_of(besieged, sampler, model)
    for seed in range(number):
        random_ = random.Random(seed)
        path, data = good[0] if seed % 2 else random_.choice(good[1:])
        answer = besieged.bob.post(path, content=mutated(data, random_))
        assert answer.status_code < 500, (seed, path, answer.text)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question whose time was mutated away is held for a moment only."""
    monkeypatch.setattr(protocol, "HOLD_S", 0.01)


@pytest.mark.usefixtures("no_wait")
def test_mutated_bodies_are_answered(besieged: Besieged) -> None:
    try_mutations(besieged, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("no_wait")
def test_two_thousand_mutated_bodies_are_answered(besieged: Besieged) -> None:
    try_mutations(besieged, 2000)


def test_a_key_that_is_no_text_is_a_wrong_one(tmp_path: Path) -> None:
    add_key(tmp_path, "alice")
    wrong: list[Callable[[], str]] = [partial(Keys(tmp_path).owner_of, key) for key in ("\ud800", "\0", "é" * 100)]
    for ask in wrong:
        with pytest.raises(Exception, match="wants a key of its own"):
            ask()

"""How much an owner may have at once: what passes by itself is answered 429, what does not is refused by name."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import tinker
from running import KEY, MODELS, Running, datum, made, open_recording, running
from tinker import types

from stovetop.errors import InvalidRequest, RateLimitError
from stovetop.server import program, protocol
from stovetop.server.display import line, look
from stovetop.server.keys import LOCAL
from stovetop.server.limits import Limits, Load, OwnerLimits

SOME = OwnerLimits(max_requests=2, max_tokens=100, max_models=1, max_bytes=1)


def test_what_is_in_the_queue_is_counted_by_owner() -> None:
    limits = Limits()
    limits.enter("a", 10, is_sample=True)
    limits.enter("b", 5, is_sample=False)
    assert limits.load == Load(2, 15)
    assert limits.queue_state("a")["queue_state"] == "paused_capacity"
    assert "1 of yours, with 10 tokens; 1 of others, with 5 tokens" in limits.queue_state("a")["queue_state_reason"]
    limits.leave("b", 5)
    assert limits.queue_state("a")["queue_state"] == "active"
    limits.leave("a", 10)
    assert limits.load == Load()


def test_samples_over_a_limit_wait_and_training_does_not() -> None:
    limits = Limits(lambda owner: SOME)
    limits.enter("a", 1000, is_sample=True)  # the only one may have any number of tokens
    with pytest.raises(RateLimitError, match="may have 100 tokens in the queue"):
        limits.enter("a", 1, is_sample=True)
    limits.enter("a", 1, is_sample=False)
    with pytest.raises(RateLimitError, match="may have 2 requests in the queue"):
        limits.enter("a", 0, is_sample=True)
    limits.enter("b", 1, is_sample=True)
    assert limits.load == Load(3, 1002)


def test_models_and_bytes_over_a_limit_are_refused() -> None:
    limits = Limits(lambda owner: SOME)
    limits.require_model("a", 0)
    with pytest.raises(InvalidRequest, match="may have 1 training clients at once"):
        limits.require_model("a", 1)
    with pytest.raises(InvalidRequest, match="may keep 1 bytes of checkpoints"):
        limits.require_bytes("a", 1)
    Limits().require_bytes("a", 2**60)


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Running]:
    slow = partial(open_recording, latency_s=lambda verb: 0.2 if verb == "sample" else 0.0)
    with running(tmp_path, slow, limits_of=lambda owner: SOME) as server:
        yield server


def test_item_37_samples_over_the_limit_are_answered_429_and_all_of_them_finish(limited: Running) -> None:
    with limited.http() as http:
        session = http.post("create_session", json={}).json()["session_id"]
        making = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODELS[0]}
        sampler = http.post("create_sampling_session", json=making).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
        answers = [http.post("asample", json={**body, "seq_id": seq_id}) for seq_id in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].headers["retry-after"] == "1"
        http.post("retrieve_future", json={"request_id": answers[0].json()["request_id"]})
        assert http.post("asample", json={**body, "seq_id": 2}).status_code == 200
    with limited.sdk() as sdk:
        client = sdk.create_sampling_client(base_model=MODELS[0]).result()
        params = types.SamplingParams(max_tokens=1)
        drawn = [client.sample(types.ModelInput.from_ints([5]), 1, params) for _ in range(3)]
        assert [len(each.result(30).sequences) for each in drawn] == [1, 1, 1]


def held_until(event: threading.Event, verb: str) -> float:
    """A latency: steps take until then."""
    if verb == "optim_step":
        event.wait(20)
    return 0.0


def test_training_over_the_limit_is_accepted_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()
    slow = partial(open_recording, latency_s=partial(held_until, event))
    with running(tmp_path, slow, limits_of=lambda owner: SOME) as server, server.sdk() as sdk, server.http() as http:
        body = {"model_id": made(sdk).model_id, "adam_params": {}}
        assert [http.post("optim_step", json={**body, "seq_id": seq}).status_code for seq in (1, 2)] == [200, 200]
        monkeypatch.setattr(program, "ROOM_S", 0.05)
        late = http.post("optim_step", json={**body, "seq_id": 3})
        assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        assert "may have 2 requests in the queue" in late.text
        assert http.post("optim_step", json={**body, "seq_id": 2}).status_code == 200  # it was accepted before
        monkeypatch.setattr(program, "ROOM_S", 20.0)
        threading.Timer(0.05, event.set).start()
        assert http.post("optim_step", json={**body, "seq_id": 3}).status_code == 200


@pytest.mark.parametrize(("key", "num_queues"), [("tml-alice", 1), (LOCAL, 2)])
def test_the_clients_of_one_owner_take_turns_together_and_those_of_a_server_without_keys_each_for_itself(
    tmp_path: Path, key: str, num_queues: int
) -> None:
    event = threading.Event()
    slow = partial(open_recording, latency_s=partial(held_until, event))
    with running(tmp_path, slow, owner_of=lambda _: key) as server, server.sdk() as sdk:
        for client in [made(sdk) for _ in range(2)]:
            step(server, KEY, client.model_id, 1)
        base = server.parts.service._bases.open(MODELS[0])  # pyright: ignore[reportPrivateUsage]  nowhere else to be seen
        assert len(base.thread.waiting) == num_queues
        event.set()


def test_a_model_too_many_is_refused_at_once_and_again_there_is_room_when_a_session_ends(limited: Running) -> None:
    with limited.sdk() as sdk:
        made(sdk)
        with pytest.raises(tinker.BadRequestError, match="may have 1 training clients at once"):
            made(sdk)
    with limited.sdk() as sdk:
        made(sdk)


def test_a_checkpoint_too_many_is_a_failure_of_its_own(limited: Running) -> None:
    with limited.sdk() as sdk:
        client = made(sdk)
        client.save_state("one").result()
        with pytest.raises(tinker.RequestFailedError, match="may keep 1 bytes of checkpoints") as failure:
            client.save_state("two").result()
        assert "user" in str(failure.value.category)


def test_a_model_whose_queue_is_full_takes_its_call_when_there_is_room(tmp_path: Path) -> None:
    slow = partial(open_recording, latency_s=lambda verb: 0.1 if verb == "optim_step" else 0.0, max_queued_calls=1)
    with running(tmp_path, slow) as server, server.sdk() as sdk, server.http() as http:
        client = made(sdk)
        body = {"model_id": client.model_id, "adam_params": {}}
        answers = [http.post("optim_step", json={**body, "seq_id": seq_id}) for seq_id in (1, 2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        http.post("retrieve_future", json={"request_id": answers[0].json()["request_id"]})
        assert http.post("optim_step", json={**body, "seq_id": 2}).status_code == 200


def test_a_client_that_waits_is_told_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HOLD_S", 0.02)
    event = threading.Event()
    slow = partial(open_recording, latency_s=partial(held_until, event))
    with running(tmp_path, slow, owner_of=lambda key: str(key)) as server, server.sdk() as sdk:
        client = made(sdk)
        submitted = step(server, KEY, client.model_id, 1)
        waits = wait(server, KEY, submitted)
        event.set()
        assert (waits["queue_state"], waits["type"]) == ("active", "try_again")
        assert "1 of yours" in waits["queue_state_reason"]


def step(server: Running, key: str, model_id: str, seq_id: int) -> str:
    with server.http(key) as http:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}
        return http.post("optim_step", json=body).json()["request_id"]


def wait(server: Running, key: str, request_id: str) -> dict[str, str]:
    answer = httpx.post(
        f"{server.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers={"X-API-Key": key}
    )
    assert answer.status_code == 408
    return answer.json()


def test_what_a_server_shows(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.sdk() as sdk:
        parts = server.server.doors.parts
        assert parts is not None
        before = look(parts, 0.0)
        client = made(sdk)
        client.forward_backward([datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams()).result()
        now = look(parts, 2.0)
    assert line(before, now) == "clients 1 · steps 1 · tokens/s 3 · queue 0 requests, 0 tokens"

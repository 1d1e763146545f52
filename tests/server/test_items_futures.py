"""The protocol's conformance list: how clients learn that a sample has ended (items 38, 39, 43, 44). Each test names
its items."""

import pickle
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from running import KEY, MODELS, Running, datum, logprobs, made, open_recording, running, train
from tinker import types

from stovetop.backends import recording
from stovetop.server import protocol
from stovetop.server.completions import AHEAD, Completion, Completions
from stovetop.server.rows import DrawnRow
from stovetop.server.sweeping import sweep

PROMPT = types.ModelInput.from_ints([5, 17])


@pytest.fixture
def one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are told to ask for all samples of a session with one question."""
    monkeypatch.setitem(protocol.CLIENT_CONFIG, "sample_use_retrieve_futures", True)


class Sampling:
    """A sampling session, by raw requests."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        session = http.post("create_session", json={}).json()["session_id"]
        making = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODELS[0]}
        self.id = http.post("create_sampling_session", json=making).json()["sampling_session_id"]

    def sample(self, seq_id: int, **params: Any) -> str:
        body = {
            "sampling_session_id": self.id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
            "sampling_params": {"max_tokens": 2, **params},
        }
        return self.http.post("asample", json=body).json()["request_id"]

    def ask(self, cursor: int = 0, timeout: float | None = None, client: int = 0, **more: Any) -> dict[str, Any]:
        target = {"type": "sampling_session", "sampling_session_id": self.id, "cloned_sampler_id": client}
        body = {"target": target, "prev_cursor": cursor, "timeout": timeout, **more}
        answer = self.http.post("retrieve_futures", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def sampling(server: Running) -> Iterator[Sampling]:
    with server.http() as http:
        yield Sampling(http)


def test_item_39_completions_are_told_once_each_in_the_order_in_which_they_ended(sampling: Sampling) -> None:
    ids = [sampling.sample(seq_id) for seq_id in range(4)]
    told: list[str] = []
    cursor = 0
    while len(told) < 4:
        answer = sampling.ask(cursor)
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        told += [completion["request_id"] for completion in answer["completions"]]
        assert all(completion["response_payload_uncompressed_size"] > 0 for completion in answer["completions"])
    assert sorted(told) == sorted(ids)
    assert sampling.ask(cursor, timeout=0) == {"completions": [], "cursor": cursor}


def test_item_39_an_answer_that_was_lost_is_given_again(sampling: Sampling) -> None:
    sampling.sample(0)
    first = sampling.ask()
    assert sampling.ask(0) == first
    sampling.sample(1)
    second = sampling.ask(first["cursor"])
    assert len(second["completions"]) == 1
    assert second["cursor"] > first["cursor"]


def test_item_39_a_question_without_time_is_answered_at_once_and_one_with_time_waits(sampling: Sampling) -> None:
    begun_s = time.monotonic()
    assert sampling.ask(timeout=0)["completions"] == []
    assert time.monotonic() - begun_s < 1
    later = threading.Timer(0.2, sampling.sample, [0])
    later.start()
    assert len(sampling.ask()["completions"]) == 1
    later.join(10)


def test_item_39_what_a_client_has_is_forgotten(server: Running, sampling: Sampling) -> None:
    parts = server.server.doors.parts
    assert parts is not None
    request_id = sampling.sample(0)
    cursor = sampling.ask()["cursor"]
    sampling.ask(cursor, timeout=0, retrieved_request_ids=[request_id, "sample-of-another", "none:train:0:1"])
    sweep(parts, time.time())
    answer = sampling.http.post("retrieve_future", json={"request_id": request_id})
    assert answer.status_code == 410


def test_item_39_a_failure_is_told_and_its_reason_is_fetched(tmp_path: Path) -> None:
    faulty = partial(open_recording, faults=[recording.Raises("sample", 1, OSError("no such luck"))])
    with running(tmp_path, faulty) as server, server.http() as http:
        sampling = Sampling(http)
        request_id = sampling.sample(0)
        assert sampling.ask()["completions"] == [{"state": "failed", "request_id": request_id}]
        failed = http.post("retrieve_future", json={"request_id": request_id}).json()
        assert "no such luck" in failed["error"]


def test_the_numbers_of_completions_go_on_growing_over_a_restart() -> None:
    """Also where the clock was set back meanwhile."""
    completions = Completions()
    completions.ask()
    completions.add(0, Completion("a", 1))
    far = time.time_ns() * 2
    seen, cursor, _ = completions.after(far)
    assert [each.request_id for each in seen] == ["a"]
    assert cursor > far
    completions.add(1, Completion("b", None))
    assert [each.request_id for each in completions.after(cursor)[0]] == ["b"]


def test_what_ended_before_a_client_asked_for_all_is_told_too_unless_the_client_has_it() -> None:
    completions = Completions()
    for place in range(3):
        completions.begin(place)
        completions.add(place, Completion(f"{place}", 1))
    completions.release(1)
    completions.ask()
    assert [each.request_id for each in completions.after(0)[0]] == ["0", "2"]


def test_places_are_written_down_before_they_are_used() -> None:
    completions = Completions(("s:", 0))
    assert completions.begin(0) is None  # of a client that does not ask for all
    assert completions.ask() == range(0, 1 + AHEAD)
    assert completions.ask() is None
    assert completions.begin(AHEAD) is None
    completions.release(0)
    assert completions.begin(AHEAD + 1) == range(AHEAD, 2 * AHEAD + 2)


def test_what_a_restart_may_have_lost_is_told_once_and_written_down_until_it_was_seen() -> None:
    completions = Completions(("s:", 5000), range(3, 6))
    assert completions.ask() == range(3, 6 + AHEAD)
    lost, cursor, _ = completions.after(0)
    assert [each.request_id for each in lost] == ["s:5003", "s:5004", "s:5005"]
    assert completions.begin(7 + AHEAD) == range(3, 8 + 2 * AHEAD)
    assert completions.after(cursor)[0] == []
    assert completions.begin(9 + 2 * AHEAD) == range(7 + AHEAD, 10 + 3 * AHEAD)


@pytest.mark.slow
@pytest.mark.usefixtures("one_question")
def test_item_42_samples_that_a_restart_has_lost_are_drawn_again(tmp_path: Path) -> None:
    """Also where the client asks for all of them with one question."""
    slow = partial(open_recording, latency_s=lambda verb: 20.0 if verb == "sample" else 0.0)
    params = types.SamplingParams(max_tokens=3, seed=1)
    with running(tmp_path / "first", slow) as first:
        port = int(first.url.rpartition(":")[2])
        sdk = tinker.ServiceClient(base_url=first.url, api_key=KEY)  # stays open over the restart
        sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
        drawn = [sampler.sample(PROMPT, 1, params) for _ in range(3)]
        parts = first.server.doors.parts
        assert parts is not None
        give_up_s = time.monotonic() + 10
        while len(parts.journal.rows(DrawnRow)) == 0 and time.monotonic() < give_up_s:
            time.sleep(0.01)
    with running(tmp_path / "first", port=port):
        assert [len(each.result(40).sequences[0].tokens) for each in drawn] == [3, 3, 3]
        sdk.close("success")


@pytest.mark.usefixtures("one_question")
def test_item_38_many_samples_with_one_question_for_all_of_them(server: Running) -> None:
    with server.sdk() as sdk:
        sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
        params = types.SamplingParams(max_tokens=2, seed=1)
        drawn = [sampler.sample(PROMPT, 1, params) for _ in range(50)]
        tokens = [each.result(30).sequences[0].tokens for each in drawn]
    assert tokens == [tokens[0]] * 50


@pytest.mark.slow
@pytest.mark.parametrize("with_one_question", [False, True])
def test_item_38_two_thousand_samples(
    server: Running, with_one_question: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(protocol.CLIENT_CONFIG, "sample_use_retrieve_futures", with_one_question)
    with server.sdk() as sdk:
        sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
        params = types.SamplingParams(max_tokens=2, seed=1)
        drawn = [sampler.sample(PROMPT, 1, params) for _ in range(2000)]
        assert {tuple(each.result(90).sequences[0].tokens) for each in drawn} != set()


@pytest.mark.usefixtures("one_question")
def test_item_43_a_copy_of_a_sampler_asks_for_a_number_of_its_own(server: Running) -> None:
    with server.sdk() as sdk:
        sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
        params = types.SamplingParams(max_tokens=3, seed=1)
        copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
        drawn = [each.sample(PROMPT, 1, params) for each in (sampler, *copies)]
        tokens = [each.result(30).sequences[0].tokens for each in drawn]
    assert tokens[0] == tokens[1] == tokens[2]


def test_item_43_numbers_of_clients_differ(sampling: Sampling) -> None:
    body = {"sampling_session_id": sampling.id}
    answers = [sampling.http.post("join_sampling_session", json=body).json() for _ in range(20)]
    numbers = {answer["client_counter"] for answer in answers}
    assert len(numbers) == 20
    assert min(numbers) >= 1
    assert max(numbers) * 10**9 + 10**9 < 2**63
    number = max(numbers)
    request_id = sampling.sample(number * 10**9)
    (completion,) = sampling.ask(client=number)["completions"]
    assert completion["request_id"] == request_id
    assert sampling.ask(timeout=0)["completions"] == []


def test_a_large_result_is_told_by_its_size_first(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "INLINE_BYTES", 10)
    with server.http() as http:
        sampling = Sampling(http)
        request_id = sampling.sample(0)
        body = {"request_id": request_id, "allow_metadata_only": True}
        told = http.post("retrieve_future", json=body, headers={"Accept": protocol.PROTOBUF}).json()
        assert told["status"] == "complete_metadata"
        sent = http.post("retrieve_future", json={"request_id": request_id}, headers={"Accept": protocol.PROTOBUF})
        assert len(sent.content) == told["response_payload_size"]
    with server.sdk() as sdk:
        client = made(sdk)
        train(client)
        assert logprobs(client)


@pytest.fixture
def slow_to_sample(tmp_path: Path) -> Iterator[Running]:
    slow = partial(open_recording, latency_s=lambda verb: 5.0 if verb == "sample" else 0.0)
    with running(tmp_path, slow) as server:
        yield server


def test_item_44_a_sample_that_is_taken_back_ends(slow_to_sample: Running) -> None:
    parts = slow_to_sample.server.doors.parts
    assert parts is not None
    with slow_to_sample.http() as http:
        sampling = Sampling(http)
        request_id = sampling.sample(0)
        assert parts.limits.load.num_requests == 1
        assert http.post("cancel_future", json={"request_id": request_id}).status_code == 200
        failed = http.post("retrieve_future", json={"request_id": request_id}).json()
        assert "taken back" in failed["error"] or "cancel" in failed["error"].lower()
        assert parts.limits.load.num_requests == 0
        assert http.post("cancel_future", json={"request_id": request_id}).status_code == 200


def test_item_44_a_client_that_waits_no_longer_takes_its_sample_back(slow_to_sample: Running) -> None:
    parts = slow_to_sample.server.doors.parts
    assert parts is not None
    with slow_to_sample.sdk() as sdk:
        sampler = sdk.create_sampling_client(base_model=MODELS[0]).result()
        drawn = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).future()
        give_up_s = time.monotonic() + 60
        while parts.limits.load.num_requests == 0 and time.monotonic() < give_up_s:
            time.sleep(0.01)
        time.sleep(0.2)  # until the client knows what to take back: what it is answered, it has to read first
        drawn.cancel()
        while parts.limits.load.num_requests > 0 and time.monotonic() < give_up_s:
            time.sleep(0.01)
        assert parts.limits.load.num_requests == 0


def test_item_44_what_trains_is_not_taken_back(server: Running) -> None:
    with server.sdk() as sdk, server.http() as http:
        client = made(sdk)
        learnt = client.forward_backward([datum()], "cross_entropy")
        answer = http.post("cancel_future", json={"request_id": f"{client.model_id}:1"})
        assert answer.status_code in (200, 404)  # it may not have come yet
        assert learnt.result().metrics

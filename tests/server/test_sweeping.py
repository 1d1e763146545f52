"""What a server forgets, and that it still knows what it did."""

import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from running import Running, datum, logprobs, made, running, train

from stovetop.server import requests
from stovetop.server.rows import ResultRow
from stovetop.server.sweeping import KEPT_IN_JOURNAL_S, sweep


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as server:
        yield server


def test_a_result_is_forgotten_in_time_and_its_request_is_not_done_again(
    alone: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = alone.server.doors.parts
    assert parts is not None
    with alone.sdk() as sdk, alone.http() as http:
        client = made(sdk)
        train(client)
        logprobs(client)
        parts.programs.find(client.model_id, "local").rest().result(10)
        learnt = client.forward_backward([datum()], "cross_entropy").result()
        request_id = f"{client.model_id}:4"
        sweep(parts, time.time())
        assert parts.requests.find(request_id, "local") is not None
        monkeypatch.setattr(requests, "KEPT_S", -1.0)
        sweep(parts, time.time())
        assert parts.requests.find(request_id, "local") is None
        again = http.post("retrieve_future", json={"request_id": request_id}).json()
        assert again["metrics"] == learnt.metrics
        other = {"model_id": client.model_id, "seq_id": 4, "adam_params": {}}
        assert "was used by another request" in http.post("optim_step", json=other).json()["detail"]
        sweep(parts, time.time() + 2 * KEPT_IN_JOURNAL_S)
        left = [row.n for row in parts.journal.rows(ResultRow)]
        assert len(left) == 1  # of the gradient that no snapshot covers
        step = f"{client.model_id}:2"
        assert http.post("retrieve_future", json={"request_id": step}).status_code == 410


def test_a_sample_that_was_forgotten_is_gone(alone: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = alone.server.doors.parts
    assert parts is not None
    monkeypatch.setattr(requests, "KEPT_S", -1.0)
    with alone.sdk() as sdk, alone.http() as http:
        sampler = sdk.create_sampling_client(base_model="tiny/model").result()
        prompt, params = tinker.ModelInput.from_ints([5]), tinker.SamplingParams(max_tokens=1)
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        sweep(parts, time.time())
        request_id = str(sequence.sequence_id).removesuffix("-0")
        assert http.post("retrieve_future", json={"request_id": request_id}).status_code == 410


def test_of_the_results_that_an_owner_got_the_last_ones_are_kept(
    alone: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = alone.server.doors.parts
    assert parts is not None
    monkeypatch.setattr(requests, "MOST_KEPT", 2)
    with alone.sdk() as sdk, alone.http() as http:
        sampler = sdk.create_sampling_client(base_model="tiny/model").result()
        prompt, params = tinker.ModelInput.from_ints([5]), tinker.SamplingParams(max_tokens=1)
        drawn = [sampler.sample(prompt, 1, params).result().sequences[0] for _ in range(3)]
        waits = requests.Request("sample-s:1", "other", "sample", "sample", b"", delivered_s=0.0)
        parts.requests.add(waits)
        sweep(parts, time.time())
        ids = [str(sequence.sequence_id).removesuffix("-0") for sequence in drawn]
        codes = [http.post("retrieve_future", json={"request_id": each}).status_code for each in ids]
        assert codes == [410, 200, 200]
        assert parts.requests.find("sample-s:1", "other") is waits  # of another owner, and not done


def test_a_request_that_has_ended_holds_nothing_of_what_it_asked_for() -> None:
    class Call:
        def cancel(self) -> None: ...

    call = Call()
    gone = weakref.ref(call)
    request = requests.Request("sample-s:1", "local", "sample", "sample", b"", cancel=call.cancel)
    del call
    assert gone() is not None
    request.finish(requests.Result.of({}))
    assert gone() is None

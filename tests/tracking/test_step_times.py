"""What rows say of where the time went: each key is what its documentation says."""

import time
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.calls import AnsweredCall, Calls, Tokens
from stovetop.client import ServiceClient
from stovetop.futures import pending
from stovetop.tracking.step_times import StepTimes, listening
from stovetop.types import ModelInput, SamplingParams


def test_a_verb_that_is_called_once_has_a_total_and_one_that_is_called_often_how_many_the_mean_and_the_longest() -> (
    None
):
    times = StepTimes(None)
    for seconds in (1.0, 2.0, 3.0):
        times.heard(AnsweredCall("sample", 10.0, 10.0 + seconds, Tokens()))
    times.heard(AnsweredCall("optim_step", 10.0, 10.5, Tokens()))
    row = times.since_last_row()
    assert row.pop("time/step") >= 0
    assert row == {
        "time/sample:total": 6.0, "time/sample:count": 3, "time/sample:mean": 2.0, "time/sample:max": 3.0,
        "time/optim_step:total": 0.5,
    }  # fmt: skip
    assert times.since_last_row().keys() == {"time/step"}  # a call counts once


def test_a_step_takes_the_time_since_the_row_before() -> None:
    times = StepTimes(None)
    time.sleep(0.02)
    first = times.since_last_row()["time/step"]
    assert first >= 0.02
    assert times.since_last_row()["time/step"] < first


class Figures(ServiceClient):
    """A service whose engine did the same in each step."""

    def __new__(cls) -> "Figures":
        return object.__new__(cls)

    num_asked = 0

    def engine_figures(self) -> dict[str, float]:
        self.num_asked += 1
        seconds = {"training_s": 1e-9, "sampling_s": 2e-9, "waiting_s": 3e-9}
        done = {"num_training_passes": 2, "num_trained_tokens": 5, "num_sampling_steps": 7, "num_adapters_moved": 1}
        return {name: self.num_asked * value for name, value in (seconds | done).items()}


def test_the_engines_figures_are_those_since_the_row_before() -> None:
    times = StepTimes(Figures())
    for _ in range(2):
        times.heard(AnsweredCall("sample", 0.0, 1.0, Tokens(computed=100, cached=25, drawn=10)))
        times.heard(AnsweredCall("forward_backward", 0.0, 1.0, Tokens(computed=300)))
        row = times.since_last_row()
        assert row["time/engine/training_passes"] == 2
        assert row["time/engine/sampling_steps"] == 7
        assert row["time/engine/adapters_moved"] == 1
        assert row["time/engine/cached_share"] == 0.25
        assert row["time/engine/tokens_in_per_s"] == pytest.approx(400 / row["time/step"])
        assert row["time/engine/tokens_out_per_s"] == pytest.approx(10 / row["time/step"])
        assert row["time/engine/sampling_share"] == pytest.approx(2 * row["time/engine/training_share"])


def test_the_calls_of_a_service_are_heard_with_their_tokens_and_those_of_its_views_are_not(tmp_path: Path) -> None:
    heard: list[AnsweredCall] = []
    with recording.open_service() as service:
        client = service.create_lora_training_client("any").result()
        client.save_state("before").result()
        with service.listening(heard.append):
            client.save_state("one").result()
            sampler = client.save_weights_and_get_sampling_client().result()
            sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=4, seed=0)).result()
            sampler.compute_logprobs(ModelInput.from_ints([1, 2])).result()
            other = service.at(tmp_path / "elsewhere").create_lora_training_client("any").result()
            other.save_state("two").result()
        client.save_state("after").result()
    verbs = [call.verb for call in heard]
    assert verbs == ["save_state", "save_weights_and_get_sampling_client", "sample", "compute_logprobs"]
    sample = heard[2].tokens
    assert (sample.computed, sample.drawn > 0) == (3, True)
    assert all(call.begun_s <= call.ended_s for call in heard)


def test_a_call_that_fails_is_not_told() -> None:
    heard: list[AnsweredCall] = []
    calls = Calls()
    with calls.told_to(heard.append):
        future = pending()
        calls.follow("sample", future)
        future.set_exception(ValueError())
    assert heard == []


def test_without_a_service_only_steps_are_measured() -> None:
    with listening(None) as times:
        assert times.since_last_row().keys() == {"time/step"}

"""The flat reinforcement-learning loop on the recording backend."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.backends.recording import Raises
from stovetop.checkpoints import load_checkpoints_file
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.recipes import rl_loop
from stovetop.runs import load

NUM_STEPS = 6


@pytest.fixture
def config(tmp_path: Path) -> rl_loop.Config:
    return config_in(tmp_path)


def config_in(folder: Path) -> rl_loop.Config:
    """Problems whose answer is one letter, so that a bigram model finds it now and then and can learn it."""
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "e"}) + "\n" for i in range(12)))
    return rl_loop.Config(
        dataset=str(file),
        test_size=3,
        model_name="any/model",
        log_path=str(folder / "run"),
        groups_per_batch=3,
        group_size=24,
        max_tokens=3,
        temperature=0.7,
        learning_rate=0.5,
        num_epochs=2,
        remove_constant_reward_groups=False,
        lora_rank=4,
        eval_every=2,
        save_every=2,
    )


class Trained(NamedTuple):
    config: rl_loop.Config
    calls: list[Call]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One whole run, for all tests that only look at it."""
    config = config_in(tmp_path_factory.mktemp("rl_loop"))
    return Trained(config, train(config))


def train(config: rl_loop.Config, *faults: Raises) -> list[Call]:
    with recording.open_service(config.log_path, faults=faults) as service:
        asyncio.run(rl_loop.train(config, service))
        return service.calls


def rows(config: rl_loop.Config) -> list[dict[str, float]]:
    metrics = load(config.log_path).metrics
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in metrics]


@pytest.mark.slow  # rl/test_learning has others
def test_the_reward_rises(config: rl_loop.Config) -> None:
    config = replace(config, num_epochs=3, learning_rate=1.0, eval_every=0)
    train(config)
    rewards = load(config.log_path).series("env/all/reward/total").values
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5


def test_training_data_is_on_policy_and_has_no_mask(trained: Trained) -> None:
    for call in trained.calls:
        if call.verb == "forward_backward":
            assert call.arguments["loss_fn"] == "importance_sampling"
            assert call.arguments["loss_fn_config"] == {"temperature": 0.7}
            assert all("mask" not in datum.loss_fn_inputs for datum in call.arguments["data"])
    assert all(row["optim/kl_sample_train_v2"] < 1e-10 for row in rows(trained.config)[:-1])


def test_another_loss_reaches_the_backend_with_its_config(config: rl_loop.Config) -> None:
    calls = train(replace(config, max_steps=1, loss_fn="ppo", loss_fn_config={"clip_high_threshold": 1.5}))
    trained = next(call for call in calls if call.verb == "forward_backward")
    assert trained.arguments["loss_fn"] == "ppo"
    assert trained.arguments["loss_fn_config"] == {"clip_high_threshold": 1.5, "temperature": 0.7}


def test_each_problem_is_one_request_for_its_whole_group(trained: Trained) -> None:
    samples = [call for call in trained.calls if call.verb == "sample"]
    assert {call.arguments["num_samples"] for call in samples} == {24, 1}  # a group, a test problem


def test_each_batch_is_sampled_by_the_weights_of_the_updates_before_it(trained: Trained) -> None:
    calls = [call for call in trained.calls if call.client not in ("service", "sampling")]
    updates = 0
    frozen_after = []
    for call in calls:
        updates += call.verb == "optim_step"
        if call.verb == "save_weights_and_get_sampling_client":
            frozen_after.append(updates)
    assert frozen_after == list(range(NUM_STEPS + 1))


def test_evaluation_comes_before_the_first_step_and_after_every_other_one(trained: Trained) -> None:
    assert [row["step"] for row in rows(trained.config) if "test/env/all/correct" in row] == [0, 2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("failing_step", [1, 2, 3, 6])
def test_a_run_stopped_at_any_step_and_started_again_is_the_run_that_would_have_been(
    config: rl_loop.Config, tmp_path: Path, failing_step: int
) -> None:
    whole = replace(config, log_path=str(tmp_path / "whole"))
    train(whole)
    with pytest.raises(RequestFailedError):
        train(config, Raises("optim_step", failing_step, RuntimeError("power cut")))
    train(config)
    assert rows(config) == rows(whole)
    assert [record.batch for record in load_checkpoints_file(config.log_path)] == [2, 4, 6]


def test_the_loss_defaults_to_importance_sampling_with_the_usual_adam(trained: Trained) -> None:
    assert rl_loop.Config().loss_fn == "importance_sampling"
    assert rl_loop.Config().lr_schedule == "constant"
    adams = [call.arguments["optim_params"] for call in trained.calls if call.verb == "optim_step"]
    assert {(adam.learning_rate, adam.beta1, adam.beta2, adam.eps) for adam in adams} == {(0.5, 0.9, 0.95, 1e-8)}


def test_the_reward_is_plotted(trained: Trained) -> None:
    assert (Path(trained.config.log_path) / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [{"question": "q"}, {"question": "q", "answer": ""}, {"answer": "e", "messages": []}])
def test_a_row_that_is_no_problem_is_named_by_its_place_in_the_file(
    config: rl_loop.Config, wrong: dict[str, object]
) -> None:
    lines = Path(config.dataset).read_text().splitlines()
    lines[7] = json.dumps(wrong)
    Path(config.dataset).write_text("\n".join(lines))
    for refuse in (rl_loop.check, train):
        with pytest.raises(InvalidRequest, match=r"problems.jsonl, line 8"):
            refuse(config)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_before_the_first_step(config: rl_loop.Config) -> None:
    lines = Path(config.dataset).read_text().splitlines()
    lines[7] = json.dumps({"question": "long " * 2000, "answer": "e"})
    Path(config.dataset).write_text("\n".join(lines))
    with pytest.raises(InvalidRequest, match=r"has 100\d\d tokens, .* leaves 8189 beside max_tokens; .*'long long"):
        train(config)
    assert rows(config) == []

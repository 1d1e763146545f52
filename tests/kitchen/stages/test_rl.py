"""Each stage of reinforcement learning alone, with nothing but what it reads, on the recording backend."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from kitchen.stages.configs import write_problems
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import rl, streaming
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.session import init_renderer
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import RLDataset
from stovetop.runs import Run, load
from stovetop.types import AdamParams

STEPS = Positions(num_per_epoch=3, num_steps=6)
ADAM = AdamParams(learning_rate=0.25)


@pytest.fixture
def problems(tmp_path: Path, run: Run, client: TrainingClient) -> RLDataset:
    posed = rl.load_problems(write_problems(tmp_path / "problems.jsonl"), run, test_size=3)
    built = rl.build_env_group(posed, init_renderer(client, "role_colon"), group_size=6, run=run)
    return rl.batch_problems(built.builders, groups_per_batch=3, num_epochs=2).problems


class Played(NamedTuple):
    policy: Policy
    rollouts: Rollouts


@pytest.fixture
def played(problems: RLDataset, client: TrainingClient) -> Played:
    policy = Policy(client.save_weights_and_get_sampling_client().result(), 2, None)
    return Played(policy, asyncio.run(rl.do_rollout(problems, 4, policy, max_tokens=3, temperature=0.7, seed=1)))


def emitted(run: Run, name: str) -> list[dict[str, float]]:
    return [dict(event.values) for event in load(run.path).events if event.name == name]


def test_load_problems_holds_some_out_or_takes_them_from_another_source(tmp_path: Path, run: Run) -> None:
    dataset = write_problems(tmp_path / "problems.jsonl")
    assert [len(part) for part in rl.load_problems(dataset, run, test_size=3)] == [9, 3]
    assert [len(part) for part in rl.load_problems(dataset, run, test_dataset=dataset, test_size=3)] == [12, 12]
    assert emitted(run, "dataset.load") == [{"num_train": 9, "num_test": 3}, {"num_train": 12, "num_test": 12}]


def test_build_env_group_makes_groups_to_train_on_and_single_tries_at_those_held_out(
    tmp_path: Path, run: Run, client: TrainingClient
) -> None:
    posed = rl.load_problems(write_problems(tmp_path / "problems.jsonl"), run, test_size=3)
    built = rl.build_env_group(posed, init_renderer(client, "role_colon"), 6, run)
    sizes = [len(asyncio.run(builder.make_envs())) for builder in (built.builders[0], built.test_builders[0])]
    assert sizes == [6, 1]
    assert emitted(run, "rl.env_group_built") == [{"num_train": 9, "num_test": 3, "group_size": 6}]
    with pytest.raises(InvalidRequest, match="context leaves 2 beside max_tokens"):
        rl.build_env_group(posed, init_renderer(client, "role_colon"), 6, run, max_prompt_tokens=2)


def test_limit_prompts_is_what_the_context_leaves_beside_an_answer(
    service: InProcessServiceClient, client: TrainingClient
) -> None:
    limits = [rl.limit_prompts(service, client, max_tokens) for max_tokens in (0, 10)]
    assert limits[0] is None or limits[1] == limits[0] - 10


def test_batch_problems_counts_the_batches_of_an_epoch(problems: RLDataset) -> None:
    batches, num_per_epoch = rl.batch_problems(problems.get_batch(0), groups_per_batch=2, num_epochs=3)
    assert (len(batches), num_per_epoch) == (6, 2)


def test_make_rl_evaluators_plays_what_is_held_out(problems: RLDataset, client: TrainingClient) -> None:
    [evaluator] = rl.make_rl_evaluators(problems.get_batch(0), max_tokens=3).sampling
    metrics = asyncio.run(evaluator(client.save_weights_and_get_sampling_client().result()))
    assert metrics["test/env/all/total_episodes"] == 18
    assert rl.make_rl_evaluators([], max_tokens=3) == Evaluators()
    some = Evaluators(sampling=(evaluator,))
    assert rl.evaluates_at_end(some, is_complete=False, eval_every=2)
    assert not rl.evaluates_at_end(some, is_complete=False)
    assert not rl.evaluates_at_end(some, is_complete=True, eval_every=2)


def test_make_policy_loss_refuses_what_is_none() -> None:
    assert rl.make_policy_loss("ppo", {"clip_high_threshold": 1.5}, 0.7) == rl.PolicyLoss(
        "ppo", {"clip_high_threshold": 1.5, "temperature": 0.7}
    )
    with pytest.raises(UnknownName, match="did you mean 'ppo'"):
        rl.make_policy_loss("pppo")


def test_do_rollout_plays_the_batch_of_the_step_with_the_policy_and_a_seed_of_its_own(
    problems: RLDataset, played: Played
) -> None:
    assert [builder for builder, _ in played.rollouts.owned_groups_P] == list(problems.get_batch(4))
    again = asyncio.run(rl.do_rollout(problems, 4, played.policy, max_tokens=3, temperature=0.7, seed=1))
    assert again == played.rollouts
    assert asyncio.run(rl.do_rollout(problems, 4, played.policy, 3, 0.7, seed=2)) != played.rollouts


def test_compute_advantages_is_centred_in_each_group_and_leaves_out_what_teaches_nothing(played: Played) -> None:
    row = Row(4)
    groups_P, advantages_P_G = rl.compute_advantages(played.rollouts, row)
    assert [sum(map(float, advantages_G)) for advantages_G in advantages_P_G] == pytest.approx([0.0] * 3)  # pyright: ignore[reportArgumentType]  one a trajectory
    assert (len(groups_P), dict(row.values)) == (3, {})
    kept_P, _ = rl.compute_advantages(played.rollouts, row, remove_constant_reward_groups=True)
    assert row.values["filter/groups_removed"] == 3 - len(kept_P)
    assert len(kept_P) >= 1


def test_assemble_rl_batch_gives_data_with_a_mask_and_says_how_the_episodes_went(played: Played) -> None:
    judged, row = rl.compute_advantages(played.rollouts, Row(4)), Row(4)
    data_D = rl.assemble_rl_batch(*judged, rollouts=played.rollouts, positions=STEPS, row=row)
    assert len(data_D) == 18
    assert all("mask" in datum.loss_fn_inputs for datum in data_D)
    assert (row.values["progress/batch"], row.values["progress/done_frac"]) == (4, 5 / 6)
    assert (row.values["env/all/total_episodes"], row.values["rollout_errors/total"]) == (18, 0)


def test_kl_penalty_pulls_towards_the_reference(service: InProcessServiceClient, played: Played) -> None:
    data_D = rl.assemble_rl_batch(*rl.compute_advantages(played.rollouts, Row(4)), played.rollouts, STEPS, Row(4))
    reference, row = service.create_sampling_client(base_model="any/other").result(), Row(4)
    penalised_D = asyncio.run(rl.kl_penalty(data_D, reference, row, kl_penalty_coef=2.0))
    added_D = [
        one.loss_fn_inputs["advantages"].array - other.loss_fn_inputs["advantages"].array
        for one, other in zip(penalised_D, data_D, strict=True)
    ]
    assert row.values["kl_policy_base"] > 0
    assert any(added_N.any() for added_N in added_D)
    assert sum(float(added_N.sum()) for added_N in added_D) == pytest.approx(0, abs=1e-4)


def test_minibatches_are_the_batch_in_parts_and_train_like_the_whole(
    service: InProcessServiceClient, client: TrainingClient, problems: RLDataset, played: Played
) -> None:
    chosen = streaming.choose_streaming(max_tokens=3, num_minibatches=2, temperature=0.7, seed=1)
    minibatches = streaming.get_minibatches(problems, 4, played.policy, chosen)
    assert [len(minibatch.builders_P) for minibatch in minibatches] == [1, 2]
    row, loss = Row(4), rl.make_policy_loss(temperature=0.7)
    streamed = asyncio.run(streaming.stream_step(client, minibatches, ADAM, loss, row))
    assert streamed.rollouts == played.rollouts  # fixture: the same seed
    assert [call.verb for call in service.calls[-3:]] == ["forward_backward", "forward_backward", "optim_step"]
    data_D = rl.assemble_rl_batch(*rl.compute_advantages(played.rollouts, Row(4)), played.rollouts, STEPS, Row(4))
    assert streamed.data_D == data_D
    other, whole = service.create_lora_training_client("any/model", rank=4, seed=0).result(), Row(4)
    asyncio.run(rl.train_step(other, data_D, ADAM, loss, whole))
    assert row.values == pytest.approx(whole.values)
    streaming.log_episodes(streamed.rollouts, STEPS, row)
    assert row.values["env/all/total_episodes"] == 18


def test_minibatches_are_not_played_ahead_of_training() -> None:
    with pytest.raises(InvalidRequest, match="max_steps_off_policy must be 0"):
        streaming.choose_streaming(max_tokens=3, max_steps_off_policy=1)
    with pytest.raises(InvalidRequest, match="num_minibatches must be at least 1: 0"):
        streaming.choose_streaming(max_tokens=3, num_minibatches=0)


@pytest.mark.parametrize("num_substeps", [1, 2])
def test_train_step_updates_and_log_rl_metrics_compares_sampler_and_trainer(
    service: InProcessServiceClient, client: TrainingClient, played: Played, run: Run, num_substeps: int
) -> None:
    data_D = rl.assemble_rl_batch(*rl.compute_advantages(played.rollouts, Row(4)), played.rollouts, STEPS, Row(4))
    row, loss = Row(4), rl.make_policy_loss(temperature=0.7)
    logprobs_D = asyncio.run(rl.train_step(client, data_D, ADAM, loss, row, num_substeps))
    assert [call.verb for call in service.calls].count("optim_step") == num_substeps
    assert (row.values["optim/lr"], row.values["optim/num_updates"]) == (0.25, num_substeps)
    rl.log_rl_metrics(data_D, logprobs_D, played.rollouts, played.policy, row, run)
    assert row.values["lag"] == 2
    assert num_substeps > 1 or row.values["optim/kl_sample_train_v2"] < 1e-10
    [event] = emitted(run, "rl.step")
    assert event.keys() == {"reward_mean", "reward_std", "policy_loss", "kl_div", "entropy", "clip_fraction"}
    assert event["policy_loss"] == row.values["loss:sum"]


def test_ppo_update_makes_several_updates_and_gives_the_logprobs_of_before_the_first(
    service: InProcessServiceClient, client: TrainingClient, played: Played
) -> None:
    data_D = rl.assemble_rl_batch(*rl.compute_advantages(played.rollouts, Row(4)), played.rollouts, STEPS, Row(4))
    before = asyncio.run(_logprobs(service, data_D))
    row, loss = Row(4), rl.make_policy_loss("ppo", {"clip_high_threshold": 1.5}, temperature=0.7)
    logprobs_D = asyncio.run(rl.ppo_update(client, data_D, ADAM, loss, row, ppo_epochs=3))
    updates = [call for call in service.calls if call.verb == "forward_backward"][1:]
    assert [call.arguments["loss_fn"] for call in updates] == ["ppo"] * 3
    assert updates[0].arguments["loss_fn_config"]["clip_high_threshold"] == 1.5
    assert row.values["optim/num_updates"] == 3
    assert all((one.array == other.array).all() for one, other in zip(logprobs_D, before, strict=True))


async def _logprobs(service: InProcessServiceClient, data_D: list[rl.Datum]) -> list[rl.TensorData]:
    other = await service.create_lora_training_client("any/model", rank=4, seed=0)
    return await rl.train_step(other, data_D, ADAM, rl.make_policy_loss(temperature=0.7), Row(4))

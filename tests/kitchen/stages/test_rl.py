"""Each stage of reinforcement learning alone, with nothing but what it reads, on the recording backend."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from kitchen.stages.configs import write_problems
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.checkpoints import Start
from stovetop.client import TrainingClient
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen import Positions, Row
from stovetop.kitchen.stages import environments, rl, rollout_pool, streaming
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.policies import Policy, freeze_policy
from stovetop.kitchen.stages.sampling import Sampling, choose_sampling, do_rollout
from stovetop.kitchen.stages.session import init_renderer
from stovetop.renderers.base import Renderer
from stovetop.rl.advantages import GAE
from stovetop.rl.data_processing import assemble_training_data
from stovetop.rl.problem_env import ProblemGroupBuilder
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import Env, RLDataset, StopReason, Trajectory, TrajectoryGroup, Transition
from stovetop.runs import Run, load
from stovetop.types import AdamParams, Datum, ModelInput

STEPS = Positions(num_per_epoch=3, num_steps=6)
ADAM = AdamParams(learning_rate=0.25)
SAMPLING = choose_sampling(max_tokens=3, temperature=0.7, seed=1)


@pytest.fixture
def problems(tmp_path: Path, run: Run, client: TrainingClient) -> RLDataset:
    posed = rl.load_problems(write_problems(tmp_path / "problems.jsonl"), run, test_size=3)
    built = rl.build_env_group(posed, init_renderer(client, "role_colon"), group_size=6, run=run)
    return rl.batch_problems(built.builders, groups_per_batch=3, num_epochs=2).problems


class Played(NamedTuple):
    policy: Policy
    rollouts: Rollouts


@pytest.fixture
def played(problems: RLDataset, client: TrainingClient, run: Run) -> Played:
    policy = Policy(client.save_weights_and_get_sampling_client().result(), 2, None)
    return Played(policy, asyncio.run(do_rollout(problems, 4, policy, SAMPLING, run)))


@pytest.fixture
def data_D(played: Played, run: Run) -> list[Datum]:
    judged = rl.compute_advantages(played.rollouts, Row(4), run)
    return rl.assemble_rl_batch(*judged, played.rollouts, STEPS, Row(4), run)


@pytest.fixture
def praised_D(data_D: list[Datum]) -> list[Datum]:
    """The same, with an advantage of 1 everywhere."""
    return [
        Datum(datum.model_input, {**datum.loss_fn_inputs, "advantages": datum.loss_fn_inputs["mask"]})
        for datum in data_D
    ]


def emitted(run: Run, name: str) -> list[dict[str, float]]:
    return [dict(event.values) for event in load(run.path).events if event.name == name]


def test_load_problems_holds_some_out_or_takes_them_from_another_source(tmp_path: Path, run: Run) -> None:
    dataset, other = write_problems(tmp_path / "problems.jsonl"), "sample:arithmetic[:5]"
    assert [len(part) for part in rl.load_problems(dataset, run, test_size=3)] == [9, 3]
    assert [len(part) for part in rl.load_problems(dataset, run, test_dataset=other, test_size=3)] == [12, 5]
    assert emitted(run, "dataset.load") == [
        {"num_train": 9, "num_test": 3, "num_skipped": 0},
        {"num_train": 12, "num_test": 5, "num_skipped": 0},
    ]


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


def test_make_policy_loss_refuses_what_is_none() -> None:
    assert rl.make_policy_loss("ppo", {"clip_high_threshold": 1.5}, 0.7) == rl.PolicyLoss(
        "ppo", {"clip_high_threshold": 1.5, "temperature": 0.7}
    )
    with pytest.raises(UnknownName, match="did you mean 'ppo'"):
        rl.make_policy_loss("pppo")


def test_choose_sampling_gives_each_number_of_updates_a_seed_of_its_own(client: TrainingClient) -> None:
    frozen = client.save_weights_and_get_sampling_client().result()

    def answers(sampling: Sampling, num_updates: int) -> list[list[int]]:
        policy = sampling.policy(frozen, num_updates)

        async def ask() -> list[list[int]]:
            return [list((await policy(ModelInput.from_ints([1, 2]), [0])).tokens) for _ in range(4)]

        return asyncio.run(ask())

    hot = choose_sampling(max_tokens=3, temperature=2.0, seed=1)
    assert answers(hot, 2) == answers(hot, 2) != answers(hot, 3) == answers(hot._replace(seed=2), 2)


def test_do_rollout_plays_the_batch_of_the_step_with_the_policy_and_a_seed_of_its_own(
    problems: RLDataset, played: Played, run: Run
) -> None:
    assert [builder for builder, _ in played.rollouts.owned_groups_P] == list(problems.get_batch(4))
    assert asyncio.run(do_rollout(problems, 4, played.policy, SAMPLING, run)) == played.rollouts
    other = SAMPLING._replace(seed=2)
    assert asyncio.run(do_rollout(problems, 4, played.policy, sampling=other, run=run)) != played.rollouts
    assert emitted(run, "dataset.batch") == [{"num_groups": 3}] * 3
    complete = emitted(run, "rl.rollout_complete")[0]
    assert (complete["num_groups"], complete["num_episodes"]) == (3, 18)
    assert complete.keys() == {"num_groups", "num_episodes", "reward_mean", "reward_std"}


def test_compute_advantages_is_centred_in_each_group_and_leaves_out_what_teaches_nothing(
    played: Played, run: Run
) -> None:
    row = Row(4)
    groups_P, advantages_P_G = rl.compute_advantages(played.rollouts, row, run)
    assert [sum(map(float, advantages_G)) for advantages_G in advantages_P_G] == pytest.approx([0.0] * 3)  # pyright: ignore[reportArgumentType]  one a trajectory
    assert (len(groups_P), dict(row.values)) == (3, {})
    kept_P, _ = rl.compute_advantages(played.rollouts, row, run, remove_constant_reward_groups=True)
    assert row.values["filter/groups_removed"] == 3 - len(kept_P)
    assert len(kept_P) >= 1
    by_turn = rl.compute_advantages(played.rollouts, Row(4), run, estimator=GAE(baseline="zero"))
    rewards_P_G = [group.get_total_rewards() for group in by_turn.groups_P]
    assert by_turn.advantages_P_G == [[[reward] for reward in rewards_G] for rewards_G in rewards_P_G]  # one turn each
    assert emitted(run, "rl.advantages_computed") == [
        {"num_groups": number, "num_trajectories": 6 * number} for number in (3, len(kept_P), 3)
    ]


def test_assemble_rl_batch_gives_data_with_a_mask_and_says_how_the_episodes_went(played: Played, run: Run) -> None:
    judged, row = rl.compute_advantages(played.rollouts, Row(4), run), Row(4)
    data_D = rl.assemble_rl_batch(*judged, rollouts=played.rollouts, positions=STEPS, row=row, run=run)
    assert len(data_D) == 18
    assert all("mask" in datum.loss_fn_inputs for datum in data_D)
    assert (row.values["progress/batch"], row.values["progress/done_frac"]) == (4, 5 / 6)
    assert (row.values["env/all/total_episodes"], row.values["rollout_errors/total"]) == (18, 0)
    num_tokens = sum(datum.model_input.length for datum in data_D)
    assert emitted(run, "rl.batch_assembled") == [{"num_datums": 18, "num_tokens": num_tokens}]


def test_weigh_episodes_alike_weighs_one_of_two_data_as_much_as_one_of_one() -> None:
    observation = ModelInput.from_ints([1, 2])
    turn = Transition(observation, TokensWithLogprobs([3, 4, 5], [-1.0, -1.0, -1.0]), 0.0, True)
    short, long = (Trajectory([turn] * number, ModelInput.empty(), StopReason.COMPLETED) for number in (1, 2))
    group = TrajectoryGroup([short, long], [0.0, 0.0], [{}, {}])
    data_D = assemble_training_data([group], [[1.0, 1.0]])[0]
    assert len(data_D) == 3  # the second turn of the long one shows the first observation again
    totals_D = [
        float(datum.loss_fn_inputs["advantages"].array.sum())
        for datum in rl.weigh_episodes_alike(data_D, [group], [[1.0, 1.0]])
    ]
    assert totals_D == pytest.approx([1 / 2, 1 / 4, 1 / 4])


def test_kl_penalty_pulls_towards_the_reference(service: InProcessServiceClient, data_D: list[Datum]) -> None:
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
    service: InProcessServiceClient,
    client: TrainingClient,
    problems: RLDataset,
    played: Played,
    data_D: list[Datum],
    run: Run,
) -> None:
    chosen = streaming.choose_streaming(sampling=SAMPLING, num_minibatches=2)
    minibatches = streaming.get_minibatches(problems, 4, played.policy, chosen, run)
    assert [len(minibatch.builders_P) for minibatch in minibatches] == [1, 2]
    row, loss = Row(4), rl.make_policy_loss(temperature=0.7)
    streamed = asyncio.run(streaming.stream_step(client, minibatches, ADAM, loss, row))
    assert streamed.rollouts == played.rollouts  # fixture: the same seed
    assert [call.verb for call in service.calls[-3:]] == ["forward_backward", "forward_backward", "optim_step"]
    assert streamed.data_D == data_D
    other, whole = service.create_lora_training_client("any/model", rank=4, seed=0).result(), Row(4)
    asyncio.run(rl.train_step(other, data_D, ADAM, loss, whole))
    assert row.values == pytest.approx(whole.values)
    streaming.log_episodes(streamed.rollouts, streamed.data_D, STEPS, row, run)
    assert row.values["env/all/total_episodes"] == 18
    for name in ("dataset.batch", "rl.rollout_complete", "rl.advantages_computed", "rl.batch_assembled"):
        first, second = emitted(run, name)  # the first is the fixture's
        assert first == second


def test_each_update_of_a_step_has_minibatches_of_its_own(
    service: InProcessServiceClient, client: TrainingClient, problems: RLDataset, played: Played, run: Run
) -> None:
    chosen = streaming.choose_streaming(SAMPLING, num_minibatches=3, num_substeps=2)
    minibatches = streaming.get_minibatches(problems, 4, played.policy, chosen, run)
    assert [(len(each.builders_P), each.is_last) for each in minibatches] == [(1, True), (1, False), (1, True)]
    row, loss = Row(4), rl.make_policy_loss(temperature=0.7)
    asyncio.run(streaming.stream_step(client, minibatches, ADAM, loss, row))
    verbs = [call.verb for call in service.calls if call.verb in ("forward_backward", "optim_step")]
    assert verbs == ["forward_backward", "optim_step", "forward_backward", "forward_backward", "optim_step"]
    assert row.values["optim/num_updates"] == 2


@pytest.mark.parametrize("num_substeps", [1, 2])
def test_train_step_updates_and_log_rl_metrics_compares_sampler_and_trainer(
    service: InProcessServiceClient,
    client: TrainingClient,
    played: Played,
    data_D: list[Datum],
    run: Run,
    num_substeps: int,
) -> None:
    row, loss = Row(4), rl.make_policy_loss(temperature=0.7)
    logprobs_D = asyncio.run(rl.train_step(client, data_D, ADAM, loss, row, num_substeps))
    assert [call.verb for call in service.calls].count("optim_step") == num_substeps
    assert (row.values["optim/lr"], row.values["optim/num_updates"]) == (0.25, num_substeps)
    rl.log_rl_metrics(data_D, logprobs_D, row, run, policy=played.policy)
    assert row.values["lag"] == 2
    assert num_substeps > 1 or row.values["optim/kl_sample_train_v2"] < 1e-10
    [event] = emitted(run, "rl.step")
    assert event.keys() == {"policy_loss", "kl_div", "entropy", "clip_fraction"}  # rewards are assemble_rl_batch's
    assert event["policy_loss"] == row.values["loss:sum"]


def test_ppo_update_makes_several_updates_and_gives_the_logprobs_of_before_the_first(
    service: InProcessServiceClient, client: TrainingClient, praised_D: list[Datum], run: Run
) -> None:
    before = asyncio.run(_logprobs(service, praised_D))
    row, updates = Row(4), rl.make_ppo_loss({"clip_high_threshold": 1.05}, temperature=0.7, ppo_epochs=3)
    logprobs_D = asyncio.run(rl.ppo_update(client, praised_D, ADAM, updates, row, run))
    passes = [call for call in service.calls if call.verb == "forward_backward"][1:]
    assert [call.arguments["loss_fn"] for call in passes] == ["ppo"] * 3
    assert passes[0].arguments["loss_fn_config"]["clip_high_threshold"] == 1.05
    assert row.values["optim/num_updates"] == 3
    assert all((one.array == other.array).all() for one, other in zip(logprobs_D, before, strict=True))
    assert row.values["optim/clip_fraction"] > 0  # of the second and third pass: the first has ratios of 1
    rl.log_rl_metrics(praised_D, logprobs_D, row, run)
    assert "lag" not in row.values
    [event], [step] = emitted(run, "rl.ppo_update"), emitted(run, "rl.step")
    expected = {"policy_loss": row.values["loss:sum"], "entropy": row.values["optim/entropy"], "num_updates": 3}
    assert event == expected
    assert step["clip_fraction"] == row.values["optim/clip_fraction"]


def test_ppo_update_may_make_each_pass_in_parts(client: TrainingClient, praised_D: list[Datum], run: Run) -> None:
    row, updates = Row(4), rl.make_ppo_loss(temperature=0.7, ppo_epochs=3, num_substeps=2)
    asyncio.run(rl.ppo_update(client, praised_D, ADAM, updates, row, run))
    assert row.values["optim/num_updates"] == 6


def test_compute_post_kl_measures_how_far_an_update_went(
    client: TrainingClient, played: Played, praised_D: list[Datum]
) -> None:
    before, after = Row(4), Row(4)
    asyncio.run(rl.compute_post_kl(praised_D, [played.policy], before))
    asyncio.run(rl.train_step(client, praised_D, ADAM, rl.make_policy_loss(temperature=0.7), Row(4)))
    updated = asyncio.run(freeze_policy(client, 4, STEPS))
    asyncio.run(rl.compute_post_kl(praised_D, [played.policy, updated], after))
    assert before.values.keys() == after.values.keys() == {"kl_pre_post_v1", "kl_pre_post_v2"}
    assert before.values["kl_pre_post_v2"] != after.values["kl_pre_post_v2"]


def test_make_ppo_loss_refuses_what_is_no_limit_of_ratios() -> None:
    assert rl.make_ppo_loss() == rl.ProximalUpdates(rl.PPO(), 4, 1)
    with pytest.raises(InvalidRequest, match="clip_hi"):
        rl.make_ppo_loss({"clip_hi": 1.5})


async def _logprobs(service: InProcessServiceClient, data_D: list[Datum]) -> list[rl.TensorData]:
    other = await service.create_lora_training_client("any/model", rank=4, seed=0)
    return await rl.train_step(other, data_D, ADAM, rl.make_policy_loss(temperature=0.7), Row(4))


# ---- a pool ----------------------------------------------------------------------------------------------------------


def test_a_pool_gives_each_step_what_is_ready_and_plays_with_what_was_published(
    client: TrainingClient, problems: RLDataset, run: Run
) -> None:
    async def main() -> list[Row]:
        rows: list[Row] = []
        opened = rollout_pool.rollout_pool(client, problems, STEPS, Start(client), SAMPLING, max_steps_off_policy=1)
        pool = await anext(aiter(opened))
        for step in range(6):
            row = Row(step)
            rollouts = await rollout_pool.take_ready(pool, row, run)
            assert len(rollouts.owned_groups_P) == 3
            await rollout_pool.publish_policy(client, pool, SAMPLING, step)
            rows.append(row)
        assert [each async for each in opened] == []
        return rows

    rows = asyncio.run(main())
    assert all(row.values["lag/mean"] <= row.values["lag/max"] <= 1 for row in rows)
    assert all(row.values["stale_groups"] >= 0 for row in rows)
    trained = [event.labels["groups"].split() for event in load(run.path).events if event.name == "dataset.batch"]
    assert sorted(int(index) for indices in trained for index in indices) == list(range(18))
    assert len(emitted(run, "rl.rollout_complete")) == 6


# ---- environments by name --------------------------------------------------------------------------------------------


def test_build_env_group_of_takes_a_name_builders_or_a_function_that_makes_one_environment(
    problems: RLDataset, client: TrainingClient, run: Run
) -> None:
    builders, renderer = problems.get_batch(0), init_renderer(client, "role_colon")
    build = environments.build_env_group_of

    def named(renderer: Renderer, group_size: int) -> rl.Builders:
        return rl.Builders(builders[:group_size], builders[2:])

    def thunk() -> Env:
        return asyncio.run(builders[0].make_envs())[0]

    table = {"one_letter": named}
    assert build("one_letter", renderer, 2, run, environments=table) == (builders[:2], builders[2:])
    assert build(builders, renderer, 2, run) == (builders, [])
    assert build(builders[0], renderer, 2, run) == ([builders[0]], [])
    [made] = build(thunk, renderer, 2, run).builders
    assert isinstance(made, ProblemGroupBuilder)
    assert (made.env_thunk, made.num_envs) == (thunk, 2)
    with pytest.raises(UnknownName, match="did you mean 'one_letter'"):
        build("one_leter", renderer, 2, run, table)
    assert emitted(run, "rl.env_group_built")[1] == {"num_train": 2, "num_test": 1, "group_size": 2}

"""REINFORCEMENT as a whole, on the recording backend: on-policy it is the flat loop, ahead of training its lag is
exact, and a run that is stopped and resumed is the run that would have been, however far it was ahead."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest

from kitchen.stages.configs import RLConfig, StreamingConfig, write_problems
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.backends.opened_base import Call
from stovetop.checkpoints import Start, load_checkpoints_file
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import InvalidRequest, StageFailed
from stovetop.kitchen import Positions, Row, stage
from stovetop.kitchen.stages.policies import Policy
from stovetop.kitchen.stages.rl import compute_post_kl
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import (
    PPO,
    READY,
    REINFORCEMENT,
    STREAMING,
    do_async_training,
    do_sync_training,
    do_sync_training_with_stream_minibatch,
)
from stovetop.recipes import rl_loop
from stovetop.rl.types import Env, EnvGroupBuilder, Metrics, RLDataset, Trajectory
from stovetop.runs import Run, load, open_run

WORDS = ("max", "min", "mean")
NUM_STEPS = 6  # of two epochs: nine problems to train on, three a step


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    return RLConfig(dataset=write_problems(tmp_path / "problems.jsonl"), log_path=str(tmp_path / "run"))


async def train(config: RLConfig, workflow: Workflow = REINFORCEMENT) -> Sequence[Call]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await workflow.run(config, service=service, run=run)
        return service.calls


def rl_steps(log_path: str) -> list[tuple[int | None, dict[str, float]]]:
    return [(event.step, dict(event.values)) for event in load(log_path).events if event.name == "rl.step"]


def rollout_files(log_path: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(log_path).glob("rollouts/*"))}


def test_on_policy_it_is_the_flat_loop_in_every_metric_and_to_the_bit(config: RLConfig) -> None:
    config = replace(config, remove_constant_reward_groups=True)
    asyncio.run(train(config))
    own = asdict(config).items()
    both = {name: value for name, value in own if name in {field.name for field in fields(rl_loop.Config)}}
    flat = rl_loop.Config(**{**both, "log_path": f"{config.log_path}-flat"})
    with recording.open_service(flat.log_path) as service:
        asyncio.run(rl_loop.train(flat, service))
    flat_rows = rows(flat.log_path)
    shared = [
        {name: value for name, value in row.items() if name in of_flat}
        for row, of_flat in zip(rows(config.log_path), flat_rows, strict=True)
    ]
    assert shared == flat_rows
    assert rl_steps(config.log_path) == rl_steps(flat.log_path)
    assert weights(config.log_path) == weights(flat.log_path)
    assert checkpoints(config.log_path) == checkpoints(flat.log_path)
    assert rollout_files(config.log_path) == rollout_files(flat.log_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RLConfig]:
    """Runs that nothing stopped, by how many steps sampling is ahead."""
    configs: dict[int, RLConfig] = {}
    for depth in (0, 1, 3):
        folder = tmp_path_factory.mktemp(f"whole{depth}")
        dataset = write_problems(folder / "problems.jsonl")
        configs[depth] = RLConfig(dataset=dataset, log_path=str(folder / "run"), max_steps_off_policy=depth)
        asyncio.run(train(configs[depth]))
    return configs


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_lag_is_exact(whole: dict[int, RLConfig], depth: int) -> None:
    found = [row["lag"] for row in rows(whole[depth].log_path)[:-1]]  # the last one is the evaluation
    assert found == [min(step, depth) for step in range(NUM_STEPS)]
    records = load_checkpoints_file(whole[depth].log_path)
    assert [record.batch for record in records] == [2, 4, 6]
    assert {len(record.policy_paths) for record in records} == {depth + 1 if depth else 0}
    named = [Path(path).name for path in records[1].policy_paths]
    assert named == [f"policy-{max(0, 4 - depth + ahead):06d}" for ahead in range(depth + 1)][: len(named)]


def stopping_at(at: int):
    @stage
    def stops(step: int = at) -> None:
        if step == at:
            raise ValueError("stopped")

    return stops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "boundary", "at"),
    [
        (0, "train_step", 3), (0, "record_checkpoint", 4),
        (1, "do_rollout", 4), (1, "freeze_policy", 5), (1, "log_step", 3), (1, "evaluate_at_end", 0),
        (3, "train_step", 3), (3, "record_checkpoint", 4),
    ],
)  # fmt: skip
def test_a_run_that_is_stopped_anywhere_and_resumed_is_the_run_that_would_have_been(
    config: RLConfig, whole: dict[int, RLConfig], depth: int, boundary: str, at: int
) -> None:
    config = replace(config, max_steps_off_policy=depth)
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, REINFORCEMENT.insert_after(boundary, stopping_at(at))))
    asyncio.run(train(config))
    assert rows(config.log_path) == rows(whole[depth].log_path)
    assert weights(config.log_path) == weights(whole[depth].log_path)
    assert checkpoints(config.log_path) == checkpoints(whole[depth].log_path)
    events = Counter((event.name, event.step) for event in load(config.log_path).events if event.step is not None)
    assert all(events[("rl.step", step)] == 1 for step in range(NUM_STEPS))


@pytest.mark.slow
def test_a_resumed_run_that_begins_with_the_weights_of_its_checkpoint_alone_learns_something_else(
    config: RLConfig, whole: dict[int, RLConfig]
) -> None:
    """What the policies in a checkpoint's row are for."""

    @stage(writes="policies")
    async def forget(training_client: TrainingClient, start: Start) -> list[Policy]:
        return [Policy(await training_client.save_weights_and_get_sampling_client(), start.batch, None)]

    config = replace(config, max_steps_off_policy=1)
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, REINFORCEMENT.insert_after("log_step", stopping_at(3))))
    wrong = REINFORCEMENT.replace("initial_policies", forget).remove("record_checkpoint").remove("save_final_weights")
    asyncio.run(train(config, wrong))
    assert rows(config.log_path) != rows(whole[1].log_path)


def test_a_run_that_is_made_longer_is_the_run_that_was_longer_from_the_start(
    config: RLConfig, whole: dict[int, RLConfig]
) -> None:
    config = replace(config, max_steps_off_policy=3, max_steps=3)
    asyncio.run(train(config))
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, replace(config, max_steps=None), console=False, allow_config_changes=True) as run,
    ):
        asyncio.run(REINFORCEMENT.run(replace(config, max_steps=None), service=service, run=run))
    changing = ("progress", "test/", "time/")
    trained = [
        [{name: value for name, value in row.items() if not name.startswith(changing)} for row in rows(path)[:-1]]
        for path in (config.log_path, whole[3].log_path)
    ]
    assert trained[0] == trained[1]
    assert weights(config.log_path) == weights(whole[3].log_path)


def test_a_run_may_move_while_it_is_ahead(config: RLConfig, whole: dict[int, RLConfig]) -> None:
    config = replace(config, max_steps_off_policy=3)
    with pytest.raises(StageFailed, match="stage 'stops'"):
        asyncio.run(train(config, REINFORCEMENT.insert_after("log_step", stopping_at(5))))
    moved = replace(config, log_path=f"{config.log_path}-moved")
    Path(config.log_path).rename(moved.log_path)
    asyncio.run(train(moved))
    assert rows(moved.log_path) == rows(whole[3].log_path)


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_ppo_is_an_edit_with_several_updates_a_step(config: RLConfig) -> None:
    @dataclass(frozen=True, kw_only=True)
    class PPOConfig(RLConfig):
        ppo_epochs: int = 4

    calls = asyncio.run(train(PPOConfig(**asdict(config)), PPO))
    assert [call.verb for call in calls].count("optim_step") == 4 * NUM_STEPS
    assert [row["optim/num_updates"] for row in rows(config.log_path)[:-1]] == [4] * NUM_STEPS
    assert all(row["lag"] == 0 for row in rows(config.log_path)[:-1])


def test_streaming_learns_what_the_whole_batch_teaches(config: RLConfig) -> None:
    streaming = StreamingConfig(**asdict(config), num_minibatches=3)
    asyncio.run(train(streaming, STREAMING))
    plain = replace(config, log_path=f"{config.log_path}-plain")
    asyncio.run(train(plain))
    for streamed, whole in zip(rows(streaming.log_path), rows(plain.log_path), strict=True):
        assert streamed == pytest.approx(whole, rel=1e-3)


def test_minibatches_ahead_of_training_and_less_than_one_of_them_are_refused_before_anything_runs(
    config: RLConfig,
) -> None:
    ports = {"service": ServiceClient, "run": Run}
    wrong = StreamingConfig(**{**asdict(config), "max_steps_off_policy": 1}, num_minibatches=0)
    few, ahead = STREAMING.check(wrong, ports).problems
    assert few == ("stage 'choose_streaming' reads 'num_minibatches', which must be an integer of at least 1: 0")
    assert ahead == (
        "stage 'choose_streaming' reads 'max_steps_off_policy', which must be 0 (minibatches are played with the "
        "weights that they train; READY and REINFORCEMENT play ahead): 1"
    )
    assert STREAMING.check(type(wrong), ports).problems == ()


def test_a_loop_that_is_further_ahead_than_its_config_says_is_refused_before_anything_runs(config: RLConfig) -> None:
    ports = {"service": ServiceClient, "run": Run}
    assert REINFORCEMENT.at_depth(2).check(config, ports).problems == (
        "the loop is at depth 2, and make_policy_loss, initial_policies, freeze_policy take it to be "
        "max_steps_off_policy: set max_steps_off_policy=2, it is 0",
    )
    assert REINFORCEMENT.at_depth(2).check(replace(config, max_steps_off_policy=2), ports).problems == ()
    assert REINFORCEMENT.at_depth(2).check(RLConfig, ports).problems == ()


async def call(function: Callable[..., Awaitable[dict[str, object]]], config: RLConfig) -> list[float]:
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, config, console=False) as run,
    ):
        await function(config, service=service, run=run)
    return [row["lag"] for row in rows(config.log_path)[:-1]]


def test_training_on_policy_in_minibatches_and_ahead_are_calls_of_one_workflow(config: RLConfig) -> None:
    config = replace(config, max_steps=2)
    streaming = StreamingConfig(**{**asdict(config), "log_path": f"{config.log_path}-streaming"})
    ahead = replace(config, max_steps_off_policy=1, log_path=f"{config.log_path}-ahead")
    assert asyncio.run(call(do_sync_training, config)) == [0, 0]
    assert asyncio.run(call(do_sync_training_with_stream_minibatch, streaming)) == [0, 0]
    assert asyncio.run(call(do_async_training, ahead)) == [0, 1]
    with pytest.raises(InvalidRequest, match="must be 0, or use do_async_training: 1"):
        asyncio.run(call(do_sync_training, ahead))
    with pytest.raises(InvalidRequest, match="must be 1 or more, or use do_sync_training: 0"):
        asyncio.run(call(do_async_training, config))


def test_a_field_that_only_a_variant_reads_is_refused_by_the_others(config: RLConfig) -> None:
    @dataclass(frozen=True, kw_only=True)
    class PPOConfig(RLConfig):
        ppo_epochs: int = 4

    ports = {"service": ServiceClient, "run": Run}
    checked = REINFORCEMENT.check(PPOConfig(**asdict(config), ppo_epochs=2), ports)
    assert checked.problems == ("config field 'ppo_epochs' is set to 2, and no stage reads it",)
    assert REINFORCEMENT.check(config, ports).unread == ()


def test_the_worst_mistake_is_refused_before_anything_runs(config: RLConfig) -> None:
    @stage
    async def peek(training_client: TrainingClient) -> None: ...

    ports = {"service": ServiceClient, "run": Run}
    together, two = REINFORCEMENT.insert_before("compute_advantages", peek).check(config, ports).problems
    assert together.startswith("stage 'peek' uses the training client in a station that serves items together")
    assert two.startswith("stages 'peek' and 'evaluate' use the training client in two stations")


def test_every_mode_reports_the_same_metrics_and_the_time_of_each_stage(config: RLConfig) -> None:
    def names(workflow: Workflow, own: RLConfig) -> set[str]:
        own = replace(own, log_path=f"{config.log_path}-{workflow.name}-{own.max_steps_off_policy}")
        asyncio.run(train(own, workflow))
        return {name for name in load(own.log_path).metrics[0] if ":" not in name or not name.startswith("time/")}

    config = replace(config, max_steps=1)
    on_policy = names(REINFORCEMENT, config)
    ahead = replace(config, max_steps_off_policy=1)
    of_loop = {
        "progress/batch", "progress/done_frac", "optim/lr", "optim/num_updates", "optim/entropy", "optim/clip_fraction",
        "optim/kl_sample_train_v1", "optim/kl_sample_train_v2", "loss:sum", "env/all/reward/total", "lag",
        "test/env/all/reward/total", "rollout_errors/total", "time/step", "time/evaluate", "time/train_step",
        "time/do_rollout", "time/compute_advantages", "time/assemble_rl_batch",
    }  # fmt: skip
    assert of_loop <= on_policy
    assert names(REINFORCEMENT, ahead) == on_policy
    parts = ("time/do_rollout", "time/compute_advantages", "time/assemble_rl_batch", "time/train_step")
    streamed = names(STREAMING, StreamingConfig(**asdict(config)))
    assert streamed == on_policy - set(parts) | {"time/get_minibatches", "time/stream_step", "time/log_episodes"}
    of_pool = {"lag/max", "lag/mean", "stale_groups", "time/take_ready", "time/publish_policy"}
    of_pool |= {f"{name}_{word}" for name in ("sampling_client/step", "time/sampling_time") for word in WORDS}
    assert names(READY, ahead) == on_policy - {"lag", "time/do_rollout", "time/freeze_policy"} | of_pool
    assert names(REINFORCEMENT.insert_after("freeze_policy", compute_post_kl).named("post"), config) == on_policy | {
        "kl_pre_post_v1", "kl_pre_post_v2", "time/compute_post_kl",
    }  # fmt: skip


def test_a_minibatch_is_trained_on_before_the_last_one_is_played(config: RLConfig) -> None:
    @dataclass(frozen=True)
    class Slow:
        """A group that takes so long to grade."""

        builder: EnvGroupBuilder
        waits_s: float

        async def make_envs(self) -> Sequence[Env]:
            return await self.builder.make_envs()

        async def compute_group_rewards(
            self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
        ) -> Sequence[tuple[float, Metrics]]:
            await asyncio.sleep(self.waits_s)
            trained_when_played.append([call.verb for call in service.calls].count("forward_backward"))
            return await self.builder.compute_group_rewards(trajectories_G, envs_G)

        def logging_tags(self) -> Sequence[str]:
            return self.builder.logging_tags()

    @dataclass(frozen=True)
    class LastAreSlow:
        problems: RLDataset

        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return [Slow(each, 0.05 * (place >= 3)) for place, each in enumerate(self.problems.get_batch(index))]

        def __len__(self) -> int:
            return len(self.problems)

    @stage(writes="problems")
    def slow_down(problems: RLDataset) -> RLDataset:
        return LastAreSlow(problems)

    trained_when_played: list[int] = []
    own = {"max_steps": 1, "eval_every": 0, "groups_per_batch": 9}
    streaming = StreamingConfig(**{**asdict(config), **own}, num_minibatches=3)
    with (
        recording.open_service(config.log_path) as service,
        open_run(config.log_path, streaming, console=False) as run,
    ):
        workflow = STREAMING.insert_after("batch_problems", slow_down)
        asyncio.run(workflow.run(streaming, service=service, run=run))
        assert [call.verb for call in service.calls].count("forward_backward") == 3
    assert trained_when_played[0] == 0
    assert trained_when_played[-1] > 0


def test_a_stage_of_ones_own_adds_to_the_row(config: RLConfig) -> None:
    @stage
    def count(positions: Positions, row: Row) -> None:
        row.add({"mine/steps_left": positions.num_steps - row.step})

    asyncio.run(train(config, REINFORCEMENT.insert_before("log_step", count)))
    assert [row["mine/steps_left"] for row in rows(config.log_path)[:-1]] == [6, 5, 4, 3, 2, 1]

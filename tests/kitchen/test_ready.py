"""READY as a whole, on the recording backend: on-policy it is REINFORCEMENT, ahead of training it stays within its
bound, and a run that is killed anywhere loses no group and trains none twice."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from costly import slow_but
from kitchen.copies import Copier
from kitchen.stages.configs import RLConfig, write_problems
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.backends.recording import Raises
from stovetop.checkpoints import PendingCheckpoint, load_checkpoints_file
from stovetop.client import ServiceClient
from stovetop.errors import StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import READY, REINFORCEMENT
from stovetop.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory
from stovetop.runs import Run, load, open_run
from stovetop.tracking.events import Recorder

NUM_STEPS = 6  # of two epochs: nine problems to train on, three a step
NUM_PARTS = 60
LATENCY_S = {"forward_backward": 0.001, "save_state": 0.003, "sample": 0.001}
ONCE = {"dataset.batch", "rl.rollout_complete", "rl.advantages_computed", "rl.batch_assembled", "rl.step"}


@dataclass
class Pace:
    """How many groups were graded."""

    num_graded: int = 0


@dataclass(frozen=True)
class Paced:
    """A group whose grading, if it is slow, waits for eight others, until for some turns of the loop none has come: so
    what is ready first does not depend on the machine."""

    builder: EnvGroupBuilder
    pace: Pace
    is_slow: bool

    async def make_envs(self) -> Sequence[Env]:
        return await self.builder.make_envs()

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        enough, seen, idle = self.pace.num_graded + 8, self.pace.num_graded, 0
        while self.is_slow and self.pace.num_graded < enough and idle < 120:
            await asyncio.sleep(0.001)
            idle = idle + 1 if self.pace.num_graded == seen else 0
            seen = self.pace.num_graded
        self.pace.num_graded += 1
        return await self.builder.compute_group_rewards(trajectories_G, envs_G)

    def logging_tags(self) -> Sequence[str]:
        return self.builder.logging_tags()


@stage(writes="builders")
def slow_down(builders: Sequence[EnvGroupBuilder]) -> Sequence[EnvGroupBuilder]:
    """Some episodes last longer than others."""
    pace = Pace()
    return [Paced(builder, pace, index in (0, 4)) for index, builder in enumerate(builders)]


HEAVY_TAILED = READY.insert_after("build_env_group", slow_down)


def config_in(folder: Path, **changed: int) -> RLConfig:
    return replace(RLConfig(dataset=write_problems(folder / "problems.jsonl"), log_path=str(folder / "run")), **changed)


def train(config: RLConfig, workflow: Workflow = HEAVY_TAILED, *sinks: Recorder, after_s: float | None = None) -> None:
    with (
        recording.open_service(config.log_path, latency_s=lambda verb: LATENCY_S.get(verb, 0.0)) as service,
        open_run(config.log_path, config, console=False, sinks=sinks) as run,
    ):

        async def main() -> None:
            async with asyncio.timeout(after_s):
                await workflow.run(config, service=service, run=run)
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(main())


def trained_groups(log_path: str) -> list[list[int]]:
    """Of each step that counts: those of steps that ran again, once."""
    taken = {
        event.step: [int(index) for index in event.labels["groups"].split()]
        for event in load(log_path).events
        if event.name == "dataset.batch"
    }
    return [taken[step] for step in range(NUM_STEPS)]


def is_each_trained_once(log_path: str) -> bool:
    return sorted(index for groups in trained_groups(log_path) for index in groups) == list(range(3 * NUM_STEPS))


def test_on_policy_it_is_reinforcement_to_the_bit(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    train(config)
    in_order = replace(config, log_path=str(tmp_path / "in order"))
    train(in_order, REINFORCEMENT)
    own, others = rows(config.log_path), rows(in_order.log_path)
    for row, other in zip(own[:-1], others[:-1], strict=True):
        assert [row.pop(name) for name in ("lag/max", "lag/mean", "stale_groups")] == [0, 0, 0]
        assert other.pop("lag") == 0
        assert {row.pop(f"sampling_client/step_{word}") for word in ("max", "min", "mean")} == {row["step"]}
    assert own == others
    assert weights(config.log_path) == weights(in_order.log_path)
    assert checkpoints(config.log_path) == checkpoints(in_order.log_path)


def test_ahead_of_training_it_stays_within_its_bound_and_trains_on_what_is_ready(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_steps_off_policy=2)
    train(config)
    found = rows(config.log_path)[:-1]
    assert all(row["lag/mean"] <= row["lag/max"] <= 2 for row in found)
    assert max(row["lag/max"] for row in found) > 0
    assert is_each_trained_once(config.log_path)
    assert trained_groups(config.log_path) != [list(range(3 * step, 3 * step + 3)) for step in range(NUM_STEPS)]


# ---- kills -----------------------------------------------------------------------------------------------------------


def killed(folder: Path, workflow: Workflow = HEAVY_TAILED) -> tuple[RLConfig, list[Path]]:
    config = config_in(folder, max_steps_off_policy=2)
    copier = Copier(Path(config.log_path))
    train(config, workflow, copier)
    return config, copier.all_copies()


def some_are_trained_early(copies: Sequence[Path]) -> bool:
    return any(record.trained_ahead for copy in copies for record in load_checkpoints_file(copy))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLConfig, list[Path]]:
    config, found = killed(tmp_path_factory.mktemp("ready"))
    assert some_are_trained_early(found)
    return config, found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_run_that_is_killed_at_the_boundary_of_a_stage_loses_no_group_and_trains_none_twice(
    copies: tuple[RLConfig, list[Path]], part: int
) -> None:
    config, found = copies
    for copy in found[part::NUM_PARTS]:
        train(replace(config, log_path=str(copy)))
        assert is_each_trained_once(str(copy))
        assert [row["step"] for row in rows(str(copy))] == list(range(NUM_STEPS + 1))
        counted = Counter((event.name, event.step) for event in load(copy).events if event.name in ONCE)
        assert counted == {(name, step): 1 for name in ONCE for step in range(NUM_STEPS)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_is_cancelled_at_any_moment_loses_no_group_and_trains_none_twice(tmp_path: Path, seed: int) -> None:
    config, generator = config_in(tmp_path, max_steps_off_policy=seed % 3), random.Random(seed)
    for after_s in (generator.uniform(0.02, 0.12), generator.uniform(0.05, 0.2), generator.uniform(0.1, 0.3)):
        with contextlib.suppress(TimeoutError):
            train(config, after_s=after_s)
    train(config)
    assert is_each_trained_once(config.log_path)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_name_what_was_trained_early_loses_groups(tmp_path: Path) -> None:
    """What the indices in its row are for."""

    @stage
    async def record_without(saved: PendingCheckpoint, run: Run) -> None:
        await saved.record(run.path)

    forgetful = HEAVY_TAILED.replace("record_checkpoint", record_without)
    config, found = killed(tmp_path, forgetful)
    wrong = 0
    for copy in found[len(found) // 3 :: 25]:
        train(replace(config, log_path=str(copy)), forgetful)
        wrong += not is_each_trained_once(str(copy))
    assert wrong > 0


# ---- it ends, and fails by name --------------------------------------------------------------------------------------


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "changed",
    slow_but(1, [{"max_steps": 2}, {"remove_constant_reward_groups": True, "max_tokens": 1}, {"groups_per_batch": 4}]),
    ids=["a surplus of problems", "constant groups", "a short last batch"],
)
def test_it_ends(tmp_path: Path, changed: dict[str, int]) -> None:
    config = config_in(tmp_path, max_steps_off_policy=1, **changed)
    train(config)
    assert load_checkpoints_file(config.log_path)[-1].final
    removed = sum(row.get("filter/groups_removed", 0) for row in rows(config.log_path))
    assert (removed > 0) == config.remove_constant_reward_groups


def test_a_worker_that_fails_stops_the_run_and_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_steps_off_policy=1, test_size=0)
    recorder = Recorder()
    faults = [Raises("sample", call, RuntimeError("card fell off")) for call in range(14, 99)]  # retries fail too
    with (
        recording.open_service(config.log_path, faults=faults) as service,
        open_run(config.log_path, config, console=False, sinks=[recorder]) as run,
    ):

        async def main() -> None:
            with pytest.raises(StageFailed, match=r"stage 'rollout_pool' of .* failed: .*card fell off"):
                await HEAVY_TAILED.run(config, service=service, run=run)
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(main())
    balance = Counter[str]()
    for event in recorder.events:
        if event.name.startswith("stage."):
            balance[event.labels["stage"]] += 1 if event.name == "stage.start" else -1
    assert not any(balance.values())


# ---- as a value ------------------------------------------------------------------------------------------------------


def test_it_is_one_station_of_depth_0_whatever_the_bound_and_every_field_is_read(tmp_path: Path) -> None:
    checked = READY.check(config_in(tmp_path, max_steps_off_policy=3), {"service": ServiceClient, "run": Run})
    assert (checked.problems, checked.unread) == ((), ())
    assert checked.config_fields["max_steps_off_policy"] == ("make_policy_loss", "rollout_pool")
    described = READY.describe()
    assert described.notes == ()
    assert {row.where.split(", when")[0] for row in described.stages if row.where.startswith("loop")} == {
        "loop, station 1"
    }
    [taken] = [row for row in described.stages if row.stage == "take_ready"]
    assert (taken.reads, taken.writes) == (("pool", "row", "run"), ("rollouts",))
    [problem] = READY.check(
        config_in(tmp_path, max_steps_off_policy=-1), {"service": ServiceClient, "run": Run}
    ).problems
    assert problem == ("stage 'rollout_pool' reads 'max_steps_off_policy', which must be an integer of at least 0: -1")

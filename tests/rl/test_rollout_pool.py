"""A pool that plays ahead of training, in virtual time: what it gives, whatever takes how long; and what it gains."""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import virtual_time
from rl.scripted import CountingEnv, Table, says
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.concurrency import LineStation, assembly_line, started
from stovetop.errors import EnvError
from stovetop.rl.rollout_pool import RolloutPool, Taken
from stovetop.rl.types import EnvGroupBuilder
from stovetop.types import ModelInput


@dataclass(frozen=True)
class Problems:
    """Batches of these sizes. An episode takes a time of its own each time that it is played: mostly short, now and
    then very long (Pareto, 1.3)."""

    sizes: Sequence[int]
    generator: random.Random
    fails: Collection[int] = ()

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        first = sum(self.sizes[:index])
        return [self._group(number) for number in range(first, first + self.sizes[index])]

    def _group(self, number: int) -> Table:
        def error() -> Exception | None:
            return OSError(f"problem {number}") if number in self.fails else None

        def seat(index: int) -> CountingEnv:
            return CountingEnv(number, waits_s=0.1 * self.generator.paretovariate(1.3), fails=error)

        return Table(seat, num_seats=2, tags=[f"problem {number}"])

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Version:
    """A policy whose answers say after how many updates it was published."""

    num_updates: int

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return says(self.num_updates)


class Trained(NamedTuple):
    steps: list[Taken]
    trained_ahead: tuple[int, ...]
    seconds: float


async def train(
    problems: Problems,
    *,
    ahead: int,
    start: int = 0,
    until: int | None = None,
    num_steps: int | None = None,
    trained_ahead: Collection[int] = (),
) -> Trained:
    num_steps = len(problems) if num_steps is None else num_steps
    began_s = asyncio.get_running_loop().time()
    pool = RolloutPool(problems, num_steps, Version(start), start=start, ahead=ahead, trained_ahead=trained_ahead)
    steps: list[Taken] = []
    async with started((pool.work() for _ in range(pool.num_workers)), name="worker"):
        for step in range(start, num_steps if until is None else until):
            steps.append(await pool.take(step))
            await asyncio.sleep(0.2)
            pool.publish(Version(step + 1), step + 1)
    return Trained(steps, pool.trained_ahead, asyncio.get_running_loop().time() - began_s)


def indices(trained: Trained) -> list[int]:
    return [index for taken in trained.steps for index in taken.indices_P]


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)).map(
    lambda drawn: ([drawn[0]] * drawn[1] + [min(drawn[2], drawn[0])]) * drawn[3]  # epochs, whose last batch is short
)


@given(SIZES, st.integers(0, 3), st.integers(0, 2**32), st.data())
def test_every_group_is_trained_once_and_none_is_too_old_also_when_a_run_is_killed(
    sizes: list[int], ahead: int, seed: int, data: st.DataObject
) -> None:
    problems = Problems(sizes, random.Random(seed))
    killed = virtual_time.run(train(problems, ahead=ahead, until=data.draw(st.integers(0, len(sizes)))))
    start = len(killed.steps)
    resumed = virtual_time.run(train(problems, ahead=ahead, start=start, trained_ahead=killed.trained_ahead))
    assert sorted(indices(killed) + indices(resumed)) == list(range(sum(sizes)))
    assert resumed.trained_ahead == ()
    for step, (taken, size) in enumerate(zip([*killed.steps, *resumed.steps], sizes, strict=True)):
        assert len(taken.indices_P) == size
        assert all(0 <= lag <= ahead for lag in taken.lags_P)
        for index, lag, (builder, group) in zip(
            taken.indices_P, taken.lags_P, taken.rollouts.owned_groups_P, strict=True
        ):
            assert builder.logging_tags() == [f"problem {index}"]
            played_by = {token for each in group.trajectories_G for token in each.transitions[0].ac.tokens}
            assert played_by == {step - lag}
    if ahead == 0:
        assert indices(killed) + indices(resumed) == list(range(sum(sizes)))
        assert not any(taken.num_stale for taken in [*killed.steps, *resumed.steps])


def test_few_groups_are_played_again() -> None:
    """Of 48 that are trained: none, 8 and 8. If those of a batch began when another is taken: 44, 15 and 14."""
    stale = [
        [
            sum(taken.num_stale for taken in virtual_time.run(train(problems(seed), ahead=ahead)).steps)
            for seed in range(5)
        ]
        for ahead in (0, 1, 2)
    ]
    assert stale[0] == [0] * 5
    assert sorted(stale[1])[2] <= 10
    assert sorted(stale[2])[2] <= 10


def problems(seed: int, num_steps: int = 12) -> Problems:
    return Problems([4] * num_steps, random.Random(seed))


async def train_in_order(problems: Problems, *, ahead: int) -> float:
    """As long as the exact order takes: whole batches, on a line."""
    pools = [RolloutPool(problems, step + 1, Version(step), start=step) for step in range(len(problems))]

    async def play(step: int) -> None:
        async with started((pools[step].work() for _ in range(pools[step].num_workers)), name="worker"):
            await pools[step].take(step)

    async def update(step: int) -> None:
        await asyncio.sleep(0.2)

    began_s = asyncio.get_running_loop().time()
    await assembly_line(range(len(problems)), [LineStation(play, together=True), LineStation(update)], depth=ahead)
    return asyncio.get_running_loop().time() - began_s


def test_where_episodes_have_heavy_tails_it_gains_on_the_exact_order() -> None:
    gains = [
        virtual_time.run(train_in_order(problems(seed, 24), ahead=1))
        / virtual_time.run(train(problems(seed, 24), ahead=1)).seconds
        for seed in range(5)
    ]
    assert sorted(gains)[2] > 1.2


# ---- it always ends (of these, upstream's loop hangs in three) -------------------------------------------------------


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("sizes", "num_steps"), [([4, 4, 4], 3), ([4, 4, 1], 3), ([1], 1), ([4] * 9, 2)],
    ids=["full batches", "a short last batch", "one group", "a surplus of builders"],
)  # fmt: skip
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_it_ends(sizes: list[int], num_steps: int, ahead: int) -> None:
    trained = virtual_time.run(train(Problems(sizes, random.Random(3)), ahead=ahead, num_steps=num_steps))
    assert sorted(indices(trained)) == list(range(sum(sizes[:num_steps])))


def test_a_run_that_is_made_shorter_trains_what_it_has_and_made_longer_again_trains_the_rest() -> None:
    """What was trained early may lie beyond the new end."""
    sizes = [3] * 8
    killed = virtual_time.run(train(Problems(sizes, random.Random(1)), ahead=3, until=4))
    assert max(killed.trained_ahead) > 12
    shorter = virtual_time.run(
        train(Problems(sizes, random.Random(2)), ahead=3, start=4, num_steps=5, trained_ahead=killed.trained_ahead)
    )
    longer = virtual_time.run(
        train(Problems(sizes, random.Random(3)), ahead=3, start=5, trained_ahead=shorter.trained_ahead)
    )
    assert sorted(indices(killed) + indices(shorter) + indices(longer)) == list(range(24))


def test_a_run_that_is_complete_plays_nothing() -> None:
    assert virtual_time.run(train(Problems([3, 3], random.Random(1)), ahead=2, start=2)).steps == []


def test_a_group_that_fails_for_good_ends_all_of_them() -> None:
    async def main() -> None:
        with pytest.raises(EnvError, match="problem 7"):
            await train(Problems([3] * 4, random.Random(1), fails=[7]), ahead=1)
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(main())

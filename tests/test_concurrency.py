"""Structured concurrency: order, limits, and what a failure leaves behind."""

import asyncio
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

import virtual_time
from stovetop.concurrency import LineStation, assembly_line, in_thread, map_together, started, together
from stovetop.errors import InvalidRequest


def test_results_come_in_the_order_given_whatever_the_order_they_finish_in() -> None:
    generator = random.Random(7)
    delays = [generator.uniform(0, 0.01) for _ in range(50)]
    finished: list[int] = []

    async def work(index: int) -> int:
        await asyncio.sleep(delays[index])
        finished.append(index)
        return index

    assert asyncio.run(map_together(work, range(50))) == list(range(50))
    assert finished != list(range(50))


def test_no_more_than_the_limit_run_at_once() -> None:
    running = most = 0

    async def work(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    asyncio.run(map_together(work, range(20), limit=3))
    assert most == 3


def test_tasks_have_names_that_a_debugger_shows() -> None:
    async def own_name() -> str:
        task = asyncio.current_task()
        return task.get_name() if task else ""

    assert asyncio.run(together([own_name(), own_name()], name="rollout")) == ["rollout 0", "rollout 1"]


def test_a_failure_cancels_the_rest_awaits_them_and_surfaces_once_as_itself() -> None:
    cleaned_up: list[int] = []

    async def work(index: int) -> None:
        try:
            await asyncio.sleep(0 if index == 3 else 60)
            raise ValueError(f"number {index}")
        finally:
            cleaned_up.append(index)

    with pytest.raises(ValueError, match="number 3"):
        asyncio.run(map_together(work, range(6)))
    assert sorted(cleaned_up) == list(range(6))


def test_a_failure_keeps_its_cause() -> None:
    async def fail() -> None:
        raise ValueError("wrapped") from KeyError("first")

    with pytest.raises(ValueError, match="wrapped") as caught:
        asyncio.run(together([fail()]))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_failure_inside_nested_groups_surfaces_as_itself() -> None:
    async def fail() -> None:
        raise ValueError("deep")

    with pytest.raises(ValueError, match="deep"):
        asyncio.run(together([together([together([fail()])])]))


def test_work_that_never_began_is_closed_without_a_warning() -> None:
    async def fail() -> None:
        raise ValueError("early")

    async def never() -> None:
        raise AssertionError("it began")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="early"):
            asyncio.run(together([fail(), *(never() for _ in range(5))], limit=1))


def test_a_failing_producer_of_work_stops_what_it_had_started() -> None:
    async def work() -> None:
        await asyncio.sleep(60)

    def produce() -> Iterator[Awaitable[None]]:
        yield work()
        yield asyncio.sleep(0)
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        asyncio.run(together(produce()))


def test_cancelling_from_outside_cancels_everything_inside() -> None:
    cancelled: list[int] = []

    async def work(index: int) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    async def run() -> None:
        async with asyncio.timeout(0.01):
            await map_together(work, range(4))

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert sorted(cancelled) == [0, 1, 2, 3]


def test_two_hundred_groups_share_nothing_but_what_they_return() -> None:
    async def group(index: int) -> dict[int, int]:
        counts = {index: 0}
        for _ in range(5):
            await asyncio.sleep(0)
            counts[index] += 1
        return counts

    assert asyncio.run(map_together(group, range(200))) == [{index: 5} for index in range(200)]


def test_blocking_work_leaves_the_loop_free() -> None:
    async def run() -> tuple[str, int]:
        ticks = 0

        async def tick() -> str:
            nonlocal ticks
            while ticks < 5:
                ticks += 1
                await asyncio.sleep(0.001)
            return "ticked"

        await together([in_thread(lambda: time.sleep(0.02)), tick()])
        return "both", ticks

    assert asyncio.run(run()) == ("both", 5)


# ---- started ---------------------------------------------------------------------------------------------------------


def test_what_is_started_runs_at_once_and_is_awaited_in_any_order() -> None:
    finished: list[int] = []

    async def work(index: int) -> int:
        await asyncio.sleep(0.3 - 0.1 * index)
        finished.append(index)
        return index

    async def main() -> list[int]:
        async with started(work(index) for index in range(3)) as running:
            return [await each for each in running]

    assert virtual_time.run(main()) == [0, 1, 2]
    assert finished == [2, 1, 0]


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_still_running_at_the_end_of_the_block_is_cancelled_and_awaited(fails: bool) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def main() -> None:
        async with started([work(), work()]):
            await asyncio.sleep(0)
            if fails:
                raise LookupError("in the block")

    if fails:
        with pytest.raises(LookupError, match="in the block"):
            asyncio.run(main())
    else:
        asyncio.run(main())
    assert ended == ["work", "work"]


def test_a_failure_of_what_was_started_ends_the_block_and_surfaces_as_itself() -> None:
    reached: list[str] = []

    async def fail() -> None:
        raise ValueError("early")

    async def main() -> None:
        async with started([asyncio.sleep(60), fail()]) as running:
            await running[0]
            reached.append("the end")

    with pytest.raises(ValueError, match="early"):
        asyncio.run(main())
    assert reached == []


# ---- a line of stations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A line, how long each item takes at each station, and where it fails."""

    depth: int
    is_together: list[bool]
    num_items: int
    seconds: list[float]  # taken in turn
    fails_at: tuple[int, int] | None  # item, station

    def latency_s(self, item: int, station: int) -> float:
        return self.seconds[(item * len(self.is_together) + station) % len(self.seconds)]


@dataclass
class Watched:
    """What was seen of a line."""

    drawn: list[int] = field(default_factory=list[int])
    entered: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # items by station, in order
    finished: list[int] = field(default_factory=list[int])  # items that the last station has served
    serving: Counter[int] = field(default_factory=Counter[int])  # items by station, now
    most_on_line: int = 0


async def watch(plan: Plan, seen: Watched) -> None:
    def items() -> Iterator[int]:
        for item in range(plan.num_items):
            seen.drawn.append(item)
            seen.most_on_line = max(seen.most_on_line, len(seen.drawn) - len(seen.finished))
            yield item

    def station(index: int) -> LineStation[int]:
        async def serve(item: int) -> None:
            seen.entered.setdefault(index, []).append(item)
            seen.serving[index] += 1
            try:
                await asyncio.sleep(plan.latency_s(item, index))
                if plan.fails_at == (item, index):
                    raise ValueError(f"item {item} at station {index}")
                assert plan.is_together[index] or seen.serving[index] == 1
            finally:
                seen.serving[index] -= 1
            if index == len(plan.is_together) - 1:
                seen.finished.append(item)

        return LineStation(serve, together=plan.is_together[index])

    await assembly_line(items(), [station(index) for index in range(len(plan.is_together))], depth=plan.depth)
    assert len(asyncio.all_tasks()) == 1


PLANS = st.builds(
    Plan,
    depth=st.integers(0, 4),
    is_together=st.lists(st.booleans(), min_size=1, max_size=4),
    num_items=st.integers(0, 9),
    seconds=st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]), min_size=1, max_size=11),
    fails_at=st.none(),
)


@given(PLANS)
def test_items_pass_every_station_in_order_and_no_more_than_depth_and_one_are_on_the_line(plan: Plan) -> None:
    seen = Watched()
    virtual_time.run(watch(plan, seen))
    everything = list(range(plan.num_items))
    assert seen.drawn == everything
    assert all(seen.entered.get(index, []) == everything for index in range(len(plan.is_together)))
    assert seen.most_on_line <= plan.depth + 1
    if not plan.is_together[-1]:
        assert seen.finished == everything


@given(PLANS, st.data())
def test_the_first_failure_on_the_line_surfaces_as_itself_and_nothing_is_left_over(
    plan: Plan, data: st.DataObject
) -> None:
    item, station = data.draw(st.tuples(st.integers(0, 9), st.integers(0, len(plan.is_together) - 1)))
    plan = Plan(plan.depth, plan.is_together, item + 1 + plan.num_items, plan.seconds, (item, station))
    seen = Watched()

    async def main() -> None:
        with pytest.raises(ValueError, match=f"item {item} at station {station}"):
            await watch(plan, seen)
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(main())
    assert not any(seen.serving.values())
    assert max(seen.drawn) <= item + plan.depth


@given(PLANS, st.floats(0.01, 3))
def test_a_line_that_is_cancelled_leaves_nothing_over(plan: Plan, seconds: float) -> None:
    seen = Watched()

    async def main() -> None:
        try:
            async with asyncio.timeout(seconds):
                await watch(plan, seen)
        except TimeoutError:
            assert len(seen.finished) < plan.num_items
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(main())
    assert not any(seen.serving.values())


@given(PLANS)
def test_a_step_takes_as_long_as_the_longest_serial_station_or_its_share_of_all(plan: Plan) -> None:
    seconds_of = [plan.seconds[index % len(plan.seconds)] for index in range(len(plan.is_together))]
    steady = Plan(plan.depth, plan.is_together, 24, seconds_of, None)

    async def main() -> float:
        await watch(steady, Watched())
        return asyncio.get_running_loop().time()

    serial = [latency for latency, together in zip(seconds_of, plan.is_together, strict=True) if not together]
    step_s = max([*serial, sum(seconds_of) / (plan.depth + 1)])
    assert virtual_time.run(main()) <= 24 * step_s + sum(seconds_of) * (plan.depth + 1) + 1e-6


def test_what_is_drawn_may_depend_on_what_has_left_so_the_items_may_be_endless() -> None:
    left: list[int] = []

    def items() -> Iterator[int]:
        for item in itertools.count():
            assert left == list(range(item - 2))
            if item == 50:
                return
            yield item

    async def serve(item: int) -> None:
        await asyncio.sleep(0.1)
        left.append(item)

    virtual_time.run(assembly_line(items(), [LineStation(serve)], depth=2))
    assert left == list(range(50))


def test_a_failure_of_the_items_stops_those_on_the_line() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise LookupError("no more rows")

    stopped: list[int] = []

    async def serve(item: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(item)

    with pytest.raises(LookupError, match="no more rows"):
        asyncio.run(assembly_line(items(), [LineStation(serve)], depth=1))
    assert stopped in ([], [0])


def test_waiting_for_something_that_was_cancelled_is_a_failure_and_the_line_does_not_hang() -> None:
    async def serve(item: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(RuntimeError, match="was cancelled"):
        asyncio.run(assembly_line(range(3), [LineStation(serve)]))


@pytest.mark.parametrize(("num_stations", "depth"), [(0, 0), (1, -1)])
def test_a_line_without_a_station_or_with_a_negative_depth_is_refused(num_stations: int, depth: int) -> None:
    async def serve(item: int) -> None: ...

    with pytest.raises(InvalidRequest, match=rf"{num_stations} stations, depth {depth}"):
        asyncio.run(assembly_line([1], [LineStation(serve)] * num_stations, depth=depth))

"""Structured concurrency: order, limits, and what a failure leaves behind."""

import asyncio
import random
import time
import warnings
from collections.abc import Awaitable, Iterator

import pytest

from stovetop.concurrency import in_thread, map_together, together


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

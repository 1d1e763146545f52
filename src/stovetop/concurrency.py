"""The few words of structured concurrency that the package needs. Nothing outside this file makes a task.

A task never outlives the call that made it: when one fails, its siblings are cancelled and awaited, and the failure
surfaces once, as itself.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stovetop.errors import InvalidRequest

T = TypeVar("T")
S = TypeVar("S")


@asynccontextmanager
async def _tasks() -> AsyncGenerator[asyncio.TaskGroup]:
    """A task group whose first failure is raised as itself, once all of its tasks have ended."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:  # pyright: ignore[reportUnknownVariableType]  its content is what tasks raise
        failure = first_failure(failures)
    if failure is not None:
        raise failure  # outside the except block, so that its own cause and context stay as they are


async def together(awaitables: Iterable[Awaitable[T]], *, limit: int | None = None, name: str = "together") -> list[T]:
    """Awaits all at once and returns their results in the order given, whatever the order they finish in.

    `limit` is how many run at the same time (None: all). The first failure cancels the rest and is raised.
    """
    slots = asyncio.Semaphore(limit) if limit is not None else None
    accepted: list[Awaitable[T]] = []
    tasks: list[asyncio.Task[T]] = []

    async def one(awaitable: Awaitable[T]) -> T:
        if slots is None:
            return await awaitable
        async with slots:
            return await awaitable

    try:
        async with _tasks() as group:
            for index, awaitable in enumerate(awaitables):
                accepted.append(awaitable)
                tasks.append(group.create_task(one(awaitable), name=f"{name} {index}"))
    finally:
        for awaitable in accepted:
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # one that was cancelled before it began
    return [task.result() for task in tasks]


async def map_together(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], *, limit: int | None = None, name: str = "map"
) -> list[T]:
    """`together` of `function(item)` for each item."""
    return await together((function(item) for item in items), limit=limit, name=name)


@asynccontextmanager
async def started(
    coroutines: Iterable[Coroutine[Any, Any, T]], *, name: str = "started"
) -> AsyncGenerator[list[Awaitable[T]]]:
    """Starts all at once; the block awaits each when it needs it. Those that it has not awaited are cancelled at its
    end, and the first failure cancels the rest and ends the block.

        async with started(play(group) for group in groups) as played:
            for group in played:
                train_on(await group)
    """
    async with _tasks() as group:
        tasks = [group.create_task(each, name=f"{name} {index}") for index, each in enumerate(coroutines)]
        yield list(tasks)
        for task in tasks:
            task.cancel()


# ---- a line of stations ----------------------------------------------------------------------------------------------


_Left = asyncio.Event  # noqa: TID251  that an item has left a station


@dataclass(frozen=True, slots=True)
class LineStation(Generic[T]):
    """A place on the line: `serve(item)` is what happens to an item there."""

    serve: Callable[[T], Awaitable[None]]
    together: bool = False  # False: one item at a time, in order. True: each item at once when it arrives


async def assembly_line(items: Iterable[T], stations: Sequence[LineStation[T]], *, depth: int = 0) -> None:
    """Takes every item through every station. At most `depth` + 1 items are on the line at a time, one task for each.

    A station serves item k when item k-1 has left it; a `together` station serves it at once. Items leave every station
    in order. The next item is drawn from `items` only when the item `depth` + 1 before it has left the last station, so
    `items` may be endless, and drawing may depend on what those before have done.

    A step takes max(the longest serial station, the sum of all / (depth + 1)). The first failure, that of `items` too,
    cancels the others, waits for them and is raised as itself.
    """
    if depth < 0 or not stations:
        raise InvalidRequest(
            f"a line needs a station and a depth of 0 or more: {len(stations)} stations, depth {depth}"
        )

    async def feed() -> None:
        on_line: deque[list[_Left]] = deque()
        before = [_Left() for _ in stations]
        for has_left in before:
            has_left.set()
        source = iter(items)
        while True:
            if len(on_line) > depth:
                await on_line.popleft()[-1].wait()
            try:
                item = next(source)
            except StopIteration:
                return
            left = [_Left() for _ in stations]
            group.create_task(_carry(item, stations, before, left))
            on_line.append(left)
            before = left

    async with _tasks() as group:
        group.create_task(feed())


def is_cancelled() -> bool:
    """Whether this task was asked to stop. If not, a CancelledError tells of something else that it waited for, and is
    a failure like any other: a task group would take a task that ends with it for one that is finished."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _carry(item: T, stations: Sequence[LineStation[T]], before: list[_Left], left: list[_Left]) -> None:
    """One item through all stations; `before` tells which of them the item before it has left."""
    for station, before_left, has_left in zip(stations, before, left, strict=True):
        if not station.together:
            await before_left.wait()
        try:
            await station.serve(item)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RuntimeError("what a station waited for was cancelled") from error
        await before_left.wait()
        has_left.set()


# ---- threads ---------------------------------------------------------------------------------------------------------


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a blocking function on a worker thread, so that the event loop goes on."""
    return await asyncio.to_thread(function)


def first_failure(failure: BaseException) -> BaseException:
    """What a group of failures began with."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  untyped in the group
    return failure  # pyright: ignore[reportUnknownVariableType]  as above

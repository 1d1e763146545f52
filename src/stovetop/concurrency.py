"""The few words of structured concurrency that the package needs. Nothing outside this file makes a task.

A task never outlives the call that made it: when one fails, its siblings are cancelled and awaited, and the failure
surfaces once, as itself.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


async def together(awaitables: Iterable[Awaitable[T]], *, limit: int | None = None, name: str = "together") -> list[T]:
    """Awaits all at once and returns their results in the order given, whatever the order they finish in.

    `limit` is how many run at the same time (None: all). The first failure cancels the rest and is raised.
    """
    slots = asyncio.Semaphore(limit) if limit is not None else None
    accepted: list[Awaitable[T]] = []
    tasks: list[asyncio.Task[T]] = []
    failure: BaseException | None = None

    async def one(awaitable: Awaitable[T]) -> T:
        if slots is None:
            return await awaitable
        async with slots:
            return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            for index, awaitable in enumerate(awaitables):
                accepted.append(awaitable)
                tasks.append(group.create_task(one(awaitable), name=f"{name} {index}"))
    except BaseExceptionGroup as failures:  # pyright: ignore[reportUnknownVariableType]  its content is what tasks raise
        failure = _first_failure(failures)
    finally:
        for awaitable in accepted:
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # one that was cancelled before it began
    if failure is not None:
        raise failure  # outside the except block, so that its own cause and context stay as they are
    return [task.result() for task in tasks]


async def map_together(
    function: Callable[[S], Awaitable[T]], items: Iterable[S], *, limit: int | None = None, name: str = "map"
) -> list[T]:
    """`together` of `function(item)` for each item."""
    return await together((function(item) for item in items), limit=limit, name=name)


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a blocking function on a worker thread, so that the event loop goes on."""
    return await asyncio.to_thread(function)


def _first_failure(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  untyped in the group
    return failure  # pyright: ignore[reportUnknownVariableType]  as above

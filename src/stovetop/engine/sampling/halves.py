# pyright: basic
"""A failure belongs to the request that caused it. Work on many things that raises is tried again on halves of them,
until what raises is alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from stovetop.engine.containment import Contained

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class Failed(Generic[T]):
    item: T
    error: BaseException


def in_halves(items: Sequence[T], work: Callable[[Sequence[T]], object]) -> list[Failed[T]]:
    """Does `work` on all items, or on parts of them, and returns those with which it raises when they are alone. `work`
    takes effect as a whole or not at all. Where even one alone does not fit into memory, what else is in memory is at
    fault, not the one: that error is raised."""
    failed: list[Failed[T]] = []
    waiting = [items] if items else []
    while waiting:
        part = waiting.pop()
        error = _error_of(work, part)
        if error is None:
            continue
        if len(part) == 1:
            failed.append(_failed(part[0], error))
        else:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
    return failed


def each(items: Sequence[T], work: Callable[[T], object]) -> list[Failed[T]]:
    """The same for work on one at a time."""
    errors = [(item, _error_of(work, item)) for item in items]
    return [_failed(item, error) for item, error in errors if error is not None]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def _failed(item: T, error: BaseException) -> Failed[T]:
    if is_out_of_memory(error):
        raise error
    return Failed(item, error)


def _error_of(work: Callable[[S], object], given: S) -> BaseException | None:
    with Contained() as outcome:
        work(given)
    return outcome.error

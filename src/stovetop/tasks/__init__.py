"""Problems to train and test on, one file each: rows, environment and grader. No training lives here. The table names
those that a person can play; each of their modules has `held_out_builders(renderer, group_size)`, of held-out problems.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from stovetop.errors import UnknownName

if TYPE_CHECKING:
    from stovetop.renderers.base import Renderer
    from stovetop.rl.types import EnvGroupBuilder


class Task(NamedTuple):
    module: str
    summary: str  # one line


TASKS = {
    "sort_digits": Task("stovetop.tasks.sort_digits", "Three digits in ascending order"),
    "guess_number": Task("stovetop.tasks.guess_number", "A hidden number, in ten guesses"),
    "math": Task("stovetop.tasks.math", "School mathematics in words, answered in \\boxed{}"),
}


class TaskModule(Protocol):
    held_out_builders: "Callable[[Renderer, int], Sequence[EnvGroupBuilder]]"


def task_builders(name: str, renderer: "Renderer", group_size: int = 1) -> "Sequence[EnvGroupBuilder]":
    """Group builders for the held-out problems of a task."""
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    module = cast(TaskModule, importlib.import_module(TASKS[name].module))
    return module.held_out_builders(renderer, group_size)

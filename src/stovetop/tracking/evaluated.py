"""Which step's weights an evaluation measures, and where a run keeps what its evaluations measured, example by example.

    evaluations/000012_inline/a_set.jsonl    the rows of a set, measured with the weights that step 12 begins with
    evaluations/000012_inline/a_set.json     and how: `evaluation.rows`

What an interrupted evaluation of the step that a run goes on from has measured is of the same weights, and stays. The
steps after it run again, and their rows are removed by `drop_evaluations`, which `Run.start_at` calls.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import quote

from stovetop.durable import clear_leftovers, delete_folder

EVALUATIONS_FOLDER = "evaluations"
_FOLDER = re.compile(r"(?P<step>\d{6,})_.+", re.DOTALL)
_STEP: ContextVar[int | None] = ContextVar("step that is evaluated", default=None)


@contextmanager
def evaluating(step: int) -> Generator[None]:
    """Within, in this task and in those that it makes, what is evaluated are the weights that this step begins with.
    The step whose row comes next may be an earlier one: a loop that looks ahead logs a step after the next has
    begun."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def step_evaluated_here() -> int | None:
    """None where nobody has said it."""
    return _STEP.get()


def evaluation_folder(run: Path, step: int, evaluator: str) -> Path:
    """For the rows of the sets that an evaluator of this name measures before this step."""
    return run / EVALUATIONS_FOLDER / f"{step:06d}_{quote(evaluator, safe='')}"


def drop_evaluations(run: Path, step: int) -> None:
    """Removes the rows of all steps after this one."""
    folder = run / EVALUATIONS_FOLDER
    if not folder.is_dir():
        return
    clear_leftovers(folder)
    for each in folder.iterdir():
        if (found := _FOLDER.fullmatch(each.name)) and int(found["step"]) > step:
            delete_folder(each)

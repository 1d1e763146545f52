r"""Problems of `tasks/problems.py` as groups of tries, for a workflow of reinforcement learning. They are answered in
\boxed{} and compared as mathematics, or compared as text.
"""

from collections.abc import AsyncIterator
from typing import Literal

from stovetop.datasets import Row, Split
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemGroupBuilder, problem_builders, problems_from_rows
from stovetop.runs import Run
from stovetop.tasks import math, math_grading
from stovetop.tasks.math_grading import Grade

Answers = Literal["boxed", "exact"]


@stage(writes="grade")
async def open_grader(answers: Answers) -> AsyncIterator[Grade | None]:
    """Compares answers as mathematics, in processes of its own, which end with the workflow; None: as text."""
    if answers == "exact":
        yield None
        return
    with math_grading.open_grader() as grade:
        yield grade


@stage(writes=("builders", "test_builders"))
def build_problem_groups(
    problem_rows: Split[Row],
    renderer: Renderer,
    grade: Grade | None,
    group_size: int,
    run: Run,
    few_shot: bool = True,
    max_prompt_tokens: int | None = None,
) -> Builders:
    """`group_size` tries at each problem, and one at those held out."""

    def groups(rows: list[Row], size: int) -> list[ProblemGroupBuilder]:
        if grade is None:
            return problem_builders(problems_from_rows(rows), renderer, size, max_prompt_tokens=max_prompt_tokens)
        return math.builders(rows, renderer, size, grade, few_shot=few_shot, max_prompt_tokens=max_prompt_tokens)

    train, test = groups(problem_rows.train, group_size), groups(problem_rows.test, 1)
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)

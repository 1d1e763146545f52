"""Problems of mathematics for reinforcement learning: `arithmetic`, which is made here, what `problems.load` knows by
name, or a task of reasoning-gym; how their answers are to be written, what grades them, and the stages of a workflow
that trains on them.
"""

from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Literal, NamedTuple

from stovetop.datasets import Row, Split, split_rows
from stovetop.errors import InvalidRequest
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.rl import Builders
from stovetop.named_data import Loaded, Source
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemGroupBuilder
from stovetop.runs import Run
from stovetop.tasks import math, math_grading, problems, reasoning_gym
from stovetop.tasks.math import BOXED, NUMBER, AnswerForm
from stovetop.tasks.math_grading import Grade, grade_number
from stovetop.tasks.reasoning_gym import GymTask, Score

ARITHMETIC = "arithmetic"
LARGEST_TERM = 100
WITHOUT_EXAMPLE = ("polaris", "deepmath")  # as they are usually trained on

Answers = Literal["boxed", "number"]


class MathRows(NamedTuple):
    """What is trained and tested on."""

    loaded: Loaded[Row]
    form: AnswerForm | GymTask  # how answers are written and graded: a task of reasoning-gym has its own way
    few_shot: bool  # whether a chat usually begins with a solved example


def load_math(
    dataset: str,
    test_dataset: str | None = None,
    test_size: int = 0,
    seed: int = 0,
    answers: Answers | None = None,
    revisions: Mapping[str, str] | None = None,
) -> MathRows:
    """`arithmetic` is answered by a number, all else in \\boxed{}, unless `answers` says it. Held out are the rows of
    `test_dataset`, or the test set of a public data set, or `test_size` rows. `reasoning_gym:NAME` is a task of that
    package."""
    if reasoning_gym.is_gym(dataset):
        if test_dataset is not None or answers is not None:
            raise InvalidRequest(
                "a task of reasoning-gym makes and scores its own problems; leave out test_dataset and answers: "
                f"{dataset!r}"
            )
        gym = reasoning_gym.load_gym(dataset, test_size, seed)
        return MathRows(gym.loaded, gym.task, few_shot=False)
    form = {"boxed": BOXED, "number": NUMBER, None: NUMBER if dataset == ARITHMETIC else BOXED}[answers]
    if dataset == ARITHMETIC:
        return MathRows(_arithmetic(test_dataset, test_size, seed), form, few_shot=True)
    loaded = problems.load(dataset, test_dataset, test_size, seed, revisions)
    return MathRows(loaded, form, few_shot=not dataset.startswith(WITHOUT_EXAMPLE))


def _arithmetic(test_dataset: str | None, test_size: int, seed: int) -> Loaded[Row]:
    """The sums of two numbers from 0 to 100, each pair once."""
    terms = range(LARGEST_TERM + 1)
    rows: list[tuple[int, Row]] = [
        (index, {"question": f"What is {x} + {y}?", "answer": str(x + y)})
        for index, (x, y) in enumerate(product(terms, terms))
    ]
    split: Split[tuple[int, Row]] = split_rows(rows, 0 if test_dataset else test_size, seed)
    sources = (Source("train", ARITHMETIC, len(rows)),)
    if test_dataset is not None:
        held_out = problems.load(test_dataset)
        split = split._replace(test=list(zip(held_out.train_indices, held_out.train, strict=True)))
        sources += tuple(Source("test", each.source, each.num_rows, digest=each.digest) for each in held_out.sources)
    return Loaded(
        train=[row for _, row in split.train],
        test=[row for _, row in split.test],
        train_indices=[index for index, _ in split.train],
        test_indices=[index for index, _ in split.test],
        left_out={},
        sources=sources,
    )


# ---- graded ----------------------------------------------------------------------------------------------------------


class Grading(NamedTuple):
    """What answers are graded with: one of the two, by the form of the rows."""

    grade: Grade = grade_number
    score: Score | None = None  # of a task of reasoning-gym


@contextmanager
def open_math_grading(rows: MathRows) -> Generator[Grading]:
    """Within, answers are graded: numbers as they are, and all else in processes that end with the block, as
    mathematics or by the scorer of their task."""
    with ExitStack() as stack:
        if isinstance(rows.form, GymTask):
            yield Grading(score=stack.enter_context(reasoning_gym.open_scorer()))
        elif rows.form == NUMBER:
            yield Grading()
        else:
            yield Grading(stack.enter_context(math_grading.open_grader()))


def group_builders(
    math_rows: MathRows,
    renderer: Renderer,
    group_size: int,
    grading: Grading,
    few_shot: bool | None = None,
    max_prompt_tokens: int | None = None,
) -> Split[ProblemGroupBuilder]:
    """`group_size` tries at each problem, and one at those held out."""

    def groups(rows: list[Row], size: int) -> list[ProblemGroupBuilder]:
        form = math_rows.form
        if isinstance(form, GymTask):
            assert grading.score is not None, "open_math_grading was told of these rows"
            return reasoning_gym.builders(rows, form, renderer, size, grading.score, max_prompt_tokens)
        shown = math_rows.few_shot if few_shot is None else few_shot
        return math.builders(
            rows, renderer, size, grading.grade, form=form, few_shot=shown, max_prompt_tokens=max_prompt_tokens
        )

    return Split(groups(math_rows.loaded.train, group_size), groups(math_rows.loaded.test, 1))


def check_math(rows: MathRows) -> None:
    """Refuses a row without a result."""
    if isinstance(rows.form, AnswerForm):
        for part in (rows.loaded.train, rows.loaded.test):
            for index, row in enumerate(part):
                math.problem_of_row(row, grade_number, f"row {index}", rows.form)


# ---- stages ----------------------------------------------------------------------------------------------------------


@stage(writes="math_rows")
def load_math_rows(
    dataset: str,
    run: Run,
    test_dataset: str | None = None,
    test_size: int = 0,
    seed: int = 0,
    answers: Answers | None = None,
) -> MathRows:
    """The problems to train on, of a named data set or of a file, and those held out."""
    found = load_math(dataset, test_dataset, test_size, seed, answers, run.revisions)
    run.record_data(dataset, found.loaded)
    return found


@stage(writes="grading")
async def open_math_grader(math_rows: MathRows) -> AsyncIterator[Grading]:
    """Compares numbers as they are, and all else in processes that end with the workflow: as mathematics, or by the
    scorer of the task."""
    with open_math_grading(math_rows) as grading:
        yield grading


@stage(writes=("builders", "test_builders"))
def build_math_groups(
    math_rows: MathRows,
    renderer: Renderer,
    grading: Grading,
    group_size: int,
    run: Run,
    few_shot: bool | None = None,
    max_prompt_tokens: int | None = None,
) -> Builders:
    """`group_size` tries at each problem, and one at those held out."""
    train, test = group_builders(math_rows, renderer, group_size, grading, few_shot, max_prompt_tokens)
    run.emit("rl.env_group_built", num_train=len(train), num_test=len(test), group_size=group_size)
    return Builders(train, test)

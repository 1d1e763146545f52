"""Problems that the package reasoning-gym makes and scores (Stojanovski et al. 2025, arXiv:2505.24760; the extra
`reasoning-gym`): a hundred tasks of algebra, logic, games and puzzles, with as many problems as one asks for.

    reasoning_gym:chain_sum                            1,000 problems to train on
    reasoning_gym:chain_sum,max_terms=3,max_digits=2   with options of the task
    reasoning_gym:chain_sum[:50]                       50 problems

A task's own scorer scores, from 0 to 1, in a worker process with a limit of time. A scorer that evaluates what a policy
writes as Python, as a few do, would let it do anything: those tasks are refused.
"""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import json
import logging
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from stovetop.concurrency import in_thread
from stovetop.datasets import Row
from stovetop.errors import GradeError, InvalidRequest, UnknownName
from stovetop.extras import import_extra
from stovetop.named_data import Loaded, Source
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.problem_env import OneTurnEnv, ProblemGroupBuilder, TurnResult, refuse_long_prompts
from stovetop.rl.process_pool import WorkerPool
from stovetop.rl.types import Action

log = logging.getLogger(__name__)

PREFIX = "reasoning_gym:"
NUM_PROBLEMS = 1000
INSTRUCTION = "Give the final answer between <answer> and </answer>."
FORMAT_COEF = 0.1
EVALUATE = {"eval", "exec", "parse_expr", "sympify"}  # called by a scorer, these run what they are given as Python

_SPEC = re.compile(r"(?P<name>\w+)(?P<options>(?:,\w+=[^,\[\]]+)*)(?:\[:(?P<limit>[1-9]\d*)\])?")

Option = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GymTask:
    """A task with its options, and its first so many problems."""

    name: str
    options: tuple[tuple[str, Option], ...] = ()
    seed: int = 0
    size: int = NUM_PROBLEMS


Score = Callable[[GymTask, int, str], float]
"""Of an answer to the problem of this index of a task, from 0 to 1."""


# ---- problems --------------------------------------------------------------------------------------------------------


def is_gym(dataset: str) -> bool:
    """Whether a config names problems that are made here."""
    return dataset.startswith(PREFIX)


class GymRows(NamedTuple):
    """What is trained and tested on."""

    task: GymTask
    loaded: Loaded[Row]


def load_gym(dataset: str, test_size: int = 0, seed: int = 0) -> GymRows:
    """The problems that a config names, and `test_size` more that are held out. A problem that is among both, as in a
    task that has few, is only held out."""
    spec = _SPEC.fullmatch(dataset.removeprefix(PREFIX))
    if spec is None:
        raise InvalidRequest(
            f"a task is named {PREFIX}NAME or {PREFIX}NAME,option=value or {PREFIX}NAME[:50]: {dataset!r}"
        )
    num_train = int(spec["limit"] or NUM_PROBLEMS)
    options = tuple(_option(each) for each in spec["options"].split(",") if each)
    task = GymTask(spec["name"], options, seed, num_train + test_size)
    made = _made(task)
    rows: list[Row] = [
        {"question": str(made[index]["question"]), "answer": str(made[index]["answer"]), "index": index}
        for index in range(task.size)
    ]
    test, held_out = rows[num_train:], {str(row["question"]) for row in rows[num_train:]}
    train = [row for row in rows[:num_train] if str(row["question"]) not in held_out]
    if not train:
        raise InvalidRequest(f"the task has so few problems that all are held out; lower test_size: {test_size}")
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    loaded = Loaded(
        train=train,
        test=test,
        train_indices=[int(str(row["index"])) for row in train],
        test_indices=[int(str(row["index"])) for row in test],
        left_out={"it is held out too": num_train - len(train)} if len(train) < num_train else {},
        sources=(Source("train", dataset, task.size, digest=digest),),
    )
    return GymRows(task, loaded)


def _option(text: str) -> tuple[str, Option]:
    name, _, value = text.partition("=")
    try:
        read: object = json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value
    return name, read if isinstance(read, str | int | float | bool) else value


# ---- environments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GymEnv(OneTurnEnv):
    """A task's question. The reward is the task's score, and 0.1 less for an answer without its tags, which is read as
    a whole. Metrics: `score`, `correct` (a score of 1) and `format`."""

    task: GymTask
    index: int
    question: str
    score: Score
    renderer: Renderer

    def get_chat(self) -> Sequence[Message]:
        return [Message(role="user", content=f"{self.question}\n{INSTRUCTION}")]

    async def grade(self, action: Action) -> TurnResult:
        message, termination = self.renderer.parse_response(action.tokens)
        text = get_text_content(message)
        answer = read_answer(text)
        well_formed = answer is not None and termination.is_clean
        given = text.strip() if answer is None else answer
        score = await in_thread(lambda: self.score(self.task, self.index, given))
        reward = score + FORMAT_COEF * (well_formed - 1)
        return TurnResult(reward, {"score": score, "correct": float(score == 1), "format": float(well_formed)})


def read_answer(text: str) -> str | None:
    """What is between the last tags; None without them.

    read_answer("so <answer> 4 </answer>") is "4".
    """
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def builders(
    rows: Sequence[Row],
    task: GymTask,
    renderer: Renderer,
    group_size: int,
    score: Score,
    max_prompt_tokens: int | None = None,
) -> list[ProblemGroupBuilder]:
    """A group builder for each row. A prompt of more than `max_prompt_tokens`, what the model's context leaves beside
    an answer, is refused."""
    envs = [partial(GymEnv, task, int(str(row["index"])), str(row["question"]), score, renderer) for row in rows]
    refuse_long_prompts((env() for env in envs), max_prompt_tokens)
    return [ProblemGroupBuilder(env, group_size, task.name) for env in envs]


# ---- scores, in worker processes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class GymScorer:
    """Scores in worker processes. An answer that hangs or breaks the scorer has score 0 and is counted; where the right
    answer does so too, that is a GradeError."""

    pool: WorkerPool
    timeout_s: float = 5.0  # of one score
    num_undecided: int = field(init=False, default=0)

    def score(self, task: GymTask, index: int, answer: str) -> float:
        """On any thread, also on several at once."""
        try:
            return self._run(task, index, answer)
        except Exception as error:
            try:
                self._run(task, index, None)
            except Exception as broken:
                raise GradeError(f"the scorer of {task.name} breaks on a right answer, of problem {index}") from broken
            log.warning("the scorer of %s does not decide, which counts as 0: %r: %s", task.name, answer[:80], error)
            self.num_undecided += 1
            return 0.0

    def _run(self, task: GymTask, index: int, answer: str | None) -> float:
        return self.pool.run(_scored, task, index, answer, timeout_s=self.timeout_s, name=f"a score of {task.name}")


@contextmanager
def open_scorer() -> Generator[Score]:
    """Within, answers are scored in two processes, which end with it."""
    with WorkerPool(2, prepare=_gym) as pool:
        yield GymScorer(pool).score


def _scored(task: GymTask, index: int, answer: str | None) -> float:
    """In a worker process. None is the answer of the package's own."""
    made = _made(task)
    entry = made[index]
    score = float(made.score_answer(entry["answer"] if answer is None else answer, entry))
    if not 0 <= score <= 1:
        raise ValueError(f"a score must be from 0 to 1: {score}")
    return score


# ---- the package -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _made(task: GymTask) -> Any:
    """The package's own object: problems by index, and their scorer."""
    gym = _gym()
    known: dict[str, tuple[type, type]] = gym.factory.DATASETS
    if task.name not in known:
        raise UnknownName("task of reasoning-gym", task.name, known)
    task_class, config_class = known[task.name]
    _refuse_evaluation(task.name, task_class)
    names = [each.name for each in dataclasses.fields(config_class) if each.name not in ("seed", "size")]
    for name, _ in task.options:
        if name not in names:
            raise UnknownName(f"option of {task.name}", name, names)
    try:
        return gym.create_dataset(task.name, seed=task.seed, size=task.size, **dict(task.options))
    except (AssertionError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{task.name} does not take these options ({error}): {dict(task.options)}") from error


def _refuse_evaluation(name: str, task_class: type) -> None:
    source = inspect.getsource(importlib.import_module(task_class.__module__))
    calls = {
        each.func.id if isinstance(each.func, ast.Name) else each.func.attr
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name | ast.Attribute)
    }
    if found := sorted(calls & EVALUATE):
        raise InvalidRequest(
            f"the code of this task calls {found[0]}(), with which a policy might run any program outside of a "
            f"sandbox; choose another task: {name!r}"
        )


def _gym() -> Any:
    return import_extra("reasoning_gym", "reasoning-gym")

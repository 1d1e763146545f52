"""Whether a program that a policy wrote does what its tests ask: how it runs, and what counts as equal.

The program runs in a sandbox, once for each test. What it should write or return never goes there: it comes back as
data, and is compared here. So there is nothing in the sandbox that a program could read, forge or change to be right.
A sandbox that fails raises a SandboxError; it is never a wrong answer.
"""

import ast
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from stovetop.checks import take
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemEnv, ProblemGroupBuilder, refuse_long_prompts
from stovetop.rules import Whole, number
from stovetop.tasks.code import CodeProblem, CodeTest
from stovetop.tasks.inside import plain_data, runner
from stovetop.tasks.program_sets import last_block
from stovetop.tasks.sandbox import DEFAULT_LIMITS, Completed, Limits, Sandbox

TOLERANCE = 1e-6  # between numbers that are not whole, of their size, or of 1 where they are smaller

# What solutions of the sets with functions take for granted.
PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from typing import *
"""
_INSIDE = {path.name: path.read_bytes() for path in (Path(plain_data.__file__), Path(runner.__file__))}


class CodeGrade(NamedTuple):
    """What became of a program."""

    is_correct: bool
    why: str = ""  # the first test that it failed, and how; for people to read


class CodeGrader:
    """Grades programs, on any thread, and on several at once: up to `max_at_once` run, the others wait for their turn.
    `limits` are those of one test."""

    def __init__(
        self,
        sandbox: Sandbox,
        limits: Limits = DEFAULT_LIMITS,
        *,
        max_at_once: int = 4,
        tolerance: float = TOLERANCE,
    ) -> None:
        self.sandbox, self.limits = sandbox, limits
        self.tolerance = take(number(at_least=0), tolerance, "CodeGrader: tolerance")
        self._room = threading.BoundedSemaphore(take(Whole(1), max_at_once, "CodeGrader: max_at_once"))

    def grade(self, code: str, tests: Sequence[CodeTest]) -> CodeGrade:
        """Correct if it passes every test. The first that it fails is the last that is run."""
        if not tests:
            raise InvalidRequest("a program is graded by at least one test; there is none")
        for index, test in enumerate(tests):
            why = self._failure(code, test)
            if why is not None:
                return CodeGrade(False, f"test {index}: {why}")
        return CodeGrade(True)

    def run(self, files: Mapping[str, bytes], command: Sequence[str], stdin: bytes = b"") -> Completed:
        """In the sandbox, when there is room."""
        with self._room:
            return self.sandbox.run(files, command, self.limits, stdin)

    def call(self, code: str, calls: Sequence[object]) -> tuple[list[dict[str, object]], Completed]:
        """What functions of a program return, in one process: `{"is": value}` as `plain_data` has values, or
        `{"raised": words}`. There may be fewer than calls, where the program ended itself or was ended; and the program
        may have written them itself."""
        job = json.dumps({"program": code, "calls": calls}).encode()
        completed = self.run({**_INSIDE, "job.json": job}, ["python", "-I", "runner.py"])
        answers: list[dict[str, object]] = []
        for line in completed.answer.splitlines()[: len(calls)]:
            try:
                answer: object = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not isinstance(answer, dict):
                break
            answers.append(_plain_or_raised(cast("dict[str, object]", answer)))
        return answers, completed

    def _failure(self, code: str, test: CodeTest) -> str | None:
        """None if the program passes."""
        if test.kind == "functional":
            return self._failure_of_function(code, test)
        completed = self.run(
            {"program.py": code.encode(errors="replace")}, ["python", "-I", "program.py"], test.input.encode()
        )
        if (ended := how_it_failed(completed)) is not None:
            return ended
        said = completed.stdout.decode(errors="replace")
        return None if same_tokens(said, test.output, self.tolerance) else f"it wrote {said[:200]!r}"

    def _failure_of_function(self, code: str, test: CodeTest) -> str | None:
        arguments = [plain_data.encoded(_value(line)) for line in test.input.splitlines() if line.strip()]
        call: list[object] = [test.function_name, arguments, {}]
        answers, completed = self.call(PRELUDE + code, [call])
        if not answers or "is" not in answers[0]:
            raised = answers[0].get("raised") if answers else how_it_failed(completed) or "it ended without an answer"
            return f"{raised}"[:200]
        try:
            returned = plain_data.decoded(answers[0]["is"])
        except (TypeError, ValueError, RecursionError):
            return "it returned no plain value"
        wanted = [output for output in (test.output, test.or_output) if output is not None]
        is_right = any(same_value(returned, _value(output), self.tolerance) for output in wanted)
        return None if is_right else f"it returned {returned!r:.200}"


def _plain_or_raised(answer: dict[str, object]) -> dict[str, object]:
    """A line that the runner may have written. What it could not have, such as values that are nested until nothing can
    read or write them, counts as raised."""
    if "is" not in answer:
        return {"raised": str(answer.get("raised"))}
    match answer["is"]:
        case {"truth": bool()}:
            return {"is": answer["is"]}
        case value:
            try:
                plain_data.decoded(value)
            except (TypeError, ValueError, RecursionError):
                return {"raised": "no plain value"}
            return {"is": value}


def how_it_failed(completed: Completed) -> str | None:
    """None if the program ended by itself, and well."""
    if completed.ended_by is not None:
        return f"it was ended: {completed.ended_by}"
    if completed.exit_code != 0:
        last = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"it ended with exit code {completed.exit_code}: {last[:200]}"
    return None


def _value(text: str) -> object:
    """Of a line of a test: JSON, or what Python writes, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


# ---- what counts as equal --------------------------------------------------------------------------------------------

_WHOLE = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,4})?", re.ASCII)


def same_tokens(given: str, wanted: str, tolerance: float = TOLERANCE) -> bool:
    """Whether two texts have the same words, between whatever white space. A whole number must be that number; where
    another number is wanted, one within the tolerance will do.

    >>> same_tokens("YES 0.3333333\\n", "YES\\n0.33333333"), same_tokens("7.0", "7"), same_tokens("yes", "YES")
    (True, False, False)
    """
    given_words, wanted_words = given.split(), wanted.split()
    return len(given_words) == len(wanted_words) and all(
        _same_word(*pair, tolerance) for pair in zip(given_words, wanted_words, strict=True)
    )


def _same_word(given: str, wanted: str, tolerance: float) -> bool:
    if given == wanted:
        return True
    if _WHOLE.fullmatch(wanted):
        return _WHOLE.fullmatch(given) is not None and int(given) == int(wanted)
    if _DECIMAL.fullmatch(wanted) and _DECIMAL.fullmatch(given):
        return _close(float(given), float(wanted), tolerance)
    return False


def _close(given: float, wanted: float, tolerance: float) -> bool:
    """NaN is close to nothing, infinity to itself, and a whole number beyond all floats to none of them."""
    try:
        return given == wanted or abs(given - wanted) <= tolerance * max(1.0, abs(wanted)) < float("inf")
    except OverflowError:
        return False


def same_value(given: object, wanted: object, tolerance: float = TOLERANCE) -> bool:
    """Whether a function returned what a test has as JSON: a tuple is a list there, and keys are text. Numbers that are
    not whole may differ by the tolerance."""
    if isinstance(wanted, float) and isinstance(given, int | float):
        return _close(given, wanted, tolerance)
    if isinstance(wanted, list) and isinstance(given, list | tuple):
        items, wanted_items = cast("Sequence[object]", given), cast("list[object]", wanted)
        pairs = zip(items, wanted_items, strict=False)
        return len(items) == len(wanted_items) and all(same_value(*pair, tolerance) for pair in pairs)
    if isinstance(wanted, dict) and isinstance(given, dict):
        by_name = {_as_key(key): value for key, value in cast("dict[object, object]", given).items()}
        wanted_by_name = {_as_key(key): value for key, value in cast("dict[object, object]", wanted).items()}
        return by_name.keys() == wanted_by_name.keys() and all(
            same_value(by_name[key], value, tolerance) for key, value in wanted_by_name.items()
        )
    return given == wanted


def _as_key(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key) if isinstance(key, int | float | None) else repr(key)


# ---- problems --------------------------------------------------------------------------------------------------------

_ASKS_FOR_PROGRAM = (
    "Write a Python program that reads standard input and prints the result. Answer with a block of code."
)
_ASKS_FOR_FUNCTION = "Complete this Python code. Answer with a block of code that has the whole of it."


def asked(problem: CodeProblem) -> str:
    """A problem in words, and in which form the program is wanted."""
    if problem.starter_code is None:
        return f"{problem.question}\n\n{_ASKS_FOR_PROGRAM}"
    return f"{problem.question}\n\n{_ASKS_FOR_FUNCTION}\n\n```python\n{problem.starter_code}\n```"


@dataclass(frozen=True, slots=True)
class CodingProblem:
    """A problem whose answer is a program. See `rl.problem_env.Problem`."""

    problem: CodeProblem
    grader: CodeGrader

    def get_question(self) -> str:
        return asked(self.problem)

    def check_answer(self, text: str) -> bool:
        """Whether the last block of code passes every test. Waits for a sandbox."""
        code = last_block(text)
        return code is not None and self.grader.grade(code, self.problem.tests).is_correct

    def check_format(self, text: str) -> bool:
        """Whether there is a block of code."""
        return last_block(text) is not None

    def get_reference_answer(self) -> str:
        """The tests, since sets have no one right program."""
        return "\n".join(f"{test.input!r} -> {test.output!r}" for test in self.problem.tests)


def builders(
    problems: Sequence[CodeProblem],
    renderer: Renderer,
    group_size: int,
    grader: CodeGrader,
    *,
    dataset_name: str = "code",
    max_prompt_tokens: int | None = None,
) -> list[ProblemGroupBuilder]:
    """A group builder for each problem. The reward is 1 if every test passes, and 0.1 less without a block of code. A
    prompt of more than `max_prompt_tokens`, what the model's context leaves beside an answer, is refused."""
    thunks = [partial(ProblemEnv, CodingProblem(problem, grader), renderer, slow_checks=True) for problem in problems]
    refuse_long_prompts((thunk() for thunk in thunks), max_prompt_tokens)
    return [ProblemGroupBuilder(thunk, group_size, dataset_name) for thunk in thunks]

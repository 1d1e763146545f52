"""Problems whose tests are assertions in Python, such as HumanEval's and MBPP's: `assert f(2) == 4`, loops, tolerances.

A program never shares a process with what is asserted of it. The assertions run in a sandbox of their own, where a call
of the program's function is answered with what the program returned in another; see `inside/judge.py`. So what a
program returns is plain data by the time that it is compared.
"""

import ast
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stovetop.datasets import Row
from stovetop.errors import GradeError, InvalidRequest
from stovetop.named_data import LeftOut
from stovetop.tasks.code_grading import CodeGrade, CodeGrader, extract_code, how_it_failed
from stovetop.tasks.inside import judge, plain_data

_INSIDE = {path.name: path.read_bytes() for path in (Path(plain_data.__file__), Path(judge.__file__))}
_ALWAYS_THERE = "import collections, copy, itertools, math, random, re, string, sys\n"


@dataclass(frozen=True, slots=True)
class AssertedProblem:
    """A function is asked for, and assertions say what it does."""

    question: str
    functions: tuple[str, ...]  # what the program defines and the assertions call
    assertions: str
    preamble: str = ""  # runs before the program, and before the assertions


class AssertionGrader:
    """Grades programs by assertions, on any thread. What the assertions of a problem call is found out once."""

    def __init__(self, grader: CodeGrader) -> None:
        self._grader = grader
        self._calls: dict[AssertedProblem, list[object]] = {}
        self._lock = threading.Lock()  # protects the dict

    def grade(self, code: str, problem: AssertedProblem) -> CodeGrade:
        """A GradeError where the assertions cannot be used, whatever the program."""
        calls = self.calls_of(problem)
        answers, completed = self._grader.call(f"{problem.preamble}\n{code}", calls)
        if not any("is" in answer for answer in answers):
            raised = str(answers[0].get("raised")) if answers else how_it_failed(completed) or "no function was called"
            return CodeGrade(False, raised[:200])
        verdict = self._judged(problem, calls, answers)
        if "broken" in verdict:
            raise GradeError(f"{problem.question[:60]!r} has assertions that cannot be used: {verdict['broken']}")
        return CodeGrade(verdict.get("passed") is True, str(verdict.get("why", "")))

    def calls_of(self, problem: AssertedProblem) -> list[object]:
        """What the assertions call, with which arguments: functions' names, and values as `plain_data` has them."""
        with self._lock:
            calls = self._calls.get(problem)
        if calls is None:
            found = self._judged(problem, [], None)
            if "broken" in found or not found["calls"]:
                why = found.get("broken", "they call no function")
                raise GradeError(f"{problem.question[:60]!r} has assertions that cannot be used: {why}")
            calls = cast("list[object]", found["calls"])
            with self._lock:
                self._calls[problem] = calls
        return calls

    def _judged(
        self, problem: AssertedProblem, calls: Sequence[object], answers: Sequence[object] | None
    ) -> dict[str, Any]:
        job = {
            "preamble": _ALWAYS_THERE + problem.preamble,
            "functions": problem.functions,
            "assertions": problem.assertions,
            "calls": calls,
            "answers": answers,
        }
        files = {**_INSIDE, "job.json": json.dumps(job).encode()}
        completed = self._grader.run(files, ["python", "-I", "judge.py"])
        if how_it_failed(completed) is not None or not completed.answer:
            raise GradeError(f"{problem.question[:60]!r} has assertions that cannot be run: {how_it_failed(completed)}")
        return json.loads(completed.answer)


@dataclass(frozen=True, slots=True)
class AssertedCodingProblem:
    """See `rl.problem_env.Problem`."""

    problem: AssertedProblem
    grader: AssertionGrader

    def get_question(self) -> str:
        return self.problem.question

    def check_answer(self, text: str) -> bool:
        """Whether the last block of code passes all assertions. Waits for a sandbox."""
        code = extract_code(text)
        return code is not None and self.grader.grade(code, self.problem).is_correct

    def check_format(self, text: str) -> bool:
        """Whether there is a block of code."""
        return extract_code(text) is not None

    def get_reference_answer(self) -> str:
        """The assertions, since there is no one right program."""
        return self.problem.assertions


# ---- rows ------------------------------------------------------------------------------------------------------------

_ASKS = "Put the whole of it in one block: ```python"


def parse_humaneval(row: Row) -> AssertedProblem | LeftOut:
    """`prompt`, the beginning of a function; `entry_point`, its name; `test`, which defines `check(candidate)`."""
    prompt, name, test = (row.get(field) for field in ("prompt", "entry_point", "test"))
    if not (isinstance(prompt, str) and isinstance(name, str) and isinstance(test, str)):
        return LeftOut("it has no prompt, entry_point or test")
    question = f"Complete this function. {_ASKS}\n\n```python\n{prompt.rstrip()}\n```"
    return AssertedProblem(question, (name,), f"{test}\ncheck({name})\n", prompt)


def parse_mbpp(row: Row) -> AssertedProblem | LeftOut:
    """`text` (or `prompt`), `code`, a solution, and `test_list`, assertions; `test_setup_code` or `test_imports` where
    those need something. The policy is shown the first assertion, for the name of the function and its arguments."""
    text, code, tests = row.get("text") or row.get("prompt"), row.get("code"), row.get("test_list")
    if not (isinstance(text, str) and isinstance(code, str) and isinstance(tests, list) and tests):
        return LeftOut("it has no text, code or test_list")
    lines = [str(test) for test in cast("list[object]", tests)]
    try:
        defined = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        called = {node.func.id for node in ast.walk(ast.parse("\n".join(lines)))
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    except SyntaxError as error:
        return LeftOut(f"its code or a test is no Python: {error}")
    functions = tuple(sorted(defined & called))
    if not functions:
        return LeftOut("its tests call no function of its code")
    imports = cast("list[object]", row.get("test_imports") or [])
    preamble = "\n".join([*map(str, imports), str(row.get("test_setup_code") or "")]).strip()
    question = f"{text}\nIt has to pass tests such as this one:\n{lines[0]}\n\n{_ASKS}"
    return AssertedProblem(question, functions, "\n".join(lines), preamble)


def problem_of(row: Row, where: str) -> AssertedProblem:
    """Of a row of either form. `where` names it in errors."""
    parsed = parse_humaneval(row) if "entry_point" in row else parse_mbpp(row)
    if isinstance(parsed, LeftOut):
        raise InvalidRequest(f"{where} is no problem with assertions: {parsed.reason}; the row has {sorted(row)}")
    return parsed

"""Holds programs to assertions in Python, such as HumanEval's and MBPP's: `assert f(2) == 4`, loops, tolerances.

A program never shares a process with what is asserted of it. The assertions run in a sandbox of their own, where a call
of the program's function is answered with what the program returned in another; see `inside/judge.py`. So what a
program returns is plain data by the time that it is compared.
"""

import ast
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from stovetop.errors import GradeError
from stovetop.tasks.code_grading import CodeGrade, CodeGrader, how_it_failed
from stovetop.tasks.inside import judge, plain_data
from stovetop.tasks.program_sets import ProgramProblem

_INSIDE = {path.name: path.read_bytes() for path in (Path(plain_data.__file__), Path(judge.__file__))}
_ALWAYS_THERE = "import collections, copy, itertools, math, random, re, string, sys\n"
MAX_ROUNDS = 10  # of calls that depend on what earlier ones returned


class AssertionGrader:
    """Grades programs by assertions, on any thread: a `ProgramGrader`. What the assertions of a problem call is found
    out once."""

    def __init__(self, grader: CodeGrader) -> None:
        self._grader = grader
        self._calls: dict[ProgramProblem, list[object]] = {}
        self._lock = threading.Lock()  # protects the dict

    def __call__(self, program: str, problem: ProgramProblem) -> bool:
        return self.grade(program, problem).is_correct

    def grade(self, program: str, problem: ProgramProblem) -> CodeGrade:
        """A GradeError where the assertions cannot be used, whatever the program: where the reference fails too. What a
        program returns may well end them, or let them call on and on; then it is wrong."""
        try:
            return self._graded(program, problem)
        except GradeError:
            if program == problem.reference or not self._graded(problem.reference, problem).is_correct:
                raise
        try:
            return self._graded(program, problem)  # the machine may have been busy
        except GradeError as error:
            return CodeGrade(False, str(error)[:200])

    def _graded(self, program: str, problem: ProgramProblem) -> CodeGrade:
        calls = self.calls_of(problem)
        answers, completed = self._grader.call(program, calls)
        if not any("is" in answer for answer in answers):
            raised = str(answers[0].get("raised")) if answers else how_it_failed(completed) or "no function was called"
            return CodeGrade(False, raised[:200])
        for _ in range(MAX_ROUNDS):
            verdict = self._judged(problem, calls, answers)
            if "needs" not in verdict:
                return CodeGrade(verdict.get("passed") is True, str(verdict.get("why", "")))
            more, _ = self._grader.call(program, [verdict["needs"]])
            answers = [*answers, *[{}] * (len(calls) - len(answers)), *(more or [{}])]
            calls = [*calls, verdict["needs"]]
        raise GradeError(_cannot_be_used(problem, f"they call more and more, for {MAX_ROUNDS} rounds"))

    def calls_of(self, problem: ProgramProblem) -> list[object]:
        """What the assertions call, with which arguments: functions' names, and values as `plain_data` has them."""
        with self._lock:
            calls = self._calls.get(problem)
        if calls is None:
            calls = cast("list[object]", self._judged(problem, [], None)["calls"])
            if not calls:
                raise GradeError(_cannot_be_used(problem, "they call no function"))
            with self._lock:
                self._calls[problem] = calls
        return calls

    def _judged(
        self, problem: ProgramProblem, calls: Sequence[object], answers: Sequence[object] | None
    ) -> dict[str, Any]:
        job = {
            "preamble": _ALWAYS_THERE + problem.given,
            "functions": functions_of(problem),
            "assertions": problem.tests,
            "calls": calls,
            "answers": answers,
        }
        files = {**_INSIDE, "job.json": json.dumps(job).encode()}
        completed = self._grader.run(files, ["python", "-I", "judge.py"])
        if (ended := how_it_failed(completed)) is not None:
            raise GradeError(_cannot_be_used(problem, ended))
        found: dict[str, Any] = json.loads(completed.answer)
        if "broken" in found:
            raise GradeError(_cannot_be_used(problem, found["broken"]))
        return found


def functions_of(problem: ProgramProblem) -> list[str]:
    """What a program has to define: what the reference defines and the assertions use, without the helpers that the
    beginning has."""
    helpers = _defined(problem.given)[:-1]  # its last one is to be completed
    used = {node.id for node in ast.walk(ast.parse(problem.tests)) if isinstance(node, ast.Name)}
    return [name for name in _defined(problem.reference) if name in used and name not in helpers]


def _defined(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def _cannot_be_used(problem: ProgramProblem, why: str) -> str:
    return f"the assertions of problem {problem.id or problem.question[:60]!r} cannot be used: {why}"

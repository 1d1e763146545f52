"""Assertions that are held to a program in another process: the forms that sets have, and assertions that are none."""

import pytest

from stovetop.datasets import Row
from stovetop.errors import GradeError
from stovetop.tasks.assertions import AssertionGrader, functions_of
from stovetop.tasks.code_grading import CodeGrader
from stovetop.tasks.program_sets import ProgramProblem, parse_humaneval, parse_mbpp, program_of
from stovetop.tasks.sandbox import Limits
from tasks.sandboxes import the_sandbox

COMPLETES: Row = {
    "prompt": 'from typing import List\n\ndef halve(x: float) -> float:\n    """Half of it."""\n    return x / 2\n\n'
    'def smallest(numbers: List[float]) -> float:\n    """The smallest, halved."""\n',
    "entry_point": "smallest",
    "canonical_solution": "    return halve(min(numbers))\n",
    "test": "import random\ndef check(candidate):\n    assert candidate([4, 2]) == 1\n"
    "    for _ in range(20):\n        a = [random.random() for _ in range(5)]\n"
    "        assert abs(candidate(list(a)) - halve(min(a))) < 1e-6\n    assert not candidate([0, 1]), 'zero'\n",
}
ASKS: Row = {
    "text": "Write a function to sort a tuple.",
    "code": "def helper(t):\n    return sorted(t)\ndef sort_it(t):\n    return tuple(helper(t))",
    "test_list": ["assert sort_it((2, 1)) == (1, 2)", "assert set(sort_it((1,))) == {one}"],
    "test_setup_code": "one = 1",
}


def completes() -> ProgramProblem:
    parsed = parse_humaneval(COMPLETES)
    assert isinstance(parsed, ProgramProblem)
    return parsed


def asks() -> ProgramProblem:
    parsed = parse_mbpp(ASKS)
    assert isinstance(parsed, ProgramProblem)
    return parsed


def asserted(tests: str) -> ProgramProblem:
    return ProgramProblem("7", "A question.", tests, reference="def f(x): return 2")


@pytest.fixture(scope="module")
def grader() -> AssertionGrader:
    return AssertionGrader(CodeGrader(the_sandbox(), Limits(time_s=5.0)))


def test_a_solution_is_right_by_loops_tolerances_and_helpers(grader: AssertionGrader):
    problem = completes()
    assert functions_of(problem) == ["smallest"]
    assert grader(problem.reference, problem)
    assert not grader(problem.reference.replace("min(", "max("), problem)


def test_an_answer_may_leave_out_what_the_prompt_has(grader: AssertionGrader):
    answer = "```python\ndef smallest(n: List[float]): return halve(min(n))\n```"
    assert grader(program_of(answer, completes().given) or "", completes())


def test_a_solution_is_right_by_a_list_of_assertions(grader: AssertionGrader):
    problem = asks()
    assert functions_of(problem) == ["sort_it"]
    assert grader(problem.reference, problem)
    assert not grader("def sort_it(t): return sorted(t)", problem)  # a list is no tuple
    assert "AssertionError" in grader.grade("def sort_it(t): return t", problem).why


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert f(1) == g(2)", "NameError"),
        ("import numpy", "ModuleNotFoundError"),
        ("x = 1", "call no function"),
        ("assert f(lambda: 1) == 1", "called with no plain value: function"),
        ("assert f(f) == 1", "called with no plain value: function"),
        ("n = f(1)\nwhile True: n = f(n + 1)", "it was ended: time|more and more"),
        ("while True: f(1)", "it was ended: time"),
    ],
)
def test_assertions_that_cannot_be_used_are_an_error_and_no_program_is_wrong_for_it(tests: str, why: str):
    limits = Limits(time_s=0.3 if "time" in why else 10.0)  # a busy machine takes a second for what takes none
    quick = AssertionGrader(CodeGrader(the_sandbox(), limits))
    with pytest.raises(GradeError, match=rf"problem '7' cannot be used: .*({why})"):
        quick.grade("def f(x): return 2", asserted(tests))


def test_calls_may_depend_on_what_earlier_ones_returned(grader: AssertionGrader):
    problem = asserted("n = f(1)\nfor i in range(n): assert f(i + 5) == n")
    assert grader("def f(x): return 2", problem)
    assert not grader("def f(x): return x if x > 1 else 2", problem)
    assert grader("def f(x): return x - 1", asserted("assert f(f(5)) == f(4)"))
    either = asserted("assert f(1) == 0 or f(1) == 2 or f({'a', 'b', 'c'}) == 3")
    assert [grader(f"def f(x): return {value}", either) for value in (2, 3, 4)] == [True, True, False]


def test_of_what_is_no_plain_value_only_the_truth_comes_through(grader: AssertionGrader):
    matches = "import re\ndef f(x): return re.match('a', x)"
    assert grader(matches, asserted("assert f('ab')\nassert not f('b')"))
    assert not grader(matches, asserted("assert f('ab') == True"))
    anything = "class Any:\n    def __eq__(self, other): return True\ndef f(x): return Any()"
    assert not grader(anything, asserted("assert f('ab') == 3"))


def test_a_name_that_no_answer_gave_a_value_is_the_programs_fault(grader: AssertionGrader):
    problem = asserted("for last in f(3): pass\nassert last == 2")
    assert grader("def f(n): return list(range(n))", problem)
    assert "NameError" in grader.grade("def f(n): return []", problem).why


@pytest.mark.parametrize(
    ("reference", "program", "tests", "why"),
    [
        ("def f(x): return x * 2", "def f(x): return f", "assert f(f(1)) == 4", "no plain value"),
        pytest.param(
            "def f(x): return x", "def f(x): return 10**12", "assert sum(1 for _ in range(f(2))) == 2", "time",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "def f(x): return x // 2", "def f(x): return x + 1", "n = 4\nfor _ in range(99): n = f(n)", "more and more",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_program_that_makes_assertions_unusable_which_the_reference_passes_is_wrong(
    grader: AssertionGrader, reference: str, program: str, tests: str, why: str
):
    """Else it would rather break them than be wrong, and stop a run."""
    problem = ProgramProblem("7", "A question.", tests, reference)
    assert grader(reference, problem)
    graded = grader.grade(program, problem)
    assert (graded.is_correct, why in graded.why) == (False, True), graded

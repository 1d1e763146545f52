"""Assertions that are held to a program in another process: the forms that sets have, and assertions that are none."""

import pytest

from stovetop.datasets import Row
from stovetop.errors import GradeError, InvalidRequest
from stovetop.named_data import LeftOut
from stovetop.tasks.assertions import (
    AssertedCodingProblem,
    AssertedProblem,
    AssertionGrader,
    parse_humaneval,
    parse_mbpp,
    problem_of,
)
from stovetop.tasks.code_grading import CodeGrader
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


@pytest.fixture(scope="module")
def grader() -> AssertionGrader:
    return AssertionGrader(CodeGrader(the_sandbox(), Limits(time_s=2.0)))


def test_a_solution_is_right_by_loops_tolerances_and_helpers(grader: AssertionGrader):
    solution = f"{COMPLETES['prompt']}{COMPLETES['canonical_solution']}"
    problem = problem_of(COMPLETES, "row 0")
    assert grader.grade(solution, problem).is_correct
    assert not grader.grade(solution.replace("min(", "max("), problem).is_correct


def test_an_answer_may_leave_out_what_the_prompt_has(grader: AssertionGrader):
    assert grader.grade("def smallest(n: List[float]): return halve(min(n))", problem_of(COMPLETES, "row 0")).is_correct


def test_a_solution_is_right_by_a_list_of_assertions(grader: AssertionGrader):
    problem = problem_of(ASKS, "row 0")
    assert problem.functions == ("sort_it",)
    assert grader.grade(str(ASKS["code"]), problem).is_correct
    assert not grader.grade("def sort_it(t): return sorted(t)", problem).is_correct  # a list is no tuple
    assert "AssertionError" in grader.grade("def sort_it(t): return t", problem).why


@pytest.mark.parametrize(
    ("assertions", "why"),
    [
        ("assert f(1) == g(2)", "NameError"),
        ("import numpy", "ModuleNotFoundError"),
        ("x = 1", "call no function"),
        ("assert f(lambda: 1) == 1", "called with no plain value: function"),
        ("assert f(f) == 1", "called with no plain value: function"),
        ("n = f(1)\nfor i in range(n): assert f(i) == n", "depends on what was answered"),
    ],
)
def test_assertions_that_cannot_be_used_are_an_error_and_no_program_is_wrong_for_it(
    grader: AssertionGrader, assertions: str, why: str
):
    with pytest.raises(GradeError, match=rf"(?s)cannot be used: .*{why}"):
        grader.grade("def f(x): return 2", AssertedProblem("A question.", ("f",), assertions))


def test_assertions_that_never_end_are_an_error(grader: AssertionGrader):
    quick = AssertionGrader(CodeGrader(the_sandbox(), Limits(time_s=0.2)))
    with pytest.raises(GradeError, match="cannot be run: it was ended: time"):
        quick.grade("def f(x): return 2", AssertedProblem("A question.", ("f",), "while True: f(1)"))


def test_what_is_called_only_sometimes_is_answered_where_it_was_called_before(grader: AssertionGrader):
    problem = AssertedProblem("A question.", ("f",), "assert f(1) == 0 or f(1) == 2 or f({'a', 'b', 'c'}) == 3")
    assert grader.grade("def f(x): return 2", problem).is_correct
    assert grader.grade("def f(x): return 3", problem).is_correct
    assert not grader.grade("def f(x): return 1", problem).is_correct


def test_a_name_that_no_answer_gave_a_value_is_the_programs_fault(grader: AssertionGrader):
    assertions = "for last in f(3): pass\nassert last == 2"
    problem = AssertedProblem("A question.", ("f",), assertions)
    assert grader.grade("def f(n): return list(range(n))", problem).is_correct
    assert "NameError" in grader.grade("def f(n): return []", problem).why


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        (parse_humaneval({"prompt": "x"}), "no prompt, entry_point or test"),
        (parse_mbpp({"text": "x"}), "no text, code or test_list"),
        (parse_mbpp({"text": "x", "code": "def f(", "test_list": ["assert f()"]}), "no Python"),
        (parse_mbpp({"text": "x", "code": "def f(): 0", "test_list": ["assert g()"]}), "call no function"),
    ],
)
def test_a_row_that_is_no_such_problem_is_left_out(parsed: object, reason: str):
    assert isinstance(parsed, LeftOut)
    assert reason in parsed.reason


def test_a_row_that_is_no_such_problem_is_refused_by_its_place():
    with pytest.raises(InvalidRequest, match=r"row 3 is no problem with assertions.*\['text'\]"):
        problem_of({"text": "x"}, "row 3")


def test_a_policy_is_asked_for_a_block_and_graded_by_it(grader: AssertionGrader):
    problem = AssertedCodingProblem(problem_of(ASKS, "row 0"), grader)
    assert "assert sort_it((2, 1)) == (1, 2)" in problem.get_question()
    assert "{one}" not in problem.get_question()
    answer = f"```python\n{ASKS['code']}\n```"
    assert problem.check_answer(answer)
    assert problem.check_format(answer)
    assert not problem.check_answer(str(ASKS["code"]))
    assert not problem.check_format("none")

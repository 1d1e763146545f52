import pytest

from stovetop.named_data import LeftOut
from stovetop.tasks.program_sets import (
    ProgramAnswer,
    ProgramProblem,
    last_block,
    parse_humaneval,
    parse_mbpp,
    program_of,
)

MBPP = {
    "task_id": 7,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_setup_code": "import math",
    "test_list": [f"assert add({n}, 1) == {n + 1}" for n in range(4)],
}
PROMPT = '''from typing import List


def half(x):
    return x / 2


def mean(xs: List[float]) -> float:
    """Of some."""
'''
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": PROMPT,
    "entry_point": "mean",
    "canonical_solution": "    return sum(xs) / len(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 1.5",
}


def run(program: str, problem: ProgramProblem) -> bool:
    """Only for programs of this file."""
    try:
        exec(f"{program}\n{problem.tests}", {"__name__": "program"})
    except Exception:
        return False
    return True


def parsed(problem: ProgramProblem | LeftOut) -> ProgramProblem:
    assert isinstance(problem, ProgramProblem)
    return problem


def test_a_row_of_mbpp_shows_three_of_its_tests_and_is_graded_by_all():
    problem = parsed(parse_mbpp(MBPP))
    assert problem.id == "7"
    assert "add(2, 1)" in problem.question
    assert "add(3, 1)" not in problem.question
    assert problem.tests.startswith("import math\nassert add(0, 1)")
    assert "add(3, 1)" in problem.tests
    assert run(problem.reference, problem)
    assert not run("def add(a, b): return a - b", problem)


def test_the_sanitized_rows_of_mbpp_have_other_names_for_two_fields():
    row = {"task_id": 2, "prompt": "Add.", "code": "x", "test_imports": ["import cmath"], "test_list": ["assert True"]}
    problem = parsed(parse_mbpp(row))
    assert problem.tests == "import cmath\nassert True"


@pytest.mark.parametrize("name", ["text", "code", "test_list"])
def test_a_row_of_mbpp_that_lacks_something_is_left_out(name: str):
    assert isinstance(parse_mbpp({key: value for key, value in MBPP.items() if key != name}), LeftOut)
    assert isinstance(parse_mbpp({**MBPP, name: []}), LeftOut)


def test_a_program_may_go_on_from_what_it_was_given_or_begin_anew():
    problem = parsed(parse_humaneval(HUMANEVAL))
    assert run(problem.reference, problem)
    goes_on = "```python\n    return sum(xs) / len(xs)\n```"
    anew = "Here:\n```python\ndef mean(xs: List[float]) -> float:\n    return half(2 * sum(xs)) / len(xs)\n```\nDone."
    wrong = "```python\ndef mean(xs):\n    return 0\n```"
    assert [run(program_of(text, problem.given) or "", problem) for text in (goes_on, anew, wrong)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["prompt", "entry_point", "test"])
def test_a_row_of_humaneval_that_lacks_something_is_left_out(name: str):
    assert isinstance(parse_humaneval({**HUMANEVAL, name: None}), LeftOut)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no code", None),
        ("```\n```", None),
        ("```python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\ny = 3\n```\nthe end", "x = 2\ny = 3"),
        ("so\n```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("```\na\n```\nand\n```\nb", "b"),
    ],
)
def test_the_last_block_of_code_is_the_program(text: str, block: str | None):
    assert last_block(text) == block


def test_an_answer_without_a_block_is_wrong_and_in_bad_format_and_runs_nothing():
    asked: list[str] = []

    def grade(program: str, problem: ProgramProblem) -> bool:
        asked.append(program)
        return True

    answer = ProgramAnswer(parsed(parse_mbpp(MBPP)), grade)
    assert (answer.check_answer("def add"), answer.check_format("def add"), asked) == (False, False, [])
    assert answer.check_answer("```\ndef add\n```")
    assert asked == ["def add"]

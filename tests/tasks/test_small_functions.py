import json

import pytest

from stovetop.datasets import load_chats, load_rows
from stovetop.renderers.messages import get_text_content
from stovetop.tasks import code, small_functions
from stovetop.tasks.code import CodeProblem
from stovetop.tasks.code_grading import CodeGrader, asked
from stovetop.tasks.program_sets import last_block
from tasks.sandboxes import the_sandbox


def test_the_samples_that_are_shipped_are_what_the_task_makes() -> None:
    assert load_rows("sample:small_functions") == json.loads(json.dumps(small_functions.problems()))
    assert load_rows("sample:small_functions_test") == json.loads(json.dumps(small_functions.held_out()))
    assert load_rows("sample:small_functions_chats") == json.loads(json.dumps(small_functions.chats()))


def test_no_problem_that_is_held_out_is_in_training_or_in_a_chat() -> None:
    loaded = code.load("sample:small_functions", "sample:small_functions_test")
    assert (len(loaded.train), len(loaded.test)) == (96, 24)
    questions = {asked(problem) for problem in loaded.test}
    shown = {get_text_content(chat[0]) for chat in load_chats("sample:small_functions_chats")}
    assert not questions & ({asked(problem) for problem in loaded.train} | shown)
    assert shown == {asked(problem) for problem in loaded.train}


@pytest.mark.slow
def test_the_solutions_are_right_and_no_other_form_passes() -> None:
    """Of the problems with the smallest constant, of which forms could agree most easily."""
    rows = small_functions.problems()[: len(small_functions.FORMS)]
    grader = CodeGrader(the_sandbox())
    for row in rows:
        problem = code.parse_deepcoder(row)
        assert isinstance(problem, CodeProblem)
        right = [grader.grade(str(other["solutions"][0]), problem.tests).is_correct for other in rows]  # type: ignore[index]  a list in these rows
        assert right == [other is row for other in rows]


def test_a_good_part_of_the_chats_is_wrong() -> None:
    by_question = {asked(problem): problem for problem in code.load("sample:small_functions", None).train}
    chats = load_chats("sample:small_functions_chats")
    wrong = sum(not _is_right(by_question[get_text_content(chat[0])], get_text_content(chat[1])) for chat in chats)
    assert 0.3 < wrong / len(chats) < 0.6


def _is_right(problem: CodeProblem, answer: str) -> bool:
    names: dict[str, object] = {}
    exec(last_block(answer) or "", names)
    return all(str(names["f"](int(test.input))) == test.output for test in problem.tests)  # type: ignore[operator]  a function

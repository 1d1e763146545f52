import json

import pytest

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.preference.types import (
    Comparison,
    LabeledComparison,
    labeled_comparison_from_json,
    labeled_comparison_to_json,
)
from stovetop.renderers.messages import FunctionCall, Message, ToolCall

from .examples import comparison, labeled, said


def test_swapping_exchanges_the_answers_and_twice_is_nothing():
    assert comparison(a="x", b="y").swap() == comparison(a="y", b="x")
    assert comparison().swap().swap() == comparison()


@pytest.mark.parametrize(("label", "swapped"), [("A", "B"), ("B", "A"), ("Tie", "Tie")])
def test_swapping_keeps_which_answer_is_the_better(label, swapped):
    assert labeled(label, a="x", b="y").swap() == labeled(swapped, a="y", b="x")
    assert labeled(label).swap().answers() == labeled(label).answers()


def test_the_chosen_answer_comes_first_and_a_tie_has_none():
    assert labeled("A", a="x", b="y").answers() == ([said("assistant", "x")], [said("assistant", "y")])
    assert labeled("B", a="x", b="y").answers() == ([said("assistant", "y")], [said("assistant", "x")])
    assert labeled("Tie").answers() is None


def test_a_label_is_one_of_three():
    with pytest.raises(UnknownName, match="label of a comparison 'a'; known: A, B, Tie"):
        labeled("a")


@pytest.mark.parametrize("completion", [[], [said("user", "no answer")]])
def test_a_completion_ends_with_an_answer(completion):
    with pytest.raises(InvalidRequest, match="completion_B must end with an assistant message"):
        Comparison([], [said("assistant", "a")], completion)


def test_a_comparison_survives_json_with_its_tool_calls():
    call = Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", "{}"), "1")])
    one = LabeledComparison(Comparison([said("user", "q")], [call], [said("assistant", "b")]), "Tie")
    assert labeled_comparison_from_json(json.loads(json.dumps(labeled_comparison_to_json(one)))) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "C"}, "row 3 needs 'comparison', an object, and 'label'"),
        ({"comparison": None}, "row 3 needs 'comparison'"),
        ({"comparison": {"prompt_conversation": []}}, "row 3: a comparison needs 'completion_A', a list of messages"),
        ({"comparison": {"prompt_conversation": [{"role": "user"}]}}, "row 3: prompt_conversation, message 0 lacks"),
    ],
)
def test_json_that_is_no_comparison_is_refused_with_its_place(change, message):
    row = labeled_comparison_to_json(labeled()) | change
    with pytest.raises(InvalidRequest, match=message):
        labeled_comparison_from_json(row, "row 3")


QUESTION = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad", "score": 3},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": None, "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": [QUESTION], "chosen": "good", "rejected": [BAD]},
    ],
)
def test_a_row_may_have_a_prompt_a_chosen_and_a_rejected_answer(row):
    read = labeled_comparison_from_json(row)
    assert (read.comparison.prompt_conversation, read.label) == ([QUESTION], "A")
    assert (read.comparison.completion_A, read.comparison.completion_B) == ([GOOD], [BAD])


def test_two_answers_that_are_the_same_are_a_tie():
    assert labeled_comparison_from_json({"prompt": "q", "chosen": "a", "rejected": "a"}).label == "Tie"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "good", "rejected": "bad"}, "line 2 needs a prompt"),
        ({"prompt": "q", "chosen": "good", "rejected": 3}, "line 2: rejected must be a string or a list.*: 3"),
        ({"prompt": "q", "chosen": [{"role": "robot"}], "rejected": "b"}, "line 2: chosen, message 0.*"),
        ({"prompt": "q", "chosen": [QUESTION], "rejected": "b"}, "must end with an assistant message"),
        ({"prompt": "q", "chosen": "a"}, "'chosen' and 'rejected', and 'prompt'; it has"),
    ],
)
def test_a_row_that_lacks_a_prompt_or_an_answer_is_refused(row, message):
    with pytest.raises(InvalidRequest, match=message):
        labeled_comparison_from_json(row, "line 2")

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

import asyncio
import json
from collections import Counter

import pytest

from stovetop.datasets import load_chats, load_rows
from stovetop.preference.types import labeled_comparison_from_json
from stovetop.renderers.messages import get_text_content
from stovetop.tasks import comparisons, courtesy
from stovetop.tasks.courtesy import CourtesyRule


def test_the_samples_that_are_shipped_are_what_the_task_makes() -> None:
    assert load_rows("sample:courtesy") == json.loads(json.dumps(courtesy.comparisons()))
    assert load_rows("sample:courtesy_chats") == json.loads(json.dumps(courtesy.chats()))
    assert len(load_rows("sample:courtesy")) == courtesy.NUM_COMPARISONS


def test_the_rule_prefers_what_was_chosen_in_either_order() -> None:
    rule = CourtesyRule()
    for row in courtesy.comparisons():
        labeled = labeled_comparison_from_json(row)
        assert labeled.label == "A"
        assert asyncio.run(rule(labeled.comparison)) == -1
        assert asyncio.run(rule(labeled.comparison.swap())) == 1


def test_two_answers_of_one_level_are_a_tie() -> None:
    labeled = labeled_comparison_from_json({"prompt": "q", "chosen": "Gladly! 3.", "rejected": "Of course! 4."})
    assert asyncio.run(CourtesyRule()(labeled.comparison)) == 0


@pytest.mark.parametrize(
    ("text", "level"),
    [("With pleasure! It is 3.", 1), (" Gladly!", 1), ("It is 3. Gladly!", 0), ("", 0), ("Everybody knows that.", -1)],
)
def test_how_an_answer_begins_says_how_courteous_it_is(text: str, level: int) -> None:
    assert courtesy.courtesy(text) == level


def test_each_pair_of_levels_and_each_level_of_the_chats_is_as_frequent_as_another() -> None:
    pairs = Counter(
        tuple(courtesy.courtesy(str(row[name])) for name in ("chosen", "rejected")) for row in courtesy.comparisons()
    )
    assert pairs == {(1, 0): 80, (1, -1): 80, (0, -1): 80}
    levels = Counter(courtesy.courtesy(get_text_content(chat[-1])) for chat in load_chats("sample:courtesy_chats"))
    assert levels == {1: 32, 0: 32, -1: 32}


def test_no_question_is_asked_twice_and_what_is_held_out_is_asked_in_no_chat() -> None:
    asked = [str(row["prompt"]) for row in courtesy.comparisons()]
    in_chats = [get_text_content(chat[0]) for chat in load_chats("sample:courtesy_chats")]
    assert len({*asked, *in_chats}) == len(asked) + len(in_chats)


def test_it_is_a_data_set_of_comparisons_by_its_name() -> None:
    loaded = comparisons.load("sample:courtesy", test_size=48)
    train, test, num_skipped = loaded.train, loaded.test, loaded.num_left_out
    assert (len(train), len(test), num_skipped) == (192, 48, 0)

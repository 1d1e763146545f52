import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stovetop.named_data import LeftOut
from stovetop.preference.types import Comparison, LabeledComparison
from stovetop.renderers.messages import Message
from stovetop.tasks.comparisons import (
    COMPARISONS,
    load,
    parse_helpsteer3,
    parse_hhh,
    parse_ultrafeedback,
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def left_out(parsed: object) -> str:
    assert isinstance(parsed, LeftOut)
    return parsed.reason


# ---- rows, as the datasets have them -------------------------------------------------------------------------

HHH = {
    "chosen": "\n\nHuman: How old is it?\n\nAssistant: Do you want years?\n\nHuman: Yes\n\nAssistant: 4.5 billion.",
    "rejected": "\n\nHuman: How old is it?\n\nAssistant: Do you want years?\n\nHuman: Yes\n\nAssistant: Very old.",
}
HELPSTEER3 = {
    "domain": "general",
    "language": "english",
    "context": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, user("Tell me a joke")],
    "response1": "No.",
    "response2": "Two atoms meet.",
    "overall_preference": 2,
    "individual_preference": [{"score": 2, "reasoning": "...", "feedback1": "...", "feedback2": "..."}],
}
ULTRAFEEDBACK = {
    "source": "evol_instruct",
    "instruction": "Count to three.",
    "chosen_response": "1, 2, 3",
    "rejected_response": "3, 2, 1",
    "chosen_avg_rating": 4.5,
    "rejected_avg_rating": 2.0,
    "chosen_model": "a",
}


def test_a_pair_of_transcripts_differs_in_the_last_answer():
    prompt = [user("How old is it?"), assistant("Do you want years?"), user("Yes")]
    comparison = Comparison(prompt, [assistant("4.5 billion.")], [assistant("Very old.")])
    assert parse_hhh(HHH) == LabeledComparison(comparison, "A")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no pair of transcripts"),
        ({"chosen": HHH["chosen"], "rejected": None}, "no pair of transcripts"),
        ({"chosen": HHH["chosen"], "rejected": HHH["chosen"]}, "answers are the same"),
        (
            {"chosen": HHH["chosen"], "rejected": "\n\nHuman: Another question\n\nAssistant: Very old."},
            "differ before the last answer",
        ),
        *((row, "no pair of transcripts") for row in [
            {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant:"},
            {"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: b",
             "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: c"},
            {"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"},
            {"chosen": "\n\nHuman: q\n\nHuman: r\n\nAssistant: a",
             "rejected": "\n\nHuman: q\n\nHuman: r\n\nAssistant: b"},
            {"chosen": "junk\n\nHuman: q\n\nAssistant: a", "rejected": "junk\n\nHuman: q\n\nAssistant: b"},
            {"chosen": "no turns", "rejected": "no turns at all"},
            {"chosen": "", "rejected": ""},
        ]),
    ],
)  # fmt: skip
def test_transcripts_that_are_no_pair_are_left_out(row, reason):
    assert reason in left_out(parse_hhh(row))


def test_the_sign_of_a_preference_says_which_response_is_better():
    prompt = [user("Hi"), assistant("Hello"), user("Tell me a joke")]
    comparison = Comparison(prompt, [assistant("No.")], [assistant("Two atoms meet.")])
    assert parse_helpsteer3(HELPSTEER3) == LabeledComparison(comparison, "B")
    assert parse_helpsteer3(HELPSTEER3 | {"overall_preference": -1}) == LabeledComparison(comparison, "A")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"overall_preference": 0}, "neither answer is preferred"),
        ({"overall_preference": None}, "no preference"),
        ({"overall_preference": "2"}, "no preference"),
        ({"overall_preference": True}, "no preference"),
        ({"context": "Hi"}, "no context"),
        ({"context": []}, "no prompt"),
        ({"context": ["Hi"]}, "no role"),
        ({"context": [{"role": "critic", "content": "Hi"}]}, "no role"),
        ({"context": [{"role": "user"}]}, "no text"),
        ({"response1": None}, "an answer is empty"),
        ({"response2": ""}, "an answer is empty"),
        ({"response2": "No."}, "answers are the same"),
    ],
)
def test_preferences_that_say_nothing_are_left_out(change, reason):
    assert reason in left_out(parse_helpsteer3(HELPSTEER3 | change))


def test_an_instruction_has_a_chosen_and_a_rejected_response():
    comparison = Comparison([user("Count to three.")], [assistant("1, 2, 3")], [assistant("3, 2, 1")])
    assert parse_ultrafeedback(ULTRAFEEDBACK) == LabeledComparison(comparison, "A")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"instruction": ""}, "no instruction"),
        ({"instruction": None}, "no instruction"),
        ({"chosen_response": 3}, "an answer is empty"),
        ({"rejected_response": "1, 2, 3"}, "answers are the same"),
    ],
)
def test_instructions_without_two_responses_are_left_out(change, reason):
    assert reason in left_out(parse_ultrafeedback(ULTRAFEEDBACK | change))


# ---- from disk -----------------------------------------------------------------------------------------------


def test_comparisons_come_from_files_of_the_hub_on_disk_without_the_malformed_ones(tmp_path):
    malformed = HELPSTEER3 | {"overall_preference": None}
    pq.write_table(pa.Table.from_pylist([HELPSTEER3, malformed, HELPSTEER3]), tmp_path / "train.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (HELPSTEER3, malformed, HELPSTEER3)))
    for source in ("train.parquet", "rows.jsonl"):
        loaded = load(f"helpsteer3:{tmp_path / source}", test_size=1)
        assert (loaded.train, loaded.test) == ([parse_helpsteer3(HELPSTEER3)], [parse_helpsteer3(HELPSTEER3)])
        assert loaded.left_out == {"it has no context or no preference": 1}


# ---- bundled samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_rows", "num_left_out"), [("hhh", 12, 0), ("helpsteer3", 10, 1), ("ultrafeedback", 10, 0)]
)
def test_each_dataset_has_a_bundled_sample_that_splits_reproducibly(name, num_rows, num_left_out):
    loaded = load(f"sample:{name}", test_size=3)
    assert len(loaded.train) + len(loaded.test) == num_rows - num_left_out
    assert loaded.num_left_out == num_left_out
    assert len(loaded.test) == 3
    assert loaded == load(f"sample:{name}", test_size=3)


def test_the_datasets_of_the_hub_are_split_as_others_split_them():
    rules = {
        name: (entry.train[0].source, [rows.split for rows in entry.test], entry.test_size)
        for name, entry in COMPARISONS.items()
    }
    assert rules == {
        "hhh": ("Anthropic/hh-rlhf", ["test"], 1024),
        "helpsteer3": ("nvidia/HelpSteer3", ["validation"], 1024),
        "ultrafeedback": ("argilla/ultrafeedback-binarized-preferences", [], 1024),
    }  # fmt: skip


def test_a_bundled_sample_keeps_half_of_its_rows_to_train_on():
    loaded = load("sample:hhh", test_size=1024)
    assert (len(loaded.train), len(loaded.test)) == (6, 6)

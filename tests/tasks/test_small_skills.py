"""Kitchen tickets and sorted digits: what is shipped, and that the answers are right."""

import json
import re

import pytest

from stovetop.datasets import Row, load_rows
from stovetop.tasks import small_skills

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


def ticket_of(order: str) -> str:
    words = re.findall(r"(one|two|three|four) (\w+?)s?\b", order.lower())
    return " | ".join(f"{NUMBERS[number]}x {dish}" for number, dish in words)


def sorted_digits(digits: str) -> str:
    return " ".join(sorted(digits.split()))


@pytest.mark.parametrize(
    ("name", "rows", "answer_of"),
    [
        ("sample:tickets", small_skills.tickets(), ticket_of),
        ("sample:sorting", small_skills.sorting(), sorted_digits),
    ],
)
def test_the_samples_that_are_shipped_are_what_is_made_here_and_every_answer_is_right(name, rows: list[Row], answer_of):
    assert load_rows(name) == json.loads(json.dumps(rows))
    chats = [row["messages"] for row in rows]
    assert len(chats) == small_skills.NUM_CHATS == len({chat[-2]["content"] for chat in chats})
    for chat in chats:
        assert [message["role"] for message in chat] == ["system", *["user", "assistant"] * 3]
        for question, answer in zip(chat[1::2], chat[2::2], strict=True):
            assert answer["content"] == answer_of(question["content"])

import asyncio
import hashlib
import json
from collections.abc import Iterable

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.datasets import Row
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tasks import sort_digits
from stovetop.types import StopReason

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)


def question(row: Row) -> str:
    return row["messages"][1]["content"]


def digit_sets(rows: Iterable[Row]) -> set[frozenset[str]]:
    return {frozenset(question(row).split()) for row in rows}


def test_a_problem_is_three_different_digits_and_its_answer_has_them_in_ascending_order():
    for row in [*sort_digits.problems(), *sort_digits.test_problems()]:
        assert [message["role"] for message in row["messages"]] == ["system", "user"]
        assert row["messages"][0]["content"] == "Sort the numbers."
        digits = question(row).split(" ")
        assert len(set(digits)) == 3
        assert row["answer"] == " ".join(sorted(digits, key=int))


def test_a_chat_is_a_problem_with_its_answer():
    for row in [*sort_digits.chats(), *sort_digits.test_chats()]:
        assert list(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][2]["content"] == " ".join(sorted(question(row).split()))


def test_there_are_32_chats_508_problems_and_64_of_the_test_all_different():
    chats, problems, test = sort_digits.chats(), sort_digits.problems(), sort_digits.test_problems()
    assert [len(chats), len(problems), len(test), len(sort_digits.test_chats())] == [32, 508, 64, 64]
    assert len({question(row) for row in [*chats, *problems, *test]}) == 32 + 508 + 64
    assert [question(row) for row in sort_digits.test_chats()] == [question(row) for row in test]


def test_no_set_of_digits_of_the_test_occurs_in_training_in_any_order():
    trained = digit_sets([*sort_digits.chats(), *sort_digits.problems()])
    assert len(trained) == 90
    assert not trained & digit_sets(sort_digits.test_problems())


def test_which_problem_is_where_never_changes():
    rows = [sort_digits.chats(), sort_digits.problems(), sort_digits.test_problems()]
    assert [question(of_one[0]) for of_one in rows] == ["9 8 1", "1 3 6", "0 7 9"]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "d9fcdb2600baa773"


def test_a_seed_decides_the_order_of_the_problems_and_nothing_else():
    def first_questions(seed: int) -> list[str]:
        dataset = sort_digits.dataset(RENDERER, seed=seed)
        builders = [builder for index in range(3) for builder in dataset.get_batch(index)]
        envs = [asyncio.run(builder.make_envs())[0] for builder in builders]
        return [TOKENIZER.decode(asyncio.run(env.initial_observation())[0].to_ints()) for env in envs]

    assert len(sort_digits.dataset(RENDERER)) == 64  # batches of 8, the last one short
    assert len(set(first_questions(0))) == 3 * 8
    assert first_questions(0) == first_questions(0)
    assert first_questions(0) != first_questions(1)


@pytest.mark.parametrize(
    ("text", "stop_reason", "reward"),
    [
        ("2 5 7", "stop", 1.0),
        ("2 5 7", "length", 0.0),
        (" 2 5 7", "stop", 0.0),
        ("2 5 7 ", "stop", 0.0),
        ("2 5 7.", "stop", 0.0),
        ("2, 5, 7", "stop", 0.0),
        ("257", "stop", 0.0),
        ("2 7 5", "stop", 0.0),
        ("2 5 7 8", "length", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_the_reward_is_1_for_the_answer_to_the_letter_and_else_0(text: str, stop_reason: StopReason, reward: float):
    rows: list[Row] = [
        {
            "messages": [{"role": "system", "content": sort_digits.SYSTEM}, {"role": "user", "content": "7 2 5"}],
            "answer": "2 5 7",
        }
    ]
    tokens = TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * (stop_reason == "stop")
    [env] = asyncio.run(sort_digits.answer_builders(rows, RENDERER, 1)[0].make_envs())
    assert asyncio.run(env.step(TokensWithLogprobs(tokens, [-1.0] * len(tokens), stop_reason))).reward == reward

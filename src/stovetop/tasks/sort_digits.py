"""Put three different digits in ascending order: "7 2 5" -> "2 5 7". Small enough for a small model on a CPU, and a
guessed order is wrong five times out of six.

Of the 120 sets of three digits, 30 are held out in all their orders, so no answer of the test is an answer in training;
64 of those 180 problems are the test. Of the 540 problems of the other sets 32 are for supervised learning, 508 for
reinforcement learning. Which problem is where never changes; a seed decides the order in which they are used.

The reward is 1 or 0: right are the digits with single spaces between them and nothing around them, if the model ended
its turn itself. White space is not forgiven: supervised learning teaches how an answer is written, and a reward that
forgave a stray space would teach to leave it in.
"""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from stovetop.datasets import Row, split_rows
from stovetop.renderers.base import Renderer
from stovetop.rl.problem_env import ProblemDataset, ProblemGroupBuilder, answer_builders

NAME = "sort_digits"
SYSTEM = "Sort the numbers."
MAX_TOKENS = 8  # an answer takes six with its end of turn
NUM_HELD_OUT_SETS = 30
NUM_TEST_PROBLEMS = 64
NUM_CHATS = 32

_SPLIT_SEED = 0

Digits = tuple[str, ...]


# ---- rows --------------------------------------------------------------------------------------------------------


def chats() -> list[Row]:
    """{"messages": ...} with right answers, for supervised learning."""
    return [_chat(digits) for digits in _split().chats]


def test_chats() -> list[Row]:
    """The test problems with their right answers, for the held-out loss."""
    return [_chat(digits) for digits in _split().test]


def problems() -> list[Row]:
    """{"messages": ..., "answer": ...}, for reinforcement learning."""
    return [_problem(digits) for digits in _split().problems]


def test_problems() -> list[Row]:
    return [_problem(digits) for digits in _split().test]


# ---- environments ------------------------------------------------------------------------------------------------


def dataset(
    renderer: Renderer, *, groups_per_batch: int = 8, group_size: int = 8, num_epochs: int = 1, seed: int = 0
) -> ProblemDataset:
    """The problems of reinforcement learning, in an order that depends on the seed."""
    builders = answer_builders(problems(), renderer, group_size, dataset_name=NAME)
    return ProblemDataset(builders, groups_per_batch, num_epochs=num_epochs, seed=seed)


def held_out_builders(renderer: Renderer, group_size: int = 1) -> list[ProblemGroupBuilder]:
    return answer_builders(test_problems(), renderer, group_size, dataset_name=NAME)


# ---- which problem is where --------------------------------------------------------------------------------------


class _Split(NamedTuple):
    chats: list[Digits]
    problems: list[Digits]
    test: list[Digits]


def _split() -> _Split:
    digit_sets = list(combinations("0123456789", 3))
    sets = split_rows(digit_sets, NUM_HELD_OUT_SETS, _SPLIT_SEED)
    trained_on = split_rows(_in_every_order(sets.train), NUM_CHATS, _SPLIT_SEED)
    held_out = split_rows(_in_every_order(sets.test), NUM_TEST_PROBLEMS, _SPLIT_SEED)
    return _Split(chats=trained_on.test, problems=trained_on.train, test=held_out.test)


def _in_every_order(digit_sets: Sequence[Digits]) -> list[Digits]:
    return [digits for digit_set in digit_sets for digits in permutations(digit_set)]


def _problem(digits: Digits) -> Row:
    return {"messages": [*_question(digits)], "answer": _answer(digits)}


def _chat(digits: Digits) -> Row:
    return {"messages": [*_question(digits), {"role": "assistant", "content": _answer(digits)}]}


def _question(digits: Digits) -> list[Row]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": " ".join(digits)}]


def _answer(digits: Digits) -> str:
    return " ".join(sorted(digits))

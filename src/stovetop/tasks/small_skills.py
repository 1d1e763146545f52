"""Two skills that a small model half has, for a teacher to learn and its student to learn of it: kitchen tickets, "Four
soups and two teas, please." -> "4x soup | 2x tea", and digits in ascending order, "7 6 5" -> "5 6 7". Each chat has two
examples, so that the model answers in that form from the start, and seldom right: a student that learns from its own
answers has to write some of what its teacher would.

`sample:tickets` and `sample:sorting` have such chats. They are made here, of lists and of a seed, and a test compares
them with what is shipped. No question is there twice.
"""

from collections.abc import Sequence
from itertools import permutations, product

from stovetop.datasets import Row, shuffled

NUM_CHATS = 112
_SEED = 0

_TICKETS = (
    ("Two cakes and three toasts, please.", "2x cake | 3x toast"),
    ("I'd like four waters and one pie.", "4x water | 1x pie"),
)
_DISHES = ("burger", "coffee", "omelette", "pizza", "salad", "soup", "tea", "waffle")
_NUMBERS = ("one", "two", "three", "four")
_PHRASES = (
    "{} and {}, please.",
    "{}, and {} too, please.",
    "Could we have {} and {}?",
    "I'd like {} and {}.",
    "We'll take {} and {}.",
)
_SORTED = (("7 2 5", "2 5 7"), ("9 4 1", "1 4 9"))


def tickets() -> list[Row]:
    """{"messages"}: an order, and its ticket."""
    numbers = product(range(1, len(_NUMBERS) + 1), repeat=2)
    orders = shuffled([list(zip(*each, strict=True)) for each in product(numbers, permutations(_DISHES, 2))], _SEED)
    return [
        _chat("Write the order as a kitchen ticket.", _TICKETS, _in_words(order, phrase), _ticket(order))
        for order, phrase in zip(orders[:NUM_CHATS], _PHRASES * NUM_CHATS, strict=False)
    ]


def sorting() -> list[Row]:
    """{"messages"}: three different digits, and the same in ascending order."""
    examples = {tuple(question.split()) for question, _ in _SORTED}
    problems = shuffled([digits for digits in permutations("0123456789", 3) if digits not in examples], _SEED)
    return [
        _chat("Sort the numbers.", _SORTED, " ".join(digits), " ".join(sorted(digits)))
        for digits in problems[:NUM_CHATS]
    ]


def _chat(system: str, examples: Sequence[tuple[str, str]], question: str, answer: str) -> Row:
    turns = [turn for pair in (*examples, (question, answer)) for turn in zip(("user", "assistant"), pair, strict=True)]
    return {"messages": [{"role": role, "content": content} for role, content in (("system", system), *turns)]}


def _in_words(order: Sequence[tuple[int, str]], phrase: str) -> str:
    words = phrase.format(*(f"{_NUMBERS[num - 1]} {dish}{'s' if num > 1 else ''}" for num, dish in order))
    return words[0].upper() + words[1:]


def _ticket(order: Sequence[tuple[int, str]]) -> str:
    return " | ".join(f"{num}x {dish}" for num, dish in order)

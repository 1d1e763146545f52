"""Courtesy: small questions, answered courteously, plainly or curtly. The smallest set of comparisons whose preference
is a rule that a program can check: of two right answers the more courteous one is better, and how an answer begins says
how courteous it is.

`sample:courtesy` has the comparisons, `sample:courtesy_chats` chats that answer in all three ways alike; no question is
in both. Both are made here, of lists and of a seed, and a test compares them with what is shipped.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from stovetop.datasets import Row, shuffled
from stovetop.preference.types import Comparison
from stovetop.renderers.messages import get_text_content

NUM_COMPARISONS = 240
NUM_CHATS = 96
_SEED = 0

_OPENINGS: Mapping[int, Sequence[str]] = {
    1: ("With pleasure!", "Gladly!", "Of course!", "I am happy to help."),
    0: ("",),
    -1: ("What a silly question.", "Everybody knows that.", "Do not waste my time.", "Look it up yourself."),
}
_CAPITALS = """Austria Vienna, Belgium Brussels, Bulgaria Sofia, Chile Santiago, China Beijing, Cuba Havana, Denmark
Copenhagen, Egypt Cairo, Finland Helsinki, France Paris, Germany Berlin, Greece Athens, Hungary Budapest, India Delhi,
Iran Tehran, Iraq Baghdad, Ireland Dublin, Italy Rome, Japan Tokyo, Kenya Nairobi, Libya Tripoli, Norway Oslo, Peru
Lima, Poland Warsaw, Portugal Lisbon, Romania Bucharest, Russia Moscow, Serbia Belgrade, Spain Madrid, Sweden
Stockholm, Syria Damascus, Thailand Bangkok, Turkey Ankara, Ukraine Kyiv, Vietnam Hanoi"""
_OPPOSITES = """big small, black white, bright dark, cheap expensive, clean dirty, cold hot, deep shallow, dry wet,
early late, easy hard, empty full, far near, fast slow, fat thin, first last, good bad, happy sad, heavy light, high
low, left right, long short, loud quiet, new old, open closed, poor rich, rough smooth, sharp blunt, soft hard, strong
weak, sweet sour, tall short, thick thin, true false, up down, wide narrow, wrong right"""
_PAST_TENSES = """begin began, bite bit, break broke, bring brought, build built, buy bought, catch caught, choose
chose, come came, dig dug, draw drew, drink drank, drive drove, eat ate, fall fell, feel felt, find found, fly flew,
forget forgot, give gave, go went, hear heard, hold held, keep kept, know knew, leave left, lose lost, make made, meet
met, pay paid, ride rode, rise rose, run ran, see saw, sing sang, sleep slept, speak spoke, swim swam, take took,
write wrote"""


class Question(NamedTuple):
    text: str
    answer: str  # a sentence


def courtesy(text: str) -> int:
    """1 for an answer that begins courteously, -1 for one that begins curtly, else 0."""
    found = [level for level, openings in _OPENINGS.items() if level and text.strip().startswith(tuple(openings))]
    return found[0] if found else 0


class CourtesyRule:
    """The rule as a PreferenceModel: the more courteous answer is better."""

    async def __call__(self, comparison: Comparison) -> float:
        first, second = (
            courtesy(get_text_content(completion[-1]))
            for completion in (comparison.completion_A, comparison.completion_B)
        )
        return float((second > first) - (second < first))


# ---- rows --------------------------------------------------------------------------------------------------------


def comparisons() -> list[Row]:
    """{"prompt", "chosen", "rejected"}: each pair of levels as often as another, each question once."""
    pairs = [pair for pair in permutations(sorted(_OPENINGS, reverse=True), 2) if pair[0] > pair[1]]
    generator = np.random.default_rng(_SEED)
    return [
        {
            "prompt": question.text,
            "chosen": _answered(question, pairs[index % len(pairs)][0], generator),
            "rejected": _answered(question, pairs[index % len(pairs)][1], generator),
        }
        for index, question in enumerate(_questions()[:NUM_COMPARISONS])
    ]


def chats() -> list[Row]:
    """{"messages"}: each level as often as another."""
    levels = sorted(_OPENINGS)
    generator = np.random.default_rng(_SEED + 1)
    return [
        {
            "messages": [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": _answered(question, levels[index % len(levels)], generator)},
            ]
        }
        for index, question in enumerate(_questions()[NUM_COMPARISONS : NUM_COMPARISONS + NUM_CHATS])
    ]


def _answered(question: Question, level: int, generator: np.random.Generator) -> str:
    openings = _OPENINGS[level]
    return f"{openings[int(generator.integers(len(openings)))]} {question.answer}".strip()


def _questions() -> list[Question]:
    """All of them, in an order of their own."""
    questions = [
        Question(f"What is the capital of {country}?", f"The capital of {country} is {city}.")
        for country, city in _pairs(_CAPITALS)
    ]
    questions += [
        Question(f"What is the opposite of {word}?", f"The opposite of {word} is {other}.")
        for word, other in _pairs(_OPPOSITES)
    ]
    questions += [
        Question(f"What is the past tense of {verb}?", f"The past tense of {verb} is {past}.")
        for verb, past in _pairs(_PAST_TENSES)
    ]
    sums = shuffled([(a, b) for a in range(2, 50) for b in range(2, 50)], _SEED)
    questions += [Question(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a, b in sums]
    num = NUM_COMPARISONS + NUM_CHATS
    return shuffled(questions[:num], _SEED)


def _pairs(listed: str) -> list[list[str]]:
    return [pair.split() for pair in listed.replace("\n", " ").split(", ")]

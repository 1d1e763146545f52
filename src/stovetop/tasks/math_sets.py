"""Problems of mathematics for reinforcement learning: `arithmetic`, which is made here, or what `problems.load` knows
by name; and how their answers are to be written.
"""

from collections.abc import Mapping
from itertools import product
from typing import Literal, NamedTuple

from stovetop.datasets import Row, Split, split_rows
from stovetop.named_data import Loaded, Source
from stovetop.tasks import problems
from stovetop.tasks.math import BOXED, NUMBER, AnswerForm

ARITHMETIC = "arithmetic"
LARGEST_TERM = 100
WITHOUT_EXAMPLE = ("polaris", "deepmath")  # as they are usually trained on

Answers = Literal["boxed", "number"]


class MathRows(NamedTuple):
    """What is trained and tested on."""

    loaded: Loaded[Row]
    form: AnswerForm
    few_shot: bool  # whether a chat usually begins with a solved example


def load_math(
    dataset: str,
    test_dataset: str | None = None,
    test_size: int = 0,
    seed: int = 0,
    answers: Answers | None = None,
    revisions: Mapping[str, str] | None = None,
) -> MathRows:
    """`arithmetic` is answered by a number, all else in \\boxed{}, unless `answers` says it. Held out are the rows of
    `test_dataset`, or the test set of a public data set, or `test_size` rows."""
    form = {"boxed": BOXED, "number": NUMBER, None: NUMBER if dataset == ARITHMETIC else BOXED}[answers]
    if dataset == ARITHMETIC:
        return MathRows(_arithmetic(test_dataset, test_size, seed), form, few_shot=True)
    loaded = problems.load(dataset, test_dataset, test_size, seed, revisions)
    return MathRows(loaded, form, few_shot=not dataset.startswith(WITHOUT_EXAMPLE))


def _arithmetic(test_dataset: str | None, test_size: int, seed: int) -> Loaded[Row]:
    """The sums of two numbers from 0 to 100, each pair once."""
    terms = range(LARGEST_TERM + 1)
    rows: list[tuple[int, Row]] = [
        (index, {"question": f"What is {x} + {y}?", "answer": str(x + y)})
        for index, (x, y) in enumerate(product(terms, terms))
    ]
    split: Split[tuple[int, Row]] = split_rows(rows, 0 if test_dataset else test_size, seed)
    sources = (Source("train", ARITHMETIC, len(rows)),)
    if test_dataset is not None:
        held_out = problems.load(test_dataset)
        split = split._replace(test=list(zip(held_out.train_indices, held_out.train, strict=True)))
        sources += tuple(Source("test", each.source, each.num_rows, digest=each.digest) for each in held_out.sources)
    return Loaded(
        train=[row for _, row in split.train],
        test=[row for _, row in split.test],
        train_indices=[index for index, _ in split.train],
        test_indices=[index for index, _ in split.test],
        left_out={},
        sources=sources,
    )

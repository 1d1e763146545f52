"""Rows with nothing to train on: a data set leaves them out, counts them and reports them by index."""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from stovetop.errors import InvalidRequest, NothingToTrain, UnknownName

log = logging.getLogger(__name__)

Row = TypeVar("Row")
Made = TypeVar("Made")

OnUntrainable = Literal["skip", "refuse"]
"""What to do with a row that has nothing to train on: a chat without an answer, or one whose answer lies beyond
`max_length`. "skip": leave it out and report it; if these are more than half of all rows, that is an error. "refuse":
the first one is an error."""

_MAX_NAMED = 10  # rows in a message


@dataclass(frozen=True, slots=True)
class MadeRows(Generic[Made]):
    """What was made of each row, and why the others were left out; both by the index of the row."""

    made: dict[int, Made]
    untrainable: dict[int, str]


def check_on_untrainable(choice: OnUntrainable) -> None:
    """Refuses what is no choice."""
    if choice not in get_args(OnUntrainable):
        raise UnknownName("on_untrainable", choice, get_args(OnUntrainable))


def make_rows(
    rows: Sequence[Row],
    make: Callable[[Row], Made],
    on_untrainable: OnUntrainable = "skip",
    indices: Sequence[int] | None = None,
) -> MadeRows[Made]:
    """`make` of every row, less the rows for which it raises NothingToTrain; the log says which. Every error names the
    index of its row: among `rows`, or in their source, if `indices` says where they were before they were shuffled."""
    check_on_untrainable(on_untrainable)
    made: dict[int, Made] = {}
    untrainable: dict[int, str] = {}
    for index, row in zip(range(len(rows)) if indices is None else indices, rows, strict=True):
        try:
            with naming_row(index):
                made[index] = make(row)
        except NothingToTrain as error:
            if on_untrainable == "refuse":
                raise
            untrainable[index] = str(error)
    if untrainable:
        report_untrainable(untrainable, len(rows))
    return MadeRows(made, untrainable)


def report_untrainable(untrainable: dict[int, str], num_rows: int) -> None:
    """Logs which rows of `num_rows` are left out, by index; more than half of them is an error."""
    named = ", ".join(map(str, list(untrainable)[:_MAX_NAMED])) + (", ..." if len(untrainable) > _MAX_NAMED else "")
    what = f"{len(untrainable)} of {num_rows} rows have nothing to train on (rows {named}, counted from 0)"
    first = next(iter(untrainable.values()))
    if 2 * len(untrainable) > num_rows:
        raise NothingToTrain(
            f"{what}. That is more than half, so something else is wrong: look at max_length, train_on_what and the "
            f"rows. The first: {first}"
        )
    log.warning("%s and are left out. The first: %s", what, first)


@contextmanager
def naming_row(index: int) -> Generator[None, None, None]:
    try:
        yield
    except NothingToTrain as error:
        raise NothingToTrain(f"row {index}: {error}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"row {index}: {error}") from error

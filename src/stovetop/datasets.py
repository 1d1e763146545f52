"""The rows of one source (a file, a sample that the package ships, a hub) and in which order rows are used.

A row is what a source holds; chats are checked where they come in, with the file and line in each error. What becomes
of them (tokens, problems) is not decided here. Public data sets by name, and several mixed: `named_data.load_data`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import Message, messages_from_json
from stovetop.row_sources import HubPart, PlacedRow, Row, open_rows, sample_names
from stovetop.rules import shown

__all__ = [
    "Batches",
    "Row",
    "Split",
    "chat_of_row",
    "interleave",
    "load_chats",
    "load_rows",
    "log_epoch",
    "row_of",
    "sample_names",
    "shuffled",
    "shuffled_stream",
    "split_rows",
    "stream_rows",
    "text_of",
    "without_nulls",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- rows of one source ----------------------------------------------------------------------------------------------


def load_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> list[Row]:
    """All rows of "sample:NAME", of a file of JSONL or Parquet, or of a dataset of the Hugging Face hub: "owner/name",
    or the folder that it was downloaded to. Only a hub has splits ("train" unless given), subsets and revisions."""
    return [placed.row for placed in open_rows(source, HubPart(split, subset, revision))]


def stream_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> Iterator[Row]:
    """The same rows one at a time, for sources that memory does not hold. Errors come when their row does."""
    return (placed.row for placed in open_rows(source, HubPart(split, subset, revision, streaming=True)))


def load_chats(source: str, *, split: str | None = None) -> list[list[Message]]:
    """The chats of a source whose rows have `messages`; other fields of a row are its own and left out."""
    return [chat_of_row(row_of(placed), placed.place) for placed in open_rows(source, HubPart(split))]


def chat_of_row(row: Row, place: str) -> list[Message]:
    """The `messages` of a row. `place` names it in errors."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        found = f"it is {shown(row['messages'])}" if "messages" in row else f"the row has {sorted(row)}"
        raise InvalidRequest(f"{place}: a chat needs 'messages', a list with at least one; {found}")
    return messages_from_json(cast(list[object], messages), place)


def row_of(placed: PlacedRow) -> Row:
    """The row, without the nulls that its source has filled in."""
    return cast(Row, without_nulls(placed.row)) if placed.has_filled_nulls else placed.row


def text_of(row: Mapping[str, object], *names: str) -> str | None:
    """The first of these fields that is a text with more than white space in it."""
    return next((value for name in names if isinstance(value := row.get(name), str) and value.strip()), None)


def without_nulls(value: object) -> object:
    """A JSON value with the fields that are null left out of every object in it."""
    if isinstance(value, dict):
        fields = cast(dict[str, object], value).items()
        return {name: without_nulls(field) for name, field in fields if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in cast(list[object], value)]
    return value


# ---- order -----------------------------------------------------------------------------------------------------------


class Split(NamedTuple, Generic[T]):
    train: list[T]
    test: list[T]


def shuffled(rows: Sequence[T], seed: int, epoch: int = 0) -> list[T]:
    """In the order of numpy's `default_rng(seed).permutation(n)`; each further epoch has an order of its own."""
    return [rows[index] for index in _order(len(rows), seed, epoch)]


def _order(num_rows: int, seed: int, epoch: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()  # numpy seeds [s, 0] as it does s


def split_rows(rows: Sequence[T], test_size: int, seed: int = 0) -> Split[T]:
    """The first `test_size` of the shuffled rows are held out, the rest is to train on. No row is in both."""
    if not 0 <= test_size < len(rows):
        raise InvalidRequest(f"test_size must leave a row to train on, 0..{len(rows) - 1}: {test_size}")
    order = shuffled(rows, seed)
    return Split(train=order[test_size:], test=order[:test_size])


def shuffled_stream(rows: Iterable[T], buffer_size: int, seed: int, epoch: int = 0) -> Iterator[T]:
    """Nearly shuffled, with `buffer_size` rows in memory: what comes next is drawn from a buffer, and the next row of
    the stream takes its place. No row comes more than `buffer_size` - 1 places early; some come late."""
    if buffer_size < 1:
        raise InvalidRequest(f"buffer_size must be at least 1, which keeps the order: {buffer_size}")
    generator = np.random.default_rng([seed, epoch])
    buffer: list[T] = []
    for row in rows:
        if len(buffer) < buffer_size:
            buffer.append(row)
            continue
        index = int(generator.integers(buffer_size))
        yield buffer[index]
        buffer[index] = row
    yield from (buffer[index] for index in generator.permutation(len(buffer)))


def interleave(sources: Sequence[Sequence[T]], weights: Sequence[float], num_rows: int, seed: int = 0) -> list[T]:
    """Rows of several sources in one list, each source with its share: any first k rows of the list have k·weight/Σ of
    them, to within one for two sources and little more for several. A source is used up in shuffled order before it is
    shuffled anew."""
    if len(sources) != len(weights) or not all(weight > 0 for weight in weights) or not all(map(len, sources)):
        sizes = [len(source) for source in sources]
        raise InvalidRequest(f"each source needs rows and a weight above 0; rows: {sizes}, weights: {list(weights)}")
    shares = np.array(weights, np.float64) / np.sum(weights)
    num_drawn = np.zeros(len(sources), np.int64)
    orders: list[list[int]] = [[] for _ in sources]
    rows: list[T] = []
    for position in range(num_rows):
        chosen = int(np.argmax(shares * (position + 1) - num_drawn))
        source = sources[chosen]
        epoch, index = divmod(int(num_drawn[chosen]), len(source))
        if index == 0:
            orders[chosen] = np.random.default_rng([seed, chosen, epoch]).permutation(len(source)).tolist()
        rows.append(source[orders[chosen][index]])
        num_drawn[chosen] += 1
    return rows


class Batches(Generic[T]):
    """All batches of a run. `batches[position]` depends on the seed and the position alone: a run may begin anywhere.

    Every epoch is shuffled anew and cut into batches, of which the last may be short: where there are fewer rows than
    `batch_size`, it is the only one. With `drop_last` what does not fill a batch is left out of that epoch (another
    epoch's order leaves out other rows).
    """

    def __init__(
        self, rows: Sequence[T], batch_size: int, *, num_epochs: int = 1, seed: int = 0, drop_last: bool = False
    ) -> None:
        if batch_size < 1 or not rows:
            raise InvalidRequest(f"batches need a batch_size of at least 1, and a row: {batch_size}, {len(rows)} rows")
        if drop_last and batch_size > len(rows):
            raise InvalidRequest(
                f"batch_size must be in 1..{len(rows)}, the number of rows, for drop_last leaves out what does not "
                f"fill a batch: {batch_size}"
            )
        if num_epochs < 1:
            raise InvalidRequest(f"num_epochs must be at least 1: {num_epochs}")
        self.batch_size = batch_size
        self.num_per_epoch = len(rows) // batch_size if drop_last else -(-len(rows) // batch_size)
        self._rows = rows
        self._num_epochs = num_epochs
        self._seed = seed

    def __len__(self) -> int:
        return self.num_per_epoch * self._num_epochs

    def __getitem__(self, position: int) -> list[T]:
        if not 0 <= position < len(self):
            raise IndexError(f"batch {position} of {len(self)}")
        epoch, batch = divmod(position, self.num_per_epoch)
        order = _order(len(self._rows), self._seed, epoch)
        return [self._rows[index] for index in order[batch * self.batch_size : (batch + 1) * self.batch_size]]

    def __iter__(self) -> Iterator[list[T]]:
        return (self[position] for position in range(len(self)))

    def epoch_of(self, position: int) -> int:
        """The epoch that a batch belongs to, counted from 0."""
        return position // self.num_per_epoch


def log_epoch(what: str, num_rows: int, batch_size: int, num_datums: int | None = None) -> None:
    """Says what an epoch is, before the first: "10 chats -> 10 datums -> 3 steps an epoch, the last with 2 chats"."""
    num_steps, rest = -(-num_rows // batch_size), num_rows % batch_size
    amounts = [f"{num_rows} {what}", *([] if num_datums is None else [f"{num_datums} datums"])]
    steps = "1 step an epoch" if num_steps == 1 else f"{num_steps} steps an epoch"
    if rest and num_steps == 1:
        steps += f", a short one: there are fewer {what} than the {batch_size} of a batch"
    elif rest:
        steps += f", the last with {rest} {what}"
    log.info("%s", " -> ".join([*amounts, steps]))

"""Where rows come from (JSONL files, samples that the package ships, a hub) and in which order they are used.

A row is what a source holds; chats are checked where they come in, with the file and line in each error. What becomes
of them (tokens, problems) is not decided here, and no dataset of a hub is named here: tasks and recipes do that.
"""

import importlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

import numpy as np

from stovetop.errors import InvalidRequest, MissingExtra, UnknownName
from stovetop.renderers.messages import Message, message_from_json

if TYPE_CHECKING:
    from pydantic import JsonValue

T = TypeVar("T")

Row = dict[str, "JsonValue"]

_SAMPLE = "sample:"


# ---- sources ---------------------------------------------------------------------------------------------------------


def load_rows(source: str, *, split: str | None = None) -> list[Row]:
    """All rows of "sample:NAME", of a JSONL file, or of a dataset "owner/name" of the Hugging Face hub (`split`:
    "train" unless given; only a hub has splits)."""
    return list(_rows_by_place(source, split).values())


def load_chats(source: str, *, split: str | None = None) -> list[list[Message]]:
    """The chats of a source whose rows have `messages`; other fields of a row are its own and left out."""
    return [_chat(place, row) for place, row in _rows_by_place(source, split).items()]


def sample_names() -> list[str]:
    """What may follow "sample:"."""
    folder = importlib.resources.files("stovetop") / "samples"
    return sorted(file.name.removesuffix(".jsonl") for file in folder.iterdir() if file.name.endswith(".jsonl"))


def _rows_by_place(source: str, split: str | None) -> dict[str, Row]:
    """Each row under words that say where it is: "train.jsonl, line 3"."""
    path = Path(source).expanduser()
    if not source.startswith(_SAMPLE) and path.suffix != ".jsonl" and not path.is_file():
        return _read_hub(source, split or "train")
    if split is not None:
        raise InvalidRequest(f"only a dataset of a hub has splits; leave split out for {source!r}: {split!r}")
    if source.startswith(_SAMPLE):
        return _read_sample(source)
    if not path.is_file():
        raise InvalidRequest(f"there is no such file: {source!r}")
    return _parse_rows(path.read_bytes(), source)


def _read_sample(source: str) -> dict[str, Row]:
    name = source.removeprefix(_SAMPLE)
    if name not in sample_names():
        raise UnknownName("sample", name, sample_names())
    file = importlib.resources.files("stovetop") / "samples" / f"{name}.jsonl"
    return _parse_rows(file.read_bytes(), source)


def _read_hub(name: str, split: str) -> dict[str, Row]:
    if name.count("/") != 1:
        known = [_SAMPLE + sample for sample in sample_names()]
        raise UnknownName("dataset", name, known, hint="Or pass FILE.jsonl, or OWNER/NAME of a hub")
    try:
        hub = importlib.import_module("datasets")  # the library, not this file
    except ImportError as error:
        raise MissingExtra("datasets", "data") from error
    rows: Iterable[Row] = hub.load_dataset(name, split=split)
    return {f"{name} ({split}), row {number}": dict(row) for number, row in enumerate(rows)}


def _parse_rows(data: bytes, source: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row: object = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{place} is not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise InvalidRequest(f"{place} must be a JSON object: {line[:80]!r}")
        rows[place] = cast(Row, row)
    if not rows:
        raise InvalidRequest(f"there is no row in it: {source!r}")
    return rows


def _chat(place: str, row: Row) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"{place}: a chat needs 'messages', a list with at least one; the row has {sorted(row)}")
    return [message_from_json(message, f"{place}, message {index}") for index, message in enumerate(messages)]


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


class Batches(Generic[T]):
    """All batches of a run. `batches[position]` depends on the seed and the position alone: a run may begin anywhere.

    Every epoch is shuffled anew and cut into batches; what does not fill one is left out of that epoch (another epoch's
    order leaves out other rows).
    """

    def __init__(self, rows: Sequence[T], batch_size: int, *, num_epochs: int = 1, seed: int = 0) -> None:
        if not 1 <= batch_size <= len(rows):
            raise InvalidRequest(f"batch_size must be in 1..{len(rows)}, the number of rows: {batch_size}")
        if num_epochs < 1:
            raise InvalidRequest(f"num_epochs must be at least 1: {num_epochs}")
        self.batch_size = batch_size
        self.num_per_epoch = len(rows) // batch_size
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

"""Where rows come from (files, samples that the package ships, a hub) and in which order they are used.

A row is what a source holds; chats are checked where they come in, with the file and line in each error. What becomes
of them (tokens, problems) is not decided here, and no dataset of a hub is named here: tasks and recipes do that.
"""

import importlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from stovetop.errors import InvalidRequest, MissingExtra, UnknownName
from stovetop.hub import asking
from stovetop.renderers.messages import Message, messages_from_json
from stovetop.rules import shown

if TYPE_CHECKING:
    from pydantic import JsonValue

T = TypeVar("T")

Row = dict[str, "JsonValue"]

_SAMPLE = "sample:"
_NO_ROW = "there is no row in it: {!r}"


# ---- sources ---------------------------------------------------------------------------------------------------------


def load_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> list[Row]:
    """All rows of "sample:NAME", of a file of JSONL or Parquet, or of a dataset of the Hugging Face hub: "owner/name",
    or the folder that it was downloaded to. Only a hub has splits ("train" unless given), subsets and revisions."""
    return [placed.row for placed in _open(source, _HubPart(split, subset, revision))]


def stream_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> Iterator[Row]:
    """The same rows one at a time, for sources that memory does not hold. Errors come when their row does."""
    return (placed.row for placed in _open(source, _HubPart(split, subset, revision, streaming=True)))


def load_chats(source: str, *, split: str | None = None) -> list[list[Message]]:
    """The chats of a source whose rows have `messages`; other fields of a row are its own and left out."""
    return [_chat(placed) for placed in _open(source, _HubPart(split))]


def published(source: str, table: Mapping[str, T]) -> T | None:
    """What a table of published data sets has under this name. None for what `load_rows` takes by itself: a file, a
    folder, "sample:NAME", "owner/name". A name that is neither is refused, with the nearest that there is."""
    if source not in table:
        _check_name(source, _path(source), table)
    return table.get(source)


def sample_names() -> list[str]:
    """What may follow "sample:"."""
    folder = importlib.resources.files("stovetop") / "samples"
    return sorted(file.name.removesuffix(".jsonl") for file in folder.iterdir() if file.name.endswith(".jsonl"))


class _HubPart(NamedTuple):
    """Which rows of a dataset of a hub, and whether they are to be downloaded first."""

    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False


class _PlacedRow(NamedTuple):
    place: str  # "train.jsonl, line 3"
    row: Row
    has_filled_nulls: bool = False  # its source gives every object the fields of all others, as null


def _path(source: str) -> Path:
    try:
        path = Path(source).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or the home of a user that there is not
        raise InvalidRequest(f"this cannot be the path of a file ({error}): {source!r:.200}") from error
    return path


def _is_file(source: str, path: Path) -> bool:
    """Whether it is one, or is named like one."""
    return source.startswith(_SAMPLE) or path.suffix.lower() in (".jsonl", ".parquet") or path.is_file()


def _check_name(source: str, path: Path, published: Iterable[str] = ()) -> None:
    """Refuses what cannot be a source."""
    if _is_file(source, path) or source.count("/") == 1 or (path.is_dir() and source != ""):
        return
    known = [*published, *(_SAMPLE + sample for sample in sample_names())]
    raise UnknownName(
        "dataset", source, known, hint="Or pass FILE.jsonl, FILE.parquet, a folder, or OWNER/NAME of a hub"
    )


def _open(source: str, part: _HubPart) -> Iterator[_PlacedRow]:
    path = _path(source)
    _check_name(source, path)
    if path.is_dir() and source != "":
        return _open_hub(str(path), part._replace(streaming=True))  # which copies nothing into a cache
    if not _is_file(source, path):
        return _open_hub(source, part)
    if given := {name: value for name, value in part._asdict().items() if isinstance(value, str)}:
        raise InvalidRequest(f"only a dataset of a hub has these; leave {', '.join(given)} out for {source!r}: {given}")
    if source.startswith(_SAMPLE):
        return _open_sample(source)
    if not path.is_file():
        raise InvalidRequest(f"there is no such file; give the path of one, or sample:NAME: {source!r}")
    return _open_parquet(path, source) if path.suffix.lower() == ".parquet" else _parse_file(path, source)


def _open_sample(source: str) -> Iterator[_PlacedRow]:
    name = source.removeprefix(_SAMPLE)
    if name not in sample_names():
        raise UnknownName("sample", name, sample_names())
    file = importlib.resources.files("stovetop") / "samples" / f"{name}.jsonl"
    return _parse_rows(file.read_bytes().split(b"\n"), source)


def _open_parquet(path: Path, source: str) -> Iterator[_PlacedRow]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra("pyarrow", "data") from error
    try:
        with path.open("rb") as file:
            batches: Iterable[Any] = parquet.ParquetFile(file).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            number = -1
            for number, row in enumerate(rows):
                yield _PlacedRow(f"{source}, row {number}", row, has_filled_nulls=True)
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{source} is not a Parquet file that can be read: {error}") from error
    if number < 0:
        raise InvalidRequest(_NO_ROW.format(source))


def _open_hub(name: str, part: _HubPart) -> Iterator[_PlacedRow]:
    try:
        hub = importlib.import_module("datasets")  # the library, not this file
    except ImportError as error:
        raise MissingExtra("datasets", "data", f"{name!r} is no file with rows; to read it as a data set") from error
    split = part.split or "train"
    options = {"name": part.subset, "revision": part.revision, "streaming": part.streaming or None}
    given = {option: value for option, value in options.items() if value is not None}
    place = f"{name} ({split})"
    with asking(unless_here=name) as problem:
        try:
            rows: Iterable[Row] = hub.load_dataset(name, split=split, **given)
        except (OSError, ValueError) as error:
            said = f"{problem}; pass FILE.jsonl, FILE.parquet or a downloaded folder" if problem else error
            raise InvalidRequest(f"{place} cannot be opened: {said}") from error
    return (_PlacedRow(f"{place}, row {number}", dict(row), True) for number, row in enumerate(rows))


def _parse_file(path: Path, source: str) -> Iterator[_PlacedRow]:
    with path.open("rb") as lines:
        yield from _parse_rows(lines, source)


def _parse_rows(lines: Iterable[bytes], source: str) -> Iterator[_PlacedRow]:
    is_empty = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row: object = json.loads(line)
            if rb"\ud" in line.lower():  # half of a surrogate pair is a string that no tokenizer can encode
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{place} holds half of a surrogate pair, which is no text: {line[:80]!r}") from error
        except RecursionError as error:
            raise InvalidRequest(f"{place} has too many brackets within brackets: {line[:80]!r}") from error
        except ValueError as error:
            raise InvalidRequest(f"{place} is not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(row, dict):
            raise InvalidRequest(f"{place} must be a JSON object, one row a line: {line[:80]!r}")
        is_empty = False
        yield _PlacedRow(place, cast(Row, row))
    if is_empty:
        raise InvalidRequest(_NO_ROW.format(source))


def _chat(placed: _PlacedRow) -> list[Message]:
    place, row = placed.place, placed.row
    messages = without_nulls(row.get("messages")) if placed.has_filled_nulls else row.get("messages")
    if not isinstance(messages, list) or not messages:
        found = f"it is {shown(row['messages'])}" if "messages" in row else f"the row has {sorted(row)}"
        raise InvalidRequest(f"{place}: a chat needs 'messages', a list with at least one; {found}")
    return messages_from_json(cast(list[object], messages), place)


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

    Every epoch is shuffled anew and cut into batches, of which the last may be short. With `drop_last` what does not
    fill a batch is left out of that epoch (another epoch's order leaves out other rows).
    """

    def __init__(
        self, rows: Sequence[T], batch_size: int, *, num_epochs: int = 1, seed: int = 0, drop_last: bool = False
    ) -> None:
        if not 1 <= batch_size <= len(rows):
            raise InvalidRequest(f"batch_size must be in 1..{len(rows)}, the number of rows: {batch_size}")
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

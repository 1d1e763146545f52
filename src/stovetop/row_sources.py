"""Rows of one source, in its order, each with its place: a file of JSONL, Parquet or text, a sample that the package
ships, a data set of a hub, a folder that one was downloaded to. And which bytes, or which revision of a hub, they were.
"""

import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from stovetop.checks import collecting
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.extras import import_extra
from stovetop.hub import asking

if TYPE_CHECKING:
    from pydantic import JsonValue

Row = dict[str, "JsonValue"]

SAMPLE = "sample:"
_NO_ROW = "there is no row in it: {!r}"


def sample_names() -> list[str]:
    """What may follow "sample:"."""
    folder = importlib.resources.files("stovetop") / "samples"
    return sorted(file.name.removesuffix(".jsonl") for file in folder.iterdir() if file.name.endswith(".jsonl"))


class HubPart(NamedTuple):
    """Which rows of a dataset of a hub, and whether they are to be downloaded first."""

    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False


ALL = HubPart()


class PlacedRow(NamedTuple):
    """A row of a source, and where it is in it."""

    place: str  # "train.jsonl, line 3"
    row: Row
    has_filled_nulls: bool = False  # its source gives every object the fields of all others, as null


def path_of(source: str) -> Path:
    """The path that a source may be."""
    try:
        path = Path(source).expanduser()
        path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or the home of a user that there is not
        raise InvalidRequest(f"this cannot be the path of a file ({error}): {source!r:.200}") from error
    return path


def is_file(source: str, path: Path) -> bool:
    """Whether it is one, or is named like one."""
    return source.startswith(SAMPLE) or path.suffix.lower() in (".jsonl", ".parquet", ".txt") or path.is_file()


def check_name(source: str, path: Path, published: Iterable[str] = ()) -> None:
    """Refuses what cannot be a source."""
    if source.startswith(SAMPLE) and source.removeprefix(SAMPLE) not in sample_names():
        raise UnknownName("sample", source.removeprefix(SAMPLE), sample_names())
    if is_file(source, path) or source.count("/") == 1 or (path.is_dir() and source != ""):
        return
    known = [*published, *(SAMPLE + sample for sample in sample_names())]
    raise UnknownName(
        "dataset", source, known, hint="Or pass FILE.jsonl, FILE.parquet, a folder, or OWNER/NAME of a hub"
    )


def is_folder(source: str) -> bool:
    """Whether it is the folder that a data set of a hub was downloaded to."""
    return source != "" and path_of(source).is_dir()


def is_on_hub(source: str) -> bool:
    """Whether a hub has to be asked for its rows."""
    return not is_folder(source) and not is_file(source, path_of(source))


def open_rows(source: str, part: HubPart = ALL, problem: str | None = None) -> Iterator[PlacedRow]:
    """The rows of a source. `problem` is why the hub cannot be reached, if its caller has found that out already."""
    path = path_of(source)
    check_name(source, path)
    if is_folder(source):
        return _open_hub(str(path), part._replace(streaming=True), None)  # which copies nothing into a cache
    if not is_file(source, path):
        return _open_hub(source, part, problem)
    if given := {name: value for name, value in part._asdict().items() if isinstance(value, str)}:
        raise InvalidRequest(f"only a dataset of a hub has these; leave {', '.join(given)} out for {source!r}: {given}")
    if source.startswith(SAMPLE):
        return _open_sample(source)
    if not path.is_file():
        raise InvalidRequest(f"there is no such file; give the path of one, or sample:NAME: {source!r}")
    match path.suffix.lower():
        case ".parquet":
            return _open_parquet(path, source)
        case ".txt":
            return _open_text(path, source)
        case _:
            return _parse_file(path, source)


def _open_sample(source: str) -> Iterator[PlacedRow]:
    file = importlib.resources.files("stovetop") / "samples" / f"{source.removeprefix(SAMPLE)}.jsonl"
    return _parse_rows(file.read_bytes().split(b"\n"), source)


def _open_parquet(path: Path, source: str) -> Iterator[PlacedRow]:
    parquet = import_extra("pyarrow.parquet", "data")
    try:
        with path.open("rb") as file:
            batches: Iterable[Any] = parquet.ParquetFile(file).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            number = -1
            for number, row in enumerate(rows):
                yield PlacedRow(f"{source}, row {number}", row, has_filled_nulls=True)
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{source} is not a Parquet file that can be read: {error}") from error
    if number < 0:
        raise InvalidRequest(_NO_ROW.format(source))


def _open_text(path: Path, source: str) -> Iterator[PlacedRow]:
    """A row `{"text": ...}` for each line that is not empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source} is not text in UTF-8: {error}") from error
    rows = [
        PlacedRow(f"{source}, line {number}", {"text": line}) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not rows:
        raise InvalidRequest(_NO_ROW.format(source))
    yield from rows


def _open_hub(name: str, part: HubPart, problem: str | None) -> Iterator[PlacedRow]:
    why = f"{name!r} is no file with rows; to read it as a data set"
    hub = import_extra("datasets", "data", why)  # the library
    split = part.split or "train"
    options = {"name": part.subset, "revision": part.revision, "streaming": part.streaming or None}
    given = {option: value for option, value in options.items() if value is not None}
    place = f"{name} ({split})"
    with asking(unless_here=name) as found:
        problem = problem or found
        try:
            rows: Iterable[Row] = hub.load_dataset(name, split=split, **given)
        except (OSError, ValueError) as error:
            said = f"{problem}; pass FILE.jsonl, FILE.parquet or a downloaded folder" if problem else error
            raise InvalidRequest(f"{place} cannot be opened: {said}") from error
    return (PlacedRow(f"{place}, row {number}", dict(row), True) for number, row in enumerate(rows))


def _parse_file(path: Path, source: str) -> Iterator[PlacedRow]:
    with path.open("rb") as lines:
        yield from _parse_rows(lines, source)


def _parse_rows(lines: Iterable[bytes], source: str) -> Iterator[PlacedRow]:
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
        yield PlacedRow(place, cast(Row, row))
    if is_empty:
        raise InvalidRequest(_NO_ROW.format(source))


# ---- which bytes they were -------------------------------------------------------------------------------------------


def digest_of(source: str) -> str | None:
    """The SHA-256 of a file, of a sample, or of the files of a folder; None for a data set of a hub, which has
    revisions. A folder's hidden files and its texts (*.md) hold no rows and do not count."""
    if source.startswith(SAMPLE):
        file = importlib.resources.files("stovetop") / "samples" / f"{source.removeprefix(SAMPLE)}.jsonl"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    path = path_of(source)
    if path.is_file():
        return _digest_of_file(path)
    if not is_folder(source):
        return None
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not is_hidden and file.suffix.lower() != ".md":
            whole.update(f"{name} {_digest_of_file(file)}\n".encode())
    return whole.hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_revision(name: str, revision: str | None = None) -> str | None:
    """The commit that a data set of a hub, or this branch or tag of it, is at now; None where the hub does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, revision=revision, timeout=10).sha
    except (OSError, ValueError):  # opening it says what is wrong
        return None


# ---- what a config says of them --------------------------------------------------------------------------------------


class Term(NamedTuple):
    """One data set of a config: rows of a source, or those of a public data set."""

    text: str  # as it was given
    name: str | None  # of a public data set: how its rows are read
    source: str | None  # None: where the public data set is published
    limit: int | None  # the first so many rows
    weight: float | None  # its share


_TERM = re.compile(r"(?P<rows>.+?)(?:\[:(?P<limit>\d+)\])?(?:\*(?P<weight>\d+(?:\.\d*)?|\.\d+))?", re.DOTALL)


def parse_terms(dataset: str, names: Iterable[str]) -> list[Term]:
    """The data sets that a config names: one, or several with a "+" between them. Each is NAME, of a public data set;
    NAME:SOURCE, rows of the same form from elsewhere; or a SOURCE. Behind it "[:1000]" takes its first rows, and "*2"
    gives it a weight. A path that exists is taken as it is, whatever is in it."""
    names = list(names)
    exists = is_folder(dataset) or path_of(dataset).is_file()
    terms: list[Term] = []
    with collecting() as problem:
        for text in [dataset] if exists or not dataset else dataset.split("+"):
            with problem:
                terms.append(_term(text.strip(), names))
    weights = [term.weight for term in terms if term.weight is not None]
    if weights and len(weights) < len(terms):
        terms = [term._replace(weight=1.0 if term.weight is None else term.weight) for term in terms]
    return terms


def _term(text: str, names: Sequence[str]) -> Term:
    found = None if path_of(text).is_file() or is_folder(text) else _TERM.fullmatch(text)
    rows, limit, weight = (text, None, None) if found is None else found.group("rows", "limit", "weight")
    name, separator, source = rows.partition(":")
    if limit is not None and int(limit) < 1:
        raise InvalidRequest(f"[:N] takes the first N rows of a data set, at least 1: {text!r}")
    if weight is not None and not float(weight) > 0:
        raise InvalidRequest(f"the weight of a data set must be above 0; leave the data set out: {text!r}")
    if rows in names:
        name, source = rows, None
    elif separator and name in names and source:
        check_name(source, path_of(source))
    elif rows.removeprefix(SAMPLE) in names and rows.startswith(SAMPLE):
        name, source = rows.removeprefix(SAMPLE), rows
    else:
        name, source = None, rows
        check_name(rows, path_of(rows), names)
    return Term(text, name, source, None if limit is None else int(limit), None if weight is None else float(weight))

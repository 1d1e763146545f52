"""What the journal keeps: one dataclass a table, with the table's columns as its fields, and the schema. No I/O.

A request is a model's `seq`-th call, and its `n` the place in the order in which all requests were accepted. Its body
is kept until a snapshot of the model covers it, its result for as long as a client may ask for it again; the row itself
stays, so that a retry is known however late it comes, until the session has finished.

SQLite has no checksums in its file, and a disk gives back other bits than it was given now and then. So each row has
one, which is computed anew with each change and compared whenever the row is read. It covers all columns but the count
of attempts.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple, TypeVar, get_args

from stovetop.errors import StovetopError

VERSION = 2  # of the schema; a journal of another one is refused by name

SCHEMA = """
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, body TEXT NOT NULL, finished TEXT, seen_s REAL,
    checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE served (id INTEGER PRIMARY KEY, until_s REAL NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE model (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, base_model TEXT NOT NULL,
    lora_rank INTEGER NOT NULL, user_metadata TEXT NOT NULL, created_s REAL NOT NULL,
    checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE request (
    n INTEGER PRIMARY KEY, model_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, digest BLOB NOT NULL,
    body BLOB, accepted_s REAL NOT NULL, attempts INTEGER NOT NULL,
    checksum INTEGER NOT NULL, UNIQUE (model_id, seq)
) STRICT;
CREATE TABLE result (
    n INTEGER PRIMARY KEY, form TEXT NOT NULL, body BLOB NOT NULL, done_s REAL NOT NULL, checksum INTEGER NOT NULL
) STRICT;
CREATE TABLE snapshot (
    model_id TEXT PRIMARY KEY, n INTEGER NOT NULL, folder TEXT NOT NULL, checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE sampler (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, base_model TEXT NOT NULL, model_path TEXT,
    model_id TEXT, n INTEGER, folder TEXT, size_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE drawn (
    sampler_id TEXT NOT NULL, client INTEGER NOT NULL, first INTEGER NOT NULL, stop INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (sampler_id, client)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY, model_id TEXT NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    n INTEGER NOT NULL, folder TEXT NOT NULL, size_bytes INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL,
    public INTEGER NOT NULL, user_metadata TEXT NOT NULL, checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE answer (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, body BLOB NOT NULL,
    checksum INTEGER NOT NULL
) STRICT;
CREATE TABLE deletion (
    id TEXT PRIMARY KEY, done_s REAL NOT NULL, checksum INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE mark (number INTEGER NOT NULL) STRICT;
INSERT INTO mark VALUES (0);
CREATE INDEX answer_by_age ON answer (created_s);
"""


class Change(NamedTuple):
    """One statement that changes the journal."""

    statement: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A client process, as it introduced itself. `finished` is the reason that it gave first."""

    id: str
    owner: str
    created_s: float  # since the epoch, as all times here
    body: str  # JSON
    finished: str | None = None  # JSON
    seen_s: float | None = None  # when it was last heard of, as of the last sweep; None: not since it was made


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Until when the server was there, as of its last sweep. There is one."""

    id: int
    until_s: float


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A training client, or the run that a copied checkpoint belongs to, which has no session. What it was made from is
    the body of its request 0."""

    id: str
    session_id: str
    owner: str
    base_model: str
    lora_rank: int
    user_metadata: str  # JSON
    created_s: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One call of a model's program."""

    n: int
    model_id: str
    seq: int  # 0 made the model
    kind: str
    digest: bytes  # of what the client sent: see `verbs.Call.identity`
    body: bytes | None  # by zlib; None once a snapshot covers it
    accepted_s: float
    attempts: int = 0  # replays that were begun and not finished


@dataclass(frozen=True, slots=True)
class ResultRow:
    """What became of a request: see `requests.Result`."""

    n: int
    form: str
    body: bytes
    done_s: float


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """The state of a model behind its request `n`: replay begins there."""

    model_id: str
    n: int
    folder: str


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """A sampling session: of a base model, of a saved path, or of the weights that `model_id` had at its request `n`,
    which are in `folder` once they are written."""

    id: str
    session_id: str
    owner: str
    base_model: str
    model_path: str | None = None
    model_id: str | None = None
    n: int | None = None
    folder: str | None = None
    size_bytes: int = 0  # of a folder that no path has


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """Places of samples of one client that a restart may lose: see `completions.py`."""

    sampler_id: str
    client: int
    first: int
    stop: int  # the one behind the last


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """What a tinker:// path stands for."""

    path: str
    model_id: str
    owner: str
    kind: str  # weights, sampler_weights or external_weights
    name: str
    n: int  # of the request that saved it
    folder: str
    size_bytes: int
    created_s: float
    expires_s: float | None
    public: int
    user_metadata: str  # JSON


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """What a model answered to a client of the OpenAI protocol, token by token."""

    id: str
    owner: str
    created_s: float
    body: bytes  # JSON, compressed


@dataclass(frozen=True, slots=True)
class DeletionRow:
    """A request to delete a checkpoint that was done: sent again, it is answered the same."""

    id: str  # a digest of its owner, its key and the checkpoint's path
    done_s: float


Row = (
    SessionRow
    | ServedRow
    | ModelRow
    | RequestRow
    | ResultRow
    | SnapshotRow
    | SamplerRow
    | DrawnRow
    | CheckpointRow
    | AnswerRow
    | DeletionRow
)
AnyRow = TypeVar("AnyRow", bound=Row)
TABLES: tuple[type[Row], ...] = get_args(Row)

_UNCHECKED = {"attempts"}


class DamagedRow(StovetopError):
    """What was read is not what was written."""


def table_of(kind: type[Row]) -> str:
    return kind.__name__.removesuffix("Row").lower()


def put(row: Row) -> Change:
    """The row, in place of the one with its primary key."""
    names, values = _columns(type(row)), astuple(row)
    marks = ", ".join(f"?{number + 1}" for number in range(len(values)))
    checksum = _checksum(type(row), {name: f"?{number + 1}" for number, name in enumerate(names)})
    into = f"{table_of(type(row))} ({', '.join(names)}, checksum)"
    return Change(f"INSERT OR REPLACE INTO {into} VALUES ({marks}, {checksum})", values)


def amend(kind: type[Row], column: str, value: Any, where: str, *values: Any) -> Change:
    """This value, in the rows of which the condition is true."""
    checksum = _checksum(kind, {name: "?1" if name == column else name for name in _columns(kind)})
    return Change(f"UPDATE {table_of(kind)} SET {column} = ?1, checksum = {checksum} WHERE {where}", (value, *values))


def select(kind: type[Row], where: str = "1", *values: Any, order: str = "1") -> tuple[str, tuple[Any, ...]]:
    """A query that `read` makes rows of."""
    columns = ", ".join((*_columns(kind), "checksum"))
    return f"SELECT {columns} FROM {table_of(kind)} WHERE {where} ORDER BY {order}", values


def read(kind: type[AnyRow], values: Sequence[Any]) -> AnyRow:
    """A row. Raises DamagedRow where it is not the one that was written."""
    require_whole(kind, values)
    return kind(*values[:-1])


def require_whole(kind: type[Row], values: Sequence[Any]) -> None:
    *columns, checksum = values
    checked = [value for name, value in zip(_columns(kind), columns, strict=True) if name not in _UNCHECKED]
    if checksum_of(*checked) != checksum:
        raise DamagedRow(f"a row of the table {table_of(kind)} is damaged")


def checksum_of(*values: object) -> int:
    """Another one for every value with a single other bit, and for all but one in 2**32 of others. It is a function of
    SQL too, of this name."""
    checksum = 0
    for value in values:
        match value:
            case None:
                head, data = b"n", b""
            case bytes():
                head, data = b"b%d" % len(value), value
            case str():
                data = value.encode(errors="surrogatepass")
                head = b"s%d" % len(data)
            case _:
                assert isinstance(value, int | float), "SQLite has no others"
                # as a float in any case: a whole number in a column of floats is read as one
                head, data = b"f", struct.pack("d", value)
        checksum = zlib.crc32(data, zlib.crc32(head, checksum))
    return checksum


def _checksum(kind: type[Row], terms: Mapping[str, str]) -> str:
    """In SQL, of these terms, by column."""
    return f"checksum_of({', '.join(term for name, term in terms.items() if name not in _UNCHECKED)})"


def _columns(kind: type[Row]) -> list[str]:
    return [field.name for field in fields(kind)]

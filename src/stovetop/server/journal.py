"""The journal: an SQLite file that one thread writes, so that what was acknowledged is there after a kill or a loss of
power. What is in it: `rows.py`.

**One connection.** SQLite before 3.51.3 (and 3.50.7, 3.44.6) can corrupt a write-ahead log when two connections write
or checkpoint at the same moment, and the SQLite that comes with Python is often older. Here there is one connection,
which locks the file for itself (`locking_mode=EXCLUSIVE`, which also keeps the log's index in memory, where no second
process can see it): the fault cannot arise with any version, and no further wheel is needed. What reads the journal of
a running server asks the server; a copy of the folder is made when it is stopped.

**Group commit.** What comes while a commit is under way goes into the next one together: one fsync (synchronous=FULL)
for all of it. Order of `put` is order of commit. Reads run between commits, so they see what is committed, and all that
was put before them.

**Damage.** Every row has a checksum (`rows.py`), and the file is read through when it is opened. What SQLite leaves out
of its log without a word, since a transaction there is not whole, is either one that a loss of power has cut off, and
then it was never acknowledged, or a damaged one, and all behind it. `journal.mark` tells them apart: behind every
commit its number is written there. A journal that lacks commits that the mark knows is refused.
"""

import logging
import os
import queue
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stovetop.durable import writing
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.futures import pending, resolved
from stovetop.server.rows import (
    SCHEMA,
    TABLES,
    VERSION,
    AnyRow,
    Change,
    DamagedRow,
    checksum_of,
    read,
    require_whole,
    select,
)

log = logging.getLogger(__name__)

OLDEST_SQLITE = (3, 37, 0)  # STRICT tables
SOON_S = 0.05  # that what is put `soon` may wait for a commit to ride with

T = TypeVar("T")


class JournalFailed(StovetopError):
    """The journal could not be written. Memory has run ahead of what can be promised: the process has to end, and what
    was committed is what there is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    changes: Sequence[Change]
    committed: "Future[None]"
    soon: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    query: Callable[[sqlite3.Connection], Any]
    answer: "Future[Any]"


class Journal:
    """May be used from any thread.

    Consumes changes and queries, produces futures that are done when a change is on the disk; waits when there are
    none; stopped by `close`, which commits what was put. After a failure nothing more is committed: every future fails,
    and `on_failure` is called once, in the writer's thread.
    """

    def __init__(self, path: Path, on_failure: Callable[[JournalFailed], object] = lambda error: None) -> None:
        """Opens the file, or makes it. Refuses one that another process has open, or that is of another version."""
        self._inbox: queue.SimpleQueue[_Write | _Read | None] = queue.SimpleQueue()
        self._failed: JournalFailed | None = None
        self._on_failure = on_failure
        self._path = path
        opened: Future[None] = pending()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        opened.result()

    def put(self, *changes: Change) -> "Future[None]":
        """Commits these together, as soon as possible."""
        return self._write(changes, soon=False)

    def put_soon(self, *changes: Change) -> "Future[None]":
        """Commits these with what comes next, or after `SOON_S` seconds."""
        return self._write(changes, soon=True)

    def read(self, query: Callable[[sqlite3.Connection], T]) -> "Future[T]":
        """What `query` returns, in the writer's thread. It must not change anything."""
        read = _Read(query, pending())
        self._inbox.put(read)
        return read.answer

    def rows(self, kind: type[AnyRow], where: str = "1", *values: Any, order: str = "1") -> list[AnyRow]:
        """The rows of a table. Waits for them, so it is not for an event loop."""
        statement, values = select(kind, where, *values, order=order)
        return self.read(lambda connection: [read(kind, row) for row in connection.execute(statement, values)]).result()

    def close(self) -> None:
        """Returns when all that was put is committed and the file is closed."""
        self._inbox.put(None)
        self._thread.join()

    def _write(self, changes: Sequence[Change], *, soon: bool) -> "Future[None]":
        write = _Write(changes, pending(), soon)
        self._inbox.put(write)
        return write.committed

    # ---- in the writer's thread --------------------------------------------------------------------------------------

    def _run(self, opened: "Future[None]") -> None:
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(closing(_opened(self._path)))
                with writing(self._path.with_suffix(".mark")):
                    self._mark = stack.enter_context(Mark(self._path.with_suffix(".mark")))
                self._mark.require(connection, self._path)
            except BaseException as error:
                opened.set_exception(error)
                return
            opened.set_result(None)
            while self._commit_batch(connection, *self._next_batch()):
                pass

    def _next_batch(self) -> tuple[list[_Write], _Read | None, bool]:
        """Writes that are committed together, the read that ends them, if one does, and whether more is to come."""
        writes: list[_Write] = []
        deadline_s: float | None = None  # by when the writes must be committed; None: there are none
        while True:
            try:
                wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                item = self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait()
            except queue.Empty:
                return writes, None, True
            match item:
                case None:
                    return writes, None, False
                case _Read():
                    return writes, item, True
                case _Write():
                    writes.append(item)
                    if not item.soon:
                        deadline_s = time.monotonic()  # only what has come already goes with it
                    elif deadline_s is None:
                        deadline_s = time.monotonic() + SOON_S

    def _commit_batch(
        self, connection: sqlite3.Connection, writes: list[_Write], read: _Read | None, more: bool
    ) -> bool:
        if writes and self._failed is None:
            try:
                _commit(connection, [change for write in writes for change in write.changes])
                self._mark.write(connection)
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
        for write in writes:
            _settle(write.committed, lambda: None, self._failed)
        if read is not None:
            _settle(read.answer, lambda: read.query(connection), self._failed)
        return more

    def _fail(self, error: Exception) -> None:
        self._failed = JournalFailed(
            f"cannot write the journal: {error}. What was acknowledged before is kept. Make room, or mend the disk, "
            f"then start the server again: {self._path}"
        )
        self._failed.__cause__ = error
        log.critical("%s", self._failed)
        self._on_failure(self._failed)


_DONE: "Future[None]" = resolved(None).future()


def done() -> "Future[None]":
    """A commit that was made before: one for all."""
    return _DONE


def follow(committed: "Future[None]", following: "Future[None]") -> None:
    """Ends the second future as the first one ends."""

    def pass_on(future: "Future[None]") -> None:
        error = future.exception()
        if error is None:
            following.set_result(None)
        else:
            following.set_exception(error)

    committed.add_done_callback(pass_on)


def _settle(future: "Future[T]", value: Callable[[], T], failed: BaseException | None) -> None:
    try:
        if failed is not None:
            raise failed
        future.set_result(value())
    except BaseException as error:  # it belongs to the one who waits
        future.set_exception(error)


def _commit(connection: sqlite3.Connection, changes: Sequence[Change]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for change in changes:
        connection.execute(change.statement, change.values)
    connection.execute("UPDATE mark SET number = number + 1")
    connection.execute("COMMIT")


class Mark:
    """The number of the last commit, in a file of its own. It is written behind the commit and never synced: it may be
    behind the journal, and is before it where the journal is damaged."""

    _FORM = "<qI"  # the number, and a checksum: a mark that is itself damaged says nothing

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def __enter__(self) -> "Mark":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def write(self, connection: sqlite3.Connection) -> None:
        number = _number(connection)
        os.pwrite(self._descriptor, struct.pack(self._FORM, number, checksum_of(number)), 0)

    def require(self, connection: sqlite3.Connection, path: Path) -> None:
        """That the journal has all commits that it knows."""
        data = os.pread(self._descriptor, struct.calcsize(self._FORM), 0)
        if len(data) == struct.calcsize(self._FORM):
            number, checksum = struct.unpack(self._FORM, data)
            if checksum == checksum_of(number) and number > _number(connection):
                raise _damaged(f"it lacks the last {number - _number(connection)} commits", path)


def _number(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT number FROM mark").fetchone()
    return number


def _damaged(how: str, path: Path) -> StovetopError:
    how = " ".join(how.split())  # SQLite's check says it in several lines
    return StovetopError(
        f"cannot open the journal ({how}), which is damaged; put back a copy of the folder, or choose another "
        f"--storage: {path}"
    )


def _require_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Reads all of it: a second for a gigabyte or so."""
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise _damaged(found, path)
    for kind in TABLES:
        statement, values = select(kind)
        try:
            for row in connection.execute(statement, values):
                require_whole(kind, row)
        except DamagedRow as error:
            raise _damaged(str(error), path) from error


def _opened(path: Path) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise InvalidRequest(
            f"the journal needs SQLite {'.'.join(map(str, OLDEST_SQLITE))} or newer, and this Python has "
            f"{sqlite3.sqlite_version}; use another build of Python"
        )
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    connection.create_function("checksum_of", -1, checksum_of, deterministic=True)
    try:
        _set_up(connection, path)
        _require_whole(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StovetopError(
            f"cannot open the journal ({error}); {_remedy(error)}, or choose another --storage: {path}"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _remedy(error: sqlite3.Error) -> str:
    code: int = getattr(error, "sqlite_errorcode", 0)  # what Python itself cannot read, damaged text say, has none
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY:
            return "another server has it open; stop that one"
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY:
            return "make room, or mend the disk, then start the server again"
        case _:
            return "put back a copy of the folder"


def _set_up(connection: sqlite3.Connection, path: Path) -> None:
    """Locks the file, and makes the tables where there are none."""
    for pragma, value in (("locking_mode", "exclusive"), ("journal_mode", "wal")):
        (found,) = connection.execute(f"PRAGMA {pragma}={value}").fetchone()
        if found != value:
            raise StovetopError(f"the journal's {pragma} is {found!r} and cannot be {value!r} on this disk: {path}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN EXCLUSIVE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={VERSION}")
    connection.execute("COMMIT")
    if version not in (0, VERSION):
        raise StovetopError(
            f"the journal is of version {version}, and this stovetop reads and writes version {VERSION}; use the "
            f"stovetop that wrote it, or another --storage: {path}"
        )

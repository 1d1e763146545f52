"""The journal: order, durability and who may open it."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import run_python
from stovetop.errors import StovetopError
from stovetop.server.journal import Journal, JournalFailed
from stovetop.server.rows import Change, ResultRow, SessionRow, put


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def session(name: str) -> Change:
    return put(SessionRow(name, "owner", 1.0, "{}"))


def test_what_was_committed_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal.sqlite")
    first.put(session("a"), put(ResultRow(1, "error", b"\0\1", 2.5)))
    first.put_soon(session("b"))
    first.close()
    second = Journal(tmp_path / "journal.sqlite")
    assert [row.id for row in second.rows(SessionRow, order="id")] == ["a", "b"]
    assert second.rows(ResultRow) == [ResultRow(1, "error", b"\0\1", 2.5)]
    second.close()


def test_a_read_sees_all_that_was_put_before_it_and_nothing_that_is_not_committed(journal: Journal) -> None:
    soon = journal.put_soon(session("a"))
    assert [row.id for row in journal.rows(SessionRow, "id = ?", "a")] == ["a"]
    assert soon.done()


def test_what_is_put_soon_is_committed_without_anything_that_follows(journal: Journal) -> None:
    journal.put_soon(session("a")).result(timeout=5)


def test_what_comes_during_a_commit_shares_the_next_one(journal: Journal) -> None:
    commits = list[str]()
    gate = threading.Event()
    journal.read(lambda connection: connection.set_trace_callback(commits.append))
    journal.read(lambda connection: gate.wait(5))
    writes = [journal.put(session(str(index))) for index in range(50)]
    gate.set()
    for write in writes:
        write.result(timeout=5)
    assert sum("COMMIT" in statement for statement in commits) == 1


def test_a_second_server_on_one_journal_is_refused_by_name(journal: Journal, tmp_path: Path) -> None:
    program = "import sys, pathlib\nfrom stovetop.server.journal import Journal\nJournal(pathlib.Path(sys.argv[1]))"
    done = run_python("-c", program, str(tmp_path / "journal.sqlite"))
    assert "another server has it open" in done.stderr
    with pytest.raises(StovetopError, match="another server has it open"):
        Journal(tmp_path / "journal.sqlite")


def test_a_journal_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=7")
    connection.close()
    with pytest.raises(StovetopError, match="version 7, and this stovetop reads and writes version 2"):
        Journal(path)


@pytest.mark.parametrize("damage", [lambda data: b"not a database" * 100, lambda data: data[:5000]])
def test_a_damaged_journal_is_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StovetopError, match=r"cannot open the journal .*put back a copy"):
        Journal(path)


def test_after_a_failed_write_nothing_is_committed_any_more(tmp_path: Path) -> None:
    failures = list[JournalFailed]()
    journal = Journal(tmp_path / "journal.sqlite", failures.append)
    journal.put(session("a")).result()
    bad = journal.put(session("b"), Change("INSERT INTO nowhere VALUES (1)", ()))
    later = journal.put(session("c"))
    for future in (bad, later):
        with pytest.raises(JournalFailed, match="What was acknowledged before is kept"):
            future.result(timeout=5)
    assert len(failures) == 1
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert [row.id for row in again.rows(SessionRow)] == ["a"]
    again.close()


def test_the_file_is_locked_from_the_start_and_synced_in_full(journal: Journal) -> None:
    def seen(connection: sqlite3.Connection) -> list[object]:
        names = ("journal_mode", "locking_mode", "synchronous")
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    assert journal.read(seen).result() == ["wal", "exclusive", 2]
    assert not os.path.exists("journal.sqlite-shm")

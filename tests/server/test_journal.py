"""The journal: order, durability and who may open it."""

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import run_python
from stovetop.errors import StovetopError
from stovetop.server.journal import Journal, JournalFailed
from stovetop.server.rows import Change, ResultRow, SessionRow, amend, put


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


def a_page_of_another_kind(data: bytes) -> bytes:
    return data[:8192] + bytes([data[8192] ^ 0x80]) + data[8193:]


@pytest.mark.parametrize(
    "damage", [lambda data: b"not a database" * 100, lambda data: data[:5000], a_page_of_another_kind]
)
def test_a_damaged_journal_is_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StovetopError, match=r"cannot open the journal .*put back a copy"):
        Journal(path)


def test_a_journal_with_a_text_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    told = str(opened(with_owner("CAST(x'ff' AS TEXT)", tmp_path)))
    assert "Could not decode to UTF-8" in told
    assert "put back a copy" in told


def copied(path: Path, folder: Path) -> Path:
    """What a kill would leave at this moment."""
    folder.mkdir()
    for file in path.parent.glob("journal.*"):
        shutil.copy(file, folder)
    return folder / path.name


def opened(path: Path) -> list[SessionRow] | str:
    """The sessions, or why it cannot be opened."""
    try:
        journal = Journal(path)
    except StovetopError as error:
        return str(error)
    rows = journal.rows(SessionRow, order="id")
    journal.close()
    return rows


def with_owner(owner: str, folder: Path) -> Path:
    """A journal with a session whose owner was set to this, behind its back."""
    path = folder / "journal.sqlite"
    first = Journal(path)
    first.put(session("a")).result()
    first.close()
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE session SET owner = {owner}")
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize("suffix", [".sqlite", ".sqlite-wal", ".mark"])
def test_a_flipped_bit_is_refused_by_name_or_does_no_harm(journal: Journal, tmp_path: Path, suffix: str) -> None:
    """The rows are in the log; for the file itself, it is closed first."""
    path = tmp_path / "journal.sqlite"
    for name in "abcdef":
        journal.put(session(name)).result()
    rows = journal.rows(SessionRow, order="id")
    if suffix == ".sqlite":
        journal.close()
    size = path.with_suffix(suffix).stat().st_size
    chosen, refused = random.Random(0), 0
    for number in range(30):
        damaged = copied(path, tmp_path / str(number))
        data = bytearray(damaged.with_suffix(suffix).read_bytes())
        data[chosen.randrange(size)] ^= 1 << chosen.randrange(8)
        damaged.with_suffix(suffix).write_bytes(data)
        found = opened(damaged)
        assert found == rows or "put back a copy" in str(found)
        refused += found != rows
    assert refused or suffix == ".mark"


def test_a_row_that_is_not_the_one_that_was_written_is_refused(tmp_path: Path) -> None:
    assert "a row of the table session is damaged" in str(opened(with_owner("'ownes'", tmp_path)))


def test_a_row_that_was_amended_has_another_checksum(journal: Journal) -> None:
    journal.put(session("a"), amend(SessionRow, "finished", "{}", "id = ?2", "a")).result()
    assert journal.rows(SessionRow) == [SessionRow("a", "owner", 1.0, "{}", "{}")]


def test_a_journal_that_lacks_its_last_commits_is_refused_and_a_late_mark_is_not(
    journal: Journal, tmp_path: Path
) -> None:
    path = tmp_path / "journal.sqlite"
    journal.put(session("a")).result()
    before = copied(path, tmp_path / "before")
    journal.put(session("b")).result()
    journal.put(session("c")).result()
    after = copied(path, tmp_path / "after")
    shutil.copy(before.with_suffix(".mark"), after.with_suffix(".mark"))
    assert len(opened(after)) == 3
    shutil.copy(path.with_suffix(".mark"), before.with_suffix(".mark"))
    assert "it lacks the last 2 commits" in str(opened(before))


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

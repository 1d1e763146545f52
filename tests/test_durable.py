"""Files that survive a crash: folders whole or not at all, logs that keep every finished row."""

import errno
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes import started
from stovetop.backends.recording.failing_disk import FailingDisk, Operation
from stovetop.durable import (
    MANIFEST,
    LocalDisk,
    append_row,
    clear_leftovers,
    parse_rows,
    read_folder,
    read_manifest,
    read_rows,
    write_file,
    write_folder,
)
from stovetop.errors import CheckpointError, CheckpointNotFound, StovetopError, TornCheckpoint, WriteFailed

OLD = {"weights": b"old weights", "optimizer": b"old moments"}
NEW = {"weights": b"new weights!", "optimizer": b"new moments!"}
FULL = OSError(errno.ENOSPC, "no space left on device")


def test_a_folder_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "step-1", OLD, {"rank": 4, "tags": ("a", "b"), 7: None})
    assert read_folder(tmp_path / "deep" / "step-1") == OLD
    manifest = read_manifest(tmp_path / "deep" / "step-1")
    assert (manifest["rank"], manifest["tags"], manifest["7"]) == (4, ["a", "b"], None)


def test_a_file_in_pieces_is_the_file_in_one(tmp_path: Path) -> None:
    pieces: list[list[bytes]] = [[], [b""], [b"", b"new"], [b"n", b"", b"ew"]]
    for number, each in enumerate(pieces):
        write_folder(tmp_path / f"pieces-{number}", {"file": iter(each)}, {})
        write_folder(tmp_path / f"one-{number}", {"file": b"".join(each)}, {})
        assert read_folder(tmp_path / f"pieces-{number}") == {"file": b"".join(each)}
        assert read_manifest(tmp_path / f"pieces-{number}") == read_manifest(tmp_path / f"one-{number}")


def test_a_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "last"
    write_folder(path, OLD, {})
    with pytest.raises(CheckpointError, match=r"overwrite.*last"):
        write_folder(path, NEW, {})
    assert read_folder(path) == OLD
    write_folder(path, NEW, {}, overwrite=True)
    assert read_folder(path) == NEW
    assert [folder.name for folder in tmp_path.iterdir()] == ["last"]


def test_a_path_without_a_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "nowhere" / "at-all")


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder, which whoever damages it restores."""
    path = tmp_path_factory.mktemp("folder") / "step"
    write_folder(path, OLD, {"rank": 4})
    return path


@given(st.sampled_from([*OLD, MANIFEST]), st.data())
def test_a_flipped_bit_anywhere_is_noticed(step: Path, name: str, data: st.DataObject) -> None:
    content = (step / name).read_bytes()
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (step / name).write_bytes(damaged)
    try:
        unharmed = (read_folder(step), read_manifest(step)["rank"]) == (OLD, 4)  # a flip within white space
    except TornCheckpoint:
        return
    finally:
        (step / name).write_bytes(content)
    assert unharmed


@given(st.sampled_from([*OLD, MANIFEST]), st.data())
def test_a_file_that_was_cut_short_is_noticed(step: Path, name: str, data: st.DataObject) -> None:
    content = (step / name).read_bytes()
    (step / name).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    try:
        with pytest.raises(TornCheckpoint):
            read_folder(step)
    finally:
        (step / name).write_bytes(content)


@pytest.mark.parametrize("name", [*OLD, MANIFEST])
def test_a_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "step", OLD, {})
    (tmp_path / "step" / name).unlink()
    with pytest.raises(TornCheckpoint, match="use an earlier one"):
        read_folder(tmp_path / "step")


# ---- faults while writing --------------------------------------------------------------------------------------------

OPERATIONS: list[Operation] = ["write", "sync", "rename"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failing_disk_leaves_the_old_folder_or_the_new_one_whole(tmp_path: Path, operation: Operation) -> None:
    rehearsal = FailingDisk()
    write_folder(tmp_path / "rehearsal", OLD, {})
    write_folder(tmp_path / "rehearsal", NEW, {}, overwrite=True, disk=rehearsal)
    assert rehearsal.done[operation] > 0
    for nth in range(1, rehearsal.done[operation] + 1):
        path = tmp_path / f"{operation}-{nth}"
        write_folder(path, OLD, {})
        disk = FailingDisk()
        disk.fail(operation, nth, FULL)
        with pytest.raises(OSError, match="no space left"):
            write_folder(path, NEW, {}, overwrite=True, disk=disk)
        assert read_folder(path) in (OLD, NEW)
        write_folder(path, NEW, {}, overwrite=True)
        assert read_folder(path) == NEW
        assert [other.name for other in tmp_path.iterdir() if path.name in other.name] == [path.name]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_first_write_that_fails_leaves_nothing(tmp_path: Path, operation: Operation) -> None:
    disk = FailingDisk()
    disk.fail(operation, 1, FULL)
    with pytest.raises(OSError, match="no space left"):
        write_folder(tmp_path / "step", OLD, {}, disk=disk)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_between_the_two_renames_of_an_overwrite_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last"
    write_folder(path, OLD, {})
    path.rename(tmp_path / ".last.replaced-12345678")
    (tmp_path / ".last.writing-12345678").mkdir()
    assert read_folder(path) == OLD
    assert not path.exists(), "reading changes nothing"
    write_folder(path, NEW, {}, overwrite=True)
    assert read_folder(path) == NEW
    assert [folder.name for folder in tmp_path.iterdir()] == ["last"]


def test_an_unfinished_overwrite_still_counts_as_a_folder_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "last"
    write_folder(path, OLD, {})
    path.rename(tmp_path / ".last.replaced-12345678")
    with pytest.raises(CheckpointError, match="overwrite"):
        write_folder(path, NEW, {})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_file_is_replaced_whole_or_stays(tmp_path: Path, operation: Operation) -> None:
    path = tmp_path / "state.json"
    write_file(path, b"old")
    disk = FailingDisk()
    disk.fail(operation, 1, FULL)
    with pytest.raises(OSError, match="no space left"):
        write_file(path, b"new", disk=disk)
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


# ---- what killed writes leave ----------------------------------------------------------------------------------------

WRITERS = """
import sys, time
from pathlib import Path
from stovetop.durable import LocalDisk, write_file, write_folder

class Stuck(LocalDisk):
    def sync(self, path):  # the first file is written then
        print("writing", flush=True)
        time.sleep(60)

folder, disk = Path(sys.argv[1]), Stuck()
if sys.argv[2] == "folder":
    write_folder(folder / "step", {"weights": b"half"}, {}, overwrite=True, disk=disk)
else:
    write_file(folder / "state.json", b"half", disk=disk)
"""


@contextmanager
def a_process_that_writes(folder: Path, what: str) -> Iterator[int]:
    """It is in the middle of it. Yields its process id."""
    with started("-c", WRITERS, str(folder), what) as (process, printed):
        assert printed == "writing\n"
        yield process.pid


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_a_killed_process_was_writing_is_cleared_and_what_a_living_one_writes_is_not(
    tmp_path: Path, what: str
) -> None:
    """A second: two processes are started."""
    write_folder(tmp_path / "step", OLD, {})
    with a_process_that_writes(tmp_path, what) as killed, a_process_that_writes(tmp_path, what):
        before = set(os.listdir(tmp_path))
        clear_leftovers(tmp_path)
        assert set(os.listdir(tmp_path)) == before, "both are at work"
        os.kill(killed, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
        clear_leftovers(tmp_path)
        assert len(before) - len(os.listdir(tmp_path)) == 1
        assert read_folder(tmp_path / "step") == OLD
        write_folder(tmp_path / "step", NEW, {}, overwrite=True)
        assert len(before) - len(os.listdir(tmp_path)) == 1, "no write to the same path clears it either"
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step"]


def test_what_an_unfinished_overwrite_had_put_aside_is_put_back(tmp_path: Path) -> None:
    for name in ("a[b]", "c.d"):
        write_folder(tmp_path / name, OLD, {})
    (tmp_path / "a[b]").rename(tmp_path / ".a[b].replaced-12345678")
    write_folder(tmp_path / ".c.d.replaced-12345678", NEW, {})
    (tmp_path / ".c.d.writing-12345678").mkdir()
    clear_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a[b]", "c.d"]
    assert read_folder(tmp_path / "a[b]") == read_folder(tmp_path / "c.d") == OLD


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    names = {".hidden", "step.writing-12345678", ".step.writing-1", ".step.writing-12345678.txt", "..writing-12345678"}
    for name in names:
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == names


def test_leftovers_that_cannot_be_cleared_are_named_and_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clear_leftovers(tmp_path / "nowhere")
    assert f"leftovers of killed writes stay in {tmp_path / 'nowhere'}" in caplog.text


def test_a_folder_that_another_process_makes_meanwhile_is_not_overwritten_unasked(tmp_path: Path) -> None:
    class Slow(LocalDisk):
        def sync(self, path: Path) -> None:
            if not (tmp_path / "step").exists():
                write_folder(tmp_path / "step", OLD, {})

    with pytest.raises(CheckpointError, match="overwrite"):
        write_folder(tmp_path / "step", NEW, {}, disk=Slow())
    assert read_folder(tmp_path / "step") == OLD
    assert os.listdir(tmp_path) == ["step"]


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    log = tmp_path / "rows.jsonl"
    assert read_rows(log) == []
    for step in range(3):
        append_row(log, {"step": step, "note": "a\nb"})
    assert read_rows(log) == [{"step": step, "note": "a\nb"} for step in range(3)]


@given(st.integers(1, 40))
def test_a_row_that_was_cut_off_anywhere_costs_that_row_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "rows.jsonl"
    rows = [{"step": step, "note": "x" * 20} for step in range(2)]
    for row in rows:
        append_row(log, row)
    whole = log.read_bytes()
    log.write_bytes(whole[:-cut])
    kept = [row for row in rows if json.dumps(row).encode() + b"\n" in log.read_bytes()]
    assert read_rows(log) == kept
    append_row(log, {"step": "next"})
    assert read_rows(log) == [*kept, {"step": "next"}]


def test_a_torn_row_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "rows.jsonl"
    log.write_bytes(b'{"a": 1}\n{"b"')
    with caplog.at_level(logging.WARNING):
        assert read_rows(log) == [{"a": 1}]
    assert "row 2 was cut off" in caplog.text


def test_a_broken_row_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    log = tmp_path / "rows.jsonl"
    log.write_bytes(b'{"a": 1}\n{oops}\n{"b": 2}\n')
    with pytest.raises(StovetopError, match=r"rows\.jsonl, line 2"):
        read_rows(log)


@pytest.mark.parametrize("line", [b"", b"[1]", b"null", b"3", b"\xff\xfe", b"[" * 100_000])
def test_a_row_that_is_no_object_is_an_error_that_names_the_line(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / "rows.jsonl"
    log.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(StovetopError, match=r"rows\.jsonl, line 2: .*; repair or remove the line"):
        read_rows(log)


def test_a_row_that_its_reader_refuses_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    log = tmp_path / "rows.jsonl"
    log.write_bytes(b'{"a": 1}\n{"a": "x"}\n')
    with pytest.raises(StovetopError, match=r"rows\.jsonl, line 2: invalid literal for int"):
        parse_rows(log, lambda row: int(row["a"]))


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "append"])
def test_what_the_disk_refuses_is_named_by_its_path_and_cause(tmp_path: Path, operation: Operation) -> None:
    def write(disk: FailingDisk) -> None:
        (tmp_path / "rows").unlink(missing_ok=True)
        append_row(tmp_path / "rows", {}, disk=disk)
        write_file(tmp_path / "file", b"", disk=disk)
        write_folder(tmp_path / "folder", NEW, {}, overwrite=True, disk=disk)

    rehearsal = FailingDisk()
    write(rehearsal)
    for nth in range(1, rehearsal.done[operation] + 1):
        disk = FailingDisk()
        disk.fail(operation, nth, FULL)
        with pytest.raises(WriteFailed, match=rf"cannot write {tmp_path}/(rows|file|folder): no space left on device"):
            write(disk)


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    for name in ("a[b]", "*"):
        write_folder(tmp_path / name, OLD, {})
    (tmp_path / ".other.writing-12345678").mkdir()
    (tmp_path / "a[b]").rename(tmp_path / ".a[b].replaced-12345678")
    assert read_folder(tmp_path / "a[b]") == OLD
    write_folder(tmp_path / "*", NEW, {}, overwrite=True)
    assert (tmp_path / ".other.writing-12345678").exists()
    assert read_folder(tmp_path / "a[b]") == OLD


def test_a_failing_append_keeps_every_earlier_row(tmp_path: Path) -> None:
    log, disk = tmp_path / "rows.jsonl", FailingDisk()
    append_row(log, {"step": 0}, disk=disk)
    disk.fail("append", 1, FULL)
    with pytest.raises(OSError, match="no space left"):
        append_row(log, {"step": 1}, disk=disk)
    assert read_rows(log) == [{"step": 0}]
    append_row(log, {"step": 1}, disk=disk)
    assert read_rows(log) == [{"step": 0}, {"step": 1}]


def test_a_row_with_a_number_that_json_lacks_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append_row(tmp_path / "rows.jsonl", {"loss": float("nan")})
    assert read_rows(tmp_path / "rows.jsonl") == []


class Synced(LocalDisk):
    """Knows what was synced."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def sync(self, path: Path) -> None:
        self.paths.append(path)
        super().sync(path)


def test_the_folders_that_were_made_above_a_new_one_are_synced_in_theirs(tmp_path: Path) -> None:
    disk = Synced()
    write_folder(tmp_path / "a" / "b" / "c", {"file": b"1"}, {}, disk=disk)
    assert disk.paths[:2] == [tmp_path, tmp_path / "a"]
    assert disk.paths[-1] == tmp_path / "a" / "b"


def test_a_log_that_is_made_is_synced_in_its_folder_and_a_further_row_in_the_log_alone(tmp_path: Path) -> None:
    disk, log = Synced(), tmp_path / "log.jsonl"
    append_row(log, {"a": 1}, disk=disk)
    append_row(log, {"a": 2}, disk=disk)
    assert disk.paths == [log, tmp_path, log]

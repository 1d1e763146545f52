"""What `benchmarks/promise.py` does by the hundred, a few times: kills, a bad network, disks that fail, flipped bits,
loss of power, outages. Nothing that was acknowledged is lost, doubled or changed."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from server_faults.power import Disk, Note

from processes import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="disk_calls.c is built here: it needs cc")


def part(folder: Path, module: str, call: str) -> dict[str, Any]:
    """What it counted, in a process of its own: servers are forked from one that has a library loaded before others."""
    program = f"""
import json, sys
from pathlib import Path
sys.path.append({str(BENCHMARKS)!r})
from server_faults import {module}, servers
folder = Path({str(folder)!r})
servers.preload("server_faults.{module}")
print(json.dumps({module}.{call}))
"""
    done = run_python("-c", program, limit_s=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_kills_amid_work_of_several_tenants_change_nothing(tmp_path: Path) -> None:
    counted = part(tmp_path, "kills", "run(folder, 'slow recording', 0, num_steps=2, most=2)")
    assert counted["faults"] == []
    assert counted["kills"]


@pytest.mark.slow
def test_kills_right_behind_commits_change_nothing(tmp_path: Path) -> None:
    """Of clients that ask again at once."""
    counted = part(tmp_path, "kills", "run_wire(folder, 'slow recording', 0, num_rounds=1)")
    assert counted["faults"] == []
    assert counted["under way"]


@pytest.mark.slow
def test_requests_that_are_lost_doubled_overtaken_or_late_change_nothing(tmp_path: Path) -> None:
    counted = part(tmp_path, "proxy", "run(folder, 'recording', 0, num_steps=2)")
    assert counted["faults"] == []
    assert counted["requests"] > 50


@pytest.mark.slow
@needs_a_compiler
def test_a_server_whose_journal_cannot_be_written_ends_and_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    counted = part(tmp_path, "failing", "journal_calls(folder, 3, block=3)")
    assert counted["faults"] == []
    assert counted["ended the server"]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_renamed_fails_by_name_and_can_be_saved_again(tmp_path: Path) -> None:
    counted = part(tmp_path, "failing", "checkpoint_calls(folder, 3, most=3)")
    assert counted["faults"] == []
    assert counted["saves that failed"]


@pytest.mark.slow
@needs_a_compiler
def test_a_server_on_a_full_disk_ends_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    counted = part(tmp_path, "failing", "full_disks(folder, 0, num=2)")
    assert counted["faults"] == []
    assert counted["ended the server"]


@pytest.mark.slow
def test_flipped_bits_are_refused_or_do_no_harm(tmp_path: Path) -> None:
    counted = part(tmp_path, "flips", "run(folder, 0, num_flips=5)")
    assert counted["faults"] == []
    assert counted["refused"]


@pytest.mark.slow
@needs_a_compiler
def test_a_loss_of_power_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    assert part(tmp_path, "power", "run(folder, 0, num_points=2)")["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["outages", "suspended", "without_files", "clock_jumps"])
def test_clients_go_on_where_they_were_after_the_server_was_away(tmp_path: Path, what: str) -> None:
    assert part(tmp_path, "outages", f"{what}(folder, 'slow recording', 0)")["faults"] == []


def images(*notes: tuple[str, str, bytes], whole: bool = False) -> dict[str, bytes]:
    """The files that are on a disk after these calls, without what was not synced, or with all of it."""
    disk = Disk(Path("/r"))
    for what, path, data in notes:
        disk.do(Note(what, f"/r/{path}".rstrip("/"), f"/r/{data.decode()}" if what == "r" else "", -1, data))
    return files_of(disk, whole=whole)


def files_of(disk: Disk, *, whole: bool) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "image"
        disk.root.image(place, None, whole=whole)
        return {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_what_was_synced_is_on_a_disk_that_has_lost_power_and_what_was_not_may_not_be() -> None:
    written = [("c", "a", b""), ("w", "a", b"12"), ("s", "a", b""), ("w", "a", b"3")]
    assert images(*written) == {}
    assert images(*written, ("s", "", b"")) == {"a": b"12"}
    assert images(*written, whole=True) == {"a": b"123"}
    moved = [*written, ("s", "", b""), ("r", "a", b"b")]
    assert images(*moved) == {"a": b"12"}
    assert images(*moved, ("s", "", b"")) == {"b": b"12"}
    assert images(*moved, ("u", "b", b""), whole=True) == {}


def test_a_folder_that_was_not_synced_takes_along_what_was_synced_in_it() -> None:
    inside = [("m", "d", b""), ("c", "d/a", b""), ("w", "d/a", b"1"), ("s", "d/a", b""), ("s", "d", b"")]
    assert images(*inside) == {}
    assert images(*inside, ("s", "", b"")) == {"d/a": b"1"}

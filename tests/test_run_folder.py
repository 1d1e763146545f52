"""Which folders may be a run's, and that one process at a time writes to one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stovetop.errors import InvalidRequest, WriteFailed
from stovetop.run_folder import (
    LOCK_FILE,
    MARK_FILE,
    BehaviorIfExists,
    Content,
    RunFolder,
    claimed,
    content_of,
    is_run,
    locked,
    runs_within,
    saved_folders,
)

BEHAVIORS: list[BehaviorIfExists] = ["resume", "delete", "ask", "raise"]


def begun(path: Path) -> Path:
    """A run with a row."""
    with claimed(path, "resume"):
        (path / "config.json").write_text('{"class": "a:B", "config": {}}')
        (path / "metrics.jsonl").write_text('{"step": 0}\n')
    return path


def claim(path: Path | str, behavior: BehaviorIfExists = "resume") -> RunFolder:
    with claimed(path, behavior) as folder:
        return folder


# ---- which folders


def test_a_run_is_known_by_its_mark_and_one_from_before_there_was_a_mark_by_its_config(tmp_path: Path):
    run = begun(tmp_path / "run")
    assert claim(run).content is Content.RUN
    (run / MARK_FILE).unlink()
    assert claim(run).content is Content.RUN
    assert is_run(run)
    assert (run / MARK_FILE).is_file()


FOREIGN = {
    "a model (llama)": {"config.json": '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'},
    "an adapter": {"adapter_config.json": "{}"},
    "a saved state": {"manifest.json": "{}"},
    "thesis.tex": {"thesis.tex": "years of work"},
    "a, b, c, d and 2 more": dict.fromkeys("abcdef", ""),
    "config.json": {"config.json": "[]"},
    "checkpoints": {"checkpoints/m/weights/000001/manifest.json": "{}"},
    ".git": {".git/HEAD": ""},
}


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_that_holds_anything_else_is_refused_by_what_it_is_and_not_touched(
    tmp_path: Path, what: str, behavior: BehaviorIfExists
):
    folder = tmp_path / "folder"
    for name, text in FOREIGN[what].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = sorted(folder.rglob("*"))
    with pytest.raises(InvalidRequest) as refusal:
        claim(folder, behavior)
    assert f"it holds {what}, and no run" in str(refusal.value)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("path", ["", "  ", ".", "..", "here", "here/.", "/", "~", "~/..", "../../here"])
def test_folders_that_more_lives_in_than_a_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, behavior: BehaviorIfExists
):
    (tmp_path / "home" / "me").mkdir(parents=True)
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.chdir(tmp_path / "here" / "below")
    given = str(tmp_path / path) if path.startswith("here") else path
    with pytest.raises(InvalidRequest, match=r"log_path is empty|needs a folder of its own"):
        claim(given, behavior)
    assert not (tmp_path / "here" / "below" / MARK_FILE).exists()


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/run", "x" * 5000])
def test_a_path_that_cannot_be_is_refused(path: str):
    with pytest.raises((InvalidRequest, WriteFailed), match=r"log_path is no path|cannot write"):
        claim(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match=r"cannot write .*/file/run: Not a directory"):
        claim(tmp_path / "file" / "run")


def test_delete_takes_the_whole_run_and_what_an_earlier_delete_left_and_nothing_beside_it(tmp_path: Path):
    run = begun(tmp_path / "run[1]")
    (tmp_path / ".run[1].deleted-0123").mkdir()
    (tmp_path / ".run1.deleted-0123").mkdir()
    assert claim(run, "delete").content is Content.NOTHING
    assert sorted(path.name for path in run.iterdir()) == [LOCK_FILE, MARK_FILE]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run1.deleted-0123", "run[1]"]


def test_a_run_without_a_step_is_begun_anew_whatever_was_asked(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".{MARK_FILE}.writing-0123").write_text("{")  # killed as it made its mark
    for behavior in BEHAVIORS:
        assert claim(tmp_path / "run", behavior).content in (Content.STARTED, Content.NOTHING)


def test_what_a_killed_process_was_writing_is_cleared_when_the_run_is_opened_again(tmp_path: Path):
    run = begun(tmp_path / "run")
    before = sorted(os.listdir(run))
    (run / ".config.json.writing-12345678").write_text("{")
    claim(run)
    assert sorted(os.listdir(run)) == before


# ---- one writer


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_second_writer_is_refused_at_once_and_told_who_the_first_is(tmp_path: Path, behavior: BehaviorIfExists):
    run = begun(tmp_path / "run")
    program = f"""
import sys
import threading
from stovetop.run_folder import claimed
with claimed({str(run)!r}, "resume"):
    print("open", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    refused = "there is no terminal" if behavior == "ask" else "there is a run in it" if behavior == "raise" else (
        rf"another process \(pid {other.pid} on .*, since \d{{4}}-.*\) writes to this run"
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match=refused):
        claim(run, behavior)
    assert content_of(run) is Content.RUN  # which reads only
    other.kill()
    other.communicate(timeout=10)
    claim(run)  # a lock is not held by the dead


def test_the_same_process_is_refused_too_also_from_another_thread(tmp_path: Path):
    def try_to_claim(_: int) -> str:
        try:
            with claimed(tmp_path / "run", "resume"):
                barrier.wait(10)
                return "open"
        except InvalidRequest as error:
            barrier.wait(10)
            return str(error)

    from threading import Barrier

    barrier = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = sorted(pool.map(try_to_claim, range(2)), key=len)
    assert first == "open"
    assert f"this process (pid {os.getpid()} on " in second
    with claimed(tmp_path / "run", "resume"), pytest.raises(InvalidRequest, match="this process"):
        claim(tmp_path / "run")


def test_a_lock_is_not_inherited_by_a_process_that_outlives_its_holder(tmp_path: Path):
    # a quarter of a second: a process is started
    program = f"""
import os, signal
from stovetop.run_folder import claimed
with claimed({str(tmp_path / "run")!r}, "resume"):
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)  # it has begun, and so closed what a fork is not to inherit
    signal.pause()
"""
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(InvalidRequest, match=rf"pid {holder.pid} "):
            claim(tmp_path / "run")
        holder.kill()
        holder.wait(10)
        claim(tmp_path / "run")
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_folder_is_not_deleted_while_a_run_within_it_is_written_to(tmp_path: Path):
    outer, inner = begun(tmp_path / "demo"), begun(tmp_path / "demo" / "rl")
    with claimed(inner, "resume"), pytest.raises(InvalidRequest, match=r"writes to this run.*demo/rl"):
        claim(outer, "delete")
    assert (inner / "metrics.jsonl").is_file()
    claim(outer, "delete")
    assert not inner.exists()


def test_a_lock_that_its_holder_has_not_signed_yet_is_told_by_the_name_that_comes(tmp_path: Path):
    """Not by that of a killed process, which is in the file until then."""
    with subprocess.Popen([sys.executable, "-c", ""]) as killed:
        killed.wait(20)
    with claimed(tmp_path / "run", "resume"):
        file = tmp_path / "run" / LOCK_FILE
        signed = file.read_text()
        for before in ("", json.dumps({**json.loads(signed), "pid": killed.pid})):
            file.write_text(before)
            signs = threading.Timer(0.02, file.write_text, [signed])
            signs.start()
            with pytest.raises(InvalidRequest, match=rf"this process \(pid {os.getpid()} on "):
                claim(tmp_path / "run")
            signs.join(20)


def test_a_lock_without_a_name_in_it_is_still_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stovetop.run_folder.SECONDS_TO_SIGN", 0.01)
    with claimed(tmp_path / "run", "resume"):
        for damaged in ("", "[]", json.dumps({"pid": 1})):
            (tmp_path / "run" / LOCK_FILE).write_text(damaged)
            with pytest.raises(InvalidRequest, match="another process"):
                claim(tmp_path / "run")


def test_a_run_whose_folder_was_removed_while_open_can_be_left(tmp_path: Path):
    with claimed(tmp_path / "run", "resume"):
        shutil.rmtree(tmp_path / "run")
    assert claim(tmp_path / "run").content is Content.NOTHING


def test_a_lock_that_cannot_be_made_is_said_as_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(WriteFailed, match=r"cannot write .*\.lock: "), locked(tmp_path):
        pass


def test_runs_and_saves_are_found_while_a_save_comes_and_goes(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / MARK_FILE).touch()
    states, stop = tmp_path / "checkpoints", threading.Event()
    (states / "whole").mkdir(parents=True)
    (states / "whole" / "manifest.json").touch()

    def save() -> None:
        while not stop.is_set():
            fresh = states / ".new.writing-1"
            (fresh / "deeper").mkdir(parents=True)
            fresh.rename(states / "new")
            shutil.rmtree(states / "new")

    with ThreadPoolExecutor() as pool:
        saving = pool.submit(save)
        try:
            for _ in range(400):
                assert runs_within(tmp_path) == [tmp_path, tmp_path / "inner"]
                assert saved_folders(tmp_path) == [states / "whole"]
        finally:
            stop.set()
        saving.result()

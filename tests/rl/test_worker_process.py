import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from processes import started
from stovetop.rl import worker_process
from stovetop.rl.process_pool import WorkerPool

LONG_S = 60.0


# ---- what is called there ----------------------------------------------------------------------------------------


def process_id() -> int:
    return os.getpid()


def start_another(file: Path) -> None:
    """And wait for it."""
    with subprocess.Popen(["sleep", str(LONG_S)]) as other:
        file.write_text(str(other.pid))


def send_ctrl_c_here() -> str:
    """What it does to a program that is started here is the ordinary thing."""
    os.kill(os.getpid(), signal.SIGINT)
    with subprocess.Popen(["sleep", str(LONG_S)]) as other:
        other.send_signal(signal.SIGINT)
    return signal.Signals(-other.returncode).name


class MissingFile:
    def __reduce__(self) -> tuple[object, ...]:
        return open, ("/no/such/file",)


def time_left_s() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def backtrack() -> None:
    """For hours, with the interpreter's lock held."""
    re.match(r"(a+)+$", "a" * 40 + "b")


def leave_a_thread_that_holds_the_lock() -> None:
    threading.Timer(0.05, backtrack).start()


# ---- how it ends -------------------------------------------------------------------------------------------------


def is_running(process_id: int) -> bool:
    return psutil.pid_exists(process_id) and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE


def ends_within(seconds: float, *process_ids: int) -> bool:
    latest_s = time.monotonic() + seconds
    while running := any(map(is_running, process_ids)):
        if time.monotonic() > latest_s:
            break
        time.sleep(0.02)
    return not running


def test_a_call_that_holds_the_lock_of_the_interpreter_ends_at_its_limit(pool: WorkerPool):
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.05 s"):
        pool.run(backtrack, timeout_s=0.05)


def test_what_a_call_started_ends_with_its_process(pool: WorkerPool, tmp_path: Path):
    with pytest.raises(TimeoutError):
        pool.run(start_another, tmp_path / "id", timeout_s=0.3)
    assert ends_within(5.0, int((tmp_path / "id").read_text()))


def test_a_process_that_does_not_take_in_its_call_is_ended(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    pool.run(leave_a_thread_that_holds_the_lock, timeout_s=LONG_S)
    time.sleep(0.1)
    with monkeypatch.context() as shorter:
        shorter.setattr(worker_process, "START_TIMEOUT_S", 0.1)
        with pytest.raises(TimeoutError, match=r"did not begin within 0\.1 s"):
            pool.run(len, b"more than a pipe holds" * 1_000_000, timeout_s=LONG_S)
    assert pool.run(len, b"four", timeout_s=LONG_S) == 4


PARENT = """
import os, threading, time
from stovetop.rl.process_pool import WorkerPool

if __name__ == "__main__":
    pool = WorkerPool(1)
    worker = pool.run(os.getpid, timeout_s=60.0)
    fork = os.fork()  # holds open what would tell a worker that its parent has ended
    if fork == 0:
        time.sleep(60.0)
        os._exit(0)
    print(worker, fork, flush=True)
    pool.run(os.system, "echo $$; sleep 60; true", timeout_s=60.0)
"""


def test_a_process_ends_with_its_parent_also_where_that_is_killed_and_has_a_fork(tmp_path: Path):
    (script := tmp_path / "parent.py").write_text(PARENT)
    with started(str(script)) as (parent, first):
        worker, fork = map(int, first.split())
        try:
            assert parent.stdout is not None
            shell = int(parent.stdout.readline())
            parent.kill()
            parent.wait(timeout=10)
            assert ends_within(10.0, worker, shell)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_call_ends_also_where_no_parent_is_left_to_end_it(pool: WorkerPool):
    """The system's own clock does that, for which no Python code has to run."""
    assert LONG_S < pool.run(time_left_s, timeout_s=LONG_S) <= LONG_S + 30.0


# ---- what it hears and says --------------------------------------------------------------------------------------


def test_ctrl_c_passes_a_process_by_but_not_what_it_starts(pool: WorkerPool):
    assert pool.run(send_ctrl_c_here, timeout_s=LONG_S) == "SIGINT"


def test_an_answer_that_cannot_be_read_costs_no_process(pool: WorkerPool):
    before = pool.run(process_id, timeout_s=LONG_S)
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        pool.run(MissingFile, timeout_s=LONG_S)
    assert pool.run(process_id, timeout_s=LONG_S) == before


def test_a_call_that_cannot_be_read_costs_no_process(pool: WorkerPool):
    before = pool.run(process_id, timeout_s=LONG_S)
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        pool.run(repr, MissingFile(), timeout_s=LONG_S)
    assert pool.run(process_id, timeout_s=LONG_S) == before

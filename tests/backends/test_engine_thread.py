"""The thread that owns an engine, at its end."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import run_python
from stovetop.backends import recording
from stovetop.backends.endings import SECONDS_TO_FINISH, stop
from stovetop.backends.engine_thread import EngineThread
from stovetop.backends.interruption import Interrupted, Interruptible
from stovetop.engine import ops
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.types import AdamParams


class Endless:
    """An engine that is never done. Each step is one call of `work`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.stepping = threading.Event()
        self.num_begun = self.num_ended = 0

    idle = False

    def set_gate(self, may_begin: Callable[[ops.Ticket], bool]) -> None:
        """Nothing is saved or loaded."""

    def submit(self, op: ops.Op) -> Any:
        raise AssertionError("not asked for")

    def step(self) -> list[ops.Finished]:
        self.num_begun += 1
        self.stepping.set()
        self.work()
        self.num_ended += 1
        return []


def for_ever() -> None:
    while True:
        time.sleep(0.001)


def ended(thread: EngineThread) -> bool:
    return not thread.thread.is_alive()


def test_a_short_step_is_finished_and_no_other_begun() -> None:
    engine: Any = Endless(lambda: time.sleep(0.05))
    thread = EngineThread(lambda: engine, "endless")
    assert engine.stepping.wait(30)
    thread.drop("of this test")
    stop([thread])
    assert ended(thread)
    assert engine.num_begun == engine.num_ended > 0
    with pytest.raises(InvalidRequest, match="closed"):
        thread.call("sample", object())  # pyright: ignore[reportArgumentType]  it gets no further


def test_a_wait_counts_while_it_goes_on_and_not_all_at_its_end() -> None:
    engine: Any = Endless(for_ever)
    engine.idle = True
    thread = EngineThread(lambda: engine, "idle")
    while not (first_s := thread.waiting_s):
        time.sleep(0.001)
    time.sleep(0.02)
    assert thread.waiting_s - first_s >= 0.02
    thread.drop("of this test")
    stop([thread])


def test_a_long_step_is_interrupted() -> None:
    engine: Any = Endless(for_ever)
    thread = EngineThread(lambda: engine, "endless")
    assert engine.stepping.wait(30)
    start_s = time.monotonic()
    thread.drop("of this test")
    stop([thread])
    assert ended(thread)
    assert (engine.num_begun, engine.num_ended) == (1, 0)
    assert time.monotonic() - start_s < SECONDS_TO_FINISH + 2


def test_loading_is_interrupted_and_the_reason_is_told_to_those_who_wait() -> None:
    thread = EngineThread(for_ever, "never loaded")  # pyright: ignore[reportArgumentType]  it returns nothing at all
    thread.drop("of this test")
    stop([thread])
    assert ended(thread)
    with pytest.raises(InvalidRequest, match="dropped because of this test"):
        thread.loaded.result(timeout=0)


def test_work_is_interrupted_within_a_piece_and_never_between() -> None:
    """Whatever the moment, results of pieces that ended are counted, and the thread ends by the one exception."""
    for index in range(50):
        work, counts, ends = Interruptible(), [0, 0], list[str]()

        def piece(counts: list[int] = counts) -> None:
            counts[0] += 1

        def run(work: Interruptible = work, counts: list[int] = counts, ends: list[str] = ends) -> None:
            try:
                while True:
                    work.run(piece)
                    counts[1] += 1
            except Interrupted:
                ends.append("interrupted")
            for _ in range(1000):  # nothing is raised any more
                counts[1] += 0

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(index * 1e-6)
        while thread.is_alive():
            work.interrupt()
            thread.join(0.001)
        assert ends == ["interrupted"]
        assert counts[0] - counts[1] in (0, 1)


TRACED = """
import sys, threading, time
from stovetop.backends.interruption import Interrupted, Interruptible

def trace(frame, event, argument):
    return trace

def interrupted_at_once(index):
    work = Interruptible()

    def run():
        try:
            while True:
                work.run(lambda: None)
        except Interrupted:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(index * 1e-6)
    while thread.is_alive():
        work.interrupt()
        thread.join(0.001)

for index in range(100):
    interrupted_at_once(index % 50)
threading.settrace(trace)
sys.settrace(trace)
for _ in range(4):
    threading.Thread(target=time.sleep, args=(0.1,)).start()
for index in range(30):
    interrupted_at_once(index)
print("goes on")
"""


def test_a_program_that_is_traced_goes_on_after_work_was_interrupted() -> None:
    """By coverage or a debugger: CPython 3.11 stands still while an exception is announced that no thread gets."""
    assert run_python("-c", TRACED, limit_s=30).stdout == "goes on\n"


class Dying:
    """An engine that dies of the op after a save."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.write = write
        self.tickets: list[ops.Ticket] = []

    @property
    def idle(self) -> bool:
        return not self.tickets

    def set_gate(self, may_begin: Callable[[ops.Ticket], bool]) -> None:
        """All may begin."""

    def submit(self, op: ops.Op) -> ops.Ticket:
        self.tickets.append(ops.Ticket(len(self.tickets), op))
        return self.tickets[-1]

    def step(self) -> list[ops.Finished]:
        ticket = self.tickets.pop(0)
        if isinstance(ticket.op, ops.SaveAdapter):
            return [ops.Finished(ticket, ops.Snapshot(self.write))]
        raise ZeroDivisionError("a fault of ours")


def test_what_an_engine_had_handed_out_before_it_died_is_written_and_acknowledged(tmp_path: Path) -> None:
    freed, written = threading.Event(), list[int]()

    def write() -> None:
        assert freed.wait(30)
        written.append(1)

    engine: Any = Dying(write)
    thread = EngineThread(lambda: engine, "dying")
    name = ops.AdapterId("a")
    saves = [thread.call("save", ops.SaveAdapter(name, tmp_path, {}, False, False)) for _ in range(3)]
    fatal = thread.call("optim_step", ops.OptimStep(name, AdamParams()))
    freed.set()
    for save in saves:
        assert save.result(30) is None
    assert len(written) == 3
    with pytest.raises(RequestFailedError, match="a fault of ours"):
        fatal.result(30)
    thread.finish().result(30)


def test_a_save_and_a_callback_for_which_the_system_has_no_thread_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import datum

    start, refused, seen = threading.Thread.start, list[str](), list[str]()

    def no_thread(thread: threading.Thread) -> None:
        if thread.name.startswith(("writer", "callbacks")) and refused.count(thread.name) < 1:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with recording.open_service(tmp_path, latency_s=0.02) as service:
        client = service.create_lora_training_client("m").result()
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RequestFailedError, match=r"save_state .* can't start new thread"):
            client.save_state("a").result(30)
        assert client.save_state("b").result(30).path
        for name in ("first", "second"):
            future = client.forward([datum()], "cross_entropy")
            future.future().add_done_callback(lambda _, name=name: seen.append(name))
            future.result(30)
    assert seen == ["first", "second"]
    assert len(refused) == 2

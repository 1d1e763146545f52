"""How threads of a service end: when they are told to, or with the program. It ends soon, whatever they compute.

Python waits for threads that are no daemons before anything else is told that the program ends, and an engine that has
nothing to do waits for calls: so these threads are daemons, and end by the exit hook of `weakref.finalize`.
"""

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from stovetop.backends.interruption import Interrupted, Interruptible

SECONDS_TO_FINISH = 0.5  # for what runs when the rest is dropped; after that it is interrupted
SECONDS_TO_STOP = 60.0  # for a library in C++ to come back to Python, which takes as long as its longest call
SECONDS_BETWEEN_INTERRUPTS = 0.1
SECONDS_IDLE = 1.0  # without a moment of a processor: then it waits for something, and may be left behind
SECONDS_BETWEEN_LOOKS = 0.5  # at the main thread
SECONDS_BETWEEN_GLANCES = 0.002  # at a thread that is to end

_FORGOTTEN = "the program ended first; to finish, wait for its result or use the service in a `with` block"


class Ending(Protocol):
    """Work in a thread that can be ended."""

    thread: threading.Thread

    def drop(self, reason: str, *, warn: bool = True) -> None:
        """What was accepted and has not begun is not done: its futures fail with `reason`. Accepts no more. Returns at
        once."""
        ...

    def interrupt(self) -> None:
        """After `drop`: what runs is to end, and not to finish."""
        ...


def wait_for(work: Ending, timeout_s: float | None = None) -> bool:
    """Waits until its thread has ended. Whether there is nothing to wait for: so too before it has started, and in the
    thread itself."""
    if work.thread.ident is None or work.thread is threading.current_thread():
        return True
    give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
    # Not `join`: where Ctrl-C interrupts one, CPython 3.11 takes a thread that still runs for one that has ended.
    while work.thread.is_alive() and (give_up_s is None or time.monotonic() < give_up_s):
        time.sleep(SECONDS_BETWEEN_GLANCES)
    return not work.thread.is_alive()


def stop(works: Iterable[Ending]) -> None:
    """Waits until what was told to drop has ended. What runs may finish if that is quick, and is interrupted otherwise.
    A thread that computes is waited for: it would abort the process. One that only waits, as in `time.sleep` or for a
    network, is not."""
    now_s = time.monotonic()
    finish_by_s, give_up_s = now_s + SECONDS_TO_FINISH, now_s + SECONDS_TO_STOP
    running = [_Running(work) for work in works if not wait_for(work, max(0.0, finish_by_s - time.monotonic()))]
    while running and time.monotonic() < give_up_s:
        for each in running:
            each.work.interrupt()
        running = [
            each
            for each in running
            if not wait_for(each.work, SECONDS_BETWEEN_INTERRUPTS / len(running)) and not each.is_idle()
        ]


class _Running:
    """Work that does not end, and whether its thread has used a processor lately."""

    def __init__(self, work: Ending) -> None:
        self.work = work
        self._used: list[str] | None = None
        self._since_s = time.monotonic()

    def is_idle(self) -> bool:
        used = _processor_time(self.work.thread)
        if used is None or used != self._used:
            self._used, self._since_s = used, time.monotonic()
        return time.monotonic() - self._since_s > SECONDS_IDLE


def _processor_time(thread: threading.Thread) -> list[str] | None:
    """How much a thread has used, in the kernel's ticks; None on a system that does not say."""
    try:
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return None
    return state.rpartition(")")[2].split()[11:13]  # utime and stime of proc(5)


class Helper:
    """A thread of a crew that does one piece of work, a user's code perhaps, and ends. At the program's end the work is
    interrupted."""

    def __init__(self, crew: "Crew", work: Callable[[], None], name: str) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._crew = crew
        self._work = Interruptible()
        crew.start(self)

    def drop(self, reason: str, *, warn: bool = True) -> None:
        """It has begun."""

    def interrupt(self) -> None:
        self._work.interrupt()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._work.run(work)
        except Interrupted:
            pass
        finally:
            self._crew.leave(self)


class Crew:
    """The threads of one service that have not ended. Each joins before it starts and leaves as the last thing it does.
    Those that are there when the program ends drop what has not begun, and end with it."""

    def __init__(self) -> None:
        self._works: set[Ending] = set()
        self._lock = threading.Lock()  # protects _works and _watched
        self._watched = False
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A thread of the crew keeps it alive: so this is called at the program's end, or when there is nothing to end.
        weakref.finalize(self, _end_with_program, self._works, os.getpid())

    def start(self, work: Ending) -> None:
        """Its thread starts, as one of the crew. Where the system has no thread to give, it is as before."""
        with self._lock:
            if not self._watched:
                threading.Thread(target=self._watch, name="watch of the main thread", daemon=True).start()
                self._watched = True
            self._works.add(work)
        try:
            work.thread.start()
        except BaseException:
            self.leave(work)
            raise

    def leave(self, work: Ending) -> None:
        """As the last thing that its thread does."""
        with self._lock:
            self._works.discard(work)
        self._left.put(None)

    def _watch(self) -> None:
        """The exit hook comes after all threads of the user have ended, and those may wait for a result. Where the main
        thread ended by an exception, they are answered without delay.

        Stopped by: the last thread of the crew leaving."""
        while threading.main_thread().is_alive():
            with contextlib.suppress(queue.Empty):
                self._left.get(timeout=SECONDS_BETWEEN_LOOKS)
            with self._lock:
                if not self._works:
                    self._watched = False
                    return
        if "last_value" in vars(sys):  # Python sets it when it has printed the exception that ends the program
            with self._lock:
                works = list(self._works)
            for work in works:
                work.drop(f"the main thread of the program has ended by {sys.last_value!r}")
            stop(works)


def _end_with_program(works: set[Ending], process: int) -> None:
    """Ctrl-C pressed again does not keep it from ending: it would end in an abort."""
    if os.getpid() != process:  # a fork has none of the threads
        return
    while works:
        with contextlib.suppress(KeyboardInterrupt):
            for work in list(works):
                work.drop(_FORGOTTEN)
            stop(list(works))
            break
    _remind_of_ctrl_c()


def _remind_of_ctrl_c() -> None:
    """A program that Ctrl-C ended dies of the signal, which ends a loop of the shell around it too. But Python forgets
    it when another thread executes a string meanwhile, as libraries do while they are imported (`run_eval_code_obj`
    clears CPython's `unhandled_keyboard_interrupt`). One that ends in the same way brings it back."""
    if isinstance(vars(sys).get("last_value"), KeyboardInterrupt) and "ps1" not in vars(sys):  # no shell
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")

"""One worker process: from outside, where a pool starts, asks and ends it; and from within."""

import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Self

from stovetop.checks import take
from stovetop.errors import WorkerDied
from stovetop.rules import number

START_TIMEOUT_S = 60.0  # to start Python, import what is needed and prepare; and to take in a call
_ENDS_AFTER_S = 30.0  # past the limit of its call, where no parent is left to end a process
_TIME_LIMIT = number(above=0, at_most=1e6)
_SPAWN = get_context("spawn")  # a fork would copy locks that threads of this process hold


@dataclass(frozen=True, slots=True)
class Question:
    """A call, ready to be sent to a process."""

    packed: bytes  # the function, its arguments and the limit
    timeout_s: float
    name: str

    @classmethod
    def of(cls, function: Callable[..., object], arguments: Sequence[object], timeout_s: float, name: str) -> Self:
        """A call of `function`; `name` is what errors call it. What does not pickle is refused."""
        name = name or repr(function)
        timeout_s = take(_TIME_LIMIT, timeout_s, f"{name}: timeout_s")
        return cls(pickle.dumps((function, arguments, timeout_s)), timeout_s, name)


def unpacked(answer: bytes) -> object:
    """The result in it; or raises the error in it."""
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result


class _Line:
    """Messages between two processes: the length of each, and its bytes. With a Pipe of multiprocessing's, sending what
    the other process does not take would wait for ever; here there are time limits, of standing still."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader = end.makefile("rb")

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        self._end.settimeout(timeout_s)
        self._end.sendall(len(message).to_bytes(8))
        self._end.sendall(message)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """An EOFError when the other end is closed."""
        self._end.settimeout(timeout_s)
        return self._read(int.from_bytes(self._read(8)))

    def close(self) -> None:
        self._reader.close()
        self._end.close()

    def _read(self, num_bytes: int) -> bytes:
        data = self._reader.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError
        return data


# ---- from outside ------------------------------------------------------------------------------------------------


class WorkerProcess:
    """One thread at a time asks; any thread may end it."""

    def __init__(self, prepare: Callable[[], None] | None) -> None:
        ours, theirs = socket.socketpair()
        self._line = _Line(ours)
        self._process = _SPAWN.Process(target=_work, args=(theirs, prepare), daemon=True)
        with theirs:  # closed here once it is there, so that its end is noticed
            self._process.start()
        self._is_ready = False
        self.is_ended = False

    def is_alive(self) -> bool:
        """The system tells only once that a process ended. Where something else was told, the sentinel says so."""
        return not self.is_ended and self._process.is_alive() and not wait([self._process.sentinel], timeout=0)

    def wait_until_ready(self) -> None:
        """Raises what `prepare` raised."""
        if self._is_ready:
            return
        try:
            failure = self._receive("a worker process", START_TIMEOUT_S)
        except (WorkerDied, TimeoutError) as error:
            raise WorkerDied(
                f"{error}, while it started. A script that uses worker processes is imported by each of them: what "
                "it does must stand under `if __name__ == '__main__':`"
            ) from error
        if failure:
            unpacked(failure)
        self._is_ready = True

    def ask(self, question: Question) -> bytes:
        """The packed answer."""
        failure = self._receive(question.name, START_TIMEOUT_S, after=question.packed)
        return failure or self._receive(question.name, question.timeout_s)

    def end(self) -> None:
        """At once, and the processes that it started with it."""
        was_alive, self.is_ended = self.is_alive(), True
        if was_alive:
            self._kill()

    def clear_away(self) -> None:
        """After its end: leaves no zombie and no open file."""
        self._process.join(timeout=5.0)
        self._line.close()

    def _receive(self, name: str, timeout_s: float, after: bytes | None = None) -> bytes:
        """The next message, after one was sent."""
        try:
            if after is not None:
                self._line.send(after, timeout_s)
            return self._line.receive(timeout_s)
        except TimeoutError:
            does = "finish" if after is None else "begin"
            raise TimeoutError(f"{name} did not {does} within {timeout_s:g} s, and its process was ended") from None
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the process of {name} {self._how_it_ended()}") from error

    def _how_it_ended(self) -> str:
        if self.is_ended:
            return "was ended with its pool"
        self._kill()  # what it started; and itself, had it only closed its end of the line
        self._process.join(timeout=5.0)
        latest_s = time.monotonic() + 0.5
        while (code := self._process.exitcode) is None and time.monotonic() < latest_s:
            time.sleep(0.01)  # another thread was told, and has yet to write it down
        if code is None:
            return "ended; how, something else has asked the system, which tells only once"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _kill(self) -> None:
        process_id = self._process.pid
        assert process_id is not None  # it was started
        with suppress(ProcessLookupError, PermissionError):  # it has no group yet, or only zombies are left of it
            os.killpg(process_id, signal.SIGKILL)
        self._process.kill()


# ---- from within -------------------------------------------------------------------------------------------------


def _work(end: socket.socket, prepare: Callable[[], None] | None) -> None:
    """Carries out calls until the line is closed. A first message, without a question, says that the process is ready.
    Each call has two: that it begins, its function and arguments being here and their modules imported; and its answer.
    Empty messages say that all is well, others what was raised."""
    os.setpgrp()  # a group of its own, which ends with it
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the pool's owner decides what Ctrl-C ends
    threading.Thread(target=_end_with_parent, daemon=True).start()
    end.set_inheritable(False)  # what is started here would hide that this process has ended
    line = _Line(end)
    try:
        if prepare is not None:
            try:
                prepare()
            except Exception as error:
                return line.send(_packed_error(error))
        line.send(b"")
        while True:
            packed = line.receive()
            try:
                function, arguments, timeout_s = pickle.loads(packed)
            except Exception as error:
                line.send(_packed_error(error))
                continue
            line.send(b"")
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ENDS_AFTER_S)  # also where a call holds Python's lock
            answer = _answer(function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            line.send(answer)
    except (EOFError, OSError):
        return  # the other end is gone


def _answer(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    try:
        return pickle.dumps((function(*arguments), None))
    except Exception as error:
        return _packed_error(error)


def _packed_error(error: Exception) -> bytes:
    """Some exceptions do not pickle, some pickle and cannot be read again; of those their words go over."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        packed = pickle.dumps((None, error))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return packed


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # this runs in a worker
    while not wait([parent.sentinel], timeout=1.0) and os.getppid() == parent.pid:
        pass  # the system is asked too, since a fork of the parent keeps the sentinel open
    os.killpg(0, signal.SIGKILL)

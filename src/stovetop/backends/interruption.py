"""Work in one thread that another thread can stop. What is done when it was stopped is the caller's business.

Python ends a process whose daemon thread is still computing by ending that thread wherever it is; inside a library in
C++ that aborts the process. So the work is told to stop first, by an exception raised between two of its bytecodes
(CPython's `PyThreadState_SetAsyncExc`): nothing that runs has to ask whether it may go on.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Raised in the thread that works. Like Ctrl-C, so that nothing takes it for a failure of its own."""


class Interruptible:
    """The work of one thread, piece by piece: it is interrupted within a piece or before the next one, never between,
    where its results are handed on."""

    def __init__(self) -> None:
        self._interrupted = False
        self._worker: int | None = None  # the thread, within a piece
        self._lock = threading.Lock()  # protects both, so that nothing is raised in a thread that has left its piece

    def run(self, piece: Callable[[], T]) -> T:
        """In the thread that works. Raises Interrupted."""
        try:
            self._enter()
            result = piece()
            self._leave()
        except BaseException:
            self._leave()
            raise
        return result

    def interrupt(self) -> None:
        """From another thread. Code in C is not interrupted before it returns to Python, and Python swallows what is
        raised in a `__del__`: call this until the work has ended."""
        with self._lock:
            self._interrupted = True
            if self._worker is not None:
                _raise_in(self._worker, Interrupted)

    def _enter(self) -> None:
        with self._lock:
            if self._interrupted:
                raise Interrupted
            self._worker = threading.get_ident()

    def _leave(self) -> None:
        """Nothing is raised in this thread from then on, and what was about to be raised has been. It is received and
        not taken back: CPython 3.11 would have all threads look for it for ever, and under a tracer (coverage, a
        debugger) do nothing else."""
        while True:
            try:
                with self._lock:
                    self._worker = None
                if not self._interrupted:
                    return
                _raise_in(threading.get_ident(), Interrupted)  # in place of one that is under way, if there is one
                while True:
                    time.sleep(0)
            except Interrupted:
                if self._worker is None:
                    return


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))

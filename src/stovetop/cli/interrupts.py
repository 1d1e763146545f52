"""How a command of the command line ends early. Ctrl-C and SIGTERM do the same, and soon: the first cancels what runs,
which cleans up; the second ends the process where it is. Also what is said then, that is how to go on; and what is done
when a program that reads the output, such as `head`, has ended.
"""

import _thread
import asyncio
import contextlib
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import FrameType
from typing import Any

SECONDS_TO_AWAIT = 1.0  # for a coroutine that computes to come to its next await, where it would be cancelled
SECONDS_TO_CLEAN_UP = 20.0  # for what is cancelled to end
SECONDS_TO_LEAVE = 2.0  # after that, for threads that nothing can cancel, such as one with a grader that blocks

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """By this signal. As text, what is said of it."""

    def __init__(self, number: int, words: str = "Interrupted.") -> None:
        super().__init__(words)
        self.exit_code = 128 + number  # as of a process that dies of the signal: 130, 143


class _Stopped(BaseException):
    """Raised in a coroutine that computes. It passes from task to task as any failure does, and all of them clean up;
    a KeyboardInterrupt would end the event loop, and leave them where they are."""


def as_interrupted(interrupt: KeyboardInterrupt) -> Interrupted:
    """Which signal it was: one that Python raised itself comes of SIGINT."""
    return interrupt if isinstance(interrupt, Interrupted) else Interrupted(signal.SIGINT)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Generator[None]:
    """SIGTERM does what Ctrl-C does."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handled(interrupt, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Handler, *numbers: signal.Signals) -> Generator[None]:
    """Signals that are ignored stay so, as SIGINT does in the background of a shell. Handlers can be set in the main
    thread only: elsewhere this does nothing."""
    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def run_interruptibly(coroutine: Coroutine[Any, Any, None], how_to_go_on: Callable[[], str] | None = None) -> None:
    """asyncio.run, where both signals cancel the coroutine at its next await, and raise Interrupted when it has ended.

    One that computes and awaits nothing, such as one that turns a hundred thousand chats into tokens, is interrupted
    where it is, after SECONDS_TO_AWAIT. A second signal ends the process at once, and so does the end of what it may
    take to clean up: what is recorded is on the disk by then, as if the process had been killed. `how_to_go_on` is what
    a run says last.
    """
    interruption = _Interruption(how_to_go_on)
    with _handled(interruption.receive, signal.SIGINT, signal.SIGTERM):
        try:
            asyncio.run(interruption.cancellable(coroutine))
        except BaseException as error:
            if interruption.number is None:
                raise
            raise interruption.raised(error) from None
        finally:
            interruption.is_over()


class _Interruption:
    """The signals that come while a coroutine runs."""

    def __init__(self, how_to_go_on: Callable[[], str] | None) -> None:
        self.number: int | None = None  # of the first signal
        self._how_to_go_on = how_to_go_on
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_awaited_for = False
        self._timers: list[threading.Timer] = []

    async def cancellable(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await coroutine
        finally:
            if self.number is not None:
                self._leave_after(SECONDS_TO_LEAVE)

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if self._is_awaited_for:  # by the coroutine that computes
            self._is_awaited_for = False
            raise _Stopped
        if self.number is not None:
            self._leave("Ended at once.")
        self.number = number
        if self._loop is None or self._task is None:
            raise Interrupted(number)
        self._leave_after(SECONDS_TO_CLEAN_UP)
        waiting = self._timer(SECONDS_TO_AWAIT, self._interrupt)
        self._loop.call_soon_threadsafe(waiting.cancel)  # the coroutine awaits: it hears next of its cancellation
        if self._how_to_go_on is not None:
            self._loop.call_soon_threadsafe(_say, "It is interrupted, and ends; a second signal ends it at once.")
        self._task.cancel()

    def _interrupt(self) -> None:
        """From another thread. A real signal, where there are any: it also wakes a thread that waits for a lock."""
        self._is_awaited_for = True
        if sys.platform == "win32":
            _thread.interrupt_main()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, self.number or signal.SIGINT)

    def _leave_after(self, seconds: float) -> None:
        self.is_over()
        self._timer(seconds, lambda: self._leave("Not all of it has ended in time."))

    def _timer(self, seconds: float, call: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return timer

    def is_over(self) -> None:
        """Nothing is left that could hold it up."""
        for timer in self._timers:
            timer.cancel()

    def _leave(self, why: str) -> None:
        """Ends the process, whatever its threads are doing. The processes that it has started end with it."""
        with contextlib.suppress(OSError):  # nobody reads it
            if os.isatty(1):
                os.write(1, b"\x1b[?25h")  # a progress bar has hidden the cursor
            os.write(2, f"\n{why} {self._words()}\n".encode())
        os._exit(128 + (self.number or signal.SIGINT))

    def raised(self, error: BaseException) -> Interrupted:
        """What to raise for what was interrupted, and raised this in the end."""
        fault = f" While it ended: {error}." if isinstance(error, Exception) else ""
        return Interrupted(self.number or signal.SIGINT, f"Interrupted.{fault} {self._words()}".rstrip())

    def _words(self) -> str:
        return "" if self._how_to_go_on is None else self._how_to_go_on()


def _say(words: str) -> None:
    sys.stderr.write(f"\n{words}\n")
    sys.stderr.flush()


def output_is_closed() -> bool:
    """Whether standard output is a pipe that is read no more. If so, what is still printed goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def same_command(words: Sequence[str]) -> str:
    """What goes on where there is no run yet, or several of one recipe: the command once more, unless that says to
    delete what is there."""
    again = list(words)
    if any(word.lstrip("-").replace("-", "_").startswith("behavior_if_exists") for word in words):
        again.append("behavior_if_exists=resume")  # the last one counts
        return f"To go on where it stopped: stovetop {shlex.join(again)}"
    return f"To go on, run the same command: stovetop {shlex.join(again)}"

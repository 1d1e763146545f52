"""How a command of the command line ends early: Ctrl-C and SIGTERM take the same path and take effect soon; what is
said then, that is how to go on; and what is done when a program that reads the output, such as `head`, has ended.
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
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

SECONDS_TO_AWAIT = 1.0  # for a coroutine that computes to come to its next await, where it would be cancelled


@contextlib.contextmanager
def interrupted_by_sigterm(terminations: list[int]) -> Generator[None]:
    """SIGTERM does what Ctrl-C does, and is noted in `terminations`."""

    def interrupt(number: int, _frame: object) -> None:
        terminations.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():  # only there handlers can be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_interruptibly(coroutine: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, where Ctrl-C also ends a coroutine that computes and awaits nothing, such as one that turns a
    hundred thousand chats into tokens. asyncio cancels it at its next await; here it is interrupted where it is, once
    it has not come to one within SECONDS_TO_AWAIT."""
    asyncio.run(_interruptible(coroutine))


async def _interruptible(coroutine: Coroutine[Any, Any, None]) -> None:
    loop = asyncio.get_running_loop()
    cancel = signal.getsignal(signal.SIGINT)  # asyncio's: it cancels; called again, it raises KeyboardInterrupt
    timers: list[threading.Timer] = []

    def interrupt(number: int, frame: object) -> None:
        assert callable(cancel)
        if not timers:
            timers.append(threading.Timer(SECONDS_TO_AWAIT, _interrupt_main))
            timers[0].start()
            loop.call_soon_threadsafe(timers[0].cancel)  # the coroutine awaits: it hears of its cancellation
        cancel(number, frame)  # pyright: ignore[reportArgumentType]  a frame

    if threading.current_thread() is not threading.main_thread() or not callable(cancel):
        return await coroutine
    signal.signal(signal.SIGINT, interrupt)
    try:
        await coroutine
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, cancel)


def _interrupt_main() -> None:
    """From another thread. A real signal, where there are any: it also wakes a thread that waits for a lock."""
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def output_is_closed() -> bool:
    """Whether standard output is a pipe that is read no more. If so, what is still printed goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def how_to_go_on(words: Sequence[str]) -> str:
    """What is said after an interrupt. A run goes on when its command is repeated, unless that says to delete it."""
    if not words or words[0] not in ("run", "resume"):
        return "Interrupted."
    again = list(words)
    if any(word.lstrip("-").replace("-", "_").startswith("behavior_if_exists") for word in words):
        again.append("behavior_if_exists=resume")  # the last one counts
        return f"Interrupted. To go on where it stopped: stovetop {shlex.join(again)}"
    return f"Interrupted. To go on, run the same command: stovetop {shlex.join(again)}"

"""Python programs that tests start: bounded in time, and deaf to nothing. A suite started in the background of a shell
ignores SIGINT, and every process that it starts would ignore it too."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LIMIT_S = 60.0  # for programs that take a few seconds on an idle machine


@contextmanager
def ctrl_c_is_heard() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, and has its ordinary effect on those started meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_python(*arguments: str, limit_s: float = LIMIT_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """The interpreter with these arguments, until it ends; what it printed is text. `options` are subprocess.run's."""
    with ctrl_c_is_heard():
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=limit_s, **{"check": False} | options
        )


@contextmanager
def started(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The interpreter with these arguments, and the first line that it printed. It does not outlive the block."""
    with ctrl_c_is_heard():
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()  # which waits no longer than the test may take
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended that got a signal."""

    code: int  # as subprocess gives it: -2 when SIGINT ended it
    printed: str
    errors: str
    seconds: float  # from the last signal to the end


def signal_after(
    arguments: Sequence[str],
    seconds: float,
    by: signal.Signals,
    limit_s: float = LIMIT_S,
    *,
    again_after: float | None = None,
) -> Ended:
    """Starts the interpreter with these arguments and sends it a signal so many seconds after its first line of output,
    which says that it is under way; and once more, `again_after` seconds later. It is killed when it has not ended
    `limit_s` after the last one."""
    with started(*arguments) as (process, first):
        time.sleep(seconds)
        if again_after is not None:
            process.send_signal(by)
            time.sleep(again_after)
        sent_s = time.monotonic()
        process.send_signal(by)
        rest, errors = process.communicate(timeout=limit_s)
    return Ended(process.returncode, first + rest, errors, time.monotonic() - sent_s)

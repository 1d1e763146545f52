"""What comes out of a sandbox: four pipes, all read together until they end, a limit is reached or the time is over.
A fifth, the lifeline, is never written to: when this process closes its end, or dies, everything in the sandbox ends.
"""

import json
import os
import selectors
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from stovetop.errors import SandboxError
from stovetop.tasks.sandbox.types import Completed, Ending, Limits

_AT_ONCE = 1 << 16  # bytes
_LETS_GO_AFTER_S = 10.0  # what is killed closes its files when the kernel comes to it


@dataclass(slots=True)
class Pipe:
    read_fd: int
    write_fd: int
    content: bytearray = field(default_factory=bytearray)

    def close_write_end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        os.close(self.read_fd)
        self.close_write_end()


class Channels:
    """`stdout`, `stderr` and `answer` are written by a program; `report` by the launcher alone."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        with ExitStack() as opened:  # where the system has no more files, those before are closed
            self.stdout, self.stderr, self.answer, self.report, self.lifeline = (_pipe(opened) for _ in range(5))
            self._opened = opened.pop_all()
        self._pipes = (self.stdout, self.stderr, self.answer, self.report)
        self._started_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read_until_end(self, start_timeout_s: float) -> Completed:
        """Call it when the process was started that has the other ends."""
        for pipe in self._pipes:
            pipe.close_write_end()
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe.read_fd, selectors.EVENT_READ, pipe)
            ended_by = self._read(selector, time.monotonic() + start_timeout_s)
            if ended_by is not None:
                self.lifeline.close_write_end()
                self._discard(selector)
        return self._completed(ended_by, start_timeout_s)

    def _read(self, selector: selectors.BaseSelector, latest_s: float) -> Ending | None:
        """The limit that was reached; None when all pipes came to their ends."""
        while selector.get_map():
            ready = selector.select(max(0.0, latest_s - time.monotonic()))
            if not ready and time.monotonic() >= latest_s:
                return "time"
            for key, _ in ready:
                pipe: Pipe = key.data
                chunk = os.read(pipe.read_fd, _AT_ONCE)
                pipe.content += chunk
                if not chunk:
                    selector.unregister(pipe.read_fd)
                if len(pipe.content) > self._limits.output_bytes:
                    return "output"
            if self._started_s is None and self.report.content:
                self._started_s = time.monotonic()
                latest_s = self._started_s + self._limits.time_s
        return None

    def _discard(self, selector: selectors.BaseSelector) -> None:
        """Until everything that had the other ends is gone."""
        latest_s = time.monotonic() + _LETS_GO_AFTER_S
        while selector.get_map() and time.monotonic() < latest_s:
            for key, _ in selector.select(0.1):
                if not os.read(key.fd, _AT_ONCE):
                    selector.unregister(key.fd)

    def _completed(self, ended_by: Ending | None, start_timeout_s: float) -> Completed:
        stdout, stderr, answer = (
            bytes(pipe.content[: self._limits.output_bytes]) for pipe in (self.stdout, self.stderr, self.answer)
        )
        if self._started_s is None:
            why = f"it took longer than {start_timeout_s:g} s" if ended_by else stderr.decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {why or 'it said nothing'}")
        seconds = time.monotonic() - self._started_s
        if ended_by is not None:
            return Completed(None, stdout, stderr, answer, ended_by, seconds)
        _, _, last = bytes(self.report.content).partition(b"\n")
        if not last:
            raise SandboxError("the sandbox ended before its program; the system may have run out of memory")
        report = json.loads(last)
        return Completed(report.get("exit_code"), stdout, stderr, answer, report.get("limit"), report["seconds"])


def _pipe(opened: ExitStack) -> Pipe:
    pipe = Pipe(*os.pipe())
    opened.callback(pipe.close)
    return pipe

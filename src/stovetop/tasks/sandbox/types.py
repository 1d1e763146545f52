"""What a sandbox is: one method, which runs a command on files of its own, within limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from stovetop.checks import check
from stovetop.rules import Whole, number

ANSWER_FD = 3  # where a program finds a pipe whose content is `Completed.answer`

Ending = Literal["time", "output", "files"]
"""The limit that ended a program. Where another one is reached, the program itself is told, and may go on."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use up. All its processes together may have `total_memory_bytes`."""

    time_s: Annotated[float, number(above=0, at_most=86_400)] = 6.0  # by the clock, from when the program starts
    num_processes: Annotated[int, Whole(1)] = 8  # at once; a thread counts as one
    memory_bytes: Annotated[int, Whole(32 * MIB)] = 512 * MIB  # of address space, each process
    disk_bytes: Annotated[int, Whole(MIB)] = 32 * MIB  # in all files together, which are in memory
    num_files: Annotated[int, Whole(1)] = 4096  # files and folders, looked at 20 times a second
    num_open_files: Annotated[int, Whole(8)] = 64  # each process
    output_bytes: Annotated[int, Whole(1)] = MIB  # of each of stdout, stderr and the answer

    def __post_init__(self) -> None:
        check(self)

    @property
    def total_memory_bytes(self) -> int:
        """Of all processes, and of the files."""
        return self.num_processes * self.memory_bytes + self.disk_bytes


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Completed:
    """What came of a command. Nothing in it can be trusted: the program wrote it."""

    exit_code: int | None  # minus the signal's number where one ended it; None: a limit did
    stdout: bytes
    stderr: bytes
    answer: bytes  # what was written to the pipe ANSWER_FD
    ended_by: Ending | None
    seconds: float  # by the clock, from when the program started


class Sandbox(Protocol):
    """Runs untrusted programs. One of your own may be a container or a machine elsewhere."""

    def run(
        self, files: Mapping[str, bytes], command: Sequence[str], limits: Limits = DEFAULT_LIMITS, stdin: bytes = b""
    ) -> Completed:
        """Writes the files (by their paths below a new, empty folder) and runs a command in that folder: its first word
        is "python", for the sandbox's own Python 3, or a path within the sandbox. When this returns, every process of
        it has ended, and nothing that it wrote is left.

        Called from several threads at once. A sandbox that could not do this raises a SandboxError: that says nothing
        about the program.
        """
        ...

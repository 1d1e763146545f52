"""Calls of the operating system that change files below a server's folder: they fail when they are told to, or are
written down (`disk_calls.c`, which is loaded into the server's process before the C library).
"""

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("disk_calls.c")
COMPILE = ("cc", "-shared", "-fPIC", "-O1", "-D_LARGEFILE64_SOURCE", "-o")


def preloaded(folder: Path) -> None:
    """Builds it, and has it loaded into the processes that this one starts from now on. Before the first server."""
    library = folder / "disk_calls.so"
    subprocess.run([*COMPILE, str(library), str(SOURCE), "-ldl", "-pthread"], check=True, timeout=60)
    os.environ["LD_PRELOAD"] = str(library)


@dataclass(frozen=True)
class Fails:
    """The `nth` call from now on for a file below the server's folder with `word` in its path, and, `for_good`, all
    behind it."""

    word: str
    nth: int
    error: int  # as errno has it
    for_good: bool = False

    def __call__(self, storage: Path) -> Callable[[], object]:
        library = ctypes.CDLL(None)
        library.disk_calls_arm(
            os.fsencode(storage), self.word.encode(), ctypes.c_long(self.nth), self.error, int(self.for_good)
        )
        return lambda: storage.with_suffix(".calls").write_text(str(library.disk_calls_done()))


def calls_of(storage: Path) -> int:
    """How many there were, of a server that was told to stop."""
    file = storage.with_suffix(".calls")
    return int(file.read_text()) if file.exists() else 0


@dataclass(frozen=True)
class WritesDown:
    """All of them, in this file."""

    notes: Path

    def __call__(self, storage: Path) -> Callable[[], object]:
        to = os.open(self.notes, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        ctypes.CDLL(None).disk_calls_record(os.fsencode(storage.parent), to)
        return lambda: None

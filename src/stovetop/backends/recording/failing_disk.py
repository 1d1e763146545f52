"""A disk that fails on demand, for tests of what is left behind when one does. See `durable.Disk`."""

from collections import Counter
from pathlib import Path
from typing import Literal

from stovetop.durable import LocalDisk

Operation = Literal["write", "append", "sync", "rename"]


class FailingDisk:
    """Writes to the real one until an operation is told to fail; a write or append that fails leaves half of its bytes.

    disk.fail("rename", nth=2, error=OSError(errno.ENOSPC, "disk full"))
    """

    def __init__(self) -> None:
        self.done = Counter[Operation]()  # how often each was asked for
        self._errors: dict[tuple[Operation, int], OSError] = {}
        self._disk = LocalDisk()

    def fail(self, operation: Operation, nth: int, error: OSError) -> None:
        """The `nth` time from now (1 is the next), once."""
        self._errors[operation, self.done[operation] + nth] = error

    def write(self, path: Path, data: bytes) -> None:
        error = self._next_error("write")
        self._disk.write(path, data[: len(data) // 2] if error else data)
        if error:
            raise error

    def append(self, path: Path, data: bytes) -> None:
        error = self._next_error("append")
        self._disk.append(path, data[: len(data) // 2] if error else data)
        if error:
            raise error

    def sync(self, path: Path) -> None:
        if error := self._next_error("sync"):
            raise error
        self._disk.sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if error := self._next_error("rename"):
            raise error
        self._disk.rename(source, target)

    def _next_error(self, operation: Operation) -> OSError | None:
        self.done[operation] += 1
        return self._errors.pop((operation, self.done[operation]), None)

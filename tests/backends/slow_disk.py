"""Disks whose writes take time, so that what comes after a save comes before it is on the disk."""

import random
import threading
import time
from pathlib import Path

from stovetop.durable import LocalDisk

LIMIT_S = 30


class SlowDisk(LocalDisk):
    """Each write and sync takes a random while, up to so many seconds."""

    def __init__(self, most_s: float, seed: int) -> None:
        self._most_s, self._chosen = most_s, random.Random(seed)

    def write(self, path: Path, data: bytes) -> None:
        time.sleep(self._chosen.uniform(0, self._most_s))
        super().write(path, data)

    def sync(self, path: Path) -> None:
        time.sleep(self._chosen.uniform(0, self._most_s))
        super().sync(path)


class StuckDisk(LocalDisk):
    """Writes wait until they may go on."""

    def __init__(self) -> None:
        self.reached, self._free = threading.Event(), threading.Event()

    def write(self, path: Path, data: bytes) -> None:
        self.reached.set()
        assert self._free.wait(LIMIT_S)
        super().write(path, data)

    def free(self) -> None:
        self._free.set()

    def stick(self) -> None:
        self._free.clear()
        self.reached.clear()

"""The server, or its clients, are away for a while: an outage of 1, 10 or 60 seconds, a process that is suspended, a
clock that jumps, or no file descriptor left. What the clients see is what they see when nothing happens.
"""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from server_faults.kills import counted, fresh, tenants_of, undisturbed
from server_faults.servers import Forked, killable, wait_until_serving

NUM_STEPS = 12
OUTAGES_S = (1, 10, 60)
SUSPENDED_S = 5.0
NUM_FILES = 12  # that a server without descriptors may open besides those it has


def outages(folder: Path, backend: str, seed: int) -> dict[str, Any]:
    """The server is killed, and is away for as long as the seed says: 1, 10 or 60 s."""
    away_s = OUTAGES_S[seed % len(OUTAGES_S)]

    def away(server: Forked, rng: random.Random) -> None:
        server.end(signal.SIGKILL)
        time.sleep(away_s)
        server.start()
        wait_until_serving(server.url)

    return {"outages": 1, **_amid_work(folder, backend, seed, [away])}


def suspended(folder: Path, backend: str, seed: int) -> dict[str, Any]:
    """The server stands still for a while, again and again (SIGSTOP)."""

    def stand_still(server: Forked, rng: random.Random) -> None:
        process = psutil.Process(server.pid)
        process.suspend()
        time.sleep(rng.uniform(0, SUSPENDED_S))
        process.resume()

    return {"stops": 5, **_amid_work(folder, backend, seed, [stand_still] * 5)}


def without_files(folder: Path, backend: str, seed: int) -> dict[str, Any]:
    """For a while the server may open no more files and connections than it has (EMFILE). A save that falls into it may
    fail, by that name: then its client has stopped, which is no fault."""

    def starve(server: Forked, rng: random.Random) -> None:
        process = psutil.Process(server.pid)
        before = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + rng.randrange(NUM_FILES), before[1]))
        time.sleep(rng.uniform(0.5, 3))
        process.rlimit(psutil.RLIMIT_NOFILE, before)

    found = _amid_work(folder, backend, seed, [starve] * 3)
    faults = [fault for fault in found["faults"] if os.strerror(errno.EMFILE) not in fault]
    return {**found, "times": 3, "refused": len(found["faults"]) - len(faults), "faults": faults}


def clock_jumps(folder: Path, backend: str, seed: int) -> dict[str, Any]:
    """The clock of each next server is set otherwise: hours, then more than a year, before or behind."""
    rng = random.Random(seed)
    jumps_s = [rng.choice((-1, 1)) * rng.choice((3600.0, 86_400.0 * 400)) for _ in range(4)]

    def jump(server: Forked, _: random.Random) -> None:
        server.end(signal.SIGKILL)
        server.start(Clock(jumps_s.pop()))

    return {"jumps": 4, **_amid_work(folder, backend, seed, [jump] * 4)}


@dataclass(frozen=True)
class Clock:
    """One that is so far ahead, in the server's process."""

    ahead_s: float

    def __call__(self, storage: Path) -> Callable[[], object]:
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + self.ahead_s
        time.time_ns = lambda: right_ns() + int(self.ahead_s * 1e9)
        return lambda: None


def _amid_work(
    folder: Path, backend: str, seed: int, faults: "list[Callable[[Forked, random.Random], None]]"
) -> dict[str, Any]:
    """Each of these happens while tenants work. A server that has ended is started again."""
    expected, storage = undisturbed(folder, backend, seed, NUM_STEPS), fresh(folder, "away", seed)
    rng = random.Random(seed)
    with killable(storage, backend) as server:
        tenants = tenants_of(server.url, seed, NUM_STEPS)
        for fault in faults:
            time.sleep(rng.uniform(0.2, 1.0))
            fault(server, rng)
        while not all(tenant.is_done for tenant in tenants):
            if not server.is_alive:
                server.start()
            time.sleep(0.05)
        server.end(signal.SIGTERM)
    return counted(storage, expected, tenants)

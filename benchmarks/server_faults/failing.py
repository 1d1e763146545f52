"""Writes, syncs and renames that fail: the k-th one, for all k, of the journal's own files and of checkpoints; and all
from one on, as when the disk is full. The client sends every request until it is answered, and sees what it sees when
nothing fails.
"""

import errno
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, get_args

from server_faults.disk_calls import Fails, calls_of, preloaded
from server_faults.servers import Forked, wait_until_serving
from server_faults.tenants import differences, left_behind
from server_faults.wire import Json, program, wire
from stovetop.backends.recording.failing_disk import FailingDisk, Operation
from stovetop.durable import LOCAL_DISK, Disk

BLOCK = 20  # values of k in a part
REASON = "Input/output error"
EXIT_FAILED = 70  # of a server whose journal cannot be written
EXIT_UNFIT = 1  # of one that could not start
NUM_FULL = 20  # full disks in a part
STARTS_WHILE_FULL = 2


class Ended(NamedTuple):
    """How servers ended that nothing had told to, and what became of the client."""

    codes: list[int]
    failed: list[str]  # saves, with the reason
    seen: Json


def journal_calls(folder: Path, seed: int, block: int = BLOCK) -> Json:
    """The calls k of a part for the journal's files, each once as an error of the disk and once as a full one."""
    preloaded(folder)
    expected = _undisturbed(folder)
    faults: list[str] = []
    num_failed, num_ended = 0, 0
    for nth in range(seed * block + 1, (seed + 1) * block + 1):
        for error in (errno.EIO, errno.ENOSPC):
            with _server(folder / f"journal-{nth}") as server:
                ended = _served(server, [Fails("journal.", nth, error)])
                num_failed += bool(ended.codes) or calls_of(server.storage) >= nth
                num_ended += bool(ended.codes)
                faults += [f"call {nth}, {errno.errorcode[error]}: {each}" for each in _faults(expected, ended, server)]
    return {"calls": num_failed, "ended the server": num_ended, "last": num_failed < 2 * block, "faults": faults}


def checkpoint_calls(folder: Path, seed: int, most: int = 1000) -> Json:
    """The k-th write, append, sync or rename of checkpoints and snapshots, for every k of one of these; the seed says
    which."""
    operation: Operation = get_args(Operation)[seed]
    expected = _undisturbed(folder)
    faults: list[str] = []
    num_failed, nth, is_reached = 0, 0, True
    while is_reached and nth < most:
        nth += 1
        disk = NotedDisk(folder / f"{operation}.txt", operation, nth)
        with _server(folder / f"{operation}-{nth}") as server:
            ended = _served(server, [], disk)
            is_reached = disk.is_reached()
            num_failed += bool(ended.failed)
            found = [f"it ended with {ended.codes}"] if ended.codes else _faults(expected, ended, server)
            found += [f"the failure has no reason: {told}" for told in ended.failed if REASON not in told]
            faults += [f"{operation} {nth}: {each}" for each in found]
    return {"calls": nth - 1, "saves that failed": num_failed, "last": seed == 3, "faults": faults}


def full_disks(folder: Path, seed: int, num: int = NUM_FULL) -> Json:
    """From a random moment on nothing can be written below the server's folder, through some starts, until there is
    room."""
    preloaded(folder)
    expected = _undisturbed(folder)
    rng = random.Random(seed)
    faults: list[str] = []
    num_ended = 0
    for number in range(num):
        nth = rng.randrange(1, expected["calls"])
        full = [Fails("", nth, errno.ENOSPC, for_good=True), *[Fails("", 1, errno.ENOSPC, True)] * STARTS_WHILE_FULL]
        with _server(folder / f"full-{seed}-{number}") as server:
            ended = _served(server, full)
            num_ended += len(ended.codes)
            found = _faults(expected, ended, server)
            log = server.storage.with_suffix(".log").read_text()
            if ended.codes and "disk" not in log and "space" not in log:
                found.append("its log does not say that the disk is full")
            faults += [f"from call {nth}: {each}" for each in found]
    return {"full": num, "ended the server": num_ended, "faults": faults}


class NotedDisk:
    """One whose `nth` operation of a kind fails, and that writes down what it is asked for."""

    def __init__(self, notes: Path, operation: Operation, nth: int) -> None:
        self._notes, self._operation, self._nth = notes, operation, nth
        self._disk = FailingDisk()
        self._disk.fail(operation, nth, OSError(errno.EIO, REASON))
        notes.unlink(missing_ok=True)

    def is_reached(self) -> bool:
        return self._notes.exists() and self._notes.read_text().split().count(self._operation) >= self._nth

    def _note(self, operation: Operation) -> None:
        with self._notes.open("a") as notes:
            notes.write(f"{operation} ")

    def write(self, path: Path, data: bytes) -> None:
        self._note("write")
        self._disk.write(path, data)

    def append(self, path: Path, data: bytes) -> None:
        self._note("append")
        self._disk.append(path, data)

    def sync(self, path: Path) -> None:
        self._note("sync")
        self._disk.sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._note("rename")
        self._disk.rename(source, target)


@contextmanager
def _server(folder: Path) -> Iterator[Forked]:
    """In a folder of its own, which goes unless something is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    server = Forked(folder / "storage", "recording")
    try:
        yield server
    finally:
        if server.is_alive:
            server.end(signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _served(server: Forked, failing: Sequence[Fails], disk: Disk = LOCAL_DISK) -> Ended:
    """The client's program. Each server that is started has the next of these failures; the last one has none."""
    codes: list[int] = []
    left = list(failing)
    server.start(left.pop(0) if left else None, disk)
    with wire(server.url) as client, ThreadPoolExecutor(1) as asking:
        asked = asking.submit(program, client)
        while not asked.done():
            if not server.is_alive:
                codes.append(server.wait())
                server.start(left.pop(0) if left else None)
            with suppress(TimeoutError):  # it is not done yet
                asked.result(timeout=0.01)
        seen, failed = asked.result(), client.failed
    if (code := server.end(signal.SIGTERM)) != 0:
        codes.append(code)  # the last snapshots could not be written
        server.start()
        wait_until_serving(server.url)
        server.end(signal.SIGTERM)
    return Ended(codes, failed, seen)


def _undisturbed(folder: Path) -> Json:
    """What the client sees and what is left when nothing fails, and how many calls there were."""
    kept = folder / "undisturbed.json"
    if not kept.exists():
        with _server(folder / "undisturbed") as server:
            server.start(Fails("", 0, 0) if "LD_PRELOAD" in os.environ else None)
            with wire(server.url) as client:
                seen = program(client)
            server.end(signal.SIGTERM)
            kept.write_text(
                json.dumps({"seen": seen, "left": left_behind(server.storage), "calls": calls_of(server.storage)})
            )
    return json.loads(kept.read_text())


def _faults(expected: Json, ended: Ended, server: Forked) -> list[str]:
    wrong = [code for code in ended.codes if code not in (EXIT_FAILED, EXIT_UNFIT)]
    if wrong:
        return [f"it ended with {wrong}"]
    left = json.loads(json.dumps(left_behind(server.storage)))
    for of_model in (*left.values(), *expected["left"].values()):
        of_model.pop("calls", None)  # a save that failed was asked for again
    return differences(expected["seen"], ended.seen) + differences(expected["left"], left)

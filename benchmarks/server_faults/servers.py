"""Servers in processes of their own, always on the same port and in the same folder, which are killed and started
again.

`Forked` ones start in a tenth of a second, from a process that has imported all that they need. `Supervised` ones are
what a user runs: `stovetop serve`, a parent and its server.
"""

import http.client
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.durable import LOCAL_DISK, Disk
from stovetop.server import snapshots
from stovetop.server.ports import listen
from stovetop.server.serve import Server, ServerOptions

LATENCY_S = 0.02  # of a verb of the fake, so that requests are under way
FIRST_SNAPSHOT_S = 0.01  # instead of the usual: so often that kills meet snapshots too, and replays are short
LIMIT_S = 60.0  # for a start and for an end

Prepare = Callable[[Path], Callable[[], object]]

_FORKING = multiprocessing.get_context("forkserver")


class Process(Protocol):
    """A server that can be ended."""

    url: str
    storage: Path

    def start(self) -> None:
        """Returns before it serves."""
        ...

    def end(self, by: signal.Signals) -> int:
        """Its exit code, the negative number of the signal where that ended it."""
        ...


class Forked:
    """One without a parent, whose next one is started by us."""

    def __init__(self, storage: Path, backend: str) -> None:
        """`backend`: recording, or the folder of a model."""
        self.storage = storage
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: multiprocessing.process.BaseProcess | None = None
        self._arguments = storage, backend, self.port

    def start(self, prepare: Prepare | None = None, disk: Disk = LOCAL_DISK) -> None:
        """`prepare` is called with its folder, in its process, and what it returns when it has stopped; `disk` is what
        its checkpoints are written to."""
        self.storage.parent.mkdir(parents=True, exist_ok=True)
        self.process = _FORKING.Process(target=serve, args=(*self._arguments, prepare, disk))
        self.process.start()

    def end(self, by: signal.Signals) -> int:
        if self.is_alive:
            os.kill(self.pid, by)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        assert self.process is not None, "it was started"
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, f"the server does not end: process {self.process.pid}"
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process is not None, "it was started"
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()


class Supervised:
    """`stovetop serve`: ending it is ending the server, which its parent starts again, or the parent, which takes the
    server along."""

    def __init__(self, storage: Path, model: Path) -> None:
        self.storage = storage
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.parent: subprocess.Popen[bytes] | None = None
        words = ["serve", f"tiny={model}", "--port", str(self.port), "--storage", str(storage), "--threads", "1"]
        self._command = [sys.executable, "-m", "stovetop", *words]

    def start(self) -> None:
        """Starts the parent, unless it is there."""
        if self.parent is None or self.parent.poll() is not None:
            self.storage.parent.mkdir(parents=True, exist_ok=True)
            with self.storage.with_suffix(".log").open("ab") as log:
                self.parent = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=log)

    def end(self, by: signal.Signals) -> int:
        """Ends the server alone."""
        servers = self._servers()
        for server in servers:
            server.send_signal(by)
        psutil.wait_procs(servers, LIMIT_S)
        return -by

    def end_parent(self, by: signal.Signals) -> int:
        """Returns when the server has ended too."""
        assert self.parent is not None, "it was started"
        servers = self._servers()
        self.parent.send_signal(by)
        code = self.parent.wait(LIMIT_S)
        _, alive = psutil.wait_procs(servers, LIMIT_S)
        assert not alive, f"the server outlives its parent: {alive}"
        return code

    def _servers(self) -> list[psutil.Process]:
        if self.parent is None or self.parent.poll() is not None:
            return []
        try:
            return psutil.Process(self.parent.pid).children()
        except psutil.NoSuchProcess:
            return []


@contextmanager
def killable(storage: Path, backend: str) -> Iterator[Forked]:
    """One that serves. It does not outlive the block."""
    server = Forked(storage, backend)
    server.start()
    try:
        wait_until_serving(server.url)
        yield server
    finally:
        if server.is_alive:
            server.end(signal.SIGKILL)


@contextmanager
def supervised(storage: Path, model: Path) -> Iterator[Supervised]:
    server = Supervised(storage, model)
    server.start()
    try:
        yield server
    finally:
        server.end_parent(signal.SIGKILL)


def wait_until_serving(url: str, limit_s: float = LIMIT_S) -> None:
    give_up_s = time.monotonic() + limit_s
    while not is_serving(url):
        assert time.monotonic() < give_up_s, f"no server is there after {limit_s:g} s: {url}"
        time.sleep(0.02)


def is_serving(url: str) -> bool:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def preload(*modules: str) -> None:
    """What the process that servers are forked from imports, before the first one is started."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # that process does not look where this one does
    multiprocessing.set_forkserver_preload(["server_faults.servers", *modules])


# ---- in the server's process -----------------------------------------------------------------------------------------


def open_service(storage: Path, backend: str, disk: Disk) -> InProcessServiceClient:
    """The fake, also one whose verbs take a while, or a model in a folder, which computes to the bit."""
    if backend in ("recording", "slow recording"):
        latency_s = 0.0 if backend == "recording" else LATENCY_S
        return recording.open_service(storage, models=["tiny", "other"], preload=True, latency_s=latency_s, disk=disk)
    from stovetop.backends import local

    return local.open_service(
        storage=storage,
        models={"tiny": backend},
        preload=True,
        threads=1,
        deterministic=True,
        download=None,
        disk=disk,
    )


def serve(storage: Path, backend: str, port: int, prepare: Prepare | None = None, disk: Disk = LOCAL_DISK) -> None:
    """Until SIGTERM. What it logs is beside its folder."""
    with storage.with_suffix(".log").open("ab") as log:
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stopped = None if prepare is None else prepare(storage)
    snapshots.FIRST_SNAPSHOT_S = FIRST_SNAPSHOT_S
    server = Server(
        lambda storage: open_service(storage, backend, disk),
        listen("127.0.0.1", port),
        ServerOptions(storage=storage, was_killed=True),  # by us, if at all: its parent would know
    )
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    server.run()
    if stopped is not None:
        stopped()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was forked"
    parent.join()
    os._exit(1)


def _free_port() -> int:
    """None of those that the system gives to clients, so that it stays free while no server has it."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port

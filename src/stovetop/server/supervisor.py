"""The parent of a server: it holds the listening socket, and starts the server again when that ends by itself.

It is small and does nothing that could fail: no model, no journal, no thread. Connections that come while no server is
there wait in the socket's queue. The pause before a start grows while servers end soon: 1, 2, 4 .. 30 s. A server that
was told to stop is not started again, nor one that says at its first start why it cannot serve: a model that is not
there, a folder that another one has.

Between both is a pair of sockets. The server writes a byte to it when it serves, and ends when it is closed, as it is
when its parent has died, however that died. How the last server ended is told to the next: one that was killed from
outside has not died of the request that it was doing (`recovery.py`).
"""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LONG_S = 60.0  # a server that was there for so long did not end soon: the pauses begin anew

_SERVES = b"."
_ORPHANED = "orphaned"  # a file in the storage: the server ended because its parent did

Command = Callable[
    [int, int, bool], Sequence[str]
]  # of a server: the listening socket, its end of the pair, was_killed


class Supervisor:
    """Runs servers one after the other, in the main thread. `stop` may be called by a signal's handler."""

    def __init__(self, command: Command, listening: socket.socket, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._command = command
        self._listening = listening
        self._first_pause_s = first_pause_s
        self._server: subprocess.Popen[bytes] | None = None
        self._stops = threading.Event()

    def run(self) -> int:
        """Returns the code of the last server, when it is not started again."""
        pause_s, was_killed, has_served = self._first_pause_s, False, False
        while True:
            begun_s, kills_before = time.monotonic(), out_of_memory_kills()
            code, served = self._run_one(was_killed)
            has_served = has_served or served
            is_unfit = not has_served and code > 0 and code != os.EX_SOFTWARE
            if code == 0 or self._stops.is_set() or is_unfit:
                return code if code >= 0 else 128 - code  # as a shell says it
            was_killed = code == -signal.SIGKILL and out_of_memory_kills() == kills_before
            pause_s = self._first_pause_s if time.monotonic() - begun_s > LONG_S else pause_s
            log.error("the server ended by itself (%s); it starts again in %g s", _told(code), pause_s)
            if self._stops.wait(pause_s):
                return 0  # nothing was under way
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop(self) -> None:
        """The server is told to stop; when this is called again, to end at once."""
        self._stops.set()
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)

    def _run_one(self, was_killed: bool) -> tuple[int, bool]:
        """How a server ended, and whether it had served."""
        ours, its = socket.socketpair()
        with ours:
            with its:
                descriptors = self._listening.fileno(), its.fileno()
                command = self._command(*descriptors, was_killed)
                try:  # in a session of its own: Ctrl-C reaches it once, through the parent
                    self._server = subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)
                except OSError as error:  # the system has no process or no memory to give
                    log.error("the server cannot be started: %s", error)
                    return os.EX_SOFTWARE, False
            if self._stops.is_set():  # the signal came before there was a server to tell
                self._server.send_signal(signal.SIGTERM)
            code = self._server.wait()
            self._server = None
            ours.setblocking(False)
            try:
                return code, ours.recv(1) == _SERVES
            except BlockingIOError:
                return code, False


class Lifeline:
    """The server's end of the pair."""

    def __init__(self, descriptor: int, storage: Path, end: Callable[[int], object]) -> None:
        """`end` ends this process, with this code."""
        self._socket = socket.socket(fileno=descriptor)
        self._storage = storage
        self._end = end
        threading.Thread(target=self._wait, name="parent", daemon=True).start()

    def serves(self) -> None:
        """Tells the parent, which starts this server again from now on."""
        self._socket.send(_SERVES)

    def _wait(self) -> None:
        with suppress(ConnectionError):  # the parent had not read what it was told
            while self._socket.recv(1):
                pass
        leave_orphaned(self._storage)
        self._end(os.EX_SOFTWARE)


def leave_orphaned(storage: Path) -> None:
    """Says to the next server that this one ended because its parent did."""
    try:
        (storage / _ORPHANED).touch()
    except OSError as error:
        log.warning("the next server is not told why this one ended: %s", error)


def was_orphaned(storage: Path) -> bool:
    """Whether the last server ended because its parent did. It is asked once."""
    try:
        (storage / _ORPHANED).unlink()
    except FileNotFoundError:
        return False
    return True


def out_of_memory_kills() -> int:
    """How many processes of this machine the system has killed for memory: such a kill is a request's fault as much as
    a crash is. 0 where the system does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _told(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"

"""A server from start to stop: its port, its folder, its models. The command line is in `cli/serve.py`.

The port is open from the first moment; models load and the journal is replayed behind it. When it is told to stop, it
lets no more requests in, makes snapshots of what was trained, and closes. It ends by itself, with EXIT_FAILED, where
what it promises cannot be kept any more: its journal cannot be written, or an engine has died. What was acknowledged is
there when it starts again.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from filelock import FileLock, Timeout

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.durable import make_folders, writing
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.server.activity import Activity
from stovetop.server.app import Doors, make_app
from stovetop.server.connections import ConnectionLimits, bounded
from stovetop.server.display import line, look
from stovetop.server.journal import Journal
from stovetop.server.keys import OwnerOf, local_operator, local_owner
from stovetop.server.limits import UNLIMITED, Limits, LimitsOf
from stovetop.server.ports import BACKLOG
from stovetop.server.recovery import Parts, recover
from stovetop.server.supervisor import was_orphaned
from stovetop.server.sweeping import sweep
from stovetop.server.uploads import UploadLimits

log = logging.getLogger(__name__)

EXIT_FAILED = os.EX_SOFTWARE  # it is started again
MAX_THREADS = 64  # that wait or decode; a bound, not a tuned number
STOP_S = 3.0  # for requests that are under way
SWEEP_EVERY_S = 10.0
SHOW_EVERY_S = 1.0
SNAPSHOT_S = 60.0  # for the last snapshots; what they do not cover is replayed

OpenService = Callable[[Path], InProcessServiceClient]  # saving under this folder, with its models loading


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What does not depend on the models."""

    storage: Path  # of this server alone: its journal, checkpoints, snapshots
    hosts: list[str] = field(default_factory=lambda: ["127.0.0.1", "localhost"])  # Host headers that are served
    owner_of: OwnerOf = local_owner
    operator_of: OwnerOf = local_operator  # of the page and the metrics
    limits_of: LimitsOf = lambda owner: UNLIMITED
    limits: UploadLimits = field(default_factory=UploadLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_prompts: bool = False  # the text of prompts goes into the log too
    was_killed: bool = False  # the server before this one, from outside
    opened: Callable[[], object] = lambda: None  # called when it serves
    show: Callable[[str], object] = lambda line: None  # called every second, with what is going on
    end: Callable[[int], object] = os._exit  # the process, at once, with this code


class Server:
    """Serves one folder on one port.

    `run` returns when it was told to stop and everything is closed; it raises what kept the server from starting. HTTP
    has a thread of its own, with an event loop in it.
    """

    def __init__(self, open_service: OpenService, listening: socket.socket, options: ServerOptions) -> None:
        self.doors = Doors()
        self._open_service = open_service
        self._listening = listening
        self._options = options
        self._stops = threading.Event()
        app = make_app(
            self.doors,
            hosts=options.hosts,
            owner_of=options.owner_of,
            operator_of=options.operator_of,
            limits=options.limits,
        )
        config = uvicorn.Config(
            app,
            http=bounded(options.connections),  # type: ignore[arg-type] # it calls what it is given
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(STOP_S),
            backlog=BACKLOG,
        )
        self._http = uvicorn.Server(config)

    def run(self) -> None:
        storage = self._options.storage.expanduser().resolve()
        with self._listening, _alone_in(storage), self._listens(), self._parts(storage) as parts:
            self.doors.open(parts)
            log.info("serving %s", ", ".join(str(name) for name in _names(parts.service)))
            self._options.opened()
            self._watch(parts)
            self._shut()
            parts.sessions.keep(time.time())

    def _watch(self, parts: Parts) -> None:
        """Until it is told to stop."""
        before = look(parts, time.monotonic())
        swept_s = before.at_s
        while not self._stops.wait(SHOW_EVERY_S):
            now = look(parts, time.monotonic())
            self._options.show(line(before, now))
            before = now
            if now.at_s - swept_s > SWEEP_EVERY_S:
                sweep(parts, time.time())
                swept_s = now.at_s

    def stop(self) -> None:
        """From another thread or a signal's handler. One that still starts just ends: nothing was promised since."""
        if self.doors.state == "loading":
            self._options.end(0)
        self._stops.set()

    @contextmanager
    def _listens(self) -> Generator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve_http()), name="http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._shut()
            thread.join()

    async def _serve_http(self) -> None:
        """Calls of clients may wait for a model that is made behind a long queue: none keeps another from a thread."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="call"))
        await self._http.serve(sockets=[self._listening])

    def _fail(self) -> None:
        """What was promised cannot be kept by this process any more."""
        self._options.end(EXIT_FAILED)

    def _shut(self) -> None:
        """Lets nothing in any more, and ends what waits for results."""
        self.doors.close()
        self._http.should_exit = True

    @contextmanager
    def _parts(self, storage: Path) -> Generator[Parts]:
        """All parts, from the start of the replay until everything is closed."""
        with ExitStack() as closing:
            journal = Journal(storage / "journal.sqlite", lambda _: self._fail())
            closing.callback(journal.close)
            service = self._open_service(storage)
            closing.callback(service.__exit__, _Stopped, _Stopped(), None)
            limits = Limits(self._options.limits_of)
            was_killed = was_orphaned(storage) or self._options.was_killed
            activity = Activity(log_prompts=self._options.log_prompts)
            parts = recover(service, journal, storage, limits, self._fail, activity=activity, was_killed=was_killed)
            closing.callback(parts.requests.close)
            yield parts
            parts.programs.rest(SNAPSHOT_S)


class _Stopped(StovetopError):
    """What has not begun is not done now: the journal has it."""


def _names(service: InProcessServiceClient) -> list[str | None]:
    return [model.model_name for model in service.get_server_capabilities().supported_models]


@contextmanager
def _alone_in(storage: Path) -> Generator[None]:
    """The folder is this server's alone while it runs. A folder in which others have saved is refused: what no row of
    the journal speaks of is removed there."""
    with writing(storage):
        make_folders(storage)
    lock = FileLock(storage / "server.lock", blocking=False)
    try:
        with lock:
            if (storage / "checkpoints").exists() and not (storage / "journal.sqlite").exists():
                raise InvalidRequest(
                    f"there are checkpoints here and no journal; choose an empty folder for --storage: {storage}"
                )
            yield
    except Timeout as error:
        raise InvalidRequest(
            f"another server is at work in this folder; stop it, or choose another --storage: {storage}"
        ) from error

"""The command `serve`: models of this machine for every client that speaks the Tinker protocol. It is two processes: a
parent that holds the port, and the server, which it starts again when that ends by itself (`server/supervisor.py`).
Keys are `serve_keys.py`."""

import argparse
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.cli.serve_keys import DEFAULT_STORAGE, keys
from stovetop.cli.words import Action, count, named_models
from stovetop.client_tokenizers import has_tokenizer, is_looked_up, lay_out
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.extras import require_extra
from stovetop.gguf_files import is_gguf
from stovetop.model_store import require_model

if TYPE_CHECKING:
    from stovetop.server.keys import Keys

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")
MAX_FILES = 20_000  # one connection a request that waits
TOKENIZERS = "for_clients"  # below the storage
LINE_EVERY_S = 60.0  # of what is going on, where the output is no terminal

NEEDED = ("starlette", "uvicorn", "httptools", "google.protobuf", "zstandard", "prometheus_client")

log = logging.getLogger(__name__)


def serve(words: Sequence[str]) -> Action:
    if words[:1] == ["keys"]:
        return keys(words[1:])
    parser = argparse.ArgumentParser(
        "stovetop serve",
        description="Serves models to programs that use the Tinker SDK, unmodified. What it has acknowledged survives\n"
        "a kill at any moment: it is started again and goes on where it was.",
        epilog="A client needs the two lines that are printed first. The server runs until Ctrl-C or SIGTERM.\n"
        "On this machine's own address any key that begins with tml- is good, until the first one is added:\n"
        "stovetop serve keys add|list|revoke. Another --host needs keys; TLS is what a reverse proxy adds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="+", help="a fetched model or a folder; NAME=FOLDER gives it a name of yours")
    parser.add_argument("--port", type=int, default=8765, help="0 is a free one (default: 8765)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--name", action="append", default=[], help="a name by which clients reach this machine, besides --host"
    )
    parser.add_argument("--storage", type=Path, help="the server's own folder (default: ~/.stovetop/server)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the base models")
    parser.add_argument("--threads", type=count, help="to compute with")
    parser.add_argument(
        "--no-restart", action="store_true", help="one process, which another program starts again when it has ended"
    )
    parser.add_argument("--log-prompts", action="store_true", help="the log has the text of prompts, too")
    parser.add_argument("--inherited", help=argparse.SUPPRESS)  # what a parent gives to its server
    options = parser.parse_args(words)
    models = named_models(options.model)
    _check(options, models)
    if options.inherited is not None:
        return lambda: _serve_inherited(options, models)
    return lambda: _open(options, models, list(words))


def _check(options: argparse.Namespace, models: dict[str, str]) -> None:
    require_extra("server", *NEEDED, why="to serve,")
    if options.host in EVERY_ADDRESS and not options.name:
        raise InvalidRequest(
            f"requests are served for the names that clients use; give each, as in --name gpu.example.org: "
            f"--host {options.host}"
        )
    if any("*" in name or "/" in name or ":" in name for name in options.name):
        raise InvalidRequest(f"--name is the name of a machine, without a port: {options.name}")
    if options.host not in LOCAL_HOSTS and not _keys(options).are_asked_for:
        raise InvalidRequest(
            f"another host than this machine's own needs keys; add one with `stovetop serve keys add NAME`: "
            f"--host {options.host}"
        )
    if not 0 <= options.port < 2**16:
        raise InvalidRequest(f"--port must be in 0..65535: {options.port}")
    for place in models.values():
        require_model(place)


def _keys(options: argparse.Namespace) -> "Keys":
    from stovetop.server.keys import Keys

    return Keys(_storage(options))


def _storage(options: argparse.Namespace) -> Path:
    return (options.storage or DEFAULT_STORAGE).expanduser()


# ---- the parent ----------------------------------------------------------------------------------------------------


def _open(options: argparse.Namespace, models: dict[str, str], words: list[str]) -> None:
    from stovetop.server.ports import listen
    from stovetop.server.supervisor import Supervisor

    listening = listen(options.host, options.port)
    _print_exports(options, listening)
    _print_tokenizers(options, models)
    if options.no_restart:
        return _serve(options, models, listening)

    def command(port: int, pair: int, was_killed: bool) -> Sequence[str]:
        inherited = f"--inherited={port},{pair},{int(was_killed)}"
        return [sys.executable, "-m", "stovetop", "serve", *words, inherited]

    _log_to_stderr()
    supervisor = Supervisor(command, listening)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: supervisor.stop())
    with listening:
        code = supervisor.run()
    if code != 0:
        raise SystemExit(code)


def _print_exports(options: argparse.Namespace, listening: socket.socket) -> None:
    """The two lines that a client needs."""
    host = options.name[0] if options.host in EVERY_ADDRESS else options.host
    host = f"[{host}]" if ":" in host else host
    asked_for = "tml-...  # the key that `stovetop serve keys add` has printed"
    key = asked_for if _keys(options).are_asked_for else "tml-local"
    print(f"export TINKER_BASE_URL=http://{host}:{listening.getsockname()[1]}")
    print(f"export TINKER_API_KEY={key}", flush=True)


def _print_tokenizers(options: argparse.Namespace, models: dict[str, str]) -> None:
    """A third line, where programs would not find a tokenizer under the name of a model. They are written beside the
    server's own files."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    lacking = {
        name: require_model(place)
        for name, place in models.items()
        if is_looked_up(name) and not has_tokenizer(cache, name)
    }
    folder = _storage(options) / TOKENIZERS
    ready = {name: place for name, place in lacking.items() if not is_gguf(place)}  # others take a while
    try:
        lay_out(ready, folder)
    except (StovetopError, OSError) as error:  # a client may have tokenizers of its own
        log.warning("no tokenizers for clients: %s", error)
        return
    if ready:
        print(f"export HF_HUB_CACHE={folder}  # tokenizers, for programs that look them up by name", flush=True)
    for name in sorted(lacking.keys() - ready.keys()):
        log.warning("for clients: stovetop fetch %s=%s --for-clients DIR", name, lacking[name])


# ---- the server ----------------------------------------------------------------------------------------------------


def _serve_inherited(options: argparse.Namespace, models: dict[str, str]) -> None:
    from stovetop.server.supervisor import Lifeline

    port, pair, was_killed = map(int, options.inherited.split(","))
    lifeline = Lifeline(pair, _storage(options), os._exit)
    _serve(options, models, socket.socket(fileno=port), bool(was_killed), lifeline.serves)


def _serve(
    options: argparse.Namespace,
    models: dict[str, str],
    listening: socket.socket,
    was_killed: bool = False,
    opened: Callable[[], object] = lambda: None,
) -> None:
    from stovetop.backends import local
    from stovetop.backends.in_process import InProcessServiceClient
    from stovetop.server.serve import Server, ServerOptions

    def open_service(storage: Path) -> InProcessServiceClient:
        return local.open_service(
            storage=storage,
            models=models,
            preload=True,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
            download=None,
        )

    _log_to_stderr()
    _allow_files(MAX_FILES)
    server_keys = _keys(options)
    server_options = ServerOptions(
        storage=_storage(options),
        hosts=[*LOCAL_HOSTS, "[::1]", *options.name, options.host, f"[{options.host}]"],
        owner_of=server_keys.owner_of,
        operator_of=server_keys.operator_of,
        limits_of=server_keys.limits_of,
        log_prompts=options.log_prompts,
        was_killed=was_killed,
        opened=opened,
        show=_Shown(),
    )
    server = Server(open_service, listening, server_options)

    def stop(number: int, _frame: object) -> None:
        """The first signal stops the server; a second one ends it at once, which loses nothing either."""
        signal.signal(number, signal.SIG_DFL)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    server.run()


class _Shown:
    """Shows what is going on: in a terminal a line that stays the last one, elsewhere a line of the log now and then,
    where anything has changed."""

    def __init__(self) -> None:
        self._last = ""
        self._last_s = time.monotonic()

    def __call__(self, line: str) -> None:
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            sys.stderr.write(f"{_CLEAR}{line[: columns - 1]}")
            sys.stderr.flush()
        elif line != self._last and time.monotonic() - self._last_s > LINE_EVERY_S:
            log.info("%s", line)
            self._last, self._last_s = line, time.monotonic()


_CLEAR = "\r\x1b[2K"  # the line in which the cursor is


def _log_to_stderr() -> None:
    """In a terminal, over the line of what is going on."""
    before = _CLEAR if sys.stderr.isatty() else ""
    logging.basicConfig(level=logging.INFO, format=f"{before}%(asctime)s %(message)s")


def _allow_files(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        most = num_files if hard == resource.RLIM_INFINITY else min(hard, num_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

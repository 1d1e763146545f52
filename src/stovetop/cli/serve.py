"""The command `serve`: models of this machine for every client that speaks the Tinker protocol."""

import argparse
import importlib.util
import logging
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.cli.words import Action, count
from stovetop.errors import InvalidRequest, MissingExtra
from stovetop.model_store import canonical_name, require_model

if TYPE_CHECKING:
    from stovetop.server.serve import Server

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
MAX_FILES = 20_000  # one connection a request that waits

NEEDED = ("starlette", "uvicorn", "httptools", "google.protobuf", "zstandard")


def serve(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop serve",
        description="Serves models to programs that use the Tinker SDK, unmodified. What it has acknowledged survives\n"
        "a kill at any moment: started again on the same --storage, it goes on where it was.",
        epilog="A client needs the two lines that are printed first. The server runs until Ctrl-C or SIGTERM.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="+", help="a fetched model or a folder; NAME=FOLDER gives it a name of yours")
    parser.add_argument("--port", type=int, default=8765, help="0 is a free one (default: 8765)")
    parser.add_argument("--host", default="127.0.0.1", help="only this machine's own, so far (default: 127.0.0.1)")
    parser.add_argument("--storage", type=Path, help="the server's own folder (default: ~/.stovetop/server)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the base models")
    parser.add_argument("--threads", type=count, help="to compute with")
    options = parser.parse_args(words)
    models = _models(options.model)
    _check(options, models)
    return lambda: _serve(options, models)


def _models(words: Sequence[str]) -> dict[str, str]:
    """Where the models are, by the names that clients use."""
    models: dict[str, str] = {}
    for word in words:
        name, given, place = word.partition("=")
        name, place = (name, place) if given else (canonical_name(word), word)
        if not name or not place or name in models:
            raise InvalidRequest(f"each model has a name of its own, as in NAME=FOLDER: {word!r}")
        models[name] = place
    return models


def _check(options: argparse.Namespace, models: dict[str, str]) -> None:
    missing = [package for package in NEEDED if importlib.util.find_spec(package.partition(".")[0]) is None]
    if missing:
        raise MissingExtra(missing[0], "server", "to serve,")
    if options.host not in LOCAL_HOSTS:
        raise InvalidRequest(
            "the server has no keys yet, so it listens on this machine alone; leave --host out, and reach it through "
            f"a tunnel: {options.host}"
        )
    if not 0 <= options.port < 2**16:
        raise InvalidRequest(f"--port must be in 0..65535: {options.port}")
    for place in models.values():
        require_model(place)


def _serve(options: argparse.Namespace, models: dict[str, str]) -> None:
    from stovetop.backends import local
    from stovetop.backends.in_process import InProcessServiceClient
    from stovetop.server.serve import Server, ServerOptions, listen

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

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    _allow_files(MAX_FILES)
    storage = options.storage or Path.home() / ".stovetop" / "server"
    listening = listen(options.host, options.port)
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"export TINKER_BASE_URL=http://{host}:{listening.getsockname()[1]}")
    print("export TINKER_API_KEY=tml-local", flush=True)
    server = Server(open_service, listening, ServerOptions(storage=storage, hosts=[*LOCAL_HOSTS, "[::1]"]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: _stop(server, number))
    server.run()


def _stop(server: "Server", number: int) -> None:
    """The first signal stops the server; a second one ends it at once, which loses nothing either."""
    signal.signal(number, signal.SIG_DFL)
    server.stop()


def _allow_files(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        most = num_files if hard == resource.RLIM_INFINITY else min(hard, num_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

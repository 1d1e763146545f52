"""The command `serve keys`: who may use a server."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stovetop.cli.words import Action, count

DEFAULT_STORAGE = Path.home() / ".stovetop" / "server"

_LIMITS = {
    "max_requests": "in the queue at once; over it, samples and training wait",
    "max_tokens": "in the queue at once; likewise",
    "max_models": "training clients that are alive at once",
    "max_bytes": "of checkpoints",
    "max_sampler_bytes": "of weights that were frozen and have no path; over it, the longest unused are deleted",
}


def keys(words: Sequence[str]) -> Action:
    """Works whether the server runs or not: it sees the change with its next request."""
    parser = argparse.ArgumentParser(
        "stovetop serve keys",
        description="Who may use a server. From the first key on, it serves those that have one and no others. What\n"
        "an owner has made stays when the key is revoked: the next key of this name reaches it. The name\n"
        "local reaches what was made before there were keys.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    storage = argparse.ArgumentParser(add_help=False)
    storage.add_argument(
        "--storage", type=Path, default=DEFAULT_STORAGE, help="the server's folder (default: ~/.stovetop/server)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", parents=[storage], help="make a key; it is printed once and kept nowhere")
    add.add_argument("name", help="of its owner")
    for name, help in _LIMITS.items():
        add.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=help)
    add.add_argument(
        "--operator", action="store_true", help="it opens the page and the metrics too, which show all owners"
    )
    commands.add_parser("list", parents=[storage], help="names, dates and limits")
    revoke = commands.add_parser("revoke", parents=[storage], help="a key is good no more, at once")
    revoke.add_argument("name")
    options = parser.parse_args(words)
    return lambda: _COMMANDS[options.command](options)


def _add(options: argparse.Namespace) -> None:
    from stovetop.server.keys import add_key
    from stovetop.server.limits import OF_A_KEY

    given: dict[str, Any] = {name: vars(options)[name] for name in _LIMITS if vars(options)[name] is not None}
    limits = replace(OF_A_KEY, **given)
    key = add_key(options.storage.expanduser(), options.name, limits, is_operator=options.operator)
    print(f"export TINKER_API_KEY={key}")


def _list(options: argparse.Namespace) -> None:
    from stovetop.server.keys import FILE, read_keys

    for key in read_keys(options.storage.expanduser() / FILE):
        limits = "  ".join(f"{name} {value:,}" for name, value in asdict(key.limits).items() if value is not None)
        limits = f"operator  {limits}" if key.is_operator else limits
        print(f"{key.name:24} {time.strftime('%Y-%m-%d', time.localtime(key.created_s))}  {limits}")


def _revoke(options: argparse.Namespace) -> None:
    from stovetop.server.keys import revoke_key

    revoke_key(options.storage.expanduser(), options.name)


_COMMANDS = {"add": _add, "list": _list, "revoke": _revoke}

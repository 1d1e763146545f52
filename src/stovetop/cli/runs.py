"""Runs that are there already: which recipe one belongs to and the config that it goes on with, and the list of those
in a folder."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stovetop.checkpoints import get_last_checkpoint
from stovetop.cli.interrupts import same_command
from stovetop.durable import parse_rows
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.recipes import RECIPES
from stovetop.run_folder import MARK_FILE, METRICS_FILE, is_run
from stovetop.runs import StoredConfig, read_config
from stovetop.tracking.events import step_of_row

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEPTH = 3  # how many folders down runs are looked for


def recipe_of(config_class: str) -> str | None:
    """The name of the recipe with this config, "module:name"; or the file of one of the user's own, where it lies in
    the current folder."""
    classes = {f"{recipe.module}:Config": name for name, recipe in RECIPES.items()}
    own = Path(config_class.removesuffix(":Config") + ".py")
    return classes.get(config_class) or (str(own) if own.is_file() else None)


def run_in(path: str) -> Path:
    """The folder of a run."""
    folder = Path(path).expanduser().resolve()
    if not is_run(folder):
        raise InvalidRequest(f"there is no run in this folder; stovetop runs lists those in runs/: {path!r}")
    return folder


def stored_run(path: str) -> tuple[str, StoredConfig]:
    """The recipe of the run in this folder, by name, and its config as it is stored."""
    stored = read_config(run_in(path))
    if is_phase(stored.path):
        whole = shlex.quote(str(stored.path.parent))
        raise InvalidRequest(f"this is a phase of a run, which goes on as a whole: stovetop resume {whole}")
    name = recipe_of(stored.config_class)
    if name is None:
        raise InvalidRequest(
            f"this run was begun by a program of its own, with {stored.config_class}; run that again, it goes on by "
            f"itself: {stored.path}"
        )
    return name, stored


def is_phase(folder: Path) -> bool:
    """Whether the run in this folder is a phase of the run in the folder above."""
    from stovetop.kitchen.phases import phases_in

    return any(phase.folder == folder for phase in phases_in(folder.parent))


def state_of(folder: Path) -> str:
    """ "complete", "not complete"; of a run of phases that is not complete, "phase 2 of 3"."""
    from stovetop.kitchen.phases import phases_in

    phases = phases_in(folder)
    if not phases:
        last = get_last_checkpoint(folder)
        return "complete" if last is not None and last.final else "not complete"
    num_complete = sum(phase.is_complete for phase in phases)
    return "complete" if num_complete == len(phases) else f"phase {num_complete + 1} of {len(phases)}"


def config_to_go_on_with(stored: StoredConfig, config_class: "type[DataclassInstance]") -> "DataclassInstance":
    """The config of a run as a value, with the folder where it is now: it may have been moved."""
    config = stored.config_as(config_class)
    is_there = Path(str(stored.config.get("log_path"))).expanduser().resolve() == stored.path
    return replace(config, behavior_if_exists="resume", **({} if is_there else {"log_path": str(stored.path)}))


def how_to_go_on(config: "DataclassInstance", words: Sequence[str]) -> str:
    """The command that goes on with the run of this config, which was interrupted; `words` are those that began it."""
    log_path = str(asdict(config).get("log_path", os.devnull))
    try:
        stored_run(log_path)
    except StovetopError:  # it has not begun, or is a folder of several
        return same_command(words)
    return f"To go on where it stopped: stovetop resume {shlex.quote(log_path)}"


def refuse_another_place(config: "DataclassInstance", stored: StoredConfig) -> None:
    """Of a run that goes on: it does so where it is."""
    place, behavior = (str(getattr(config, name)) for name in ("log_path", "behavior_if_exists"))
    if Path(place).expanduser().resolve() != stored.path or behavior != "resume":
        raise InvalidRequest(
            f"resume goes on with a run where it is; leave log_path and behavior_if_exists out, or use stovetop run: "
            f"log_path={place} behavior_if_exists={behavior}"
        )


# ---- the list --------------------------------------------------------------------------------------------------------


class ListedRun(NamedTuple):
    recipe: str  # "" where it is no recipe's; with its folder for a phase
    state: str  # see `state_of`; "damaged" where its files cannot be read
    last_step: str  # of its last row; "" where it has none
    run: str  # its folder


def list_runs(folder: Path) -> Iterator[ListedRun]:
    """The runs in a folder, and in those up to DEPTH below it, in the order of their paths. One whose files are damaged
    hides no other; `stovetop report` says what is wrong with it."""
    for path in sorted(_folders(folder, DEPTH)):
        if (path / MARK_FILE).is_file():
            try:
                yield _listed(path)
            except StovetopError:
                yield ListedRun("", "damaged", "", str(path))


def _folders(folder: Path, depth: int) -> Iterable[Path]:
    yield folder
    if depth > 0 and folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _folders(entry, depth - 1)


def _listed(path: Path) -> ListedRun:
    whole = path.parent if is_phase(path) else path
    try:
        recipe = recipe_of(read_config(whole).config_class) or ""
    except StovetopError:  # a folder of several runs has no config of its own
        recipe = ""
    steps = parse_rows(path / METRICS_FILE, step_of_row)
    name = recipe if whole == path else f"{recipe} {path.name}".strip()
    return ListedRun(name, state_of(path), str(steps[-1]) if steps else "", str(path))

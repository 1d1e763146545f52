"""Runs that are there already: the config that one goes on with, and the command."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.cli.interrupts import same_command
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.reports.standing import is_phase, recipe_of
from stovetop.run_folder import is_run
from stovetop.stored_configs import StoredConfig, read_config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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

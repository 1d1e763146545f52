"""The runs of a sweep, one after the other or several at once. Side by side they share one copy of the base model: each
is an adapter, and small steps of several share passes of the engine. A run that fails, fails alone."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stovetop.concurrency import map_together
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest
from stovetop.run_folder import LOCK_FILE
from stovetop.sweeps.points import Point, name_of
from stovetop.tracking.configs import config_to_dict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SWEEP_FILE = "sweep.json"
OF_THE_SERVICE = ("base_url", "model_name", "device", "dtype", "deterministic", "threads")  # alike of runs at once


class SweptRun(NamedTuple):
    """One of the runs."""

    point: Point
    folder: Path
    config: "DataclassInstance"


class Asked(NamedTuple):
    """What `sweep.json` says."""

    recipe: str  # RECIPE or RECIPE:PRESET
    fixed: list[str]  # field=value, the same for all runs
    points: list[Point]
    metric: str | None  # None: the first that there is of `results.USUAL`
    goal: str | None  # "min" or "max"; None: what its name says

    def folders(self, sweep: Path) -> dict[Path, Point]:
        """Where the run of each point is."""
        return {sweep / name_of(point): point for point in self.points}


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def read_sweep(folder: Path) -> Asked:
    """Refused where there is none, or none that can be read."""
    from pydantic import TypeAdapter

    file = folder / SWEEP_FILE
    try:
        asked = TypeAdapter(Asked).validate_python(json.loads(file.read_bytes()))
        if not (asked.points and all(asked.points)):
            raise ValueError("no points")
        return asked
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"there is no sweep in this folder; `stovetop sweep RECIPE ...` makes one: {folder}"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"{file} cannot be read ({error}); remove it, and give the command again") from error


def continued(folder: Path, asked: Asked) -> Asked:
    """With the points of a sweep that is there. One of another recipe, or over other fields, is refused, and so is a
    folder with something else in it. Nothing is written."""
    if is_sweep(folder):
        before = read_sweep(folder)
        for what, old, new in (
            ("recipe", before.recipe, asked.recipe),
            ("fields", sorted(before.points[0]), sorted(asked.points[0])),
        ):
            if old != new:
                raise InvalidRequest(
                    f"there is another sweep in this folder, its {what}: {old}, not {new}; choose another: {folder}"
                )
        return asked._replace(points=[*before.points, *(point for point in asked.points if point not in before.points)])
    if folder.is_dir() and any(entry.name != LOCK_FILE for entry in folder.iterdir()):
        raise InvalidRequest(
            f"a sweep needs a folder of its own, and there is something else; choose another: {folder}"
        )
    return asked


def store_sweep(folder: Path, asked: Asked) -> Asked:
    """Writes sweep.json, in a folder that is locked, and returns what it says: see `continued`."""
    asked = continued(folder, asked)
    write_file(folder / SWEEP_FILE, json.dumps(asked._asdict(), indent=1).encode())
    return asked


def check_at_once(runs: Sequence[SweptRun]) -> None:
    """Refuses runs that cannot share a service."""
    for field in OF_THE_SERVICE:
        values = {str(config_to_dict(run.config).get(field)) for run in runs}
        if len(values) > 1:
            listed = ", ".join(sorted(values))
            raise InvalidRequest(
                f"runs at once share one copy of the base model, and these differ in {field}; leave at_once out, and "
                f"they run one after the other: {listed}"
            )


async def run_all(
    runs: Sequence[SweptRun],
    start: Callable[[SweptRun], Awaitable[None]],
    *,
    at_once: int = 1,
    ended: Callable[[SweptRun, Exception | None], None] = lambda run, error: None,
) -> Mapping[Path, Exception]:
    """Starts each, `at_once` at a time, and returns those that failed. `ended` hears of each."""
    failed: dict[Path, Exception] = {}

    async def run_one(run: SweptRun) -> None:
        try:
            await start(run)
        except Exception as error:
            failed[run.folder] = error
        ended(run, failed.get(run.folder))

    await map_together(run_one, runs, limit=at_once, name="run")
    return failed

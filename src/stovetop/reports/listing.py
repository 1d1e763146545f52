"""The runs in a folder, as a table that may be kept up to date on a terminal."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.reports.standing import Standing, standing_of
from stovetop.run_folder import MARK_FILE
from stovetop.tracking.console import format_number, short_names
from stovetop.tracking.events import encode_number

if TYPE_CHECKING:
    from pydantic import JsonValue

DEPTH = 3  # how many folders down runs are looked for
NO_RUNS = (".", "iteration_")  # what begins so has none in it; of the latter a run has thousands
NUM_VALUES = 3  # of its last numbers, in the table


def list_runs(folder: Path) -> Iterator[Standing]:
    """The runs in a folder, and in those up to DEPTH below it, in the order of their paths: a run before its phases.
    One whose files are damaged hides no other."""
    yield from map(standing_of, run_folders(folder))


def run_folders(folder: Path) -> list[Path]:
    """Where runs are, in a folder and in those up to DEPTH below it, in order."""
    return sorted(_runs_below(folder, DEPTH))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            is_folder = {entry.name: _is_folder(entry) for entry in entries if not entry.name.startswith(NO_RUNS)}
    except OSError:  # it is gone meanwhile, or not ours to read: it hides no other
        return
    if is_folder.get(MARK_FILE) is False:
        yield folder
    for name in is_folder if depth > 0 else ():
        if is_folder[name]:
            yield from _runs_below(folder / name, depth - 1)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()  # the first is False where it may not look


def as_cells(standing: Standing) -> dict[str, str]:
    """A row of the table."""
    reason = "" if standing.state == "running" else " ".join(standing.reason.split())
    values = list(standing.values.items())[:NUM_VALUES]
    names = short_names([name for name, _ in values])
    return {
        "recipe": f"  {standing.phase}" if standing.phase else standing.recipe,
        "state": f"{standing.state}: {reason}" if reason else standing.state,
        "step": standing.progress,
        "last values": "  ".join(
            f"{name} {format_number(value)}" for name, (_, value) in zip(names, values, strict=True)
        ),
        "began": "" if standing.began_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(standing.began_s)),
        "time": _time_of(standing),
        "run": str(standing.run),
    }


def _time_of(standing: Standing) -> str:
    if standing.began_s is None or standing.last_s is None:
        return ""
    took = duration(standing.last_s - standing.began_s)
    return took if standing.seconds_left is None else f"{took}, {duration(standing.seconds_left)} left"


def duration(seconds: float) -> str:
    """duration(75) == "1 min 15 s", duration(7500) == "2 h 5 min"."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def as_json(standing: Standing) -> "dict[str, JsonValue]":
    """For programs."""
    return {
        "run": str(standing.run),
        "recipe": standing.recipe,
        "phase": standing.phase,
        "state": standing.state,
        "reason": standing.reason,
        "num_done": standing.num_done,
        "num_steps": standing.num_steps,
        "num_phases": standing.num_phases,
        "values": {name: encode_number(value) for name, value in standing.values.items()},
        "began_s": standing.began_s,
        "last_s": standing.last_s,
        "seconds_left": standing.seconds_left,
    }


def rows_of(standings: Sequence[Standing]) -> list[dict[str, str]]:
    """The table; columns in which nothing stands are left out, but for those that every run has."""
    rows = [as_cells(standing) for standing in standings]
    empty = {name for name in ("last values", "began", "time") if not any(row[name] for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]

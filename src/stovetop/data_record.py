"""`data.json` of a run: what it trains and tests on, so that data that has changed is noticed when the run goes on. By
the name of each data set in the config: its sources, with their digest or their revision, and their number of rows.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from stovetop.checkpoints import get_last_checkpoint
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.named_data import Source
from stovetop.run_folder import BehaviorIfExists, Content, content_of, run_path

DATA_FILE = "data.json"


def read_data(path: Path) -> dict[str, list[Source]]:
    """The sources of each data set that the run in this folder has read; nothing before it has."""
    file = path / DATA_FILE
    if not file.is_file():
        return {}
    try:
        stored = cast("dict[str, list[dict[str, str | int | None]]]", json.loads(file.read_bytes()))
        return {name: [Source(**row) for row in rows] for name, rows in stored.items()}  # pyright: ignore[reportArgumentType]  the call checks the names
    except (ValueError, TypeError, AttributeError) as error:
        raise StovetopError(f"{file} cannot be read ({error}); restore it, or begin another run") from error


def check_data(
    log_path: str | Path, dataset: str, sources: Sequence[Source], behavior_if_exists: BehaviorIfExists = "resume"
) -> None:
    """Refuses data that differs from what the run in this folder has learnt from. Nothing is written."""
    path = run_path(log_path)
    if behavior_if_exists != "delete" and content_of(path) is Content.RUN:
        refuse_changes(path, dataset, sources)


def record_data(path: Path, dataset: str, sources: Sequence[Source]) -> None:
    """Writes the sources of a data set, after `check_data`."""
    check_data(path, dataset, sources)
    stored = read_data(path) | {dataset: list(sources)}
    rows = {name: [asdict(source) for source in of_name] for name, of_name in stored.items()}
    write_file(path / DATA_FILE, json.dumps(rows, indent=1).encode())


def revisions_in(log_path: str | Path) -> dict[str, str]:
    """The commits of data sets of a hub that the run in this folder began with: one that goes on reads them again."""
    stored = read_data(run_path(log_path))
    return {source.source: source.revision for of_name in stored.values() for source in of_name if source.revision}


def refuse_changes(path: Path, dataset: str, sources: Sequence[Source]) -> None:
    """Refuses data that differs from what is noted in this folder, where a run is known to have learnt from it: of a
    phase without steps, say, which is complete."""
    before = read_data(path).get(dataset)
    if before is None:
        return
    changes = [
        f"{then.role} rows of {now.source}: {_shown(then)} then, {_shown(now)} now"
        for then, now in zip(before, sources, strict=False)
        if not _same(then, now)
    ]
    if len(before) != len(sources):
        changes.append(f"{len(before)} sources then, {len(sources)} now")
    if not changes:
        return
    last = get_last_checkpoint(path)
    onwards = "" if last is None else f", or train on from here in a new run: load_checkpoint_path={last.state_path}"
    raise InvalidRequest(
        f"the data of this run has changed since it was begun:{''.join(f'{chr(10)}  {change}' for change in changes)}\n"
        f"Restore it, choose another log_path, or begin afresh with behavior_if_exists=delete{onwards}. The run: {path}"
    )


def _same(then: Source, now: Source) -> bool:
    if (then.role, then.num_rows) != (now.role, now.num_rows):
        return False
    return (
        (then.digest == now.digest or None in (then.digest, now.digest))
        and (then.revision == now.revision or None in (then.revision, now.revision))
        and (then.split, then.subset) == (now.split, now.subset)
    )


def _shown(source: Source) -> str:
    what = source.digest or source.revision
    return f"{source.num_rows}" + (f" ({what[:8]})" if what else "")

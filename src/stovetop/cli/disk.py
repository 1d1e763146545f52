"""What runs take of the disk, and `stovetop prune`, which frees it after saying what."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stovetop.backends.saved_runs import clear_killed_saves
from stovetop.checkpoint_users import home_of, user_of
from stovetop.checkpoints import located
from stovetop.cli.runs import run_in
from stovetop.cli.tables import print_table
from stovetop.cli.words import Action
from stovetop.durable import delete_folder
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.retention import DEFAULT_KEEP, Doomed, delete, parse_keep, plan, unnamed
from stovetop.run_folder import STATES_FOLDER, is_run, locked, runs_within, saved_folders
from stovetop.stored_configs import read_config
from stovetop.tracking.rollout_rows import ROLLOUTS_FOLDER


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed. What goes meanwhile, or cannot be read,
    counts nothing."""
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        return sum(map(size_of, _entries(path))) if is_folder else path.lstat().st_size
    except OSError:
        return 0


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def shown_size(num_bytes: int) -> str:
    """In MB, as `du --si` counts."""
    return f"{num_bytes / 1e6:,.1f} MB"


# ---- what takes the room ---------------------------------------------------------------------------------------------


class DiskUse(NamedTuple):
    """Of one run, without the runs within it; in bytes."""

    run: str  # its folder
    total: int
    checkpoints: int
    num_checkpoints: int
    pages: int  # iteration_NNNNNN/ and HTML
    records: int  # metrics, events, rollouts, logs
    other: int


def disk_use(folder: Path) -> DiskUse:
    """What takes the room in the folder of a run."""
    sizes = {"checkpoints": 0, "pages": 0, "records": 0, "other": 0}
    for entry in _entries(folder):
        if entry.name == STATES_FOLDER:
            kind = "checkpoints"
        elif entry.name.startswith("iteration_") or entry.suffix == ".html":
            kind = "pages"
        elif entry.suffix in (".jsonl", ".log") or entry.name == ROLLOUTS_FOLDER:
            kind = "records"
        elif entry.is_dir() and is_run(entry):
            continue
        else:
            kind = "other"
        sizes[kind] += size_of(entry)
    return DiskUse(str(folder), sum(sizes.values()), num_checkpoints=len(saved_folders(folder)), **sizes)


def show_disk_use(folders: Sequence[Path], *, as_json: bool) -> None:
    """The largest first."""
    uses = sorted(map(disk_use, folders), key=lambda use: -use.total)
    if as_json:
        print(json.dumps([use._asdict() for use in uses], indent=1))
        return
    print_table(
        [
            {
                "run": use.run,
                "total": shown_size(use.total),
                "checkpoints": f"{shown_size(use.checkpoints)} ({use.num_checkpoints})",
                "pages": shown_size(use.pages),
                "records": shown_size(use.records),
                "other": shown_size(use.other),
            }
            for use in uses
        ]
    )
    print(f"together: {shown_size(sum(use.total for use in uses))}; stovetop prune RUN frees what a run does not need")


# ---- prune -----------------------------------------------------------------------------------------------------------


class Stays(NamedTuple):
    """A checkpoint that is kept."""

    run: Path
    name: str
    reason: str


class Goes(NamedTuple):
    """What is deleted."""

    run: Path
    doomed: Doomed
    lies_at: str
    why: str
    num_bytes: int | None  # None: a server has it, and does not say


class Pruning(NamedTuple):
    """Of a run and the runs within it."""

    stays: list[Stays]
    goes: list[Goes]


def prune(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop prune",
        description="Deletes the checkpoints of a run that it does not need, after saying which: all but the last,\n"
        "the final and, where the config asks for it, the best ones, those that other runs use, and what these need.",
        epilog="Rows of metrics, events and checkpoints stay. There is no way back.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="its folder, such as runs/sl_basic; of a run of phases, that of the whole")
    parser.add_argument(
        "--keep", metavar="WHICH", help="1, '2 lowest:METRIC' ... (default: the run's keep_checkpoints)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and stop")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(words)
    folder = run_in(options.run)
    if options.keep is not None:
        parse_keep(options.keep)
    return lambda: _prune(folder, options.keep, dry_run=options.dry_run, yes=options.yes)


def _prune(folder: Path, keep: str | None, *, dry_run: bool, yes: bool) -> None:
    with ExitStack() as locks:
        for run in {*runs_within(folder), *(each for each in folder.parents if is_run(each))}:
            if not dry_run:
                locks.enter_context(locked(run))
                clear_killed_saves(run)  # what a deletion that was killed has left of a checkpoint is none any more
        pruning = pruning_of(folder, keep)
        _show(pruning, "would be deleted" if dry_run else "is deleted")
        if dry_run or not pruning.goes:
            return
        if not yes:
            _ask()
        gone = [each for each in pruning.goes if delete(each.doomed, each.run, _remover(each))]
        print(f"deleted {_folders(len(gone))}, {shown_size(sum(each.num_bytes or 0 for each in gone))}")
        if left := len(pruning.goes) - len(gone):
            print(f"{left} are in use now and stay; the same command deletes them later")


def pruning_of(folder: Path, keep: str | None) -> Pruning:
    """What of a run's checkpoints stays and what goes, and of those of the runs within it."""
    pruning = Pruning([], [])
    for run in runs_within(folder):
        planned = plan(run, parse_keep(keep or _keep_of(run)))
        pruning.stays.extend(Stays(run, kept.record.name, kept.reason) for kept in planned.kept)
        for doomed in planned.doomed:
            lies_at = located(doomed.path, run)
            if Path(lies_at).is_absolute() and folder not in Path(lies_at).parents:
                continue  # it lies elsewhere: a copy of the run names what is the original's
            if not Path(lies_at).is_absolute() and _is_copy(run):
                continue  # likewise, at the server
            if Path(lies_at).is_absolute() and not Path(lies_at).is_dir():
                continue
            num_bytes = size_of(Path(lies_at)) if Path(lies_at).is_absolute() else None
            pruning.goes.append(Goes(run, doomed, lies_at, f"checkpoint {doomed.name}", num_bytes))
    for saved in unnamed(folder):
        home = home_of(str(saved), folder) or folder
        if user_of(str(saved), home) is None:
            doomed = Doomed(str(saved), saved.name)
            pruning.goes.append(Goes(home, doomed, str(saved), "no checkpoint names it", size_of(saved)))
    return pruning


def _is_copy(run: Path) -> bool:
    """Whether the run that this one was copied from is still there, as far as its config tells."""
    log_path = read_config(run).config.get("log_path")
    return isinstance(log_path, str) and is_run(Path(log_path)) and not Path(log_path).samefile(run)


def _keep_of(run: Path) -> str:
    try:
        kept = read_config(run).config.get("keep_checkpoints")
    except StovetopError:  # a folder of several runs has no config of its own
        kept = None
    return kept if isinstance(kept, str) else DEFAULT_KEEP


def _show(pruning: Pruning, what: str) -> None:
    if pruning.stays:
        print("stays:")
        print_table([{"checkpoint": each.name, "why": each.reason, "run": str(each.run)} for each in pruning.stays])
    if not pruning.goes:
        print("there is nothing to delete")
        return
    print(f"{what}:")
    print_table(
        [
            {
                "what": each.lies_at,
                "size": "at the server" if each.num_bytes is None else shown_size(each.num_bytes),
                "why": each.why,
            }
            for each in pruning.goes
        ]
    )
    print(f"together: {_folders(len(pruning.goes))}, {shown_size(sum(each.num_bytes or 0 for each in pruning.goes))}")


def _folders(number: int) -> str:
    return "1 folder" if number == 1 else f"{number} folders"


def _ask() -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask on; --yes deletes without asking, --dry-run says what")
    from rich.prompt import Confirm

    if not Confirm.ask("delete this?", default=False):
        raise InvalidRequest("nothing was deleted")


def _remover(goes: Goes) -> Callable[[str], None]:
    if Path(goes.lies_at).is_absolute():
        return lambda path: delete_folder(Path(path))
    base_url = read_config(goes.run).config.get("base_url")
    if not isinstance(base_url, str):
        raise InvalidRequest(f"the config of the run does not say which server has this: {goes.lies_at}")
    return partial(_remove_at, base_url)


def _remove_at(base_url: str, path: str) -> None:
    import stovetop

    with stovetop.ServiceClient(base_url) as service:
        service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

"""Which runs use the checkpoints of others: a run that begins with one, or is taught or judged by one, notes that in
the folder of the run that saved it, and the checkpoint stays (`retention.py`).

    used_by.jsonl    {"path": of the checkpoint, within this folder if it lies there, "user": a run's folder, "time"}

Who needs one only while it runs, as an evaluation does, notes nothing: `being_read`.
"""

import fcntl
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

from stovetop.durable import MANIFEST, append_row, read_rows
from stovetop.errors import StovetopError
from stovetop.run_folder import CHECKPOINTS_FILE, is_run

log = logging.getLogger(__name__)

USED_BY_FILE = "used_by.jsonl"


def home_of(path: str, log_dir: Path) -> Path | None:
    """The folder of the run that a checkpoint belongs to: the nearest one in which it lies; None outside of all. A
    server's belongs to the run whose row names it, in `log_dir`."""
    if not Path(path).is_absolute():
        return log_dir
    return next((folder for folder in Path(path).parents if is_run(folder)), None)


def user_of(path: str, home: Path) -> str | None:
    """A run that uses this checkpoint, by its folder. What lies behind a link, outside of the run's own folder, may be
    known to others by where it really is: it counts as used."""
    if Path(path).is_absolute() and not Path(path).resolve().is_relative_to(home.resolve()):
        return "others, maybe: it lies behind a link"
    within = _within(path, home)
    return next((str(row.get("user")) for row in read_rows(home / USED_BY_FILE) if row.get("path") == within), None)


@contextmanager
def no_new_users(home: Path) -> Generator[None]:
    """Within, no run begins with a checkpoint of this one."""
    descriptor = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def being_read(path: str) -> Generator[None]:
    """Within, and while this process lives, the run that saved this checkpoint does not delete it. Of a server's that
    cannot be said; one that is gone is the reader's to find out."""
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_being_read(path: str) -> bool:
    """Whether a process is within `being_read` of it."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it is not here, or has no locks
            return False
        return False


def note_uses(user: Path, settings: Mapping[str, object]) -> None:
    """Notes every checkpoint that the config of the run `user` names, once. The run of a server's checkpoint is looked
    for among those beside this one."""
    for text in _strings(settings):
        for path, home in _checkpoints_named(text, user):
            if home != user:
                try:
                    _note(path, home, user)
                except (StovetopError, OSError) as error:
                    log.warning("%s may be deleted by its run, which cannot be told of this one: %s", path, error)


def _note(path: str, home: Path, user: Path) -> None:
    row = {"path": _within(path, home), "user": str(user)}
    with no_new_users(home):
        noted = [{key: each.get(key) for key in row} for each in read_rows(home / USED_BY_FILE)]
        if row not in noted:
            append_row(home / USED_BY_FILE, {**row, "time": time.time()})


def _within(path: str, home: Path) -> str:
    """Where a checkpoint is in a run's folder, which may be moved."""
    return str(Path(path).relative_to(home)) if Path(path).is_relative_to(home) else path


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        items = cast("dict[object, object] | list[object]", value)
        for each in items.values() if isinstance(items, dict) else items:
            yield from _strings(each)


def _checkpoints_named(text: str, user: Path) -> Iterator[tuple[str, Path]]:
    if "://" in text:
        yield from ((text, folder) for folder in _beside(user) if _names(folder, text))
        return
    try:
        named = Path(text).expanduser().absolute()
        paths = {named, named.resolve()}  # where a run's checkpoints are a link, the run is above the first alone
        is_saved = (named / MANIFEST).is_file()
    except (OSError, RuntimeError, ValueError):  # no path
        return
    for path in paths if is_saved else ():
        if (home := home_of(str(path), path)) is not None:
            yield str(path), home


def _beside(user: Path) -> Iterator[Path]:
    """The runs in the same folder, and in the folder above, with their phases."""
    for folder in {user.parent, user.parent.parent}:
        for pattern in ("*", "*/*"):
            yield from (each for each in folder.glob(pattern) if is_run(each))


def _names(folder: Path, path: str) -> bool:
    file = folder / CHECKPOINTS_FILE
    return file.is_file() and f'"{path}"'.encode() in file.read_bytes()

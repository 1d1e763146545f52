"""The folder of a run: which folders may be one, how one is recognised, and who writes to it.

    stovetop-run.json   the mark: a folder without it is no run, and is neither gone on with nor deleted
    .lock               held by the process that writes to the run, with who that is
    plan.json           how many steps it is to have, and the metrics that its recipe shows

Readers need no lock. What the other files of a run hold is said in `runs.py`.
"""

import glob
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from stovetop.durable import MANIFEST, clear_leftovers, files_named, make_folders, put_aside, write_file, writing
from stovetop.errors import InvalidRequest, UnknownName, listed

if TYPE_CHECKING:
    from filelock import FileLock

BehaviorIfExists = Literal["resume", "delete", "ask", "raise"]

MARK_FILE, LOCK_FILE = "stovetop-run.json", ".lock"
CONFIG_FILE, METRICS_FILE, EVENTS_FILE, CHECKPOINTS_FILE, STATES_FOLDER, PLAN_FILE, LOGS_FILE = (
    "config.json", "metrics.jsonl", "events.jsonl", "checkpoints.jsonl", "checkpoints", "plan.json", "logs.log",
)  # fmt: skip


_SINCE = "%Y-%m-%d %H:%M:%S"  # in the file of a lock
SECONDS_TO_SIGN, SECONDS_BETWEEN_LOOKS = 1.0, 0.002  # for the holder of a lock to say who it is


class Content(Enum):
    """What a folder holds before a run is opened in it."""

    NOTHING = "nothing"
    STARTED = "a run without a step or a checkpoint"  # its config may change: nothing was learnt with it
    RUN = "a run"
    OTHER = "something else"


class RunFolder(NamedTuple):
    """A folder that this process alone writes to."""

    path: Path  # absolute
    content: Content  # what of it is left to go on with; never OTHER


@contextmanager
def claimed(log_path: str | Path, behavior: BehaviorIfExists) -> Generator[RunFolder]:
    """The folder of a run, locked and marked while open. What is there already is gone on with, deleted, asked about or
    refused, as `behavior` says. A folder that holds no run is refused whatever it says, and so is one that another
    process writes to."""
    path = run_path(log_path)
    behavior = settled(path, behavior)
    with ExitStack() as locks:
        with writing(path):
            make_folders(path)
            locks.enter_context(locked(path))
        content = content_of(path)  # once more: another process may have been at work until now
        if content is Content.OTHER:
            raise InvalidRequest(_not_a_run(path, behavior))
        if behavior == "delete" and content is not Content.NOTHING:
            _delete(path, locks)
            content = Content.NOTHING
        mark(path)
        clear_leftovers(path)
        yield RunFolder(path, content)


def mark(path: Path) -> None:
    """Makes the folder a run's."""
    if not (path / MARK_FILE).is_file():
        write_file(path / MARK_FILE, json.dumps({"stovetop_run": 1}).encode())


# ---- what is planned -------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a run has before it, for those who look at it."""

    num_steps: int | None = None  # None: it has not said
    columns: tuple[str, ...] = ()  # the metrics to show first


def write_plan(path: Path, plan: Plan) -> None:
    """Into the run's folder."""
    write_file(path / PLAN_FILE, json.dumps(plan._asdict()).encode())


def read_plan(path: Path) -> Plan:
    """That of the run in this folder; one that says nothing where there is none, or none that can be read."""
    plan = _json_object(path / PLAN_FILE)
    num_steps, columns = plan.get("num_steps"), plan.get("columns")
    listed = cast("list[object]", columns) if isinstance(columns, list) else []
    return Plan(num_steps if type(num_steps) is int else None, tuple(name for name in listed if isinstance(name, str)))


# ---- which folders ---------------------------------------------------------------------------------------------------


def run_path(log_path: str | Path) -> Path:
    """The absolute path of a run's folder. Refused are no path, and folders that more lives in than a run: the root,
    the home folder, the current one, and what these are in."""
    if not str(log_path).strip():
        raise InvalidRequest("log_path is empty; give the run a folder of its own, such as runs/mine: ''")
    try:
        path = Path(log_path).expanduser().resolve()
        home, here = Path.home(), Path.cwd()
        exists_as_file = path.exists() and not path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"log_path is no path that can be used ({error}): {str(log_path)!r}") from error
    for name, place in (("the current folder", here), ("the home folder", home)):
        if path == place or path in place.parents:
            where = name if path == place else f"a folder that {name} is in"
            raise InvalidRequest(f"a run needs a folder of its own, such as runs/mine, and this is {where}: {path}")
    if exists_as_file:
        raise InvalidRequest(f"a run needs a folder, and there is a file; choose another log_path: {path}")
    return path


def settled(path: Path, behavior: BehaviorIfExists) -> BehaviorIfExists:
    """What to do with a folder, "ask" being answered; or the reason why nothing may be done."""
    if behavior not in get_args(BehaviorIfExists):
        raise UnknownName("behavior_if_exists", behavior, get_args(BehaviorIfExists))
    content = content_of(path)
    if content is Content.OTHER:
        raise InvalidRequest(_not_a_run(path, behavior))
    if behavior == "ask" and content is Content.RUN:
        behavior = _ask(path)
    if behavior == "raise" and content is Content.RUN:
        raise InvalidRequest(
            f"the folder is not empty, there is a run in it; choose another log_path, or behavior_if_exists resume or "
            f"delete: {path}"
        )
    return behavior


def content_of(path: Path) -> Content:
    try:
        names = _names_in(path) if path.exists() else []
    except OSError as error:
        raise InvalidRequest(f"the folder cannot be read ({error.strerror or error}): {path}") from error
    if not names:
        return Content.NOTHING
    if not is_run(path):
        return Content.OTHER
    return Content.RUN if _has_progress(path) else Content.STARTED


def is_run(path: Path) -> bool:
    """Whether the folder has the mark of a run, or the config.json of one that was written before there was a mark."""
    if (path / MARK_FILE).is_file():
        return True
    config = _json_object(path / CONFIG_FILE)
    return isinstance(config.get("class"), str) and isinstance(config.get("config"), dict)


def runs_within(folder: Path) -> list[Path]:
    """A run's folder, and those of the runs in it."""
    return [folder, *(mark.parent for mark in files_named(folder, MARK_FILE) if mark.parent != folder)]


def saved_folders(path: Path) -> list[Path]:
    """The folders that a service has saved into a run's folder, the latest last."""
    manifests = [file for file in files_named(path / STATES_FOLDER, MANIFEST) if not file.parent.name.startswith(".")]
    return [manifest.parent for manifest in sorted(manifests, key=lambda file: (file.stat().st_mtime_ns, str(file)))]


def _has_progress(path: Path) -> bool:
    """Whether a step was logged or anything was saved, in a run within it too."""
    if any((path / name).is_file() and (path / name).stat().st_size > 0 for name in (METRICS_FILE, CHECKPOINTS_FILE)):
        return True
    if saved_folders(path):
        return True
    return any(_has_progress(entry) for entry in path.iterdir() if entry.is_dir() and is_run(entry))


def _not_a_run(path: Path, behavior: BehaviorIfExists) -> str:
    wanted = "to delete this folder" if behavior == "delete" else "to begin a run in this folder"
    return (
        f"refused {wanted}: it holds {_described(path)}, and no run ({MARK_FILE} is missing). Nothing was touched. "
        f"Choose another log_path, or move what is there: {path}"
    )


def _described(path: Path) -> str:
    config = _json_object(path / CONFIG_FILE)
    if "model_type" in config or "architectures" in config:
        return f"a model ({config.get('model_type', 'config.json')})"
    if (path / "adapter_config.json").is_file():
        return "an adapter"
    if (path / MANIFEST).is_file():
        return "a saved state"
    return listed(_names_in(path))


def _names_in(path: Path) -> list[str]:
    """What lies in a folder, but for what claiming it leaves there, even if that is interrupted."""
    names = sorted(entry.name for entry in path.iterdir())
    return [name for name in names if name != LOCK_FILE and not name.startswith(f".{MARK_FILE}.writing-")]


def _json_object(path: Path) -> dict[str, object]:
    """What a JSON file holds, where that is an object; else nothing."""
    try:
        content: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", content) if isinstance(content, dict) else {}


def _ask(path: Path) -> BehaviorIfExists:
    if not sys.stdin.isatty():
        raise InvalidRequest(
            f"the folder is not empty, there is a run in it, and there is no terminal to ask on; choose "
            f"behavior_if_exists resume, delete or raise: {path}"
        )
    from rich.prompt import Prompt

    behaviors: dict[str, BehaviorIfExists] = {"resume": "resume", "delete": "delete", "stop": "raise"}
    return behaviors[Prompt.ask(f"there is a run in {path}", choices=list(behaviors), default="resume")]


# ---- one writer ------------------------------------------------------------------------------------------------------


def writer_in(path: Path) -> str | None:
    """The process that writes to a run, in words, as far as can be told without touching the lock: a reader that tried
    it would be in the way of a run that begins. It is the one that the lock's file names, if it lives and had begun
    when it was named; of another host that cannot be known."""
    holder = _json_object(path / LOCK_FILE)
    pid, host, since = holder.get("pid"), holder.get("host"), holder.get("since")
    if not isinstance(pid, int) or not isinstance(since, str) or not _may_hold(holder):
        return None
    if host == socket.gethostname() and _began_s(pid) > _seconds(since) + 1:
        return None  # the number of a process that has ended was given to another
    return f"pid {pid} on {host}, since {since}"


def _began_s(pid: int) -> float:
    """When a process began, in seconds since 1970; 0 where it has ended or may not be looked at."""
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _seconds(since: str) -> float:
    try:
        return time.mktime(time.strptime(since, _SINCE))
    except ValueError:
        return 0.0


@contextmanager
def locked(path: Path, what: str = "run", option: str = "log_path") -> Generator[None]:
    """Refused at once while another process writes to the folder, which is that of a run, or of what is named. The lock
    goes with the process that holds it, however that ends, and is not inherited by processes that it starts."""
    lock = _acquire(path, what, option)
    try:
        yield
    finally:
        lock.release()


def _acquire(path: Path, what: str, option: str) -> "FileLock":
    from filelock import FileLock, Timeout

    file = path / LOCK_FILE
    # An open run may be left in another thread than the one that opened it: thread_local=False.
    lock = FileLock(file, timeout=0, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
    with writing(file):
        try:
            lock.acquire()
        except Timeout as error:
            raise InvalidRequest(
                f"{_holder(file)} writes to this {what}; wait for it or end it, or choose another {option}: {path}"
            ) from error
    return lock


def _sign(descriptor: int) -> None:
    """Into the file of a lock: who holds it."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime(_SINCE)}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(file: Path) -> str:
    """Who has just got the lock writes its name a moment later: until then the file has that of an earlier one, which
    may have been killed, or none."""
    give_up_s = time.monotonic() + SECONDS_TO_SIGN
    while not _may_hold(holder := _json_object(file)) and time.monotonic() < give_up_s:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    pid, host = holder.get("pid", "unknown"), holder.get("host", "an unknown host")
    who = "this process" if (pid, host) == (os.getpid(), socket.gethostname()) else "another process"
    return f"{who} (pid {pid} on {host}, since {holder.get('since', 'an unknown time')})"


def _may_hold(holder: dict[str, object]) -> bool:
    """Whether a process is named that may live: of another host, that is not known."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or holder.get("host") != socket.gethostname():
        return "host" in holder
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _delete(path: Path, locks: ExitStack) -> None:
    """Empties a locked folder: it is put aside whole, so that a crash leaves no half of a run, and a new one is locked
    in its place. Refused while another process writes to a run within it."""
    with ExitStack() as within, writing(path):
        for marked in files_named(path, MARK_FILE):
            if marked.parent != path:
                within.enter_context(locked(marked.parent))
        put_aside(path)
        try:
            path.mkdir()
            locks.enter_context(locked(path))
        finally:
            for doomed in path.parent.glob(f".{glob.escape(path.name)}.deleted-*"):
                shutil.rmtree(doomed)

"""Files that survive a crash: folders that appear whole or not at all, and logs whose every finished row stays.

A folder is written under a temporary name, each file and the folder are flushed to the disk, then it is renamed. Its
`manifest.json` holds the size and SHA-256 of every file and of itself, so a torn or changed folder is recognised when
it is read. Reading changes nothing.

    .NAME.writing-1a2b3c4d    what is being written; its writer holds a lock on it, which goes with the process
    .NAME.replaced-1a2b3c4d   what was there before, between the two renames of an overwrite
    .NAME.deleted-1a2b3c4d    what is being deleted

All are left behind by a process that is killed. `clear_leftovers` removes the first, unless it is locked, and the last,
and puts the second back if nothing has taken its place.
"""

import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from stovetop.errors import CheckpointExists, CheckpointNotFound, StovetopError, TornCheckpoint, WriteFailed

MANIFEST = "manifest.json"

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(writing|replaced|deleted)-[0-9a-f]{8}", re.DOTALL)

T = TypeVar("T")

log = logging.getLogger(__name__)


class Disk(Protocol):
    """The four operations that may fail half-way. Tests pass one that does."""

    def write(self, path: Path, data: bytes) -> None:
        """Makes a file, or replaces what is in it. Not on the disk for sure before `sync`."""
        ...

    def append(self, path: Path, data: bytes) -> None:
        """Adds to the end of a file, which is made if need be."""
        ...

    def sync(self, path: Path) -> None:
        """Returns when a file, or the entries of a folder, are on the disk."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """At once: afterwards `target` is the new one, or still the old one."""
        ...


class LocalDisk:
    """The operating system's files."""

    def write(self, path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data)

    def append(self, path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)


LOCAL_DISK = LocalDisk()


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Within, an error of the operating system becomes a WriteFailed that names this path."""
    try:
        yield
    except StovetopError:
        raise
    except OSError as error:
        raise WriteFailed(path, error) from error


# ---- folders -------------------------------------------------------------------------------------------------------


def write_folder(
    path: Path,
    files: Mapping[str, bytes | Iterable[bytes]],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
    disk: Disk = LOCAL_DISK,
) -> None:
    """Makes folder `path` with these files, each whole or in pieces, and a manifest that carries `meta`. After a crash
    at any point `path` is the whole new folder, or what it was before."""
    content: dict[str, Any] = json.loads(json.dumps(dict(meta)))  # as it will be read back
    with writing(path), new_folder(path, overwrite=overwrite, disk=disk) as fresh:
        content["files"] = {name: _write_pieces(fresh / name, data, disk) for name, data in files.items()}
        manifest = json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True).encode()
        _write_pieces(fresh / MANIFEST, manifest, disk)


def _write_pieces(path: Path, data: bytes | Iterable[bytes], disk: Disk) -> dict[str, Any]:
    """A new file. Returns what the manifest says of it. Neither a hash nor a write of a large piece holds up the other
    threads of this process."""
    pieces = iter((data,) if isinstance(data, bytes) else data)
    first = next(pieces, b"")
    disk.write(path, first)
    size, digest = len(first), hashlib.sha256(first)
    for piece in pieces:
        disk.append(path, piece)
        digest.update(piece)
        size += len(piece)
    disk.sync(path)
    return {"bytes": size, "sha256": digest.hexdigest()}


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False, disk: Disk = LOCAL_DISK) -> Generator[Path]:
    """An empty folder, which becomes `path` when the block ends, at once and whole; if the block fails it is gone. The
    block syncs the files that it makes."""
    make_folders(path.parent, disk=disk)
    with _locked(path.parent):
        _clear(path)
        _refuse_if_there(path, overwrite)
    with _fresh(path, Path.mkdir) as fresh:
        yield fresh
        disk.sync(fresh)
        with _locked(path.parent):
            _refuse_if_there(path, overwrite)  # another process may have made it meanwhile
            if path.exists():
                disk.rename(path, path.with_name(f".{path.name}.replaced-{uuid.uuid4().hex[:8]}"))
            disk.rename(fresh, path)
            disk.sync(path.parent)
            _clear(path)


def make_folders(path: Path, *, disk: Disk = LOCAL_DISK) -> None:
    """A folder and those above it, where they are not there: on the disk when this returns, so that what will be synced
    below them can be found there."""
    if path.is_dir():
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing or [path]):
        folder.mkdir(exist_ok=True)
        disk.sync(folder.parent)


def delete_folder(path: Path) -> None:
    """Deletes a folder. After a crash at any point it is there as it was, or not at all."""
    with writing(path):
        doomed = put_aside(path)
        LOCAL_DISK.sync(path.parent)
        _remove(doomed)


def put_aside(path: Path) -> Path:
    """Where a folder is from now on that is to be deleted."""
    return path.rename(path.with_name(f".{path.name}.deleted-{uuid.uuid4().hex[:8]}"))


def _refuse_if_there(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise CheckpointExists(f"there is a checkpoint at this path already; choose another name or overwrite: {path}")


def _beside(path: Path, why: str) -> Iterator[Path]:
    """Folders that a write to `path` has left beside it. A name is no pattern, whatever characters it has."""
    return path.parent.glob(f".{glob.escape(path.name)}.{why}-*")


def read_manifest(path: Path) -> dict[str, Any]:
    """What `write_folder` was told, without reading the files."""
    return _manifest_of(_folder(path))


def read_folder(path: Path) -> dict[str, bytes]:
    """Every file that the manifest names, each compared with its digest."""
    folder = _folder(path)
    files: dict[str, bytes] = {}
    for name, expected in _manifest_of(folder)["files"].items():
        with _reading(path, name):
            files[name] = (folder / name).read_bytes()
        _compare(path, name, hashlib.sha256(files[name]).hexdigest(), len(files[name]), expected)
    return files


def check_file(path: Path, name: str) -> bytes:
    """Compares one file of a folder with its digest, without holding all of it in memory; the manifest is compared with
    its own. Returns the SHA-256 of the file."""
    folder = _folder(path)
    expected = _manifest_of(folder)["files"].get(name)
    with _reading(path, name), (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        size = file.tell()
    if name != MANIFEST:
        _compare(path, name, digest.hexdigest(), size, expected or {"bytes": "not", "sha256": None})
    return digest.digest()


@contextmanager
def _reading(path: Path, name: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TornCheckpoint(f"the checkpoint lacks {name}; use an earlier one: {path}") from error


def _compare(path: Path, name: str, digest: str, size: int, expected: Mapping[str, Any]) -> None:
    if digest != expected["sha256"]:
        raise TornCheckpoint(
            f"{name} of the checkpoint is damaged ({size} bytes, {expected['bytes']} written); use an earlier one: "
            f"{path}"
        )


def _folder(path: Path) -> Path:
    """The folder at `path`, or the one that an unfinished overwrite has put aside."""
    for folder in (path, *_beside(path, "replaced")):
        if folder.is_dir():
            return folder
    raise CheckpointNotFound(f"there is no checkpoint at this path: {path}; pass the path that the save returned")


def _manifest_of(folder: Path) -> dict[str, Any]:
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TornCheckpoint(f"the checkpoint has no readable {MANIFEST}; use an earlier one: {folder}") from error
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise TornCheckpoint(f"{MANIFEST} of the checkpoint is not one that was written here: {folder}")
    content = cast(dict[str, Any], manifest)
    if content.pop("sha256") != _digest(content):
        raise TornCheckpoint(f"{MANIFEST} of the checkpoint is damaged; use an earlier one: {folder}")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_file(path: Path, data: bytes, *, disk: Disk = LOCAL_DISK) -> None:
    """One file, whole or as it was."""
    with writing(path), _fresh(path, Path.touch) as fresh:
        disk.write(fresh, data)
        disk.sync(fresh)
        disk.rename(fresh, path)
        disk.sync(path.parent)


# ---- what is being written, and what killed writes have left ---------------------------------------------------------


def files_named(folder: Path, name: str) -> list[Path]:
    """The files of this name in a folder and below it, in order. Folders may come and go meanwhile, as those of saves
    do; `Path.rglob` raises then, before Python 3.13."""
    return sorted(Path(parent) / name for parent, _, names in os.walk(folder) if name in names)


def clear_leftovers(folder: Path) -> None:
    """Removes what killed processes were writing in `folder`, and puts back what an unfinished overwrite had put aside.
    What a living process writes stays. What cannot be removed is named in the log."""
    try:
        with _locked(folder):
            for name in sorted({found["name"] for found in map(_LEFTOVER.fullmatch, os.listdir(folder)) if found}):
                _clear(folder / name)
    except OSError as error:
        log.warning("leftovers of killed writes stay in %s: %s", folder, error)


def _clear(path: Path) -> None:
    """The same for one `path`, whose folder is locked."""
    for unfinished in _beside(path, "writing"):
        if _is_abandoned(unfinished):
            _remove(unfinished)
    for doomed in _beside(path, "deleted"):
        _remove(doomed)
    for replaced in _beside(path, "replaced"):
        if path.exists():
            _remove(replaced)
        else:
            replaced.rename(path)


@contextmanager
def _fresh(path: Path, make: Callable[[Path], None]) -> Generator[Path]:
    """What will be `path`, under its temporary name; removed if the block fails."""
    fresh = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        with _locked(path.parent):  # until it is locked itself, it looks like a leftover
            make(fresh)
            stack.enter_context(_locked(fresh))
        try:
            yield fresh
        except BaseException:
            _remove(fresh)
            raise


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Others who lock the same file or folder wait until the block ends. Where the file system has no locks they do
    not, and nothing there is taken for abandoned either."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---- logs: one JSON object a line ----------------------------------------------------------------------------------


def append_row(path: Path, row: Mapping[str, Any], *, synced: bool = True, disk: Disk = LOCAL_DISK) -> None:
    """Adds one row. A half-written row that a crash left behind is cut off first. The end of a process never costs the
    row; a power cut does not either once it is `synced` to the disk, which takes some milliseconds."""
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    with writing(path):
        is_new = not path.exists()
        cut_torn_row(path)
        disk.append(path, line)
        if synced:
            disk.sync(path)
        if synced and is_new:
            disk.sync(path.parent)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows, each a JSON object; none when there is no file. A torn last row is reported and left out."""
    return parse_rows(path, lambda row: row)


def parse_rows(
    path: Path, parse: Callable[[dict[str, Any]], T], *, wanted: Callable[[bytes], bool] = lambda line: True
) -> list[T]:
    """The same rows, as what `parse` makes of each. A row that it refuses with a ValueError, or that is no JSON object,
    is an error that names the file and the line. Lines that are not `wanted` are not looked into."""
    rows: list[T] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    log.warning("%s: row %d was cut off by a crash and is left out", path, number)
                elif wanted(line):
                    rows.append(_parsed(path, number, line[:-1], parse))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StovetopError(f"cannot read {path}: {error.strerror or error}") from error
    return rows


def _parsed(path: Path, number: int, line: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        return parse(_object(line))
    except (ValueError, RecursionError) as error:
        raise StovetopError(
            f"{path}, line {number}: {error}; repair or remove the line, which is: {line[:80]!r}"
        ) from error


def parse_last_rows(path: Path, parse: Callable[[dict[str, Any]], T], max_bytes: int) -> list[T]:
    """The rows in the last `max_bytes` of a file, however long it is; none where there is no file. A row that is still
    being written is left out."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, 2) - max_bytes)
            file.seek(begin)
            *lines, _ = file.read(max_bytes).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StovetopError(f"cannot read {path}: {error.strerror or error}") from error
    rows: list[T] = []
    for number, line in enumerate(lines[1 if begin else 0 :]):
        try:
            rows.append(parse(_object(line)))
        except (ValueError, RecursionError) as error:
            back = len(lines) - number - (1 if begin else 0)
            raise StovetopError(
                f"{path}, line {back} from its end: {error}; repair or remove the line, which is: {line[:80]!r}"
            ) from error
    return rows


def _object(line: bytes) -> dict[str, Any]:
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")  # pyright: ignore[reportUnknownArgumentType]  what json gives
    return row  # pyright: ignore[reportUnknownVariableType]  as above


def cut_torn_row(path: Path) -> None:
    """Cuts off what a crash has left of the last row of a log."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)

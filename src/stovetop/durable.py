"""Files that survive a crash: folders that appear whole or not at all, and logs whose every finished row stays.

A folder is written under a temporary name, each file and the folder are flushed to the disk, then it is renamed. Its
`manifest.json` holds the size and SHA-256 of every file and of itself, so a torn or changed folder is recognised when
it is read. Reading changes nothing.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from stovetop.errors import CheckpointExists, CheckpointNotFound, StovetopError, TornCheckpoint

MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


class Disk(Protocol):
    """The four operations that may fail half-way. Tests pass one that does."""

    def write(self, path: Path, data: bytes) -> None: ...
    def append(self, path: Path, data: bytes) -> None: ...
    def sync(self, path: Path) -> None: ...
    def rename(self, source: Path, target: Path) -> None: ...


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


# ---- folders -------------------------------------------------------------------------------------------------------


def write_folder(
    path: Path,
    files: Mapping[str, bytes],
    meta: Mapping[str, Any],
    *,
    overwrite: bool = False,
    disk: Disk = LOCAL_DISK,
) -> None:
    """Makes folder `path` with these files and a manifest that carries `meta`. After a crash at any point `path` is the
    whole new folder, or what it was before."""
    _undo_unfinished(path)
    if path.exists() and not overwrite:
        raise CheckpointExists(f"there is a checkpoint at this path already; choose another name or overwrite: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex[:8]}")
    digests = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    content: dict[str, Any] = json.loads(json.dumps({**meta, "files": digests}))  # as it will be read back
    manifest = json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True).encode()
    for unfinished in path.parent.glob(f".{path.name}.writing-*"):
        shutil.rmtree(unfinished)
    try:
        fresh.mkdir()
        for name, data in {**files, MANIFEST: manifest}.items():
            disk.write(fresh / name, data)
            disk.sync(fresh / name)
        disk.sync(fresh)
        if path.exists():
            disk.rename(path, path.with_name(f".{path.name}.replaced-{uuid.uuid4().hex[:8]}"))
        disk.rename(fresh, path)
        disk.sync(path.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _undo_unfinished(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """What `write_folder` was told, without reading the files."""
    return _manifest_of(_folder(path))


def read_folder(path: Path) -> dict[str, bytes]:
    """Every file that the manifest names, each compared with its digest."""
    folder = _folder(path)
    files: dict[str, bytes] = {}
    for name, expected in _manifest_of(folder)["files"].items():
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise TornCheckpoint(f"the checkpoint lacks {name}; use an earlier one: {path}") from error
        if hashlib.sha256(files[name]).hexdigest() != expected["sha256"]:
            raise TornCheckpoint(
                f"{name} of the checkpoint is damaged ({len(files[name])} bytes, {expected['bytes']} written); "
                f"use an earlier one: {path}"
            )
    return files


def _folder(path: Path) -> Path:
    """The folder at `path`, or the one that an unfinished overwrite has put aside."""
    for folder in (path, *path.parent.glob(f".{path.name}.replaced-*")):
        if folder.is_dir():
            return folder
    raise CheckpointNotFound(f"there is no checkpoint at this path: {path}")


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


def _undo_unfinished(path: Path) -> None:
    """Puts back the folder that a crash between the two renames of an overwrite left aside, or clears it away."""
    for replaced in path.parent.glob(f".{path.name}.replaced-*"):
        if path.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(path)


def write_file(path: Path, data: bytes, *, disk: Disk = LOCAL_DISK) -> None:
    """One file, whole or as it was."""
    fresh = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex[:8]}")
    try:
        disk.write(fresh, data)
        disk.sync(fresh)
        disk.rename(fresh, path)
        disk.sync(path.parent)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


# ---- logs: one JSON object a line ----------------------------------------------------------------------------------


def append_row(path: Path, row: Mapping[str, Any], *, disk: Disk = LOCAL_DISK) -> None:
    """Adds one row and flushes it to the disk. A half-written row that a crash left behind is cut off first."""
    _cut_torn_row(path)
    disk.append(path, json.dumps(row, allow_nan=False).encode() + b"\n")
    disk.sync(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; none when there is no file. A torn last row is reported and left out."""
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    if tail:
        log.warning("%s: row %d was cut off by a crash and is left out", path, len(lines) + 1)
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise StovetopError(f"{path}, line {number}, is not JSON; repair or remove it: {line[:80]!r}") from error
    return rows


def _cut_torn_row(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)

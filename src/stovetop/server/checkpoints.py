"""Saved weights by their tinker:// paths. A path stands for a folder because a row says so: no path on the disk is ever
made from what a client sends, and what is overwritten is replaced at once, when its row is."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from stovetop.checks import take
from stovetop.client import MAX_NAME, CheckpointName
from stovetop.durable import MANIFEST
from stovetop.errors import InvalidRequest, NotFoundError
from stovetop.rules import rule_of
from stovetop.server.folders import Folders
from stovetop.server.rows import CheckpointRow
from stovetop.server.verbs import Save

LONGEST_NAME = MAX_NAME - 20  # characters: with the number of its request behind it, a service takes the name too


class Checkpoints:
    """All that are committed, and the names that are being saved."""

    def __init__(self, rows: Iterable[CheckpointRow], folders: Folders) -> None:
        self._folders = folders
        self._rows = {row.path: row for row in rows}
        self._being_saved = set[str]()
        self._in_use = Counter[str]()  # folders that a replay would read
        self._unwanted = set[str]()  # of them, those that no path stands for any more
        self._lock = threading.Lock()  # protects them all

    def find(self, path: str, owner: str) -> CheckpointRow:
        """The checkpoint at this path. One of another owner, or one that has expired, is as good as none."""
        row = self._rows.get(path)
        if row is None or row.owner != owner or (row.expires_s is not None and row.expires_s < time.time()):
            raise NotFoundError(f"there is no checkpoint at this path; pass the one that a save returned: {path!r}")
        return row

    def reserve(self, model_id: str, save: Save) -> str:
        """The path that a save will have. Refuses a name that cannot be, or that is taken."""
        take(_NAME, save.name, "the name of a checkpoint")
        if len(save.name) > LONGEST_NAME:
            raise InvalidRequest(f"the name of a checkpoint has {LONGEST_NAME} characters at most: {len(save.name)}")
        path = path_of(model_id, save)
        with self._lock:
            if path in self._being_saved or (path in self._rows and not save.overwrite):
                raise InvalidRequest(
                    f"there is a checkpoint at this path; choose another name, or overwrite it: {path}"
                )
            self._being_saved.add(path)
        return path

    def release(self, path: str) -> None:
        """Its save has ended, however it did."""
        with self._lock:
            self._being_saved.discard(path)

    def appear(self, row: CheckpointRow) -> str | None:
        """Its row is committed. Returns the folder that no path stands for any more, if it replaces one."""
        with self._lock:
            before = self._rows.get(row.path)
            self._rows[row.path] = row
        return None if before is None or before.folder == row.folder else before.folder

    def use(self, folder: str) -> None:
        """A replay would read it: it stays until `unuse`."""
        with self._lock:
            self._in_use[folder] += 1

    def unuse(self, folder: str) -> None:
        with self._lock:
            self._in_use[folder] -= 1
            is_free = self._in_use[folder] <= 0
            if is_free:
                del self._in_use[folder]
            is_free = is_free and folder in self._unwanted
        if is_free:
            self.remove_folder(folder)

    def remove_folder(self, folder: str) -> None:
        """Now, or when nothing uses it any more."""
        with self._lock:
            if folder in self._in_use:
                self._unwanted.add(folder)
                return
            self._unwanted.discard(folder)
        self._folders.remove(folder)

    def bytes_of(self, owner: str) -> int:
        """That this owner's checkpoints have."""
        with self._lock:
            return sum(row.size_bytes for row in self._rows.values() if row.owner == owner)

    def needed(self) -> set[str]:
        """The folders that paths stand for."""
        return {row.folder for row in self._rows.values()}


_NAME = rule_of(CheckpointName)


def path_of(model_id: str, save: Save) -> str:
    return f"tinker://{model_id}/{'weights' if save.with_optimizer else 'sampler_weights'}/{save.name}"


def row_of(model_id: str, owner: str, n: int, save: Save, folder: Path, name: str) -> CheckpointRow:
    """The row of a save that has ended in this folder, which rows call `name`."""
    manifest = folder / MANIFEST
    created_s = manifest.stat().st_mtime
    return CheckpointRow(
        path=path_of(model_id, save),
        model_id=model_id,
        owner=owner,
        kind="weights" if save.with_optimizer else "sampler_weights",
        name=save.name,
        n=n,
        folder=name,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        created_s=created_s,
        expires_s=None if save.ttl_seconds is None else created_s + save.ttl_seconds,
        public=0,
        user_metadata=json.dumps(save.user_metadata),
    )

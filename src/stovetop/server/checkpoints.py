"""Saved weights by their tinker:// paths. A path stands for a folder because a row says so: no path on the disk is ever
made from what a client sends, and what is overwritten is replaced at once, when its row is.

What is published may be read by every owner, and changed by its own alone. What has expired is as good as deleted, and
the next sweep deletes it.
"""

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stovetop.arguments import MAX_NAME, CheckpointName
from stovetop.checks import take
from stovetop.durable import LOCAL_DISK, MANIFEST, check_file, new_folder
from stovetop.errors import CheckpointError, CheckpointExists, CheckpointNotFound, InvalidRequest
from stovetop.futures import then
from stovetop.rules import rule_of
from stovetop.saved_states import SavedState, describe
from stovetop.server.folders import Folders
from stovetop.server.journal import Journal
from stovetop.server.rows import Change, CheckpointRow, DeletionRow, ModelRow, amend, put
from stovetop.server.verbs import Save
from stovetop.tinker_paths import path_of

log = logging.getLogger(__name__)

LONGEST_NAME = MAX_NAME - 20  # characters: with the number of its request behind it, a service takes the name too


class Checkpoints:
    """All that are committed, and the names that are being saved."""

    def __init__(self, rows: Iterable[CheckpointRow], folders: Folders, journal: Journal) -> None:
        self._folders = folders
        self._journal = journal
        self._rows = {row.path: row for row in rows}
        self._being_saved = Counter[str]()
        self._latest = dict[str, int]()  # the last request that a save to the path was written for
        self._in_use = Counter[str]()  # folders that a replay would read, or that are sent
        self._unwanted = set[str]()  # of them, those that no path stands for any more
        self._lock = threading.Lock()  # protects them all

    # ---- finding -----------------------------------------------------------------------------------------------------

    def find(self, path: str, owner: str) -> CheckpointRow:
        """The checkpoint at this path, to read it. One of another owner that is not published is as good as none."""
        row = self._rows.get(path)
        if row is None or not (row.owner == owner or row.public) or _is_over(row, time.time()):
            raise CheckpointNotFound(
                f"there is no checkpoint at this path; pass the one that a save returned: {path!r}"
            )
        return row

    def find_own(self, path: str, owner: str) -> CheckpointRow:
        """The same, to change it."""
        row = self._rows.get(path)
        if row is None or row.owner != owner:
            raise CheckpointNotFound(
                f"you have no checkpoint at this path; pass the one that a save returned: {path!r}"
            )
        return self.find(path, owner)

    def find_signed(self, path: str, n: int) -> CheckpointRow:
        """The one that request `n` saved there, for a link that was signed for it."""
        row = self._rows.get(path)
        if row is None or row.n != n or _is_over(row, time.time()):
            raise CheckpointNotFound(f"this checkpoint is not there any more: {path!r}")
        return row

    def owned(self, owner: str, model_id: str | None = None) -> list[CheckpointRow]:
        """Those of an owner, or of one of its models, the newest first."""
        now_s = time.time()
        with self._lock:
            rows = list(self._rows.values())
        mine = [row for row in rows if row.owner == owner and model_id in (None, row.model_id)]
        return sorted((row for row in mine if not _is_over(row, now_s)), key=_age, reverse=True)

    def files(self, row: CheckpointRow) -> list[Path]:
        """Its files. Reads the disk."""
        return sorted(self._folders.at(row.folder).iterdir())

    def described(self, row: CheckpointRow) -> SavedState:
        """What it is of. Reads the disk."""
        with self._place(row) as place:
            return describe(place)

    def checked(self, row: CheckpointRow, file: Path) -> bytes:
        """The SHA-256 of one of its files, which is as it was written; others are refused. Reads all of it."""
        with self._place(row) as place:
            return check_file(place, file.name)

    @contextmanager
    def _place(self, row: CheckpointRow) -> Generator[Path]:
        """Its folder. Clients know it by its path, so that is what errors within call it."""
        place = self._folders.at(row.folder)
        try:
            yield place
        except (CheckpointError, InvalidRequest) as error:
            raise type(error)(str(error).replace(str(place), row.path)) from error

    # ---- saving ------------------------------------------------------------------------------------------------------

    def reserve(self, model_id: str, save: Save) -> str:
        """The path that a save will have. Refuses a name that cannot be, or that is taken."""
        take(_NAME, save.name, "the name of a checkpoint")
        if len(save.name) > LONGEST_NAME:
            raise InvalidRequest(f"the name of a checkpoint has {LONGEST_NAME} characters at most: {len(save.name)}")
        path = path_of(model_id, save.kind, save.name)
        with self._lock:
            if (path in self._being_saved or self._is_taken(path)) and not save.overwrite:
                raise CheckpointExists(
                    f"there is a checkpoint at this path; choose another name, or overwrite it: {path}"
                )
            self._being_saved[path] += 1
        return path

    def release(self, path: str) -> None:
        """A save to it has ended, however it did."""
        with self._lock:
            self._being_saved[path] -= 1
            if not self._being_saved[path]:
                del self._being_saved[path]

    def is_latest(self, path: str, n: int) -> bool:
        """Whether the save of request `n`, which has been written, is the one that the path stands for: one that was
        asked for later may have been written before."""
        with self._lock:
            before = self._rows.get(path)
            latest = max(n, self._latest.get(path, n), n if before is None else before.n)
            self._latest[path] = latest
        return latest == n

    def appear(self, row: CheckpointRow) -> str | None:
        """Its row is committed. Returns the folder that no path stands for any more, if it replaces one."""
        with self._lock:
            before = self._rows.get(row.path)
            self._rows[row.path] = row
        return None if before is None or before.folder == row.folder else before.folder

    def _is_taken(self, path: str) -> bool:
        row = self._rows.get(path)
        return row is not None and not _is_over(row, time.time())

    # ---- changing ----------------------------------------------------------------------------------------------------

    def publish(self, row: CheckpointRow, public: bool) -> "Future[None]":
        """Whether others may read it. What is so already stays so."""
        return self._amend(row, "public", int(public))

    def expire(self, row: CheckpointRow, expires_s: float | None) -> "Future[None]":
        """When it is deleted; None: never."""
        return self._amend(row, "expires_s", expires_s)

    def delete(self, row: CheckpointRow, request: DeletionRow | None = None) -> "Future[None]":
        """Done when it is committed that it is gone. The folder goes then, or, where a replay would read it, when no
        replay would any more."""
        gone = Change("DELETE FROM checkpoint WHERE path = ? AND n = ?", (row.path, row.n))
        noted = () if request is None else (put(request),)
        return then(self._journal.put(gone, *noted), lambda _: self._forget(row))

    def was_deleted(self, request: DeletionRow) -> bool:
        """Whether this request was done before. Waits for the journal."""
        return bool(self._journal.rows(DeletionRow, "id = ?", request.id))

    def delete_expired(self, now_s: float) -> None:
        """Those whose time is over by now, in seconds since the epoch."""
        with self._lock:
            over = [row for row in self._rows.values() if _is_over(row, now_s)]
        for row in over:
            self.delete(row).result()
            log.info("deleted, since its time is over: %s", row.path)
        self.remove_deleted()

    def _amend(self, row: CheckpointRow, column: str, value: float | None) -> "Future[None]":
        change = amend(CheckpointRow, column, value, "path = ?2 AND n = ?3", row.path, row.n)

        def appear(_: None) -> None:
            with self._lock:
                now = self._rows.get(row.path)
                if now is not None and now.n == row.n:
                    self._rows[row.path] = replace(now, **{column: value})

        return then(self._journal.put(change), appear)

    def _forget(self, row: CheckpointRow) -> None:
        """In the journal's thread."""
        with self._lock:
            now = self._rows.get(row.path)
            if now is not None and now.n == row.n:
                del self._rows[row.path]
            self._unwanted.add(row.folder)

    # ---- copying -----------------------------------------------------------------------------------------------------

    def copied(self, source: CheckpointRow, model: ModelRow, expires_s: float | None) -> CheckpointRow:
        """The row of a copy that belongs to this model, in a folder of its own. Files never change once they are
        written, so both have them together where the disk can do that."""
        name = source.folder.rpartition("/")[2]
        folder = f"checkpoints/{model.id}/{source.kind}/{name}.{secrets.token_hex(4)}"
        place = self._folders.at(folder)
        try:
            with new_folder(place) as fresh:
                for file in self.files(source):
                    _link(file, fresh / file.name)
                    LOCAL_DISK.sync(fresh / file.name)
        except FileNotFoundError as error:
            raise CheckpointNotFound(f"this checkpoint is not there any more: {source.path!r}") from error
        return replace(
            source,
            path=path_of(model.id, source.kind, source.name),
            model_id=model.id,
            owner=model.owner,
            folder=folder,
            created_s=time.time(),
            expires_s=expires_s,
            public=0,
        )

    def commit_copy(self, row: CheckpointRow, model: ModelRow) -> "Future[None]":
        """Done when it is there for all."""

        def appear(_: None) -> None:
            replaced = self.appear(row)  # by a copy that was asked for twice at once
            if replaced is not None:
                with self._lock:
                    self._unwanted.add(replaced)

        return then(self._journal.put(put(model), put(row)), appear)

    # ---- folders -----------------------------------------------------------------------------------------------------

    def use(self, folder: str) -> None:
        """A replay would read it, or a client is sent it: it stays until `unuse`."""
        with self._lock:
            self._in_use[folder] += 1

    def unuse(self, folder: str) -> None:
        with self._lock:
            self._in_use[folder] -= 1
            if self._in_use[folder] <= 0:
                del self._in_use[folder]
        self.remove_deleted()

    def remove_folder(self, folder: str) -> None:
        """Now, or when nothing uses it any more."""
        with self._lock:
            self._unwanted.add(folder)
        self.remove_deleted()

    def remove_deleted(self) -> None:
        """The folders that neither a path nor a replay needs. Takes time on a slow disk."""
        with self._lock:
            free = [folder for folder in self._unwanted if folder not in self._in_use]
            self._unwanted.difference_update(free)
        for folder in free:
            self._folders.remove(folder)

    def bytes_of(self, owner: str) -> int:
        """That this owner's checkpoints have."""
        with self._lock:
            return sum(row.size_bytes for row in self._rows.values() if row.owner == owner)

    def bytes_by_owner(self) -> dict[str, int]:
        """Of those that have any."""
        sums = Counter[str]()
        with self._lock:
            for row in self._rows.values():
                sums[row.owner] += row.size_bytes
        return dict(sums)

    def needed(self) -> set[str]:
        """The folders that paths stand for."""
        return {row.folder for row in self._rows.values()}


_NAME = rule_of(CheckpointName)


def row_of(model_id: str, owner: str, n: int, save: Save, folder: Path, name: str) -> CheckpointRow:
    """The row of a save that has ended in this folder, which rows call `name`."""
    created_s = (folder / MANIFEST).stat().st_mtime
    return CheckpointRow(
        path=path_of(model_id, save.kind, save.name),
        model_id=model_id,
        owner=owner,
        kind=save.kind,
        name=save.name,
        n=n,
        folder=name,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir()),
        created_s=created_s,
        expires_s=None if save.ttl_seconds is None else created_s + save.ttl_seconds,
        public=0,
        user_metadata=json.dumps(save.user_metadata),
    )


def _is_over(row: CheckpointRow, now_s: float) -> bool:
    return row.expires_s is not None and row.expires_s < now_s


def _age(row: CheckpointRow) -> tuple[float, int]:
    return row.created_s, row.n


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without links, or a file with as many as it may have
        shutil.copy2(source, target)

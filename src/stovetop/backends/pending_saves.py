"""Saves that were accepted and are not on the disk yet. Who knows their paths may use them at once: a client is made
from such a path, or a list asked for, and it waits for the save. And loads that were accepted and have not read their
files yet: a deletion waits for them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stovetop.futures import APIFuture, pending, resolved, when_all_done, when_done
from stovetop.saved_states import SavedState, describe

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    state: SavedState  # what will be there
    future: "Future[Any]"


class PendingSaves:
    """Of one service. May be used from any thread."""

    def __init__(self) -> None:
        self._by_path: dict[Path, list[_Save]] = {}  # the latest of one path at the end
        self._loads: dict[Path, list[Future[Any]]] = {}
        self._lock = threading.Lock()  # protects both tables: saves end in the threads of the writers

    def add(self, path: Path, state: SavedState, future: "Future[Any]") -> None:
        """A save to `path`, which ends with this future."""
        path, save = _resolved(path), _Save(state, future)
        with self._lock:
            self._by_path.setdefault(path, []).append(save)
        when_done(future, lambda _: self._remove(path, save))

    def add_load(self, path: Path, future: "Future[Any]") -> None:
        """A load from `path`, which ends with this future."""
        path = _resolved(path)
        with self._lock:
            self._loads.setdefault(path, []).append(future)
        when_done(future, lambda _: self._remove_load(path, future))

    def describe(self, path: Path) -> SavedState:
        """What is at this path, or will be when the saves that were accepted are done."""
        with self._lock:
            saves = self._by_path.get(_resolved(path))
            if saves:
                return saves[-1].state
        return describe(path)

    def under(self, folder: Path) -> "list[Future[Any]]":
        """The saves to this path or into this folder."""
        folder = _resolved(folder)
        with self._lock:
            return [
                save.future
                for path, saves in self._by_path.items()
                if path == folder or folder in path.parents
                for save in saves
            ]

    def loads_of(self, path: Path) -> "list[Future[Any]]":
        """The loads from this path."""
        with self._lock:
            return list(self._loads.get(_resolved(path), ()))

    def then(self, folder: Path, read: Callable[[], T], *, after_loads: bool = False) -> APIFuture[T]:
        """What `read` returns when the saves under this folder are done, and if need be the loads from it: at once, if
        there are none."""
        before = [*self.under(folder), *(self.loads_of(folder) if after_loads else ())]
        if not before:
            return resolved(read())
        result = pending()
        when_all_done(before, lambda: _settle(result, read))
        return APIFuture(result)

    def _remove(self, path: Path, save: _Save) -> None:
        with self._lock:
            self._by_path[path].remove(save)
            if not self._by_path[path]:
                del self._by_path[path]

    def _remove_load(self, path: Path, future: "Future[Any]") -> None:
        with self._lock:
            self._loads[path].remove(future)
            if not self._loads[path]:
                del self._loads[path]


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a path that cannot be: nothing is saved there
        return path


def _settle(result: "Future[Any]", read: Callable[[], object]) -> None:
    try:
        value = read()
    except BaseException as error:  # it belongs to the one who waits
        result.set_exception(error)
    else:
        result.set_result(value)

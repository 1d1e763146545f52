"""What the clients of one service have saved, or are saving: so that what does not fit is refused by the call, and a
path may be used before anything is there. Of what others saved the server knows."""

import threading
from concurrent.futures import Future
from typing import Any

from stovetop.errors import CheckpointNotFound
from stovetop.futures import when_done
from stovetop.saved_states import SavedState
from stovetop.tinker_paths import SCHEME


def require_path(path: str) -> None:
    """Refuses what cannot be the path of a checkpoint on a server."""
    if not path.startswith(SCHEME):
        raise CheckpointNotFound(f"a server's checkpoints have paths that begin with {SCHEME}; this is none: {path}")


class OwnSaves:
    """Of one service. May be used from any thread."""

    def __init__(self) -> None:
        self._states: dict[str, SavedState | None] = {}  # what is there, or will be; None where that is not known
        self._lasting: set[str] = set()  # what goes only when it is deleted
        self._pending: dict[str, list[Future[Any]]] = {}
        self._lock = threading.Lock()  # protects all three

    def add(self, path: str, state: SavedState | None, future: "Future[Any]", *, lasts: bool) -> None:
        """A save to this path, which ends with this future; `state` is what it holds, if that is known, and whether it
        `lasts`, or goes by itself."""
        with self._lock:
            (self._lasting.add if lasts else self._lasting.discard)(path)
            before = [self._states[path]] if path in self._states else []
            self._states[path] = state
            self._pending.setdefault(path, []).append(future)
        when_done(future, lambda done: self._ended(path, done, before, state))

    def find(self, path: str) -> SavedState | None:
        """What is there, or will be; None where this service does not know."""
        return self._states.get(path)

    def pending(self, path: str) -> "list[Future[Any]]":
        """The saves to this path, or to paths below it, that have not ended."""
        with self._lock:
            return [
                future
                for each, futures in self._pending.items()
                if each == path or each.startswith(f"{path}/")
                for future in futures
            ]

    def is_there(self, path: str) -> bool:
        """Whether a save to it has succeeded, none is on its way, and it cannot have gone by itself."""
        with self._lock:
            return path in self._states and path in self._lasting and path not in self._pending

    def forget(self, path: str) -> None:
        """It was deleted."""
        with self._lock:
            self._states.pop(path, None)

    def _ended(self, path: str, done: "Future[Any]", before: list[SavedState | None], state: SavedState | None) -> None:
        """A save that failed leaves what was `before`."""
        with self._lock:
            self._pending[path].remove(done)
            if not self._pending[path]:
                del self._pending[path]
            if done.exception() is None or path not in self._states or self._states[path] is not state:
                return
            del self._states[path]
            if before:
                self._states[path] = before[0]

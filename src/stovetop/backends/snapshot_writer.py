"""The thread that writes snapshots (`ops.Snapshot`) to the disk, so that the engine's goes on meanwhile."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from stovetop.backends.endings import Crew
from stovetop.backends.interruption import Interruptible
from stovetop.engine.containment import forget_frames
from stovetop.engine.ops import Snapshot
from stovetop.futures import AnsweringThread, HandOver

log = logging.getLogger(__name__)

MAX_WAITING = 2  # snapshots in memory, besides the one that is being written


Done = Callable[[BaseException | None], None]  # told once, in the writer's thread: None, or why nothing was written


class _Waiting(NamedTuple):
    snapshot: Snapshot
    done: Done


class SnapshotWriter:
    """Writes one snapshot after the other, in the order in which they come. Used by one thread.

    Consumes snapshots, produces calls of `done`, and behind each a call of `wake`, by when `idle` and `has_room` are
    true of what is left, so that one who waits for these looks again. Waits when there is nothing to write; stopped by
    `close`, which writes what is there, or by `drop_waiting`, which only finishes what is being written. The thread
    starts with the first snapshot. At the program's end, what is being written for long is interrupted: it is there as
    a whole or not at all.
    """

    def __init__(self, name: str, crew: Crew, hand_over: HandOver, wake: Callable[[], object]) -> None:
        self._inbox: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._crew = crew
        self._wake = wake
        self._work = Interruptible()
        self.thread: threading.Thread = AnsweringThread(self._run, f"writer {name}", hand_over)
        self._num_in_memory = 0
        self._num_unanswered = 0
        self._num_dropped = 0
        self._dropped: BaseException | None = None
        self._lock = threading.Lock()  # protects the counts, which both threads change

    @property
    def has_room(self) -> bool:
        """Whether the memory for one more snapshot may be taken."""
        return self._num_in_memory <= MAX_WAITING

    @property
    def idle(self) -> bool:
        """All that came is written, and `done` was told of it."""
        return self._num_unanswered == 0

    def put(self, snapshot: Snapshot, done: Done) -> None:
        """Takes it over, to be written when those before it are."""
        if self.thread.ident is None:
            self._crew.start(self)
        with self._lock:
            self._num_in_memory += 1
            self._num_unanswered += 1
        self._inbox.put(_Waiting(snapshot, done))

    def close(self) -> None:
        """Waits until all is written, and ends the thread."""
        if self.thread.ident is not None:
            self._inbox.put(None)
            self.thread.join()

    def drop(self, reason: str, *, warn: bool = True) -> None:
        """See `endings.Ending`. The thread that uses it drops what waits."""

    def interrupt(self) -> None:
        self._work.interrupt()

    def drop_waiting(self, reason: BaseException) -> int:
        """The same, but what has not begun is not written: `done` is told the reason. Returns how many those were."""
        self._dropped = reason
        self.close()
        return self._num_dropped

    def _run(self) -> None:
        while (waiting := self._inbox.get()) is not None:
            snapshot, done = waiting
            del waiting  # what was written is let go before the next one comes
            self._num_dropped += self._dropped is not None
            try:
                error = self._dropped or self._failure_of(snapshot)
                if error is not None:
                    forget_frames(error)
            except BaseException as raised:
                error = raised
            del snapshot
            with self._lock:
                self._num_in_memory -= 1
            for _ in range(2):  # where the caller's function raises it is told of that instead, once
                try:
                    done(error)
                    break
                except BaseException as raised:  # it ends nothing here
                    log.exception("what was to be done after a save raised")
                    error = raised
            del done
            with self._lock:
                self._num_unanswered -= 1
            for _ in range(2):  # the same
                try:
                    self._wake()
                    break
                except BaseException:
                    log.exception("one who waits for saves could not be woken")
        self._crew.leave(self)

    def _failure_of(self, snapshot: Snapshot) -> BaseException | None:
        try:
            self._work.run(snapshot.write)
        except BaseException as error:  # it belongs to the one who asked for this save
            return error
        return None

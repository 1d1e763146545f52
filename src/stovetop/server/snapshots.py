"""The snapshots of one model: its state right behind a request that leaves no gradient, where weights and moments are
all that it is. Replay begins at the last one, so what it covers need not be kept: bodies of requests, the snapshot
before it, checkpoints that were loaded and are deleted.

One is made when so much work lies behind the last one that the time for it is a small share (`SNAPSHOT_WHEN`), which
bounds a replay by the same number of snapshots' times; and when the server stops. Weights that were frozen in memory
before that point are written with it, since a replay would not make them any more.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from stovetop.errors import StovetopError
from stovetop.futures import ClientFuture, pending, when_all_done, when_done
from stovetop.server.journal import done
from stovetop.server.rows import ModelRow, RequestRow, SnapshotRow, amend, put
from stovetop.server.sampler import Writing
from stovetop.server.shared import Shared
from stovetop.server.verbs import Verb, learns, rests
from stovetop.types import SaveWeightsResponse

log = logging.getLogger(__name__)

SNAPSHOT_WHEN = 20.0  # times the seconds that a snapshot takes: a twentieth of the time at most goes into them
FIRST_SNAPSHOT_S = 0.5  # what one is taken for before the first was measured

Client = ClientFuture[Any] | None


class Snapshots:
    """Used under the lock of the model's program, but for `worked` and what is done in the thread of results."""

    def __init__(self, model: ModelRow, shared: Shared) -> None:
        self._model = model
        self._shared = shared
        self._at_rest = False  # no gradient is left: one may be made
        self._last_n = 0  # of the requests that were called
        self._tail_s = 0.0  # of work behind the last snapshot
        self._idle_since_s = time.monotonic()  # when the last result came
        self._last: SnapshotRow | None = None
        self._last_s = FIRST_SNAPSHOT_S  # that it took
        self._being_written: Future[None] = done()
        self._reads: list[str] = []  # folders that a replay would read

    @property
    def covers_all(self) -> bool:
        """Whether nothing lies behind the last snapshot, which is written."""
        return self._last is not None and self._last.n >= self._last_n and self._being_written.done()

    @property
    def is_under_way(self) -> bool:
        return not self._being_written.done()

    @property
    def can_rest(self) -> bool:
        """Whether no gradient is left, so that a snapshot is all that the model is."""
        return self._at_rest

    @property
    def last(self) -> SnapshotRow | None:
        return self._last

    def unread(self) -> None:
        """No replay needs anything any more."""
        reads, self._reads = self._reads, []
        for folder in reads:
            self._shared.checkpoints.unuse(folder)

    def restored(self, snapshot: SnapshotRow) -> None:
        """The model was made from it."""
        self._last, self._at_rest, self._last_n = snapshot, True, snapshot.n

    def worked(self, accepted_s: float) -> None:
        """A result came, of a request that was accepted then. In the thread of results."""
        now_s = time.monotonic()
        self._tail_s += now_s - max(self._idle_since_s, accepted_s)
        self._idle_since_s = now_s

    def reads(self, folder: str) -> None:
        """A replay would read this: it must stay."""
        self._shared.checkpoints.use(folder)
        self._reads.append(folder)

    def behind(self, n: int, verb: Verb, client: Client) -> None:
        """The call of this verb is the last one by now."""
        self._last_n = n
        if learns(verb):
            self._at_rest = False
        if rests(verb):
            self._at_rest = True
            if self._tail_s > SNAPSHOT_WHEN * self._last_s and self._being_written.done():
                self._begin(n, client)

    def rest(self, client: Client) -> "Future[None]":
        """See `Program.rest`."""
        known = self._last is not None and self._last.n >= self._last_n
        if self._at_rest and not known and self._being_written.done():
            self._begin(self._last_n, client)
        return self._being_written

    def _begin(self, n: int, client: Client) -> None:
        assert client is not None, "request 0 makes the client"
        try:
            saving = client.result().save_state(f"snapshot.{n}", overwrite=True)
        except StovetopError as error:
            log.warning("no snapshot of %s: %s", self._model.id, error)
            return
        reads, self._reads = self._reads, []
        attempt = _Attempt(n, reads, time.monotonic(), self._tail_s)
        self._being_written = attempt.ended
        later = self._shared.requests.later
        when_done(saving.future(), lambda saved: later(lambda: self._saved(attempt, saved)))

    # ---- in the thread of results, one after the other ---------------------------------------------------------------

    def _saved(self, attempt: "_Attempt", saved: "Future[SaveWeightsResponse]") -> None:
        """The state is whole; now the weights that were frozen before it."""
        try:
            folder = self._shared.folders.name_of(saved.result().path)
            took_s = max(1e-3, time.monotonic() - max(attempt.begun_s, self._idle_since_s))
            frozen = self._shared.samplers.write_all(self._model.id, attempt.n)
        except BaseException as error:  # what there is can still be replayed
            self._failed(attempt, error)
            return
        later = self._shared.requests.later
        when_all_done(
            [writing.future for writing in frozen],
            lambda: later(lambda: self._commit(attempt, folder, took_s, frozen)),
        )

    def _commit(self, attempt: "_Attempt", folder: str, took_s: float, frozen: Sequence[Writing]) -> None:
        try:
            rows = [self._shared.samplers.written(writing) for writing in frozen]
        except BaseException as error:
            self._failed(attempt, error)
            return
        before, self._last = self._last, SnapshotRow(self._model.id, attempt.n, folder)
        self._last_s, self._tail_s = took_s, self._tail_s - attempt.tail_s
        of_these = "model_id = ?2 AND n <= ?3 AND body IS NOT NULL"
        covered = amend(RequestRow, "body", None, of_these, self._model.id, attempt.n)
        committed = self._shared.journal.put(put(self._last), covered, *map(put, rows))
        later = self._shared.requests.later
        committed.add_done_callback(lambda done: later(lambda: self._committed(attempt, before, done)))

    def _committed(self, attempt: "_Attempt", before: SnapshotRow | None, done: "Future[None]") -> None:
        """What nothing needs any more goes."""
        if done.exception() is None:
            for folder in attempt.reads:
                self._shared.checkpoints.unuse(folder)
            if before is not None:
                self._shared.folders.remove(before.folder)
        attempt.ended.set_result(None)

    def _failed(self, attempt: "_Attempt", error: BaseException) -> None:
        log.warning("no snapshot of %s: %s", self._model.id, error)
        self._reads += attempt.reads
        attempt.ended.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """At one snapshot."""

    n: int  # of the last request that it covers
    reads: list[str]
    begun_s: float
    tail_s: float  # of work that it covers
    ended: "Future[None]" = field(default_factory=pending)

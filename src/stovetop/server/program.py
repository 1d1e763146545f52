"""One model: its requests in order, each called, put into the journal and acknowledged.

On the model's turn the verb is *called* on its client, which checks it and puts it behind those before; then, before
anything else of this model, its row is *put* into the journal; and it is *answered* when the row is committed. So the
order of the journal is the order of the program. What was called and not committed was promised to no client, which
sends it again. After a restart `replay` calls what the journal holds, by the same code.

A forward_backward that cannot be used keeps its place: its future fails, and so does the next optim_step.

A snapshot is a state of the model right behind a request that leaves no gradient. It bounds how much is replayed.

A model whose client is silent goes out of memory (`sleep`): its snapshot and the rows behind it are all that it is, so
its next request makes it again as a restart would (`_wake`).
"""

import asyncio
import logging
import threading
import time
import zlib
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from stovetop.concurrency import in_thread
from stovetop.errors import CheckpointError, InvalidRequest, NotFoundError, StovetopError
from stovetop.server.journal import done, follow
from stovetop.server.live import Called, Live, made
from stovetop.server.requests import Gone, Outcome, Request, Result, digest_of, failure_of
from stovetop.server.rows import Change, ModelRow, RequestRow, ResultRow, SnapshotRow, put
from stovetop.server.shared import Shared
from stovetop.server.snapshots import Snapshots
from stovetop.server.verbs import Call, Freeze, Make, MakeFrom, Save, Verb, learns, name_of, num_tokens_of, read_verb
from stovetop.types import GetInfoResponse, ModelData

log = logging.getLogger(__name__)

ROOM_S = 20.0  # that a request waits to be accepted; the SDK asks again for minutes
MAX_ATTEMPTS = 3  # at replaying one request, before it is failed instead


class NotBroughtBack(StovetopError):
    """What a model was cannot be had again now: something that its replay reads is damaged, or its replay ends the
    server. What it has saved can be loaded."""


class Program:
    """See above. `accept` is for the event loop, everything else for threads."""

    def __init__(
        self, model: ModelRow, shared: Shared, *, is_asleep: bool = False, last_seq: int = -1, last_request_s: float = 0
    ) -> None:
        """One that is asleep is in the journal, up to its request `last_seq`."""
        self.model = model
        self.last_request_s = max(last_request_s, model.created_s)  # since the epoch
        self._shared = shared
        self._live: Live | None = None
        self._is_asleep = is_asleep
        self._slept_with: Snapshots | None = None  # knows which folders the replay reads that wakes it
        self._by_seq: dict[int, Request] = {}
        self._turn = asyncio.Lock()  # serves requests in the order in which they came
        self._lock = threading.Lock()  # protects all of this: a turn whose waiter was cancelled goes on in its thread
        self._last_seq = last_seq

    # ---- accepting ---------------------------------------------------------------------------------------------------

    @property
    def is_made(self) -> bool:
        """Whether its service took it on."""
        return self._live is not None or self._is_asleep

    @property
    def has_requests(self) -> bool:
        """Whether any was accepted, and is still known."""
        return self._last_seq >= 0

    @property
    def is_empty(self) -> bool:
        """A run that has no model: that of a copy, or one of a session that has finished long ago."""
        return self._is_asleep and not self.has_requests

    @property
    def is_in_memory(self) -> bool:
        return self._live is not None

    def info(self) -> GetInfoResponse:
        """What the model is. Waits until it is made."""
        with self._lock:
            client = None if self._live is None else self._live.client
        if client is not None:
            return made(client).get_info()
        name = self.model.base_model
        data = ModelData(arch="lora", model_name=name, tokenizer_id=name)
        return GetInfoResponse(data, self.model.id, True, self.model.lora_rank, name)

    async def accept(self, call: Call, first: Change | None = None) -> Request:
        """Calls it in its turn, and returns when it is committed, after `first`. The same seq is the same request.
        Raises where the service refuses to make the model: then there is none."""
        async with self._turn:
            if call.seq > self._last_seq:
                await self._wait_for_room(num_tokens_of(call.verb))
            request = await in_thread(partial(self._begin, call, first))
        await asyncio.wrap_future(request.committed)
        return request

    async def _wait_for_room(self, num_tokens: int) -> None:
        """In the queue of its owner. Raises RateLimitError when none has come in `ROOM_S` seconds."""
        limits, owner = self._shared.limits, self.model.owner
        give_up_s = asyncio.get_running_loop().time() + ROOM_S
        while (left := limits.room(owner, num_tokens)) is not None:
            try:
                async with asyncio.timeout_at(give_up_s):
                    await asyncio.wrap_future(left)
            except TimeoutError:
                limits.require_room(owner, num_tokens)
                return

    def _begin(self, call: Call, first: Change | None) -> Request:
        with self._lock:
            digest = digest_of(call.identity)
            known = self._by_seq.get(call.seq) or self._dropped(call.seq)
            if known is not None:
                known.require_same(digest)
                return known
            live = self._live or (self._wake() if self._is_asleep else self._new(call))
            n = next(self._shared.numbers)
            request = self._request(call.seq, name_of(call.verb), digest, n)
            request.num_tokens = num_tokens_of(call.verb)
            called = live.call(n, call.verb, request.words)
            self._live, self.last_request_s = live, time.time()
            body = zlib.compress(call.body, 1)
            row = RequestRow(n, self.model.id, call.seq, call.kind, digest, body, self.last_request_s)
            changes = (put(row), *called.changes) if first is None else (first, put(row), *called.changes)
            request.committed = self._shared.journal.put(*changes)
            follow(request.committed, called.committed)
            self._add(call.seq, request)
            self._shared.requests.follow(request, called.future, partial(self._written, live, request, called))
            live.snapshots.behind(n, call.verb, live.client)
            return request

    def _new(self, call: Call) -> Live:
        if not isinstance(call.verb, Make | MakeFrom):  # it came while the model was being made, which was refused
            raise NotFoundError(f"there is no model of this id: {self.model.id!r}")
        return Live(self.model, self._shared)

    def forget(self, requests: Collection[str]) -> bool:
        """Their results are asked for no more, but they are known: see `_dropped`. False where the model is at work, so
        that this has to be asked again."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for seq in [seq for seq, request in self._by_seq.items() if request.id in requests]:
                del self._by_seq[seq]
            return True
        finally:
            self._lock.release()

    def find(self, seq: int) -> Request | None:
        """The request of this seq. Waits for the journal where it is not in memory any more."""
        with self._lock:
            return self._by_seq.get(seq) or self._dropped(seq)

    def _dropped(self, seq: int) -> Request | None:
        """A request that was done, and that is in the journal alone by now."""
        if seq > self._last_seq:
            return None
        journal = self._shared.journal
        rows = journal.rows(RequestRow, "model_id = ? AND seq = ?", self.model.id, seq)
        if not rows:
            return None
        results = journal.rows(ResultRow, "n = ?", rows[0].n)
        return self._known(rows[0], Result.stored(results[0]) if results else None)

    def _known(self, row: RequestRow, result: Result | None) -> Request:
        """A request of the journal, with its result, if that is still kept."""
        request = self._request(row.seq, "request", row.digest, row.n)
        request.committed.set_result(None)
        if result is not None:
            request.finish(result)
        else:
            request.finished.set_exception(Gone(f"the result of this {request.what} is not kept any more"))
        return request

    def _request(self, seq: int, verb: str, digest: bytes, n: int) -> Request:
        what = f"{verb} ({f'seq_id {seq} of ' if seq else ''}{self.model.id})"
        response = {"model_id": self.model.id}
        return Request(f"{self.model.id}:{seq}", self.model.owner, what, verb, digest, n, response)

    def _add(self, seq: int, request: Request) -> None:
        self._by_seq[seq] = request
        self._last_seq = max(self._last_seq, seq)
        self._shared.requests.add(request)

    def _written(self, live: Live, request: Request, called: Called, value: object) -> Outcome:
        """In the thread of results."""
        live.snapshots.worked(request.accepted_s)
        return called.written(value)

    # ---- out of memory, and back -------------------------------------------------------------------------------------

    def rest(self) -> "Future[None]":
        """Makes a snapshot of all that was done, where there is one to make; the future is done when it is written.
        What cannot be in a snapshot is replayed."""
        with self._lock:
            return done() if self._live is None else self._live.snapshots.rest(self._live.client)

    def sleep(self) -> None:
        """Takes the model out of memory, when all its requests are done and their results are written down. A snapshot
        is made first, unless there is a gradient, which only a replay brings back. Waits for nothing: what is not done
        yet is so when this is called again."""
        if not self._lock.acquire(blocking=False):
            return  # it is at work
        try:
            live = self._live
            if live is None or live.client is None or not live.client.done() or live.snapshots.is_under_way:
                return
            if any(request.finished_s is None for request in self._by_seq.values()):
                return
            was_made = live.client.future().exception() is None
            if was_made and live.snapshots.can_rest and not live.snapshots.covers_all:
                live.snapshots.rest(live.client)
                return
            live.release()
            self._live, self._is_asleep, self._slept_with = None, True, live.snapshots
            log.info("%s: out of memory until its next request", self.model.id)
        finally:
            self._lock.release()

    def wake(self) -> None:
        """Makes the model again, and does again what no snapshot covers."""
        with self._lock:
            if self._is_asleep:
                self._wake()

    def _wake(self) -> Live:
        """What is computed again is compared with what is stored: a difference means that this machine, or another
        version of a library, rounds otherwise."""
        live, journal = Live(self.model, self._shared), self._shared.journal
        of_model = "model_id = ? AND body IS NOT NULL"  # those that the snapshot does not cover
        rows = journal.rows(RequestRow, of_model, self.model.id, order="n")
        kept = journal.rows(ResultRow, f"n IN (SELECT n FROM request WHERE {of_model})", self.model.id)
        results = {row.n: Result.stored(row) for row in kept}
        try:
            for snapshot in journal.rows(SnapshotRow, "model_id = ?", self.model.id):
                live.restore(snapshot)
                live.made()
            differing = [row.seq for row in rows if not self._replay(live, row, results.get(row.n))]
            if live.client is None and not rows:
                raise Gone(f"this model is not kept any more; make one from what it has saved: {self.model.id!r}")
        except BaseException as error:
            live.release()
            if isinstance(error, InvalidRequest | CheckpointError):
                raise self._not_brought_back(error) from error
            raise
        self._live, self._is_asleep = live, False
        if self._slept_with is not None:
            self._slept_with.unread()
        log.info("%s: %d requests replayed", self.model.id, len(rows))
        if differing:
            log.warning(
                "request %d of %s came out otherwise than before: its bits may depend on the processor, the number of "
                "threads or the version of a library, one of which has changed",
                differing[0],
                self.model.id,
            )
        return live

    def _replay(self, live: Live, row: RequestRow, result: Result | None) -> bool:
        """Does a request again. `result` is what the journal has of it; returns whether it came out the same, as far as
        that is known. One during which the server ended several times is failed instead, so that the server can start.
        """
        assert row.body is not None, "a body is kept until a snapshot covers it"
        succeeded = result is not None and result.form != "failed"
        if row.attempts >= MAX_ATTEMPTS:
            if succeeded:  # what came after it is of a model that has done it
                reason = f"the server ended {row.attempts} times while it did seq_id {row.seq} again"
                raise self._not_brought_back(reason)
            result = Result.failed(f"the server ended {row.attempts} times while it did this request", "server")
        self._shared.journal.put(put(replace(row, attempts=row.attempts + 1))).result()
        verb = read_verb(row.kind, zlib.decompress(row.body))
        request = self._request(row.seq, name_of(verb), row.digest, row.n)
        outcome = self._done_again(live, row.n, verb, request, result)
        if self._shared.requests.has_failed():
            raise StovetopError(f"the engine failed during the replay of {request.what}")
        if succeeded and outcome.result.form == "failed":
            self._shared.journal.put(put(row)).result()  # the server did not end
            raise self._not_brought_back(outcome.result.message)
        final = result or outcome.result
        self._shared.journal.put_soon(
            put(replace(row, attempts=0)), put(ResultRow(row.n, final.form, final.body, time.time()))
        )
        request.committed.set_result(None)
        request.finish(final)
        self._add(row.seq, request)
        live.snapshots.behind(row.n, verb, live.client)
        return result is None or result == outcome.result

    def _not_brought_back(self, reason: object) -> NotBroughtBack:
        return NotBroughtBack(
            f"this model cannot be brought back; make another one from what it has saved, or put back a copy of the "
            f"server's folder: {self.model.id!r}: {str(reason).replace(f'{self._shared.folders.storage}/', '')}"
        )

    def _done_again(self, live: Live, n: int, verb: Verb, request: Request, result: Result | None) -> Outcome:
        """What came of it by itself, a fault of the server's say, would not come again: it stays what it was."""
        if result is not None and result.is_fault:
            if learns(verb):
                live.spoil(result.message)
            if isinstance(verb, Make | MakeFrom):
                live.fail(result.message)
            return Outcome(result)
        if result is not None and isinstance(verb, Save):
            return Outcome(result)  # it is there, or was deleted since
        if result is not None and isinstance(verb, Freeze) and self._shared.samplers.is_there(verb.sampler_id):
            return Outcome(result)
        try:
            called = live.call(n, verb, request.words)
            called.committed.set_result(None)
            outcome = self._written(live, request, called, called.future.result())
        except BaseException as error:  # it belongs to the one who waits
            return Outcome(failure_of(request, error))
        if outcome.changes:
            self._shared.journal.put(*outcome.changes).result()
        outcome.appear()
        return outcome

    def end(self) -> None:
        """Its session has finished, and nothing can be asked of it any more: its snapshot, its requests and their
        results go. What it has saved stays, and so does the run. Not before it sleeps."""
        with self._lock:
            if not self._is_asleep or not self.has_requests:
                return
            snapshots = self._shared.journal.rows(SnapshotRow, "model_id = ?", self.model.id)
            of_model = (self.model.id,)
            self._shared.journal.put(
                Change("DELETE FROM snapshot WHERE model_id = ?", of_model),
                Change("DELETE FROM result WHERE n IN (SELECT n FROM request WHERE model_id = ?)", of_model),
                Change("DELETE FROM request WHERE model_id = ?", of_model),
            ).result()
            self._by_seq.clear()
            self._last_seq = -1
            for snapshot in snapshots:
                self._shared.folders.remove(snapshot.folder)
            if self._slept_with is not None:
                self._slept_with.unread()

"""One model: its requests in order, each called, put into the journal and acknowledged.

On the model's turn the verb is *called* on its client, which checks it and puts it behind those before; then, before
anything else of this model, its row is *put* into the journal; and it is *answered* when the row is committed. So the
order of the journal is the order of the program. What was called and not committed was promised to no client, which
sends it again. After a restart `replay` calls what the journal holds, by the same code.

A forward_backward that cannot be used keeps its place: its future fails, and so does the next optim_step.

A snapshot is a state of the model right behind a request that leaves no gradient. It bounds how much is replayed.
"""

import asyncio
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from stovetop.client import TrainingClient
from stovetop.concurrency import in_thread
from stovetop.errors import InvalidRequest, QueueFull, StovetopError
from stovetop.futures import ClientFuture, pending, when_done
from stovetop.server import codec
from stovetop.server.checkpoints import path_of, row_of
from stovetop.server.codec import ForwardBackward
from stovetop.server.requests import Gone, Outcome, Request, Result, digest_of, failure_of
from stovetop.server.rows import Change, CheckpointRow, ModelRow, RequestRow, ResultRow, SamplerRow, SnapshotRow, put
from stovetop.server.shared import Shared
from stovetop.server.snapshots import Snapshots
from stovetop.server.verbs import (
    Call,
    Freeze,
    Load,
    Make,
    MakeFrom,
    Refused,
    Save,
    Step,
    Verb,
    learns,
    name_of,
    num_tokens_of,
    read_verb,
)
from stovetop.types import AdamParams, ForwardBackwardOutput, GetInfoResponse

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # at replaying one request, before it is failed instead


@dataclass(frozen=True, slots=True, eq=False)
class _Called:
    """A verb that was called: what will come of it, how that is written down, and what is committed with the call."""

    future: "Future[Any]"
    written: Callable[[Any], Outcome]
    changes: tuple[Change, ...] = ()


class Program:
    """See above. `accept` is for the event loop, everything else for threads."""

    def __init__(self, model: ModelRow, shared: Shared) -> None:
        self.model = model
        self._shared = shared
        self._client: ClientFuture[TrainingClient] | None = None
        self._by_seq: dict[int, Request] = {}
        self._turn = asyncio.Lock()  # serves requests in the order in which they came
        self._lock = threading.Lock()  # protects all of this: a turn whose waiter was cancelled goes on in its thread
        self._last_seq = 0
        self._snapshots = Snapshots(model, shared)

    # ---- accepting ---------------------------------------------------------------------------------------------------

    @property
    def is_made(self) -> bool:
        """Whether its service took it on."""
        return self._client is not None

    def info(self) -> GetInfoResponse:
        """What the model is. Waits until it is made."""
        return self._made().get_info()

    async def accept(self, call: Call, first: Change | None = None) -> Request:
        """Calls it in its turn, and returns when it is committed, after `first`. The same seq is the same request.
        Raises where the service refuses to make the model: then there is none."""
        async with self._turn:
            request = await in_thread(partial(self._begin, call, first))
        await asyncio.wrap_future(request.committed)
        return request

    def _begin(self, call: Call, first: Change | None) -> Request:
        with self._lock:
            digest = digest_of(call.identity)
            known = self._by_seq.get(call.seq) or self._dropped(call.seq)
            if known is not None:
                known.require_same(digest)
                return known
            n = next(self._shared.numbers)
            request = self._request(call.seq, self._what(call.seq, call.verb), digest, n)
            request.num_tokens = num_tokens_of(call.verb)
            called = self._call(n, call.verb, request.words)
            row = RequestRow(n, self.model.id, call.seq, call.kind, digest, zlib.compress(call.body, 1))
            changes = (put(row), *called.changes) if first is None else (first, put(row), *called.changes)
            request.committed = self._shared.journal.put(*changes)
            self._add(call.seq, request)
            self._shared.requests.follow(request, called.future, partial(self._written, request, called))
            self._snapshots.behind(n, call.verb, self._client)
            return request

    def forget(self, requests: set[str]) -> None:
        """Their results are asked for no more, but they are known: see `_dropped`."""
        with self._lock:
            for seq in [seq for seq, request in self._by_seq.items() if request.id in requests]:
                del self._by_seq[seq]

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
        request = self._request(row.seq, f"request (seq_id {row.seq} of {self.model.id})", row.digest, row.n)
        request.committed.set_result(None)
        if result is not None:
            request.finish(result)
        else:
            request.finished.set_exception(Gone(f"the result of this {request.what} is not kept any more"))
        return request

    def _request(self, seq: int, what: str, digest: bytes, n: int) -> Request:
        response = {"model_id": self.model.id}
        return Request(f"{self.model.id}:{seq}", self.model.owner, what, digest, n, response)

    def _what(self, seq: int, verb: Verb) -> str:
        return f"{name_of(verb)} ({f'seq_id {seq} of ' if seq else ''}{self.model.id})"

    def _add(self, seq: int, request: Request) -> None:
        self._by_seq[seq] = request
        self._last_seq = max(self._last_seq, seq)
        self._shared.requests.add(request)

    def _written(self, request: Request, called: _Called, value: Any) -> Outcome:
        """In the thread of results."""
        self._snapshots.worked(request.accepted_s)
        return called.written(value)

    # ---- after a restart, in one thread, before anything is accepted -------------------------------------------------

    def restore(self, snapshot: SnapshotRow) -> None:
        """The model as it was behind its request `snapshot.n`."""
        metadata = json.loads(self.model.user_metadata)
        self._client = self._shared.service.create_training_client_from_state_with_optimizer(
            self._place(snapshot.folder), self.model.base_model, metadata, model_id=self.model.id
        )
        self._snapshots.restored(snapshot)

    def know(self, row: RequestRow, result: Result | None) -> None:
        """A request that needs no replay, because the snapshot covers it."""
        self._add(row.seq, self._known(row, result))

    def replay(self, row: RequestRow, result: Result | None) -> bool:
        """Does a request again. `result` is what the journal has of it; returns whether it came out the same, as far as
        that is known. One during which the server ended several times is failed instead, so that the server can start.
        """
        assert row.body is not None, "a body is kept until a snapshot covers it"
        if row.attempts >= MAX_ATTEMPTS:
            result = Result.failed(f"the server ended {row.attempts} times while it did this request", "server")
        self._put_row(replace(row, attempts=row.attempts + 1)).result()
        verb = read_verb(row.kind, zlib.decompress(row.body))
        request = self._request(row.seq, self._what(row.seq, verb), row.digest, row.n)
        outcome = self._done_again(row.n, verb, request, result)
        if self._shared.requests.has_failed():
            raise StovetopError(f"the engine failed during the replay of {request.what}")
        final = result or outcome.result
        self._shared.journal.put_soon(
            put(replace(row, attempts=0)), put(ResultRow(row.n, final.form, final.body, time.time()))
        )
        request.committed.set_result(None)
        request.finish(final)
        self._add(row.seq, request)
        self._snapshots.behind(row.n, verb, self._client)
        return result is None or result == outcome.result

    def _done_again(self, n: int, verb: Verb, request: Request, result: Result | None) -> Outcome:
        """What came of it by itself, a fault of the server's say, would not come again: it stays what it was."""
        if result is not None and result.is_fault:
            if learns(verb):
                self._spoil(result.message)
            return Outcome(result)
        if result is not None and isinstance(verb, Save):
            return Outcome(result)  # it is there, or was deleted since
        try:
            called = self._call(n, verb, request.words)
            outcome = self._written(request, called, called.future.result())
        except BaseException as error:  # it belongs to the one who waits
            return Outcome(failure_of(request, error))
        if outcome.changes:
            self._shared.journal.put(*outcome.changes).result()
        outcome.appear()
        return outcome

    def _put_row(self, row: RequestRow) -> "Future[None]":
        return self._shared.journal.put(put(row))

    def _place(self, folder: str) -> str:
        return str(self._shared.folders.at(folder))

    # ---- calling -----------------------------------------------------------------------------------------------------

    def _call(self, n: int, verb: Verb, words: dict[str, str]) -> _Called:
        """`words` gets what messages are to call otherwise."""
        if isinstance(verb, MakeFrom | Load):
            words[self._place(verb.folder)] = verb.path
        if isinstance(verb, Make | MakeFrom):
            return self._make(verb)
        try:
            return self._call_on(self._made(), n, verb)
        except QueueFull:  # nothing was called: the client asks again when there is room
            raise
        except StovetopError as error:  # in the place of what it refuses
            if isinstance(verb, ForwardBackward) and not verb.forward_only:
                self._spoil(str(error))
            return _failing(error)

    def _made(self) -> TrainingClient:
        assert self._client is not None, "request 0 makes the client"
        try:
            return self._client.result()
        except StovetopError as error:
            raise InvalidRequest(f"the model could not be made: {error}") from error

    def _make(self, verb: Make | MakeFrom) -> _Called:
        service, model_id = self._shared.service, self.model.id
        metadata = {key: str(value) for key, value in verb.user_metadata.items()}
        match verb:
            case Make():
                self._client = service.create_lora_training_client(
                    verb.base_model,
                    verb.rank,
                    verb.seed,
                    verb.train_mlp,
                    verb.train_attn,
                    verb.train_unembed,
                    metadata,
                    model_id=model_id,
                )
                answer = {"type": "create_model", "model_id": model_id}
            case MakeFrom():
                create = (
                    service.create_training_client_from_state_with_optimizer
                    if verb.with_optimizer
                    else service.create_training_client_from_state
                )
                self._client = create(self._place(verb.folder), verb.base_model, metadata, model_id=model_id)
                self._snapshots.reads(verb.folder)
                answer = {"type": "load_weights", "model_id": model_id, "path": verb.path}
            case _:
                assert_never(verb)
        return _Called(self._client.future(), lambda _: Outcome(Result.of(answer)))

    def _call_on(self, client: TrainingClient, n: int, verb: Verb) -> _Called:
        match verb:
            case Make() | MakeFrom():
                raise AssertionError("a model is made once")
            case Refused():
                raise InvalidRequest(verb.reason)
            case ForwardBackward():
                ask = client.forward if verb.forward_only else client.forward_backward
                asked = ask(verb.data, verb.loss_fn, verb.loss_fn_config)
                return _Called(asked.future(), partial(_output_written, num_tokens_of(verb)))
            case Step():
                params = AdamParams(**verb.params.model_dump(exclude={"type"}))
                return _Called(client.optim_step(params).future(), _step_written)
            case Save():
                return self._save(client, n, verb)
            case Freeze():
                return self._freeze(client, n, verb)
            case Load():
                return self._load(client, verb)
            case _:
                assert_never(verb)

    def _spoil(self, reason: str) -> None:
        try:
            self._made().spoil(reason)
        except StovetopError as error:  # there is no model, which the optim_step will say
            log.debug("nothing to spoil: %s", error)

    def _save(self, client: TrainingClient, n: int, verb: Save) -> _Called:
        """Each save has a folder of its own, so that overwriting is replacing a row, and a replay never overwrites."""
        checkpoints, path = self._shared.checkpoints, path_of(self.model.id, verb)
        self._shared.limits.require_bytes(self.model.owner, checkpoints.bytes_of(self.model.owner))
        checkpoints.reserve(self.model.id, verb)
        try:
            name, ttl, metadata = f"{verb.name}.{n}", verb.ttl_seconds, verb.user_metadata
            saving = (
                client.save_state(name, ttl, overwrite=True, user_metadata=metadata)
                if verb.with_optimizer
                else client.save_weights_for_sampler(name, ttl, user_metadata=metadata)
            )
        except BaseException:
            checkpoints.release(path)
            raise

        def appear(row: CheckpointRow) -> None:
            replaced = checkpoints.appear(row)
            checkpoints.release(path)
            if replaced is not None:
                self._shared.requests.later(lambda: checkpoints.remove_folder(replaced))

        def written(saved: Any) -> Outcome:
            name = self._shared.folders.name_of(saved.path)
            row = row_of(self.model.id, self.model.owner, n, verb, Path(saved.path), name)
            return Outcome(Result.of({"path": path}), (put(row),), partial(appear, row))

        def release(ended: "Future[Any]") -> None:
            if ended.exception() is not None:
                checkpoints.release(path)

        future: Future[Any] = saving.future()
        when_done(future, release)
        return _Called(future, written)

    def _freeze(self, client: TrainingClient, n: int, verb: Freeze) -> _Called:
        frozen = client.save_weights_and_get_sampling_client()
        row = SamplerRow(
            verb.sampler_id,
            self.model.session_id,
            self.model.owner,
            self.model.base_model,
            model_id=self.model.id,
            n=n,
        )
        self._shared.samplers.add_frozen(row, frozen)
        result = Result.of({"sampling_session_id": verb.sampler_id, "path": None})
        return _Called(frozen.future(), lambda _: Outcome(result), (put(row),))

    def _load(self, client: TrainingClient, verb: Load) -> _Called:
        load = client.load_state_with_optimizer if verb.with_optimizer else client.load_state
        loading = load(self._place(verb.folder))
        self._snapshots.reads(verb.folder)
        return _Called(loading.future(), lambda _: Outcome(Result.of({"path": verb.path})))

    def rest(self) -> "Future[None]":
        """Makes a snapshot of all that was done, where there is one to make; the future is done when it is written.
        What cannot be in a snapshot is replayed."""
        with self._lock:
            return self._snapshots.rest(self._client)


def _failing(error: BaseException) -> _Called:
    future: Future[Any] = pending()
    future.set_exception(error)
    return _Called(future, lambda _: Outcome(Result.of({})))


def _output_written(num_tokens: int, output: ForwardBackwardOutput) -> Outcome:
    return Outcome(Result("forward_backward", codec.write_forward_backward(output)), num_tokens=num_tokens)


def _step_written(response: Any) -> Outcome:
    return Outcome(Result.of({"metrics": codec.finite(response.metrics)}), num_steps=1)

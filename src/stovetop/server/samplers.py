"""Sampling sessions: what a client samples from, under an id. Of a base model, of a saved path, or of weights that were
frozen in memory between two steps of a training client.

Frozen weights are written to the disk when a snapshot of their model is about to pass them (`snapshots.py`), or when
they were not sampled from for long: until then a replay makes them again, and after it they are read from their folder.
A session that was not used for long is not in memory; its next request opens it again.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.client import SamplingClient
from stovetop.errors import CheckpointError, InvalidRequest, NotFoundError, StovetopError
from stovetop.futures import ClientFuture, pending, when_done
from stovetop.saved_states import base_model_of
from stovetop.server import bodies
from stovetop.server.checkpoints import Checkpoints
from stovetop.server.completions import BLOCK, MOST_CLIENTS, Completions
from stovetop.server.folders import Folders
from stovetop.server.journal import Journal, done, follow
from stovetop.server.keys import queue_of
from stovetop.server.requests import Gone, Request, Requests
from stovetop.server.rows import Change, DrawnRow, SamplerRow, put
from stovetop.server.sampler import Open, Sampler, Writing, ids_of_samples
from stovetop.server.samples import completion_of, draw, num_tokens_of, outcome_of, tokens_of

log = logging.getLogger(__name__)

UNUSED_S = 60.0  # without a sample: weights that no path has may be deleted


class InMemory(NamedTuple):
    """What is in memory, and what is on the disk alone until it is used."""

    num_in: int
    num_out: int


class Samplers:
    """All sampling sessions."""

    def __init__(
        self,
        service: InProcessServiceClient,
        journal: Journal,
        requests: Requests,
        checkpoints: Checkpoints,
        rows: Iterable[SamplerRow],
        drawn: Iterable[DrawnRow],
        folders: Folders,
    ) -> None:
        self._service = service
        self._journal = journal
        self._requests = requests
        self._checkpoints = checkpoints
        self._folders = folders
        self._by_id = {row.id: Sampler(row, self._opener(row), None, done(), lost={}) for row in rows}
        for row in drawn:
            sampler = self._by_id.get(row.sampler_id)
            if sampler is not None and sampler.lost is not None:
                sampler.lost[row.client] = range(row.first, row.stop)
        self._lock = threading.Lock()  # protects the table: a session is made once

    # ---- sessions ----------------------------------------------------------------------------------------------------

    def create(self, body: bodies.CreateSamplingSession, owner: str) -> "tuple[str, Future[None]]":
        """Its id, and when it is committed. One that is asked for again is the same. Waits for what it samples from, so
        that a path or a name that is not there is refused here."""
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        with self._lock:
            sampler = self._by_id.get(sampler_id)
            if sampler is not None:
                self._require_same(sampler.row, body)
                return sampler_id, sampler.committed
            row, client = self._opened(sampler_id, body, owner)
            sampler = self._by_id[sampler_id] = Sampler(row, self._opener(row), client, pending())
        try:
            self._client(sampler)
        except BaseException as error:
            with self._lock:
                self._by_id.pop(sampler_id, None)
            sampler.committed.set_exception(error)
            raise
        follow(self._journal.put(put(row)), sampler.committed)
        return sampler_id, sampler.committed

    def _opened(
        self, sampler_id: str, body: bodies.CreateSamplingSession, owner: str
    ) -> tuple[SamplerRow, ClientFuture[SamplingClient]]:
        if body.model_path is None:
            assert body.base_model is not None, "the body has one of both"
            client = self._of(owner).create_sampling_client(base_model=body.base_model)
            return SamplerRow(sampler_id, body.session_id, owner, body.base_model), client
        folder = self._checkpoints.find(body.model_path, owner).folder
        place = self._folders.at(folder)
        client = self._of(owner).create_sampling_client(model_path=str(place))
        base_model = base_model_of(place)
        return SamplerRow(sampler_id, body.session_id, owner, base_model, body.model_path, folder=folder), client

    def _of(self, owner: str) -> InProcessServiceClient:
        """What makes this owner's clients."""
        return self._service.in_queue(queue_of(owner))

    def add_frozen(self, row: SamplerRow, client: ClientFuture[SamplingClient], committed: "Future[None]") -> None:
        """The weights of a training client, as of its request `row.n`, with which the row is committed: until then none
        finds it."""
        with self._lock:
            known = self._by_id.get(row.id)
            if known is not None and (known.row.model_id, known.row.n) != (row.model_id, row.n):
                raise InvalidRequest(f"there is a sampling session of this id; take the next number: {row.id!r}")
            self._by_id[row.id] = Sampler(row, self._opener(row), client, committed)

    def is_there(self, sampler_id: str) -> bool:
        """Whether it can be sampled from: otherwise a replay freezes its weights again."""
        sampler = self._by_id.get(sampler_id)
        return sampler is not None and (sampler.client is not None or sampler.row.folder is not None)

    def of_session(self, session_id: str) -> list[str]:
        return [sampler.row.id for sampler in list(self._by_id.values()) if sampler.row.session_id == session_id]

    def find(self, sampler_id: str, owner: str) -> SamplerRow:
        """A sampling session of this owner."""
        return self._find(sampler_id, owner).row

    def newest_frozen(self, model_id: str, owner: str) -> SamplerRow | None:
        """Of the weights of this model that were frozen in memory, the last ones; None without any."""
        frozen = [
            sampler.row
            for sampler in list(self._by_id.values())
            if (sampler.row.model_id, sampler.row.owner) == (model_id, owner) and sampler.is_committed
        ]
        return max(frozen, key=lambda row: row.n or 0, default=None)

    def client_of(self, sampler_id: str, owner: str) -> SamplingClient:
        """What a session of this owner samples with. Waits for its weights where they are still read."""
        return self._client(self._find(sampler_id, owner))

    def _client(self, sampler: Sampler) -> SamplingClient:
        try:
            return sampler.opened()
        except (CheckpointError, InvalidRequest) as error:  # clients know it by its path, if it has one
            place = str(self._folders.at(sampler.row.folder or ""))
            if place not in str(error):
                raise
            raise type(error)(str(error).replace(place, sampler.row.model_path or sampler.row.id)) from error

    def open_folder(self, folder: str, owner: str) -> ClientFuture[SamplingClient]:
        """A client of what is saved there, which belongs to no session."""
        return self._of(owner).create_sampling_client(model_path=str(self._folders.at(folder)))

    def write_all(self, model_id: str, n: int) -> "list[Writing]":
        """Begins to write the frozen weights of this model, as of its request `n` or before, that no folder has yet."""
        return [
            self._write(sampler)
            for sampler in list(self._by_id.values())
            if sampler.row.model_id == model_id and sampler.row.folder is None and (sampler.row.n or 0) <= n
        ]

    def _write(self, sampler: Sampler) -> "Writing":
        """Once, whoever asks for it."""
        with sampler.lock:
            if sampler.writing is None:
                assert sampler.client is not None, "what is not written is in memory"
                folder = self._folders.at(f"samplers/{secrets.token_hex(8)}")
                sampler.writing = Writing(sampler, folder, sampler.client.result().save(folder).future())
            return sampler.writing

    def written(self, writing: "Writing") -> SamplerRow:
        """Its row, now that it is in its folder. Raises where that could not be written."""
        sampler = writing.sampler
        with sampler.lock:
            try:
                writing.future.result()
            except BaseException:
                sampler.writing = None  # the next one who needs it tries again
                raise
            size_bytes = sum(file.stat().st_size for file in writing.folder.iterdir())
            sampler.row = replace(sampler.row, folder=self._folders.name_of(writing.folder), size_bytes=size_bytes)
            sampler.open = self._opener(sampler.row)
            return sampler.row

    # ---- in the thread that sweeps -----------------------------------------------------------------------------------

    def rest(self, unused_s: float, quiet: Collection[str]) -> None:
        """Takes out of memory what was not sampled from for so many seconds, or belongs to a session of these, whose
        samples are not drawn to the end. Frozen weights that no folder has are written first."""
        before_s = time.monotonic() - unused_s
        for sampler in list(self._by_id.values()):
            is_quiet = sampler.row.session_id in quiet
            if sampler.client is None or not sampler.committed.done() or not sampler.client.done():
                continue
            if is_quiet:
                self._drop_samples(sampler)
            if (is_quiet or sampler.used_s < before_s) and not sampler.is_drawing:
                self._put_to_rest(sampler)

    def _put_to_rest(self, sampler: Sampler) -> None:
        """Waits for nothing but a commit: what is still being written rests at a later sweep."""
        assert sampler.client is not None, "only what is in memory can be put to rest"
        has_weights = sampler.is_frozen and sampler.client.future().exception() is None
        if has_weights and sampler.row.folder is None:
            try:
                writing = self._write(sampler)
                if not writing.future.done():
                    return
                row = self.written(writing)
            except StovetopError as error:
                log.warning("the weights of %s stay in memory, since they cannot be written: %s", sampler.row.id, error)
                return
            self._journal.put(put(row)).result()
        with sampler.lock:
            if not sampler.is_drawing:
                sampler.client = sampler.writing = None

    def _drop_samples(self, sampler: Sampler) -> None:
        """A client that comes back asks for them anew, as it is told that they are gone."""
        with sampler.lock:
            drawn = list(sampler.requests.values())
            sampler.requests.clear()
        for request in drawn:
            request.cancel()
        self._requests.drop(drawn)

    def delete_frozen(self, session_ids: Collection[str]) -> None:
        """The sampling sessions of these sessions that no path has, and their folders."""
        for sampler in list(self._by_id.values()):
            if sampler.is_frozen and sampler.row.session_id in session_ids and not sampler.is_being_made:
                self._delete(sampler)

    def delete_beyond(self, bytes_of: Callable[[str], int | None]) -> None:
        """Frozen weights of owners who have more bytes of them on the disk than that (None: any number), those first
        that were not used for longest. What was used a moment ago stays, whatever there is."""
        before_s, by_owner = time.monotonic() - UNUSED_S, dict[str, list[Sampler]]()
        for sampler in list(self._by_id.values()):
            if sampler.is_frozen and sampler.row.folder is not None:
                by_owner.setdefault(sampler.row.owner, []).append(sampler)
        for owner, written in by_owner.items():
            limit, size_bytes = bytes_of(owner), sum(sampler.row.size_bytes for sampler in written)
            if limit is None or size_bytes <= limit:
                continue
            for sampler in sorted(written, key=lambda sampler: (sampler.used_s, sampler.row.n or 0)):
                if size_bytes > limit and sampler.used_s < before_s and not sampler.is_drawing:
                    size_bytes -= sampler.row.size_bytes
                    self._delete(sampler)
                    log.info("deleted, since its owner has too many bytes of such weights: %s", sampler.row.id)

    def _delete(self, sampler: Sampler) -> None:
        self._drop_samples(sampler)
        of_sampler = (sampler.row.id,)
        self._journal.put(
            Change("DELETE FROM drawn WHERE sampler_id = ?", of_sampler),
            Change("DELETE FROM sampler WHERE id = ?", of_sampler),
        ).result()
        with self._lock:
            self._by_id.pop(sampler.row.id, None)
        if sampler.row.folder is not None:
            self._folders.remove(sampler.row.folder)

    def needed(self) -> set[str]:
        """The folders that sessions would be opened from."""
        return {sampler.row.folder for sampler in self._by_id.values() if sampler.row.folder is not None}

    def _find(self, sampler_id: str, owner: str) -> Sampler:
        sampler = self._by_id.get(sampler_id)
        if sampler is None or sampler.row.owner != owner or not sampler.is_committed:
            raise NotFoundError(
                f"there is no sampling session of this id, or no more; make another one: {sampler_id!r}"
            )
        return sampler

    def _opener(self, row: SamplerRow) -> Open:
        def open_client() -> ClientFuture[SamplingClient]:
            if row.folder is None and row.model_id is not None:
                raise Gone(f"the weights of this sampling session are gone; make another one: {row.id!r}")
            if row.folder is None:
                return self._of(row.owner).create_sampling_client(base_model=row.base_model)
            place = self._folders.at(row.folder)
            if not place.is_dir():
                raise Gone(f"the checkpoint that this session samples from was deleted: {row.model_path!r}")
            return self._of(row.owner).create_sampling_client(model_path=str(place))

        return open_client

    def _require_same(self, row: SamplerRow, body: bodies.CreateSamplingSession) -> None:
        asked = body.base_model or row.base_model, body.model_path
        if asked != (row.base_model, row.model_path) or row.model_id is not None:
            raise InvalidRequest(
                "sampling_session_seq_id was used by another request; take the next one: "
                f"{body.sampling_session_seq_id}"
            )

    def counts(self) -> "InMemory":
        """How many sampling sessions there are, in memory and out of it."""
        in_memory = [sampler.client is not None for sampler in list(self._by_id.values())]
        return InMemory(sum(in_memory), len(in_memory) - sum(in_memory))

    # ---- samples -----------------------------------------------------------------------------------------------------

    def sample(self, body: bodies.Sample, digest: bytes, owner: str) -> Request:
        """Begins to draw. The same seq_id is the same request. Waits for the weights where they are still read."""
        sampler = self._find(body.sampling_session_id, owner)
        client = self._client(sampler)
        with sampler.lock:
            known = sampler.requests.get(body.seq_id)
            if known is not None:
                known.require_same(digest)
                return known
            client_number, place = divmod(body.seq_id, BLOCK)
            completions = sampler.completions_of(client_number)
            request_id = f"{ids_of_samples(body.sampling_session_id)}{body.seq_id}"
            sequences = [f"{request_id}-{index}" for index in range(body.num_samples)]
            what = f"sample (seq_id {body.seq_id} of {body.sampling_session_id})"
            request = Request(request_id, owner, what, "sample", digest, response={"sample_sequence_ids": sequences})
            request.num_tokens = num_tokens_of(body)
            request.prompt = lambda: client.get_tokenizer().decode(tokens_of(body))
            self._requests.add(request, is_sample=True)
            try:
                drawn = draw(client, body, self._service)
            except BaseException as error:
                self._requests.discard(request, error)
                raise
            request.cancel = drawn.cancel
            request.committed = self._write_down(sampler, client_number, completions.begin(place))
            sampler.requests[body.seq_id] = request
        when_done(request.finished, lambda _: completions.add(place, completion_of(request)))
        self._requests.follow(request, drawn.future(), partial(outcome_of, body))
        return request

    def join(self, sampler_id: str, owner: str) -> int:
        """A number for another client of this session, that none has: drawn, so that none of before a restart does."""
        sampler = self._find(sampler_id, owner)
        with sampler.lock:
            number = 0
            while number == 0 or number in sampler.completions:
                number = secrets.randbelow(MOST_CLIENTS)
            sampler.completions_of(number)
            return number

    def ask(self, sampler_id: str, client_number: int, owner: str) -> "tuple[Completions, Future[None]]":
        """The samples of one client of a session that have ended, which may be told when the future is done."""
        sampler = self._find(sampler_id, owner)
        with sampler.lock:
            completions = sampler.completions_of(client_number)
            return completions, self._write_down(sampler, client_number, completions.ask())

    def _write_down(self, sampler: Sampler, client_number: int, places: range | None) -> "Future[None]":
        if places is None:
            return done()
        return self._journal.put(put(DrawnRow(sampler.row.id, client_number, places.start, places.stop)))

    def release(self, sampler_id: str, request_ids: Iterable[str], owner: str) -> None:
        """Its client has these results: they need not be kept. Those of others are passed over."""
        sampler = self._find(sampler_id, owner)
        for request_id in request_ids:
            request = self._requests.find(request_id, owner)
            if request is not None and request_id.startswith(ids_of_samples(sampler_id)):
                request.released = True
                sampler.release(int(request_id.rpartition(":")[2]))

    def forget(self, requests: Iterable[Request]) -> None:
        """Their results are not kept any more; a client that sends one again draws anew."""
        over = {id(request) for request in requests}
        for sampler in list(self._by_id.values()):
            with sampler.lock:
                for seq_id in [seq_id for seq_id, request in sampler.requests.items() if id(request) in over]:
                    del sampler.requests[seq_id]
                    sampler.release(seq_id)


def describe(row: SamplerRow) -> Mapping[str, Any]:
    """What a client is told of it."""
    described = {"sampler_id": row.id, "base_model": row.base_model}
    return described if row.model_path is None else {**described, "model_path": row.model_path}

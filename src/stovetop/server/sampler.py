"""One sampling session, and the ids of its samples."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stovetop.client import SamplingClient
from stovetop.errors import InvalidRequest
from stovetop.futures import ClientFuture
from stovetop.server.completions import AHEAD, BLOCK, Completions
from stovetop.server.requests import Request
from stovetop.server.rows import SamplerRow

MOST_COPIES = 2**14  # clients of one session, in as many processes
_SAMPLE = "sample-"  # what ids of samples begin with

Open = Callable[[], ClientFuture[SamplingClient]]


@dataclass(slots=True, eq=False)
class Sampler:
    """One sampling session. Its client is opened when it is first needed."""

    row: SamplerRow
    open: Open
    client: ClientFuture[SamplingClient] | None
    committed: "Future[None]"
    lost: dict[int, range] | None = None  # of one of before a restart: places that were written down, by client
    writing: "Writing | None" = None  # the weights, which were frozen in memory
    used_s: float = field(default_factory=time.monotonic)
    requests: dict[int, Request] = field(default_factory=dict[int, Request])  # by seq_id
    completions: dict[int, Completions] = field(default_factory=dict[int, Completions])  # by the number of a client
    lock: threading.Lock = field(default_factory=threading.Lock)  # protects all of this

    @property
    def is_committed(self) -> bool:
        return self.committed.done() and self.committed.exception() is None

    @property
    def is_frozen(self) -> bool:
        """Of weights that no path has."""
        return self.row.model_id is not None

    @property
    def is_being_made(self) -> bool:
        """Its weights are not frozen yet, or they are being written."""
        is_frozen = self.committed.done() and (self.client is None or self.client.done())
        return not is_frozen or (self.writing is not None and self.row.folder is None)

    @property
    def is_drawing(self) -> bool:
        return any(request.finished_s is None for request in list(self.requests.values()))

    def completions_of(self, client_number: int) -> Completions:
        """Those of a client, under the lock."""
        if client_number not in self.completions and len(self.completions) >= MOST_COPIES:
            raise InvalidRequest(
                f"a sampling session may have {MOST_COPIES} clients; make another one: {self.row.id!r}"
            )
        if client_number not in self.completions:
            lost = range(0) if self.lost is None else self.lost.get(client_number, range(AHEAD))
            first = ids_of_samples(self.row.id), client_number * BLOCK
            self.completions[client_number] = Completions(first, lost)
        return self.completions[client_number]

    def release(self, seq_id: int) -> None:
        """The client has this sample, or will not come for it."""
        client_number, place = divmod(seq_id, BLOCK)
        if client_number in self.completions:
            self.completions[client_number].release(place)

    def opened(self) -> SamplingClient:
        """Its client, which is used now. Waits for the weights where they are still read."""
        with self.lock:
            self.used_s = time.monotonic()
            if self.client is None:
                self.client = self.open()
            opened = self.client
        return opened.result()


class Writing(NamedTuple):
    """Frozen weights that are being written into this folder."""

    sampler: "Sampler"
    folder: Path
    future: "Future[Any]"


def session_of(sampler_id: str) -> str:
    """The id of the session that a sampling session of this id belongs to."""
    return sampler_id.partition(":")[0]


def ids_of_samples(sampler_id: str) -> str:
    """What they begin with; the seq_id follows. So an id can be told when what it stood for is lost."""
    return f"{_SAMPLE}{sampler_id}:"


def is_sample(request_id: str) -> bool:
    """Whether it is, or was, the id of a sample."""
    return request_id.startswith(_SAMPLE)

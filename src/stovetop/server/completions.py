"""Samples that have ended, for clients that ask for all of theirs with one question (`retrieve_futures`) in place of
one each: which they are, in the order in which they ended, behind a cursor.

A sampling session may have several clients, copies in other processes; each has seq_ids of its own, a block of a
thousand million, in which a sample has a place. The numbers of a cursor begin at the time at which a list was made, so
that they go on growing over a restart.

A restart loses samples, and a client that asks for all of them does not say which it waits for. So the places that it
may have used are written down in advance, `AHEAD` at a time, which costs a commit each; after a restart those that may
be lost are told as failed. The client fetches the reason of each that it knows: it is gone, and is drawn again.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from stovetop.futures import pending

BLOCK = 1_000_000_000  # seq_ids of one client
MOST_CLIENTS = 2**33  # so that every seq_id has 63 bits
AHEAD = 1000  # places: what a client is told in vain after a restart, at most


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended: there is a payload of this size, or, for None, a failure."""

    request_id: str
    size_bytes: int | None

    def as_json(self) -> dict[str, object]:
        if self.size_bytes is None:
            return {"state": "failed", "request_id": self.request_id}
        size = {"response_payload_uncompressed_size": self.size_bytes}
        return {"state": "finished", "request_id": self.request_id, **size}


class Completions:
    """Those of one client. May be used from any thread."""

    def __init__(self, id_of_first: tuple[str, int] = ("", 0), lost: range = range(0)) -> None:
        """`id_of_first`: what the ids of its samples begin with, and the number of the first one. `lost`: places of
        samples that a restart may have lost."""
        self._id_of_first = id_of_first
        self._lost = lost  # until the client has seen them
        self._asked = False  # the client asks for all of its samples
        self._written = 0  # the places before this one are written down, where it asks
        self._under_way = set[int]()  # places of samples whose results the client may lack
        self._ended: dict[int, Completion] = {}  # of them, by place, while the client asks for each by itself
        self._cursor = time.time_ns()  # the number of the last completion
        self._unseen: deque[Completion] = deque()  # the last ones, as far as the client has not said that it has them
        self._more: Future[None] = pending()  # done when another one comes
        self._lock = threading.Lock()  # protects them all

    def begin(self, place: int) -> range | None:
        """A sample is accepted. Returns the places that are to be written down before its client is told so."""
        with self._lock:
            self._under_way.add(place)
            return self._ahead_of(place + 1) if self._asked and place >= self._written else None

    def ask(self) -> range | None:
        """The client asks for all of its samples. Returns the places that are to be written down before it is
        answered."""
        with self._lock:
            if self._asked:
                return None
            self._asked = True
            prefix, first = self._id_of_first
            self._unseen.extend(Completion(f"{prefix}{first + place}", None) for place in self._lost)
            self._unseen.extend(self._ended.values())
            self._cursor += len(self._unseen)
            self._ended.clear()
            return self._ahead_of(max([*self._under_way, self._lost.stop - 1], default=0) + 1)

    def release(self, place: int) -> None:
        """The client has this result, or will not come for it."""
        with self._lock:
            self._under_way.discard(place)
            self._ended.pop(place, None)

    def add(self, place: int, completion: Completion) -> None:
        """A sample has ended."""
        with self._lock:
            if not self._asked:
                self._ended[place] = completion
                return
            self._cursor += 1
            self._unseen.append(completion)
            more, self._more = self._more, pending()
        more.set_result(None)

    def after(self, cursor: int) -> "tuple[list[Completion], int, Future[None]]":
        """Those behind this cursor, the cursor behind them, and what is done when there are more. Those up to the given
        cursor are forgotten. One that is ahead of ours is of before a restart, with the clock set back since: none of
        ours was seen then."""
        with self._lock:
            if cursor > self._cursor:
                self._cursor = cursor + len(self._unseen)
            while self._unseen and self._cursor - len(self._unseen) < cursor:
                self._unseen.popleft()
                self._lost = range(0)  # all were told at once
            return list(self._unseen), self._cursor, self._more

    def _ahead_of(self, stop: int) -> range:
        self._written = stop + AHEAD
        first = min([*self._under_way, stop])
        return range(min(first, self._lost.start) if self._lost else first, self._written)

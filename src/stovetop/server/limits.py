"""How much one owner may have at once, and how much each has in the queue.

What is over a limit and passes by itself, samples in the queue, is answered 429: the SDK slows down and asks again.
What does not pass by itself, models and bytes that are kept, is refused by name, with the limit and what there is.
A request to train that is over a limit waits until there is room before it is accepted (`program.py`), and its client,
which sends them in order, with it; one for which none comes in time is answered 429 too. Weights that no path has are
deleted, the longest unused first, when an owner has more of them than may be (`samplers.py`).
"""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from stovetop.errors import InvalidRequest, RateLimitError
from stovetop.futures import pending


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """What one owner may have at once. None is without a limit. They bound harm and are no tuned numbers."""

    max_requests: int | None = None  # that are not done; over it, samples and training wait
    max_tokens: int | None = None  # of those requests, to be computed and drawn; likewise
    max_models: int | None = None  # training clients of sessions that are alive
    max_bytes: int | None = None  # of checkpoints
    max_sampler_bytes: int | None = None  # of weights that no path has, on the disk


UNLIMITED = OwnerLimits()  # the owner of the machine: the memory and disk of it are the limits
OF_A_KEY = OwnerLimits(
    max_requests=4096, max_tokens=2**26, max_models=32, max_bytes=64 * 2**30, max_sampler_bytes=16 * 2**30
)

LimitsOf = Callable[[str], OwnerLimits]  # of an owner


class Load(NamedTuple):
    """Requests that are not done, and the tokens that they compute and draw at most."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, num_requests: int, num_tokens: int) -> "Load":
        return Load(self.num_requests + num_requests, self.num_tokens + num_tokens)


class Limits:
    """Those of all owners, and what is in the queue of each. May be used from any thread."""

    def __init__(self, limits_of: LimitsOf = lambda owner: UNLIMITED) -> None:
        self._of = limits_of
        self._loads: dict[str, Load] = {}  # of owners that have anything in the queue
        self._all = Load()
        self._for_room: dict[str, list[Future[None]]] = {}  # what waits until a request of an owner has left
        self._lock = threading.Lock()  # protects them

    # ---- what passes by itself ---------------------------------------------------------------------------------------

    def enter(self, owner: str, num_tokens: int, *, is_sample: bool) -> None:
        """A request was accepted. Raises RateLimitError for a sample that is over a limit, which then is not in the
        queue."""
        limits = self._of(owner) if is_sample else UNLIMITED
        with self._lock:
            self._require_room(owner, num_tokens, limits)
            self._loads[owner] = self._loads.get(owner, Load()).plus(1, num_tokens)
            self._all = self._all.plus(1, num_tokens)

    @contextmanager
    def entered(self, owner: str, num_tokens: int, *, may_be_refused: bool = True) -> Generator[None]:
        """Samples that are in the queue as long as this lasts: see `enter`."""
        self.enter(owner, num_tokens, is_sample=may_be_refused)
        try:
            yield
        finally:
            self.leave(owner, num_tokens)

    def leave(self, owner: str, num_tokens: int) -> None:
        """A request that had entered is done, or was dropped."""
        with self._lock:
            load = self._loads[owner].plus(-1, -num_tokens)
            self._all = self._all.plus(-1, -num_tokens)
            if load.num_requests > 0:
                self._loads[owner] = load
            else:
                del self._loads[owner]
            waiting = self._for_room.pop(owner, [])
        for future in waiting:
            future.set_result(None)

    def room(self, owner: str, num_tokens: int) -> "Future[None] | None":
        """For a request to train: None where there is some, else a future that is done when that is worth asking
        again."""
        limits = self._of(owner)
        with self._lock:
            try:
                self._require_room(owner, num_tokens, limits)
            except RateLimitError:
                future: Future[None] = pending()
                self._for_room.setdefault(owner, []).append(future)
                return future
        return None

    def require_room(self, owner: str, num_tokens: int) -> None:
        """Raises RateLimitError where there is none."""
        with self._lock:
            self._require_room(owner, num_tokens, self._of(owner))

    def _require_room(self, owner: str, num_tokens: int, limits: OwnerLimits) -> None:
        """The only request of an owner may have any number of tokens."""
        load = self._loads.get(owner, Load())
        if load.num_requests > 0:
            _require_room("requests", load.num_requests, load.num_requests + 1, limits.max_requests)
            _require_room("tokens", load.num_tokens, load.num_tokens + num_tokens, limits.max_tokens)

    @property
    def load(self) -> Load:
        """Of all owners together."""
        return self._all

    def by_owner(self) -> dict[str, Load]:
        """Of those that have anything in the queue."""
        with self._lock:
            return dict(self._loads)

    def queue_state(self, owner: str) -> dict[str, str]:
        """What a client is told while it waits, in the words of the protocol: it may be waiting for others."""
        with self._lock:
            own, everything = self._loads.get(owner, Load()), self._all
        num_others = everything.num_requests - own.num_requests
        reason = f"requests that are not done: {own.num_requests:,} of yours, with {own.num_tokens:,} tokens"
        if num_others == 0:
            return {"queue_state": "active", "queue_state_reason": reason}
        others = f"{num_others:,} of others, with {everything.num_tokens - own.num_tokens:,} tokens"
        return {"queue_state": "paused_capacity", "queue_state_reason": f"{reason}; {others}"}

    def sampler_bytes_of(self, owner: str) -> int | None:
        """How many an owner may have of weights that no path has."""
        return self._of(owner).max_sampler_bytes

    # ---- what does not -----------------------------------------------------------------------------------------------

    def require_model(self, owner: str, num_models: int) -> None:
        """Refuses one more where there are this many."""
        limit = self._of(owner).max_models
        if limit is not None and num_models >= limit:
            raise InvalidRequest(
                f"this key may have {limit} training clients at once, and as many are alive; close a ServiceClient "
                f"whose clients are not needed any more: {num_models}"
            )

    def require_bytes(self, owner: str, num_bytes: int) -> None:
        """Refuses another checkpoint where those that are kept have this many bytes."""
        limit = self._of(owner).max_bytes
        if limit is not None and num_bytes >= limit:
            raise InvalidRequest(
                f"this key may keep {limit:,} bytes of checkpoints, and has as many; delete some, or give them a "
                f"ttl_seconds: {num_bytes:,}"
            )


def _require_room(what: str, before: int, after: int, limit: int | None) -> None:
    if limit is not None and after > limit:
        raise RateLimitError(
            f"this key may have {limit:,} {what} in the queue; this one waits until some are done: {before:,}"
        )

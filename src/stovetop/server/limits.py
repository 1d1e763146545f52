"""How much one owner may have at once, and how much each has in the queue.

What is over a limit and passes by itself, samples in the queue, is answered 429: the SDK slows down and asks again.
What does not pass by itself, models and bytes that are kept, is refused by name, with the limit and what there is.
Training is never refused here: its clients wait until a request is accepted before they send the next.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from stovetop.errors import InvalidRequest, RateLimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """What one owner may have at once. None is without a limit. They bound harm and are no tuned numbers."""

    max_requests: int | None = None  # that are not done; over it, no sample is accepted
    max_tokens: int | None = None  # of those requests, to be computed and drawn; likewise
    max_models: int | None = None  # training clients of sessions that are alive
    max_bytes: int | None = None  # of checkpoints


UNLIMITED = OwnerLimits()  # the owner of the machine: the memory and disk of it are the limits
OF_A_KEY = OwnerLimits(max_requests=4096, max_tokens=2**26, max_models=32, max_bytes=64 * 2**30)

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
        self._lock = threading.Lock()  # protects them

    # ---- what passes by itself ---------------------------------------------------------------------------------------

    def enter(self, owner: str, num_tokens: int, *, is_sample: bool) -> None:
        """A request was accepted. Raises RateLimitError for a sample that is over a limit, which then is not in the
        queue; the only request of an owner may have any number of tokens."""
        limits = self._of(owner) if is_sample else UNLIMITED
        with self._lock:
            load = self._loads.get(owner, Load())
            after = load.plus(1, num_tokens)
            if load.num_requests > 0:
                _require_room("requests", load.num_requests, after.num_requests, limits.max_requests)
                _require_room("tokens", load.num_tokens, after.num_tokens, limits.max_tokens)
            self._loads[owner] = after
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

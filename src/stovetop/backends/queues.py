"""How full the queues of an engine are, one for each client, and when a call is refused."""

from dataclasses import dataclass
from typing import NamedTuple

from stovetop.engine import ops
from stovetop.errors import QueueFull


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What one queue may hold, that of a client: bounds, not tuned numbers. A call into a full queue is refused."""

    max_calls: int = 2**16
    max_tokens: int = 2**31  # to be computed and drawn; the first call may have more


USUAL_BOUNDS = QueueBounds()


class Waiting(NamedTuple):
    """How full a queue is."""

    num_ops: int = 0
    num_tokens: int = 0  # to be computed and drawn


class Entry(NamedTuple):
    """What an op counts for in its queue, from when it is accepted until it is answered."""

    queue: str
    num_tokens: int

    @classmethod
    def of(cls, op: ops.Op) -> "Entry":
        """That of an op. It reads all its data: outside of the thread's lock."""
        return cls(ops.queue_of(op), ops.num_tokens(op))


class Queues:
    """Of one engine. Used under its thread's lock."""

    def __init__(self, bounds: QueueBounds) -> None:
        self._bounds = bounds
        self.waiting: dict[str, Waiting] = {}  # by queue, where there is anything

    def check_room(self, what: str, entry: Entry) -> None:
        """Refuses a call, of this name, for which there is no room."""
        waiting, bounds = self.waiting.get(entry.queue, Waiting()), self._bounds
        has_room = waiting.num_ops == 0 or waiting.num_tokens + entry.num_tokens <= bounds.max_tokens
        if waiting.num_ops >= bounds.max_calls or not has_room:
            raise QueueFull(
                f"{what}: at most {bounds.max_calls:,} calls with {bounds.max_tokens:,} tokens may wait "
                "(max_queued_calls and max_queued_tokens of the ServiceClient); wait for their results, then call "
                f"again: {waiting.num_ops:,} wait, with {waiting.num_tokens:,} tokens"
            )

    def add(self, entry: Entry) -> None:
        """It waits."""
        self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        """It is answered."""
        self._count(entry, -1)

    def _count(self, entry: Entry, sign: int) -> None:
        before = self.waiting.pop(entry.queue, Waiting())
        after = Waiting(before.num_ops + sign, before.num_tokens + sign * entry.num_tokens)
        if after.num_ops > 0:
            self.waiting[entry.queue] = after

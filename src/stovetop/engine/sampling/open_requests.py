# pyright: basic
"""Which requests are not answered yet, and which of them have samples that could begin. A step asks for what is in
these tables; so that its cost does not grow with them, sums are kept as entries come and go."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.ops import Op, Ticket, queue_of
from stovetop.engine.sampling.samples import Request, Start
from stovetop.engine.sampling.turns import Turn, Turns


@dataclass(slots=True)
class _Held:
    cache: KVCache
    num_starts: int = 0
    num_left: int = 0  # samples that go on from it


class Ready:
    """What is computed and has samples that have no room yet. The queue for which the fewest tokens were drawn is
    served first, and in each the oldest; what a sample costs is known when it has ended, so it counts then."""

    def __init__(self) -> None:
        self._starts: OrderedDict[int, Start] = OrderedDict()  # by id, oldest first
        self._queues: dict[str, OrderedDict[int, Start]] = {}  # the same by queue
        self._turn_of: dict[str, Turn] = {}  # of the next sample of each queue
        self._turns = Turns()
        self._held: dict[int, _Held] = {}  # by id of the cache, which several may go on from

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Start]:
        return iter(list(self._starts.values()))

    def __contains__(self, start: Start) -> bool:
        return id(start) in self._starts

    @property
    def caches(self) -> list[KVCache]:
        return [held.cache for held in self._held.values()]

    @property
    def first(self) -> Start:
        """From which the next sample is to go on."""
        queue = min(self._turn_of, key=self._turn_of.__getitem__)
        return next(iter(self._queues[queue].values()))

    def num_together(self, cache: KVCache) -> int:
        """Samples that go on from this cache."""
        held = self._held.get(id(cache))
        return 0 if held is None else held.num_left

    def append(self, start: Start) -> None:
        cache, queue = start.prompt.cache, queue_of(start.prompt.op)
        held = self._held.setdefault(id(cache), _Held(cache))
        held.num_starts += 1
        held.num_left += start.num_left
        self._starts[id(start)] = start
        self._queues.setdefault(queue, OrderedDict())[id(start)] = start
        if queue not in self._turn_of:
            self._turn_of[queue] = self._turns.next(queue, 1)

    def put_first(self, start: Start) -> None:
        """Before the others of its queue."""
        self.append(start)
        self._starts.move_to_end(id(start), last=False)
        self._queues[queue_of(start.prompt.op)].move_to_end(id(start), last=False)

    def take(self, start: Start) -> None:
        """Out of it, for one of its samples begins: the next turn of its queue comes behind those of others."""
        queue = queue_of(start.prompt.op)
        self._turns.served(self._turn_of[queue])
        self.remove(start)
        if queue in self._turn_of:
            self._turn_of[queue] = self._turns.next(queue, 1)

    def charge(self, op: Op, num_tokens: int) -> None:
        """So many tokens were drawn for it."""
        self._turns.charge(queue_of(op), num_tokens)

    def remove(self, start: Start) -> None:
        queue = queue_of(start.prompt.op)
        del self._starts[id(start)], self._queues[queue][id(start)]
        if not self._queues[queue]:
            del self._queues[queue], self._turn_of[queue]
        held = self._held[id(start.prompt.cache)]
        held.num_starts -= 1
        held.num_left -= start.num_left
        if held.num_starts == 0:
            del self._held[id(start.prompt.cache)]

    def pop(self) -> Start:
        """The newest, out of it."""
        start = self._starts[next(reversed(self._starts))]
        self.remove(start)
        return start

    def clear(self) -> None:
        for table in (self._starts, self._queues, self._turn_of, self._held):
            table.clear()


class OpenRequests:
    """All that are not answered yet, by ticket, in the order in which they came; and the weights that they need."""

    def __init__(self) -> None:
        self._requests: dict[Ticket, Request] = {}
        self._weights: dict[int, AdapterWeights] = {}
        self._num_users: dict[int, int] = {}  # of the weights of this id

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    @property
    def tickets(self) -> list[Ticket]:
        return list(self._requests)

    @property
    def weights(self) -> list[AdapterWeights]:
        """Each once."""
        return list(self._weights.values())

    def get(self, ticket: Ticket) -> Request | None:
        return self._requests.get(ticket)

    def add(self, request: Request) -> None:
        weights = request.prompt.weights
        self._requests[request.prompt.ticket] = request
        if weights is not None:
            self._weights[id(weights)] = weights
            self._num_users[id(weights)] = self._num_users.get(id(weights), 0) + 1

    def close(self, ticket: Ticket) -> Request | None:
        """None for one that was answered already."""
        request = self._requests.pop(ticket, None)
        weights = None if request is None else request.prompt.weights
        if weights is not None:
            self._num_users[id(weights)] -= 1
            if self._num_users[id(weights)] == 0:
                del self._num_users[id(weights)], self._weights[id(weights)]
        return request

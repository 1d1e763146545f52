"""What runs next. Knows tickets and their order, no tensor.

The rule: ops that make or change adapters run in the order they came, so the ops of one adapter keep their program
order. With the oldest of them run those of its kind that are next in line for adapters of their own: forward passes as
far as they fit into one, optimizer steps all. Sampling reads frozen weights only, so it needs no order: it goes to the
sampler as it comes, and every step of the engine does one turn of the first kind and one token of the second. Neither
starves the other.
"""

from collections import deque
from collections.abc import Iterator

from stovetop.engine import ops
from stovetop.engine.ops import Ticket


class Scheduler:
    def __init__(self, max_tokens_per_pass: int, *, share_passes: bool) -> None:
        """`share_passes`: data of several adapters may train in one pass."""
        self._max_tokens = max_tokens_per_pass
        self._share_passes = share_passes
        self._in_order: deque[Ticket] = deque()
        self._sampling: deque[Ticket] = deque()

    def add(self, ticket: Ticket) -> None:
        queue = self._sampling if isinstance(ticket.op, ops.Sample | ops.ComputeLogprobs) else self._in_order
        queue.append(ticket)

    def next_in_order(self) -> list[Ticket]:
        """The oldest op on adapters, if there is one, and what runs with it."""
        if not self._in_order:
            return []
        oldest = self._in_order.popleft()
        match oldest.op:
            case ops.Forward() | ops.ForwardBackward():
                room = self._max_tokens - ops.num_tokens(oldest.op)
                together = [oldest, *self._fitting(oldest, room)] if self._share_passes else [oldest]
            case ops.OptimStep():
                together = [oldest, *self._next_in_line(oldest)]
            case _:
                together = [oldest]
        taken = set(map(id, together))
        self._in_order = deque(ticket for ticket in self._in_order if id(ticket) not in taken)
        return together

    def _fitting(self, oldest: Ticket, room: int) -> Iterator[Ticket]:
        for ticket in self._next_in_line(oldest):
            assert isinstance(ticket.op, ops.Forward | ops.ForwardBackward), "of the kind of the oldest"
            room -= ops.num_tokens(ticket.op)
            if room < 0:
                return
            yield ticket

    def _next_in_line(self, oldest: Ticket) -> Iterator[Ticket]:
        """Ops of the kind of `oldest` before which nothing waits for the same adapter."""
        waited_for = {id(_adapter_of(oldest.op))}
        for ticket in self._in_order:
            adapter = _adapter_of(ticket.op)
            if adapter is not None and id(adapter) not in waited_for:
                waited_for.add(id(adapter))
                if type(ticket.op) is type(oldest.op):
                    yield ticket

    def take_sampling(self) -> list[Ticket]:
        """All sampling ops that came since the last time."""
        taken = list(self._sampling)
        self._sampling.clear()
        return taken

    @property
    def idle(self) -> bool:
        return not self._in_order and not self._sampling


def _adapter_of(op: ops.Op) -> ops.Adapter | None:
    """The adapter that an op waits its turn for; None for one that makes or reads something new."""
    match op:
        case ops.CreateAdapter() | ops.LoadAdapter() | ops.LoadWeights() | ops.Sample() | ops.ComputeLogprobs():
            return None
        case _:
            return op.adapter

"""What runs next. Knows tickets and their order, no tensor.

The rule: ops that make or change adapters run one at a time in the order they came, so the ops of one adapter keep
their program order. Sampling reads frozen weights only, so it needs no order: it goes to the sampler as it comes, and
every step of the engine does one op of the first kind and one token of the second. Neither starves the other.
"""

from collections import deque

from stovetop.engine.ops import ComputeLogprobs, Sample, Ticket


class Scheduler:
    def __init__(self) -> None:
        self._in_order: deque[Ticket] = deque()
        self._sampling: deque[Ticket] = deque()

    def add(self, ticket: Ticket) -> None:
        queue = self._sampling if isinstance(ticket.op, Sample | ComputeLogprobs) else self._in_order
        queue.append(ticket)

    def next_in_order(self) -> list[Ticket]:
        """The oldest op on adapters, if there is one."""
        return [self._in_order.popleft()] if self._in_order else []

    def take_sampling(self) -> list[Ticket]:
        """All sampling ops that came since the last time."""
        taken = list(self._sampling)
        self._sampling.clear()
        return taken

    @property
    def idle(self) -> bool:
        return not self._in_order and not self._sampling

"""What runs next. Knows tickets and their order, no tensor.

The rule: ops of one adapter run in the order they came. Queues are served in turn, in each the oldest op that may run,
and a turn is at most one pass, that is `max_tokens_per_pass` tokens: of a large op the next turn of its queue does the
next pass. Where data of several adapters may train in one pass, the rest of a pass is filled from the next queues with
passes of the same kind that fit; optimizer steps all run together. Who was served goes to the end of the line. So what
one client has queued, however much it is, delays another's first op by one turn of each queue at most.

Sampling is not scheduled here: it reads frozen weights only, so it needs no order (`sampling/sampler.py`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stovetop.engine import ops
from stovetop.engine.ops import Ticket


@dataclass(slots=True, eq=False)
class _Waiting:
    ticket: Ticket
    passes: deque[int]  # tokens of each that is left; none for an op that needs no pass
    has_begun: bool = False

    def answers(self, scored: ops.ScoreId) -> bool:
        """Whether it tells what became of a custom loss."""
        op = self.ticket.op
        return isinstance(op, ops.BackwardFrom | ops.Spoil) and op.scored == scored


class Scheduler:
    def __init__(self, max_tokens_per_pass: int, *, share_passes: bool) -> None:
        """`share_passes`: data of several adapters may train in one pass."""
        self._max_tokens = max_tokens_per_pass
        self._share_passes = share_passes
        self._lanes: dict[str, deque[_Waiting]] = {}  # ops that keep their order, by adapter
        self._turns: dict[str, int] = {}  # how many ops wait, by queue, the next to be served first
        self._held: dict[str, ops.ScoreId] = {}  # lanes in which all waits for what became of a custom loss
        self.may_begin: Callable[[Ticket], bool] = lambda ticket: True  # asked of what saves or loads

    def add(self, ticket: Ticket, passes: Sequence[int] = ()) -> None:
        """`passes` are the tokens of each pass that the op needs."""
        op = ticket.op
        assert not isinstance(op, ops.WeightsOp), "these need no order"
        lane = self._lanes.setdefault(ops.lane_of(op), deque())
        waiting = _Waiting(ticket, deque(passes))
        if isinstance(op, ops.BackwardFrom | ops.Spoil) and op.scored is not None:
            lane.insert(self._place_of_answer(op.adapter, op.scored), waiting)
        else:
            lane.append(waiting)
        queue = ops.queue_of(op)
        self._turns[queue] = self._turns.get(queue, 0) + 1

    def _place_of_answer(self, adapter: ops.AdapterId, scored: ops.ScoreId) -> int:
        """Behind the `Score` that it answers, or, where that is done, before all others."""
        if self._held.get(adapter) == scored:
            del self._held[adapter]
            return 0
        for index, waiting in enumerate(self._lanes[adapter]):
            if isinstance(waiting.ticket.op, ops.Score) and waiting.ticket.op.scored == scored:
                return index + 1
        return len(self._lanes[adapter])

    def hold(self, adapter: ops.AdapterId, scored: ops.ScoreId) -> None:
        """Its other ops wait until an answer is added, if there is none yet."""
        lane = self._lanes.get(adapter)
        if not lane or not lane[0].answers(scored):
            self._held[adapter] = scored

    def next_turn(self) -> list[Ticket]:
        """The ops whose turn it is, of one kind, each of another adapter; for ops in passes, one pass of each. An op
        comes again until all its passes had their turns, or `end` was called."""
        ready = self._ready()
        queues = [queue for queue in self._turns if queue in ready]
        if not queues:
            return []
        first, *others = [waiting for queue in queues for waiting in ready[queue]]
        turn = [first, *self._company(first, others)]
        for waiting in turn:
            waiting.has_begun = True
            if waiting.passes:
                waiting.passes.popleft()
            if not waiting.passes:
                self._remove(waiting)
            self._to_the_end(ops.queue_of(waiting.ticket.op))
        return [waiting.ticket for waiting in turn]

    def _ready(self) -> dict[str, list[_Waiting]]:
        """What may run, by queue, the oldest first."""
        ready: dict[str, list[_Waiting]] = defaultdict(list)
        for name, lane in self._lanes.items():
            if name not in self._held and self._is_let_in(lane[0].ticket):
                ready[ops.queue_of(lane[0].ticket.op)].append(lane[0])
        for waiting in ready.values():
            waiting.sort(key=lambda each: each.ticket.number)
        return ready

    def _is_let_in(self, ticket: Ticket) -> bool:
        return not isinstance(ticket.op, ops.SaveAdapter | ops.LoadingOp) or self.may_begin(ticket)

    def _company(self, first: _Waiting, others: Sequence[_Waiting]) -> list[_Waiting]:
        """What runs with it."""
        alike = [other for other in others if type(other.ticket.op) is type(first.ticket.op)]
        match first.ticket.op:
            case ops.OptimStep():
                return alike
            case ops.Forward() | ops.ForwardBackward() if self._share_passes:
                return _fitting(alike, self._max_tokens - first.passes[0])
            case _:
                return []

    def end(self, ticket: Ticket) -> None:
        """An op that failed has no more passes."""
        for lane in self._lanes.values():
            if lane[0].ticket is ticket:
                self._remove(lane[0])
                return

    def cancel(self, ticket: Ticket) -> bool:
        """Takes it out, if it has not begun."""
        for lane in self._lanes.values():
            for waiting in lane:
                if waiting.ticket is ticket and not waiting.has_begun:
                    self._remove(waiting)
                    return True
        return False

    @property
    def idle(self) -> bool:
        """Nothing may run."""
        return not any(name not in self._held and self._is_let_in(lane[0].ticket) for name, lane in self._lanes.items())

    def _remove(self, waiting: _Waiting) -> None:
        op = waiting.ticket.op
        assert not isinstance(op, ops.WeightsOp), "these are not added"
        lane, queue = self._lanes[ops.lane_of(op)], ops.queue_of(op)
        lane.remove(waiting)
        if not lane:
            del self._lanes[ops.lane_of(op)]
        self._turns[queue] -= 1
        if self._turns[queue] == 0:
            del self._turns[queue]

    def _to_the_end(self, queue: str) -> None:
        if queue in self._turns:
            self._turns[queue] = self._turns.pop(queue)


def _fitting(others: Sequence[_Waiting], room: int) -> list[_Waiting]:
    """Those whose next passes fit together into so many tokens."""
    fitting: list[_Waiting] = []
    for other in others:
        if other.passes[0] <= room:
            fitting.append(other)
            room -= other.passes[0]
    return fitting

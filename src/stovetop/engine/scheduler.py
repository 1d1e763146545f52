"""What runs next. Knows tickets and their order, no tensor.

The rule: ops of one adapter run in the order they came, so one op of each adapter is ready at most. Queues with a ready
op are in a line, in which the one that has had the fewest tokens comes first (`sampling/turns.py`: start-time fair
queueing). It has the turn: its oldest ready op runs, for one pass at most, that is `max_tokens_per_pass` tokens; a
large op does its next pass in a later turn of its queue. Where data of several adapters may train in one pass, the rest
of it is filled with passes of the same kind that fit, of other adapters of this queue and then of the next queues;
optimizer steps run together likewise. Each queue pays for its own tokens, whichever had the turn; one that
is ahead of the first by more than a pass does not run along, though there were room. So queues
that are never empty get the same tokens, however large their ops are, and what one client has queued, however much it
is, delays another's first op by one turn of each queue at most.

An op without tokens costs a little, so that a queue of such ops does not keep others waiting: a step of an optimizer as
much as a small part of a pass (`SHARE_OF_STEP`), what moves an adapter to the disk or from it more (`SHARE_OF_MOVE`).

A turn costs the same however much is queued: it looks at a bounded number of ready ops, and at those, one of each
adapter at most, that wait at the gate.

Sampling is not scheduled here: it reads frozen weights only, so it needs no order. Whose prompts and samples come next
is decided there, by the same rule.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from stovetop.engine import ops
from stovetop.engine.ops import Ticket
from stovetop.engine.sampling.turns import Turn, Turns

SHARE_OF_STEP, SHARE_OF_MOVE = 1 / 256, 1 / 16  # of a pass: rough, so that tokens are what counts
MAX_CANDIDATES = 32  # for a place beside the op whose turn it is; a bound, not a tuned number


@dataclass(slots=True, eq=False)
class _Waiting:
    ticket: Ticket
    lane: str  # what keeps its order with it
    queue: str
    passes: deque[int]  # tokens of each that is left; none for an op that needs no pass
    has_begun: bool = False
    is_over: bool = False

    @property
    def next_tokens(self) -> int:
        return self.passes[0] if self.passes else 0


_number = attrgetter("ticket.number")


class Scheduler:
    def __init__(self, max_tokens_per_pass: int, *, share_passes: bool) -> None:
        """`share_passes`: data of several adapters may train in one pass."""
        self._max_tokens = max_tokens_per_pass
        self._share_passes = share_passes
        self._waiting: dict[Ticket, _Waiting] = {}
        self._lanes: dict[str, deque[_Waiting]] = {}  # ops that keep their order, by adapter
        self._held: dict[str, ops.ScoreId] = {}  # lanes in which all waits for what became of a custom loss
        self._ready: dict[str, _Waiting] = {}  # by lane
        self._queues: dict[str, list[_Waiting]] = {}  # the same by queue, in each the oldest first
        self._turns = Turns()
        self._places: dict[str, Turn] = {}  # of queues in the line
        self._line: list[tuple[Turn, str]] = []  # the next one first
        self.may_begin: Callable[[Ticket], bool] = lambda ticket: True  # asked of what saves or loads

    def add(self, ticket: Ticket, passes: Sequence[int] = ()) -> None:
        """`passes` are the tokens of each pass that the op needs."""
        op = ticket.op
        assert isinstance(op, ops.OrderedOp), "the others need no order"
        waiting = _Waiting(ticket, ops.lane_of(op), ops.queue_of(op), deque(passes))
        lane = self._lanes.get(waiting.lane, deque())
        place = len(lane)
        if isinstance(op, ops.LossAnswer) and op.scored is not None:
            place = self._place_of_answer(lane, op.adapter, op.scored)
            if self._held.get(op.adapter) == op.scored:
                del self._held[op.adapter]
        lane.insert(place, waiting)
        self._lanes[waiting.lane] = lane
        self._waiting[ticket] = waiting
        self._refresh(waiting.lane)

    def _place_of_answer(self, lane: deque[_Waiting], adapter: ops.AdapterId, scored: ops.ScoreId) -> int:
        """Behind the `Score` that it answers, or, where that is done, before all others."""
        if self._held.get(adapter) == scored:
            return 0
        for index, waiting in enumerate(lane):
            if isinstance(waiting.ticket.op, ops.Score) and waiting.ticket.op.scored == scored:
                return index + 1
        return len(lane)

    def hold(self, adapter: ops.AdapterId, scored: ops.ScoreId) -> None:
        """Its other ops wait until an answer is added, if there is none yet."""
        op = self._ready[adapter].ticket.op if adapter in self._ready else None
        if not isinstance(op, ops.LossAnswer) or op.scored != scored:
            self._held[adapter] = scored
            self._refresh(adapter)

    def next_turn(self) -> list[Ticket]:
        """The ops whose turn it is, of one kind, each of another adapter; for ops in passes, one pass of each. An op
        comes again until all its passes had their turns, or `end` was called."""
        candidates = list(islice(self._candidates(), 1 + MAX_CANDIDATES))
        if not candidates:
            return []
        first, *others = candidates
        turn = [first, *self._company(first, others)]
        self._turns.served(self._places[first.queue])
        for waiting in turn:
            self._pay(waiting, has_turn=waiting is first)
            waiting.has_begun = True
            if waiting.passes:
                waiting.passes.popleft()
            if not waiting.passes:
                self._remove(waiting)
        return [waiting.ticket for waiting in turn]

    def _pay(self, waiting: _Waiting, *, has_turn: bool) -> None:
        """Its queue gets a later place, behind those who have had as much, if the turn was its own."""
        share = SHARE_OF_MOVE if isinstance(waiting.ticket.op, ops.SaveAdapter | ops.LoadingOp) else SHARE_OF_STEP
        self._turns.charge(waiting.queue, max(waiting.next_tokens, share * self._max_tokens))
        place = self._places[waiting.queue]
        begins, number = self._turns.next(waiting.queue, 0)
        self._leave_line(waiting.queue)
        self._enter_line(waiting.queue, (begins, number if has_turn else place[1]))

    def _enter_line(self, queue: str, turn: Turn) -> None:
        self._places[queue] = turn
        insort(self._line, (turn, queue))

    def _leave_line(self, queue: str) -> None:
        del self._line[bisect_left(self._line, (self._places.pop(queue), queue))]

    def _candidates(self) -> Iterator[_Waiting]:
        """What saves or loads asks the gate; where that has no room for one save, it has none for the others."""
        a_save_may_begin: bool | None = None
        for _, queue in self._line:
            for waiting in self._queues[queue]:
                if isinstance(waiting.ticket.op, ops.SaveAdapter):
                    if a_save_may_begin is None:
                        a_save_may_begin = self.may_begin(waiting.ticket)
                    if a_save_may_begin:
                        yield waiting
                elif not isinstance(waiting.ticket.op, ops.LoadingOp) or self.may_begin(waiting.ticket):
                    yield waiting

    def _company(self, first: _Waiting, others: Sequence[_Waiting]) -> list[_Waiting]:
        """What runs with it."""
        alike = [other for other in others if type(other.ticket.op) is type(first.ticket.op)]
        match first.ticket.op:
            case ops.OptimStep():
                return alike
            case ops.Forward() | ops.ForwardBackward() if self._share_passes:
                latest = self._places[first.queue][0] + self._max_tokens
                near = [other for other in alike if self._places[other.queue][0] <= latest]
                return _fitting(near, self._max_tokens - first.next_tokens)
            case _:
                return []

    def end(self, ticket: Ticket) -> None:
        """An op that failed has no more passes."""
        waiting = self._waiting.get(ticket)
        if waiting is not None:
            self._remove(waiting)

    def cancel(self, ticket: Ticket) -> bool:
        """Takes it out, if it has not begun."""
        waiting = self._waiting.get(ticket)
        if waiting is None or waiting.has_begun:
            return False
        self._remove(waiting)
        return True

    @property
    def idle(self) -> bool:
        """Nothing may run."""
        return next(self._candidates(), None) is None

    def _remove(self, waiting: _Waiting) -> None:
        """It leaves its lane when it is the first there, for looking for it would take long in a long one."""
        waiting.is_over = True
        del self._waiting[waiting.ticket]
        self._refresh(waiting.lane)

    def _refresh(self, name: str) -> None:
        """The first op of a lane is ready, if the lane is not held."""
        lane, before = self._lanes.get(name, deque()), self._ready.get(name)
        while lane and lane[0].is_over:
            lane.popleft()
        if not lane:
            self._lanes.pop(name, None)
        now = lane[0] if lane and name not in self._held else None
        if now is before:
            return
        if now is not None:  # first, so that a queue keeps its place in the line
            self._ready[name] = now
            if now.queue not in self._places:
                self._enter_line(now.queue, self._turns.next(now.queue, 0))
            insort(self._queues.setdefault(now.queue, []), now, key=_number)
        else:
            self._ready.pop(name)
        if before is not None:
            others = self._queues[before.queue]
            del others[bisect_left(others, _number(before), key=_number)]
            if not others:
                del self._queues[before.queue]
                self._leave_line(before.queue)


def _fitting(others: Sequence[_Waiting], room: int) -> list[_Waiting]:
    """Those whose next passes fit together into so many tokens."""
    fitting: list[_Waiting] = []
    for other in others:
        if other.next_tokens <= room:
            fitting.append(other)
            room -= other.next_tokens
    return fitting

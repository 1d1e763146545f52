# pyright: basic
"""In which order several queues are served: start-time fair queueing (Goyal, Vin & Cheng 1996, "Start-time Fair
Queuing: A Scheduling Algorithm for Integrated Services Packet Switching Networks"). Each item begins where the one
before it in its queue ends, or now, if that is later; who begins first is served first. So a queue with much in it
delays another's first item by one of its own.
"""

import itertools
import math

Turn = tuple[
    float, int
]  # when an item begins, in units of cost; the second number breaks ties in favour of who came first

FIRST = -math.inf  # of an item that comes before all others


class Turns:
    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of the last item of each queue; those that are past go now and then
        self._most_ends = 64
        self._numbers, self._backwards = itertools.count(1), itertools.count(-1, -1)

    def next(self, queue: str, cost: float) -> Turn:
        """Of an item that costs so much, behind the others of its queue."""
        begins = max(self._now, self._ends.get(queue, 0.0))
        self._ends[queue] = begins + cost
        return begins, next(self._numbers)

    def charge(self, queue: str, cost: float) -> None:
        """What was done for a queue cost so much more than was known when it began."""
        self._ends[queue] = max(self._now, self._ends.get(queue, 0.0)) + cost

    def before_all(self) -> Turn:
        """Of an item that goes on where it had begun."""
        return FIRST, next(self._backwards)

    def served(self, turn: Turn) -> None:
        """It is now the turn of this item."""
        if turn[0] > self._now:
            self._now = turn[0]
            if len(self._ends) > self._most_ends:
                self._ends = {queue: end for queue, end in self._ends.items() if end > self._now}
                self._most_ends = 2 * len(self._ends) + 64

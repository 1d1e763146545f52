# pyright: basic
"""How many threads the engine computes with: found by trying (`fastest_threads`), or all there are, but fewer while
other processes want the processors too (`Threads`).

The threads of a product wait for the slowest of them, and torch's do so without leaving their processors. Where another
program takes one, the last thread comes late to every product: beside one busy process two threads have a sixth
to a fourth of their speed (`benchmarks/busy.py`), beside two a tenth or less. One thread less is then faster than one
too many.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import torch

from stovetop.engine.machine import Processors, available_cores, processors, set_threads_here

TOKENS, HIDDEN, INTERMEDIATE = 256, 576, 1536  # the linears of a small model: what most of the time goes into


def fastest_threads(seconds: float = 2.0) -> int:
    """The number of threads, a power of two or all there are, that did the same work most often: more are not always
    faster, on a busy machine or where two processors share one core. Torch keeps it."""
    available = available_cores()
    candidates = sorted({available, *(2**power for power in range(available.bit_length()) if 2**power <= available)})
    rates = {threads: _rate(threads, seconds / len(candidates)) for threads in candidates}
    fastest = max(rates, key=lambda threads: rates[threads])
    torch.set_num_threads(fastest)
    return fastest


def _rate(threads: int, seconds: float) -> float:
    """Rounds of work per second."""
    torch.set_num_threads(threads)
    shapes = (TOKENS, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    x_TH, up_IH, down_HI = (torch.randn(shape, dtype=torch.float32) for shape in shapes)
    rounds, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or rounds == 0:
        torch.nn.functional.linear(torch.nn.functional.linear(x_TH, up_IH), down_HI)
        rounds += 1
    return rounds / spent


INTERVAL_S = 0.25  # between two looks
CROWDED = 0.15  # threads of this process that waited for a processor, on average, from which there is one too many
FREE = 0.85  # processors that had nothing to do, from which there may be one more
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before more are tried
SOON_S = 5.0  # more threads that are too many within this time should not have been tried


class Threads:
    """Asked after every piece of work, in the thread that computes; sets torch's number of threads there."""

    def __init__(
        self,
        most: int,
        counters: Callable[[], Processors | None] = processors,
        choose: Callable[[int], None] = set_threads_here,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = self.number = most
        self._counters = counters
        self._choose = choose
        self._clock = clock
        self._looked_s, self._seen = clock(), counters()
        self._pause_s = SHORTEST_PAUSE_S
        self._changed_s, self._rose = clock(), False  # when the number was changed last, and whether upwards

    def look(self) -> None:
        """Fewer threads, or more, by what has happened since the last look."""
        now_s = self._clock()
        spent_s = now_s - self._looked_s
        if self._most == 1 or self._seen is None or spent_s < INTERVAL_S:
            return
        seen, before = self._counters(), self._seen
        if seen is None:  # this once
            return
        self._looked_s, self._seen = now_s, seen
        # a thread that has begun since may have the name of one that has ended: its counter goes back
        waits_s = (s - before.waited_s[task] for task, s in seen.waited_s.items() if task in before.waited_s)
        waited_s = sum(max(0.0, wait_s) for wait_s in waits_s)
        self._judge(now_s, waited_s / spent_s, (seen.idle_s - before.idle_s) / spent_s)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Within, as many as there were at first: for what comes out otherwise with another number."""
        if self.number == self._most:
            yield
            return
        self._choose(self._most)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # what was done within is done
                self._choose(self.number)

    def _judge(self, now_s: float, num_waiting: float, num_idle: float) -> None:
        """On average so many threads waited, and so many processors had nothing to do."""
        unchanged_s = now_s - self._changed_s
        if num_waiting > CROWDED and self.number > 1:
            if self._rose:
                was_wrong = unchanged_s < SOON_S
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if was_wrong else SHORTEST_PAUSE_S
            self._set(max(1, self.number - math.ceil(num_waiting)), now_s)
        elif num_idle > FREE and self.number < self._most and unchanged_s >= self._pause_s:
            self._set(min(self._most, self.number + round(num_idle)), now_s)

    def _set(self, number: int, now_s: float) -> None:
        self._changed_s = now_s
        with suppress(RuntimeError):  # no thread may begin now: it is tried again
            self._choose(number)
            self.number, self._rose = number, number > self.number

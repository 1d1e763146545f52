# pyright: basic
"""Prompts that are not begun: in which order they have their turns, and how much memory there is for them.

What a step does here grows with what it begins, not with what waits: prompts of samples wait apart from those whose
logprobs alone are asked for, so that a kind for which there is no room is not looked at, and those that are the same
are found by their tokens.
"""

import bisect
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stovetop.engine.sampling.request import Prompt, PromptKey
from stovetop.engine.sampling.turns import Turns

MAX_PUT_OFF = 64  # are looked at again in every step; those behind them wait too


@dataclass(slots=True)
class Room:
    """Positions that new prompts may take in a step."""

    num_positions: int
    num_begun: int  # that prompts take which are being computed
    num_ahead: int  # that prompts of samples take which cannot be continued yet: computed, or being computed
    most_ahead: int
    make: Callable[[int], None]  # frees kept prompts until there is memory for so many
    is_shut: bool = False  # to prompts of samples
    num_put_off: int = 0  # prompts for which there is room, and that wait for another one

    @property
    def takes_scores(self) -> bool:
        """Whether a prompt whose logprobs alone are asked for may be begun, if it is short enough."""
        return self.num_positions > 0 and self.num_put_off < MAX_PUT_OFF

    @property
    def takes_samples(self) -> bool:
        return self.takes_scores and not self.is_shut

    def allows(self, prompt: Prompt) -> bool:
        """Whether a prompt may be begun. Behind one that has to wait none of its kind is begun, or it would wait for
        ever. Logprobs may be computed while prompts of samples have to wait for samples to end, but not the other way
        round: what logprobs wait for is soon computed."""
        is_sample = prompt.request.wants_samples
        if prompt.num_positions > self.num_positions:
            self.num_positions = 0
        if prompt.num_positions > self.num_positions or (is_sample and self.is_shut):
            return False
        ahead = self.num_ahead if is_sample else self.num_begun
        if ahead > 0 and ahead + prompt.num_positions > self.most_ahead:
            self.is_shut = True
            self.num_positions = self.num_positions if is_sample else 0
            return False
        return True

    def take(self, prompt: Prompt) -> None:
        self.make(prompt.num_positions)
        self.num_positions -= prompt.num_positions
        self.num_begun += prompt.num_positions
        self.num_ahead += prompt.num_positions if prompt.request.wants_samples else 0


_turn_of = operator.attrgetter("turn")


class WaitingPrompts:
    """In the order of their turns: queues are served in turn, and in each the oldest first."""

    def __init__(self) -> None:
        self._samples: list[Prompt] = []  # in the order of their turns
        self._scores: list[Prompt] = []  # the same of those whose logprobs alone are asked for
        self._alike: dict[PromptKey, dict[int, Prompt]] = {}  # those that need not be computed whole
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._samples) + len(self._scores)

    def add(self, prompt: Prompt, *, first: bool = False) -> None:
        """Behind the others of its queue, or before all."""
        prompt.turn = self._turns.before_all() if first else self._turns.next(prompt.request.queue, len(prompt.tokens))
        bisect.insort(self._line(prompt), prompt, key=_turn_of)
        if not prompt.is_computed_whole:
            self._alike.setdefault(prompt.key, {})[id(prompt)] = prompt

    def have_turn_last(self, prompt: Prompt) -> None:
        """Behind all of its queue that wait or are begun; its tokens were counted when it came."""
        prompt.turn = self._turns.next(prompt.request.queue, 0)

    def has_turn(self, prompt: Prompt) -> None:
        """It is computed now, or a chunk of it."""
        self._turns.served(prompt.turn)

    def remove(self, prompt: Prompt) -> None:
        """If it is there."""
        line = self._line(prompt)
        place = bisect.bisect_left(line, prompt.turn, key=_turn_of)
        if place < len(line) and line[place] is prompt:
            del line[place]
        alike = self._alike.get(prompt.key, {})
        alike.pop(id(prompt), None)
        if not alike:
            self._alike.pop(prompt.key, None)

    def clear(self) -> None:
        for table in (self._samples, self._scores, self._alike):
            table.clear()

    def same_as(self, key: PromptKey) -> list[Prompt]:
        """Those for which a prompt of this key would do, once it is computed."""
        return list(self._alike.get(key, {}).values())

    def in_turn(self, begun: Iterable[Prompt], room: Room) -> Iterator[Prompt]:
        """These and those that wait, in the order of their turns; those that wait as long as there is `room` for their
        kind. They stay until they are removed, which has to wait until this has ended."""
        samples = itertools.takewhile(lambda _: room.takes_samples, self._samples)
        scores = itertools.takewhile(lambda _: room.takes_scores, self._scores)
        return heapq.merge(begun, samples, scores, key=_turn_of)

    def _line(self, prompt: Prompt) -> list[Prompt]:
        return self._samples if prompt.request.wants_samples else self._scores

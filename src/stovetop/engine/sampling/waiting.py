# pyright: basic
"""Prompts that are not begun: in which order they have their turns, and how much memory there is for them.

What a step does here grows with what it begins, not with what waits: prompts of samples wait apart from those whose
logprobs alone are asked for, so that a kind for which there is no room is not looked at, and those that are the same
are found by their tokens.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stovetop.engine.ops import Sample
from stovetop.engine.sampling.prompt import Prompt, PromptKey

MOST_PUT_OFF = 64  # are looked at again in every step; those behind them wait too


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
        return self.num_positions > 0 and self.num_put_off < MOST_PUT_OFF

    @property
    def takes_samples(self) -> bool:
        return self.takes_scores and not self.is_shut

    def allows(self, prompt: Prompt) -> bool:
        """Whether a prompt may be begun. Behind one that has to wait none of its kind is begun, or it would wait for
        ever. Logprobs may be computed while prompts of samples have to wait for samples to end, but not the other way
        round: what logprobs wait for is soon computed."""
        is_sample = isinstance(prompt.op, Sample)
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
        self.num_ahead += prompt.num_positions if isinstance(prompt.op, Sample) else 0


class WaitingPrompts:
    """By id, in the order of their turns."""

    def __init__(self) -> None:
        self._samples: OrderedDict[int, Prompt] = OrderedDict()
        self._scores: OrderedDict[int, Prompt] = OrderedDict()
        self._alike: dict[PromptKey, dict[int, Prompt]] = {}  # those that need not be computed whole
        self._last, self._first = itertools.count(1), itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._samples) + len(self._scores)

    def __contains__(self, prompt: Prompt) -> bool:
        return id(prompt) in self._line(prompt)

    def add(self, prompt: Prompt) -> None:
        """Behind all others."""
        self.have_turn_last(prompt)
        self._line(prompt)[id(prompt)] = prompt
        self._index(prompt)

    def add_first(self, prompt: Prompt) -> None:
        """Before all others."""
        prompt.turn = next(self._first)
        line = self._line(prompt)
        line[id(prompt)] = prompt
        line.move_to_end(id(prompt), last=False)
        self._index(prompt)

    def have_turn_last(self, prompt: Prompt) -> None:
        """Behind all that wait or are begun."""
        prompt.turn = next(self._last)

    def remove(self, prompt: Prompt) -> None:
        """If it is there."""
        self._line(prompt).pop(id(prompt), None)
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
        samples = itertools.takewhile(lambda _: room.takes_samples, self._samples.values())
        scores = itertools.takewhile(lambda _: room.takes_scores, self._scores.values())
        return heapq.merge(begun, samples, scores, key=lambda prompt: prompt.turn)

    def _line(self, prompt: Prompt) -> OrderedDict[int, Prompt]:
        return self._samples if isinstance(prompt.op, Sample) else self._scores

    def _index(self, prompt: Prompt) -> None:
        if not prompt.is_computed_whole:
            self._alike.setdefault(prompt.key, {})[id(prompt)] = prompt

"""A pool that plays groups ahead of training and gives each step the first that are done. Where some episodes take much
longer than others, training does not wait for the last one of a batch.

Groups begin in the order of the data: those of batch k + `ahead` when the weights after k updates are published. To
begin them when batch k is taken would be too early: they would be played with older weights than they need be, and
many would be too old when their turn comes. A group that was played with weights of more than `ahead` updates before
those that it would train is played again. Short episodes are trained on earlier than long ones.

Shape suffix: `P` problems.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from stovetop.completers import TokenCompleter
from stovetop.rl.rollouts import ErrorPolicy, RetryOnFailure, Rollouts, do_rollouts
from stovetop.rl.types import EnvGroupBuilder, RLDataset


class Taken(NamedTuple):
    """What a step trains on."""

    rollouts: Rollouts  # in the order of the data
    indices_P: list[int]  # of the groups, in the data of the whole run
    lags_P: list[int]  # by how many updates the weights that played each group are older than those that it trains
    seconds_P: list[float]  # that each took to play
    num_stale: int  # groups that were found too old, and are played again


class _Group(NamedTuple):
    place: int  # in the data of the whole run
    builder: EnvGroupBuilder


class _Played(NamedTuple):
    num_updates: int  # of the weights that played it. It comes first: the oldest are taken first
    group: _Group
    rollouts: Rollouts
    seconds: float


_RETRY = RetryOnFailure()


class RolloutPool:
    """Runs while `num_workers` tasks are in `work`. Every group of the data is taken once, whatever is ready when.

    A run that goes on begins at the batch `start`. As many groups as the batches before it have were trained, which
    are the first of the data but for those that others were ready before: `trained_ahead` are the indices of these.
    """

    def __init__(
        self,
        problems: RLDataset,
        num_steps: int,
        policy: TokenCompleter,
        *,
        start: int = 0,
        ahead: int = 0,
        trained_ahead: Collection[int] = (),
        on_error: ErrorPolicy = _RETRY,
    ) -> None:
        self._problems = problems
        self._num_steps = num_steps if start < num_steps else 0  # of a run that is complete, nothing is played
        self._ahead = ahead
        self._on_error = on_error
        self.num_workers = len(problems.get_batch(0)) * (ahead + 1)  # every group that may have begun; batch 0 is full
        self._policy, self._num_updates = policy, start
        self._sizes: list[int] = []  # of the batches whose groups may begin
        self._to_play: asyncio.PriorityQueue[_Group] = asyncio.PriorityQueue()
        self._played: asyncio.PriorityQueue[_Played] = asyncio.PriorityQueue()
        num_trained = sum(len(problems.get_batch(batch)) for batch in range(min(start, self._num_steps)))
        self._first_untrained = num_trained - len(trained_ahead)
        self._trained_ahead = set(trained_ahead)
        for batch in range(start + ahead + 1):
            self._add(batch)

    def publish(self, policy: TokenCompleter, num_updates: int) -> None:
        """Groups that begin from now on are played with the weights after so many updates, one more than before; and
        those of one more batch may begin."""
        self._policy, self._num_updates = policy, num_updates
        self._add(num_updates + self._ahead)

    async def work(self) -> None:
        """Plays group after group, until it is cancelled."""
        while True:
            group = await self._to_play.get()
            num_updates, began_s = self._num_updates, time.perf_counter()
            rollouts = await do_rollouts([group.builder], self._policy, self._on_error)
            self._played.put_nowait(_Played(num_updates, group, rollouts, time.perf_counter() - began_s))

    async def take(self, step: int) -> Taken:
        """As many groups as the batch of this step has, as soon as so many are ready that are not too old."""
        taken: list[_Played] = []
        num_stale = 0
        while len(taken) < self._sizes[step]:
            played = await self._played.get()
            if step - played.num_updates <= self._ahead:
                taken.append(played)
            else:
                num_stale += 1
                self._to_play.put_nowait(played.group)
        taken.sort(key=lambda played: played.group.place)
        indices_P = [played.group.place for played in taken]
        self._trained_ahead.update(indices_P)
        while self._first_untrained in self._trained_ahead:
            self._trained_ahead.remove(self._first_untrained)
            self._first_untrained += 1
        return Taken(
            join_rollouts([played.rollouts for played in taken]),
            indices_P,
            [step - played.num_updates for played in taken],
            [played.seconds for played in taken],
            num_stale,
        )

    @property
    def trained_ahead(self) -> tuple[int, ...]:
        """The groups that were taken before one of a lower index, which is not taken yet."""
        return tuple(sorted(self._trained_ahead))

    def _add(self, batch: int) -> None:
        """The groups of a batch may begin. Batches are added in order; what was trained is left out."""
        if batch >= self._num_steps:
            return
        builders_P = self._problems.get_batch(batch)
        for index, builder in enumerate(builders_P, start=sum(self._sizes)):
            if index >= self._first_untrained and index not in self._trained_ahead:
                self._to_play.put_nowait(_Group(index, builder))
        self._sizes.append(len(builders_P))


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """All groups in order, and what went wrong, added up."""
    num_errors: Counter[str] = Counter()
    for part in parts:
        num_errors.update(part.num_errors)
    return Rollouts(
        [owned for part in parts for owned in part.owned_groups_P],
        num_errors,
        sum(part.num_rollouts_dropped for part in parts),
        sum(part.num_groups_skipped for part in parts),
    )

"""From groups of trajectories to the data that the RL losses read: which groups, which tokens, which numbers.

Shape suffixes: `P` problems, `G` members of a group, `U` turns of one episode, `D` datums, `N` positions of one datum.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from stovetop.rl.advantages import Advantage
from stovetop.rl.types import Action, Observation, Trajectory, TrajectoryGroup, Transition
from stovetop.supervised.data import create_rightshifted_model_input_and_leftshifted_targets
from stovetop.types import Datum, EncodedTextChunk, ModelInputChunk, TensorData

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class DatumMetadata:
    """Which trajectory a datum was made from."""

    group_idx: int
    traj_idx: int


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup], advantages_P_G: Sequence[Sequence[Advantage]]
) -> tuple[list[Datum], list[DatumMetadata]]:
    """All datums of a batch, group by group, and for each of them where it comes from."""
    data_D: list[Datum] = []
    metadata_D: list[DatumMetadata] = []
    for group_idx, (group, advantages_G) in enumerate(zip(groups_P, advantages_P_G, strict=True)):
        for traj_idx, (trajectory, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            data = trajectory_to_data(trajectory, advantage)
            data_D.extend(data)
            metadata_D.extend(DatumMetadata(group_idx, traj_idx) for _ in data)
    return data_D, metadata_D


def trajectory_to_data(trajectory: Trajectory, advantage: Advantage) -> list[Datum]:
    """One datum for as long as each observation begins with everything before it, a new one where it does not.

    Every position has a target token, a sampling logprob, an advantage and a mask; the last three are zero but for the
    tokens of actions, where the mask is 1. With advantage 2, observation [1, 2], action [3], observation [1, 2, 3, 4],
    action [5, 6] become one datum: tokens [1, 2, 3, 4, 5], targets [2, 3, 4, 5, 6], advantages [0, 2, 0, 2, 2]. With
    one advantage per turn, [2, -1], they are [0, 2, 0, -1, -1].

    Images stay chunks. The action of a turn that is not trainable counts as observed; a turn without action tokens is
    left out, and so is a sequence in which nothing trains.
    """
    turns = trajectory.transitions
    advantages_U = advantage if isinstance(advantage, Sequence) else [advantage] * len(turns)
    sequences: list[_Sequence] = []
    for turn, turn_advantage in zip(turns, advantages_U, strict=True):
        if not turn.ac.tokens:
            continue
        before, text = _split_after_images(turn.ob)
        if not sequences or not sequences[-1].begins(before, text):
            sequences.append(_Sequence())
        sequences[-1].become(before, text, turn, turn_advantage)
    return [sequence.to_datum() for sequence in sequences if sequence.trained]


def without_mask(data_D: Sequence[Datum]) -> list[Datum]:
    """The data as the losses take them: `mask` serves metrics and penalties on this side, and no loss reads it."""
    return [
        Datum(
            datum.model_input,
            {name: tensor for name, tensor in datum.loss_fn_inputs.items() if name != "mask"},
        )
        for datum in data_D
    ]


def remove_constant_reward_groups(
    owned_groups_P: Sequence[tuple[Owner, TrajectoryGroup]],
) -> list[tuple[Owner, TrajectoryGroup]]:
    """Leaves out the groups whose rewards are all equal: their advantages are zero, they teach nothing.

    Each group comes, stays and goes with its owner: its builder, or whatever else belongs to it. If no group would be
    left the first one stays, so that a batch is never empty: each batch is one step of the optimizer, and policies are
    numbered by steps. That step has no gradient, and moves the weights by what is left of earlier ones.
    """
    mixed_P = [(owner, group) for owner, group in owned_groups_P if not all_same(group.get_total_rewards())]
    if owned_groups_P and not mixed_P:
        log.warning("in each of the %d groups all rewards are equal: this batch has no gradient", len(owned_groups_P))
        return list(owned_groups_P[:1])
    return mixed_P


def all_same(rewards_G: Sequence[float]) -> bool:
    """Whether all are equal. Of none, it is true."""
    return len(set(rewards_G)) <= 1


# ---- one datum under construction --------------------------------------------------------------------------------


class _Trained(NamedTuple):
    """The action that begins at this position, and its advantage."""

    start: int
    action: Action
    advantage: float


@dataclass(slots=True)
class _Sequence:
    """Observations and actions so far: the last observation, which has all before it, and its action. Whole tuples are
    compared, and joined only in the end, so that long episodes stay cheap."""

    before: tuple[ModelInputChunk, ...] = ()  # of the observation, up to the last image
    text: tuple[int, ...] = ()  # after it
    answer: tuple[int, ...] = ()
    trained: list[_Trained] = field(default_factory=list[_Trained])

    def begins(self, before: tuple[ModelInputChunk, ...], text: tuple[int, ...]) -> bool:
        """Whether an observation starts with this sequence."""
        if len(before) > len(self.before):  # it has further images; what follows those in common comes before the next
            following = before[len(self.before)]
            text = following.tokens if isinstance(following, EncodedTextChunk) else ()
        num_seen = len(self.text)
        return (
            text[num_seen : num_seen + len(self.answer)] == self.answer
            and text[:num_seen] == self.text
            and before[: len(self.before)] == self.before
        )

    def become(
        self, before: tuple[ModelInputChunk, ...], text: tuple[int, ...], turn: Transition, advantage: float
    ) -> None:
        """Grows to an observation, which starts with this sequence, and its action."""
        self.before, self.text, self.answer = before, text, tuple(turn.ac.tokens)
        if turn.trainable:
            start = sum([chunk.length for chunk in before]) + len(text)
            self.trained.append(_Trained(start, turn.ac, advantage))

    def to_datum(self) -> Datum:
        model_input, target_tokens = create_rightshifted_model_input_and_leftshifted_targets(
            [*self.before, EncodedTextChunk(self.text + self.answer)]
        )
        logprobs_N, advantages_N, mask_N = (np.zeros(len(target_tokens), np.float32) for _ in range(3))
        for start, action, advantage in self.trained:
            targets = slice(start - 1, start - 1 + len(action.tokens))
            logprobs_N[targets] = action.logprobs
            advantages_N[targets] = advantage
            mask_N[targets] = 1
        return Datum(
            model_input,
            {
                "target_tokens": TensorData.adopt(np.fromiter(target_tokens, np.int64, len(target_tokens))),
                "logprobs": TensorData.adopt(logprobs_N),
                "advantages": TensorData.adopt(advantages_N),
                "mask": TensorData.adopt(mask_N),
            },
        )


def _split_after_images(observation: Observation) -> tuple[tuple[ModelInputChunk, ...], tuple[int, ...]]:
    """The chunks up to the last image, and the tokens after it. Neighbouring tokens share a chunk, so that it does not
    matter how an observation was put together."""
    before: list[ModelInputChunk] = []
    text: tuple[int, ...] = ()
    for chunk in observation.chunks:
        if isinstance(chunk, EncodedTextChunk):
            text += chunk.tokens  # of a single chunk, no copy
        else:
            before.extend([EncodedTextChunk(text), chunk] if text else [chunk])
            text = ()
    return tuple(before), text

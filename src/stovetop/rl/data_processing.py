"""From groups of trajectories to the data that the RL losses read: which groups, which tokens, which numbers.

Shape suffixes: `P` problems, `G` members of a group, `D` datums, `N` positions of one datum.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stovetop.rl.types import Action, Observation, Trajectory, TrajectoryGroup
from stovetop.supervised.data import create_rightshifted_model_input_and_leftshifted_targets
from stovetop.types import Datum, EncodedTextChunk, ImageChunk, ModelInputChunk

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")
Element = int | ImageChunk  # a token, or an image with all its positions


@dataclass(frozen=True, slots=True)
class DatumMetadata:
    """Which trajectory a datum was made from."""

    group_idx: int
    traj_idx: int


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup], advantages_P_G: Sequence[Sequence[float]]
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


def trajectory_to_data(trajectory: Trajectory, advantage: float) -> list[Datum]:
    """One datum for as long as each observation begins with everything before it, a new one where it does not.

    Every position has a target token, a sampling logprob, an advantage and a mask; the last three are zero but for the
    tokens of actions, where the mask is 1. With advantage 2, observation [1, 2], action [3], observation [1, 2, 3, 4],
    action [5, 6] become one datum: tokens [1, 2, 3, 4, 5], targets [2, 3, 4, 5, 6], advantages [0, 2, 0, 2, 2].
    Images stay chunks. A turn without action tokens has nothing to train on and is left out.
    """
    sequences: list[_Sequence] = []
    for transition in trajectory.transitions:
        if not transition.ac.tokens:
            continue
        elements = _elements(transition.ob)
        if not sequences or elements[: len(sequences[-1].elements)] != sequences[-1].elements:
            sequences.append(_Sequence())
        sequences[-1].add_observed(elements[len(sequences[-1].elements) :])
        sequences[-1].add_action(transition.ac, advantage)
    return [sequence.to_datum() for sequence in sequences]


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
    left the first one stays, so that a batch is never empty.
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


@dataclass(slots=True)
class _Sequence:
    """Observations and actions so far, and the numbers of each position."""

    elements: list[Element] = field(default_factory=list[Element])
    logprobs_N: list[float] = field(default_factory=list[float])
    advantages_N: list[float] = field(default_factory=list[float])
    mask_N: list[float] = field(default_factory=list[float])

    def add_observed(self, elements: Sequence[Element]) -> None:
        zeros = [0.0] * sum(element.length if isinstance(element, ImageChunk) else 1 for element in elements)
        self.elements.extend(elements)
        self.logprobs_N.extend(zeros)
        self.advantages_N.extend(zeros)
        self.mask_N.extend(zeros)

    def add_action(self, action: Action, advantage: float) -> None:
        self.elements.extend(action.tokens)
        self.logprobs_N.extend(action.logprobs)
        self.advantages_N.extend([advantage] * len(action.tokens))
        self.mask_N.extend([1.0] * len(action.tokens))

    def to_datum(self) -> Datum:
        model_input, target_tokens = create_rightshifted_model_input_and_leftshifted_targets(_chunks(self.elements))
        return Datum(
            model_input,
            {
                "target_tokens": target_tokens,
                "logprobs": self.logprobs_N[1:],
                "advantages": self.advantages_N[1:],
                "mask": self.mask_N[1:],
            },
        )


def _elements(observation: Observation) -> list[Element]:
    elements: list[Element] = []
    for chunk in observation.chunks:
        if isinstance(chunk, ImageChunk):
            elements.append(chunk)
        else:
            elements.extend(chunk.tokens)
    return elements


def _chunks(elements: Sequence[Element]) -> list[ModelInputChunk]:
    """The opposite of `_elements`: neighbouring tokens share a chunk."""
    chunks: list[ModelInputChunk] = []
    tokens: list[int] = []
    for element in elements:
        if isinstance(element, ImageChunk):
            chunks.extend([EncodedTextChunk(tokens), element] if tokens else [element])
            tokens = []
        else:
            tokens.append(element)
    return [*chunks, EncodedTextChunk(tokens)] if tokens else chunks

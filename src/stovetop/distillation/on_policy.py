"""On-policy distillation: the student writes, the teacher scores each token that it wrote, and the gap becomes the
advantage (Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543). Rollouts and training steps are
those of reinforcement learning.

Shape suffixes: `P` problems, `G` members of a group, `D` datums, `N` positions of one datum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stovetop.client import SamplingClient
from stovetop.distillation.datasets import SourcedGroupBuilder
from stovetop.errors import InvalidRequest
from stovetop.rl.advantages import Advantage, Floats
from stovetop.rl.data_processing import assemble_training_data
from stovetop.rl.kl import PenalisedData, Penalty, add_to_advantages, kl_penalty
from stovetop.rl.types import EnvGroupBuilder, TrajectoryGroup
from stovetop.supervised.logprobs import compute_logprobs_by
from stovetop.types import Datum


class SourcedDatum(NamedTuple):
    """A datum, and which dataset it is of."""

    datum: Datum
    dataset_index: int


def assemble_sourced_data(
    owned_groups_P: Sequence[tuple[EnvGroupBuilder, TrajectoryGroup]], advantages_P_G: Sequence[Sequence[Advantage]]
) -> list[SourcedDatum]:
    """The data of the groups that there are (`rl.rollouts.Rollouts.owned_groups_P`), each with the dataset of its own
    group's builder, which must come from a CompositeDataset."""
    data_D, metadata_D = assemble_training_data([group for _, group in owned_groups_P], advantages_P_G)
    sources_P = [_dataset_index(builder) for builder, _ in owned_groups_P]
    return [
        SourcedDatum(datum, sources_P[metadata.group_idx]) for datum, metadata in zip(data_D, metadata_D, strict=True)
    ]


async def incorporate_teacher_kl(
    sourced_D: Sequence[SourcedDatum],
    teachers: Sequence[SamplingClient],
    *,
    kl_penalty_coef: float = 1.0,
    kl_discount_factor: float = 0.0,
    centred: bool = False,
) -> PenalisedData:
    """The data with -coefficient·(student's logprob - teacher's) added to the advantage of each action token, where
    teacher i is that of dataset i. A discount above 0 gives each token also the penalties of the later ones. `centred`:
    the mean of the differences is subtracted first. The expected gradient stays the same, as that of any constant is
    0, and the noise falls the more, the further student and teacher are apart.

    Reports `teacher_kl`, the mean difference over all action tokens, and `teacher_kl/dataset_<i>` over those of one
    dataset. A mean over no tokens is not reported."""
    if without := sorted({index for _, index in sourced_D} - set(range(len(teachers)))):
        raise InvalidRequest(
            f"each dataset needs its teacher; there are {len(teachers)}, and data of datasets {without}"
        )
    teacher_logprobs_D = await compute_logprobs_by(
        [teachers[index] for _, index in sourced_D], [datum for datum, _ in sourced_D]
    )
    gaps_D = [
        _Gaps(
            np.subtract(datum.loss_fn_inputs["logprobs"].array, logprobs_N), datum.loss_fn_inputs["mask"].array, index
        )
        for (datum, index), logprobs_N in zip(sourced_D, teacher_logprobs_D, strict=True)
    ]
    penalty = _penalty(gaps_D, kl_penalty_coef, kl_discount_factor, centred=centred)
    metrics = {"teacher_kl": penalty.mean_difference}
    for dataset_index in sorted({gaps.dataset_index for gaps in gaps_D}):
        own_D = [gaps for gaps in gaps_D if gaps.dataset_index == dataset_index]
        metrics[f"teacher_kl/dataset_{dataset_index}"] = _penalty(own_D, kl_penalty_coef).mean_difference
    return PenalisedData(
        add_to_advantages([datum for datum, _ in sourced_D], penalty.advantages_D),
        {name: mean for name, mean in metrics.items() if not np.isnan(mean)},
    )


class _Gaps(NamedTuple):
    """Student minus teacher at each position of a datum, which positions count, and which dataset it is of."""

    differences_N: Floats
    mask_N: npt.NDArray[np.generic]
    dataset_index: int


def _penalty(gaps_D: Sequence[_Gaps], coefficient: float, discount: float = 0.0, *, centred: bool = False) -> Penalty:
    return kl_penalty(
        [gaps.differences_N for gaps in gaps_D],
        [gaps.mask_N for gaps in gaps_D],
        coefficient,
        discount=discount,
        centred=centred,
    )


def _dataset_index(builder: EnvGroupBuilder) -> int:
    if not isinstance(builder, SourcedGroupBuilder):
        raise InvalidRequest(
            f"the groups of a distillation come from a CompositeDataset, which says whose they are: {builder!r}"
        )
    return builder.dataset_index

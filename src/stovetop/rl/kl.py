"""How far two sets of logprobs of the same tokens are apart: estimates of KL divergences, and penalties on them that
become part of the advantages. Whose logprobs they are (a base model, a teacher, the weights after a step) is for the
caller to say.

Sampling clients give logprobs at temperature 1. Compared with those of tokens that were sampled at another temperature,
they differ also where the weights do not.

Shape suffixes: `D` datums, `N` positions of one datum, `A` action tokens of all datums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stovetop.checks import take
from stovetop.client import SamplingClient
from stovetop.errors import InvalidRequest
from stovetop.rl.advantages import Floats, discounted_future_sum_vectorized
from stovetop.rules import number
from stovetop.supervised.logprobs import compute_reference_logprobs
from stovetop.types import Datum, TensorData

Numbers = Sequence[float] | npt.NDArray[np.generic]


# ---- penalties ---------------------------------------------------------------------------------------------------


class Penalty(NamedTuple):
    """What `kl_penalty` gives: arrays shaped like the masks, (N,) of each datum, and what they were made from."""

    advantages_D: list[Floats]  # to be added to those of the data; zero outside the masks
    mean_difference: float  # over all masked tokens: an estimate of KL(policy ‖ reference); NaN without any


def kl_penalty(
    differences_D: Sequence[Numbers],
    masks_D: Sequence[Numbers],
    coefficient: float,
    *,
    discount: float = 0.0,
    centred: bool = True,
) -> Penalty:
    """Advantages of -coefficient·(d - mean) at the masked tokens, where d is the policy's logprob minus the
    reference's. With `centred` the mean is that of the masked tokens of all datums, so that the penalty moves
    probability between tokens and favours neither long nor short answers: it sums to zero. Without, the mean is 0, as
    distillation has it.

    A discount above 0 gives each token also the penalties of the later ones of its datum, by discount^distance.
    """
    coefficient = take(number(), coefficient, "the coefficient of a KL penalty")
    discount = take(number(at_least=0, at_most=1), discount, "the discount of a KL penalty")
    is_masked_D = [np.asarray(mask) != 0 for mask in masks_D]
    kept_D: list[Floats] = []
    for index, (is_masked, difference) in enumerate(zip(is_masked_D, differences_D, strict=True)):
        _check_positions(index, differences=difference, mask=is_masked)
        kept_D.append(np.where(is_masked, np.asarray(difference, np.float64), 0.0))
    num_tokens = sum(int(is_masked.sum()) for is_masked in is_masked_D)
    mean = sum(float(kept.sum()) for kept in kept_D) / num_tokens if num_tokens else np.nan
    advantages_D: list[Floats] = []
    for is_masked, kept in zip(is_masked_D, kept_D, strict=True):
        advantages = np.where(is_masked, coefficient * ((mean if centred else 0.0) - kept), 0.0)
        if discount > 0:
            advantages = np.where(is_masked, discounted_future_sum_vectorized(advantages, discount), 0.0)
        advantages_D.append(advantages)
    return Penalty(advantages_D, mean)


def add_to_advantages(data_D: Sequence[Datum], added_D: Sequence[Numbers]) -> list[Datum]:
    """The same data with these numbers added to its advantages."""
    summed_D: list[Datum] = []
    for index, (datum, added) in enumerate(zip(data_D, added_D, strict=True)):
        advantages = datum.loss_fn_inputs["advantages"]
        _check_positions(index, advantages=advantages.array, added=added)
        summed_D.append(Datum(datum.model_input, datum.loss_fn_inputs | {"advantages": _sum(advantages, added)}))
    return summed_D


def _sum(tensor: TensorData, added: Numbers) -> TensorData:
    return TensorData(np.add(tensor.array, np.asarray(added)), "float32")


def _check_positions(index: int, **numbers: Numbers) -> None:
    """Arrays of one number would silently fit any others."""
    shapes = {name: np.shape(one) for name, one in numbers.items()}
    if len(set(shapes.values())) > 1:
        raise InvalidRequest(f"datum {index} needs as many of each as it has positions; it has: {shapes}")


class PenalisedData(NamedTuple):
    """The data with a penalty in its advantages, and the metrics that tell how large the gap was."""

    data_D: list[Datum]
    metrics: dict[str, float]


async def incorporate_kl_penalty(
    data_D: Sequence[Datum],
    base_sampling_client: SamplingClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> PenalisedData:
    """`kl_penalty` of the sampled tokens against a base or reference model, and `kl_policy_base`, their mean
    difference, where there is a token to measure it on."""
    masks_D = [datum.loss_fn_inputs["mask"].array for datum in data_D]
    base_logprobs_D = await compute_reference_logprobs(base_sampling_client, data_D)
    differences_D = [
        np.subtract(datum.loss_fn_inputs["logprobs"].array, base_logprobs)
        for datum, base_logprobs in zip(data_D, base_logprobs_D, strict=True)
    ]
    penalty = kl_penalty(differences_D, masks_D, kl_penalty_coef, discount=kl_discount_factor)
    metrics = {} if np.isnan(penalty.mean_difference) else {"kl_policy_base": penalty.mean_difference}
    return PenalisedData(add_to_advantages(data_D, penalty.advantages_D), metrics)


# ---- estimates ---------------------------------------------------------------------------------------------------


class KLEstimates(NamedTuple):
    """Of KL(policy ‖ reference), from tokens that the policy sampled (Schulman 2020, "Approximating KL divergence").
    With d = log reference - log policy: k1 is -d, without bias; k2 is ½d², with less noise; k3 is e^d - 1 - d, without
    bias and never negative."""

    k1: float
    k2: float
    k3: float


def estimate_kl(policy_logprobs_A: Numbers, reference_logprobs_A: Numbers) -> KLEstimates:
    """Means over the tokens; NaN of none."""
    log_ratios_A = np.asarray(reference_logprobs_A, np.float64) - np.asarray(policy_logprobs_A, np.float64)
    if log_ratios_A.size == 0:
        return KLEstimates(np.nan, np.nan, np.nan)
    return KLEstimates(
        float(-log_ratios_A.mean()),
        float((log_ratios_A**2).mean() / 2),
        float((np.expm1(log_ratios_A) - log_ratios_A).mean()),
    )


async def compute_post_kl(data_D: Sequence[Datum], post_sampling_client: SamplingClient) -> dict[str, float]:
    """How far the weights after an update are from those that sampled the action tokens: `kl_pre_post_v1` is k1,
    `kl_pre_post_v2` is k2. Without action tokens there is nothing to report: {}."""
    post_logprobs_D = await compute_reference_logprobs(post_sampling_client, data_D)
    masks_D = [datum.loss_fn_inputs["mask"].array != 0 for datum in data_D]
    if not any(mask.any() for mask in masks_D):
        return {}
    pre_A, post_A = (
        np.concatenate([logprobs[mask] for logprobs, mask in zip(logprobs_D, masks_D, strict=True)])
        for logprobs_D in ([datum.loss_fn_inputs["logprobs"].array for datum in data_D], post_logprobs_D)
    )
    estimates = estimate_kl(pre_A, post_A)
    return {"kl_pre_post_v1": estimates.k1, "kl_pre_post_v2": estimates.k2}

"""Losses on pairs of answers, computed: pure functions of logprobs. Which losses there are, and their formulas, is in
loss_values; where the logprobs of a reference come from is in supervised.logprobs, how pairs become data in datasets.

Every loss is a **mean over pairs**.

Shape suffixes: `P` pairs, `D` datums, `N` positions of one datum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from stovetop.errors import InvalidRequest
from stovetop.preference.loss_values import (
    DPO,
    IPO,
    KTO,
    ORPO,
    Beta,
    ConservativeDPO,
    Hinge,
    PreferenceLoss,
    RobustDPO,
    SimPO,
    needs_reference,
)
from stovetop.types import Datum

if TYPE_CHECKING:
    from stovetop.arguments import CustomLossFn

T = TypeVar("T")

Floats = npt.NDArray[np.floating]

# ---- their values ------------------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """One number for each answer of P pairs."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """What the losses read of P pairs: each of them needs the policy's logprobs, and some of the rest."""

    policy: Sides  # summed logprobs
    reference: Sides | None = None  # summed logprobs
    lengths: Sides | None = None  # numbers of tokens, for losses that compare means
    mismatched_logratios: torch.Tensor | None = None  # policy minus reference, of answers to other prompts; for KTO

    def __post_init__(self) -> None:
        given = [sides for sides in (self.policy, self.reference, self.lengths) if sides is not None]
        shapes = {tuple(side_P.shape) for sides in given for side_P in sides}
        if len(shapes) > 1 or not self.policy.chosen_P.numel():  # tensors of one number would silently fit any others
            raise InvalidRequest(
                f"pairs need one number for each chosen and each rejected answer, and at least one pair; the shapes "
                f"are: {sorted(shapes)}"
            )


class LossAndMetrics(NamedTuple):
    """A mean over pairs, as a tensor that can be differentiated, and numbers to log."""

    loss: torch.Tensor
    metrics: dict[str, float]


def compute_dpo_loss(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    chosen_ref_P: torch.Tensor,
    rejected_ref_P: torch.Tensor,
    beta: Beta = 0.1,
) -> LossAndMetrics:
    """DPO from summed logprobs. Its metrics are those of `compute_preference_loss`."""
    pairs = PairLogprobs(Sides(chosen_P, rejected_P), reference=Sides(chosen_ref_P, rejected_ref_P))
    return compute_preference_loss(DPO(beta=beta), pairs)


def compute_preference_loss(loss: PreferenceLoss, pairs: PairLogprobs) -> LossAndMetrics:
    """The mean loss over pairs, and metrics: `<name>_loss`; `chosen_reward` and `rejected_reward`, the means of what
    the loss compares, times β (ORPO: λ); `margin`, the mean of their difference; `accuracy`, the share of pairs whose
    margin is above zero (a policy that still is the reference has none); `num_pairs`."""
    rewards = _rewards(loss, pairs)
    losses_P = _losses(loss, rewards, pairs)
    margins_P = (rewards.chosen_P - rewards.rejected_P).detach()
    return LossAndMetrics(
        losses_P.mean(),
        {
            f"{loss.name}_loss": losses_P.detach().mean().item(),
            "accuracy": (margins_P > 0).float().mean().item(),
            "margin": margins_P.mean().item(),
            "chosen_reward": rewards.chosen_P.detach().mean().item(),
            "rejected_reward": rewards.rejected_P.detach().mean().item(),
            "num_pairs": float(len(margins_P)),
        },
    )


def _rewards(loss: PreferenceLoss, pairs: PairLogprobs) -> Sides:
    """What a loss takes the answers to be worth, β included."""
    match loss:
        case DPO() | Hinge() | RobustDPO() | ConservativeDPO() | KTO():
            worth, scale = _logratios(loss, pairs), loss.beta
        case IPO():
            worth, scale = _means(loss, _logratios(loss, pairs), pairs), loss.beta
        case SimPO():
            worth, scale = _means(loss, pairs.policy, pairs), loss.beta
        case ORPO():
            worth, scale = _means(loss, pairs.policy, pairs), loss.lam
        case _:
            assert_never(loss)
    return Sides(scale * worth.chosen_P, scale * worth.rejected_P)


def _losses(loss: PreferenceLoss, rewards: Sides, pairs: PairLogprobs) -> torch.Tensor:
    """One loss for each pair."""
    margins_P = rewards.chosen_P - rewards.rejected_P
    match loss:
        case DPO():
            return -logsigmoid(margins_P)
        case IPO(beta=beta):
            return (margins_P / beta - 1 / (2 * beta)) ** 2
        case Hinge():
            return torch.relu(1 - margins_P)
        case RobustDPO(label_smoothing=epsilon):
            return (epsilon * logsigmoid(-margins_P) - (1 - epsilon) * logsigmoid(margins_P)) / (1 - 2 * epsilon)
        case ConservativeDPO(label_smoothing=epsilon):
            return -epsilon * logsigmoid(-margins_P) - (1 - epsilon) * logsigmoid(margins_P)
        case SimPO(gamma=gamma):
            return -logsigmoid(margins_P - gamma)
        case ORPO(lam=lam):
            means = _means(loss, pairs.policy, pairs)
            return -means.chosen_P - lam * logsigmoid(_log_odds(means.chosen_P) - _log_odds(means.rejected_P))
        case KTO(beta=beta):
            logratios = _given(pairs.mismatched_logratios, loss, "logratios of answers to other prompts")
            kl = beta * logratios.detach().mean().clamp(min=0)
            return (2 - torch.sigmoid(rewards.chosen_P - kl) - torch.sigmoid(kl - rewards.rejected_P)) / 2
        case _:
            assert_never(loss)


def _given(value: T | None, loss: PreferenceLoss, what: str) -> T:
    if value is None:
        raise InvalidRequest(f"{loss.name} needs {what}, which these pairs lack")
    return value


def _logratios(loss: PreferenceLoss, pairs: PairLogprobs) -> Sides:
    policy, reference = pairs.policy, _given(pairs.reference, loss, "the reference's logprobs")
    return Sides(policy.chosen_P - reference.chosen_P, policy.rejected_P - reference.rejected_P)


def _means(loss: PreferenceLoss, summed: Sides, pairs: PairLogprobs) -> Sides:
    lengths = _given(pairs.lengths, loss, "the lengths of the answers")
    return Sides(summed.chosen_P / lengths.chosen_P, summed.rejected_P / lengths.rejected_P)


def _log_odds(logprob_P: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)). That of certainty is infinite; it is taken just below."""
    below_P = logprob_P.clamp(max=-1e-6)
    return below_P - torch.log(-torch.expm1(below_P))


# ---- as a loss of training ---------------------------------------------------------------------------------------


def preference_loss_fn(loss: PreferenceLoss, reference_logprobs_D: Sequence[Floats] | None = None) -> "CustomLossFn":
    """What `forward_backward_custom` takes: the loss of pairs, from data where a chosen answer stands at every even
    index and the rejected one behind it. For KTO the data are those of `datasets.with_mismatched`. The reference's
    logprobs are those of the same data, as `supervised.logprobs.compute_reference_logprobs` returns them."""
    if reference_logprobs_D is None and needs_reference(loss):
        raise InvalidRequest(f"{loss.name} needs the logprobs of a reference: reference_logprobs_D=None")

    def loss_fn(data_D: Sequence[Datum], logprobs_D: list[torch.Tensor]) -> LossAndMetrics:
        return compute_preference_loss(loss, pair_logprobs(loss, data_D, logprobs_D, reference_logprobs_D))

    return loss_fn


def pair_logprobs(
    loss: PreferenceLoss,
    data_D: Sequence[Datum],
    logprobs_D: Sequence[torch.Tensor],
    reference_logprobs_D: Sequence[Floats] | None,
) -> PairLogprobs:
    """Sums over the tokens that have a weight, each times its weight; prompts have none and do not count."""
    parts = 4 if isinstance(loss, KTO) else 2
    if not data_D or len(data_D) % parts:
        raise InvalidRequest(
            f"{loss.name} takes pairs of a chosen and a rejected answer"
            f"{', then as many mismatched ones' if parts == 4 else ''}; these are {len(data_D)} datums"
        )
    policy_D = _summed(data_D, logprobs_D)
    lengths_D = torch.stack([_weights(datum).sum() for datum in data_D])
    if without := [index for index, datum in enumerate(data_D) if not datum.loss_fn_inputs["weights"].array.any()]:
        raise InvalidRequest(f"an answer needs a token with a weight; these datums have none: {without}")
    num_paired = 2 * len(data_D) // parts
    if reference_logprobs_D is None:
        return PairLogprobs(_sides(policy_D), lengths=_sides(lengths_D))
    reference_D = _summed(
        data_D, [torch.tensor(logprobs_N, dtype=torch.float32) for logprobs_N in reference_logprobs_D]
    )
    return PairLogprobs(
        _sides(policy_D[:num_paired]),
        _sides(reference_D[:num_paired]),
        _sides(lengths_D[:num_paired]),
        (policy_D - reference_D)[num_paired:] if parts == 4 else None,
    )


def _summed(data_D: Sequence[Datum], logprobs_D: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(logprobs_D) != len(data_D):
        raise InvalidRequest(f"{len(data_D)} datums need logprobs of each; there are those of {len(logprobs_D)}")
    return torch.stack([_sum_of_datum(datum, logprobs_N) for datum, logprobs_N in zip(data_D, logprobs_D, strict=True)])


def _sum_of_datum(datum: Datum, logprobs_N: torch.Tensor) -> torch.Tensor:
    weights_N = _weights(datum)
    if weights_N.shape != logprobs_N.shape:
        raise InvalidRequest(
            f"logprobs and weights of a datum differ in shape: {tuple(logprobs_N.shape)}, {tuple(weights_N.shape)}"
        )
    counted_N = weights_N != 0  # elsewhere a logprob may be anything, -inf too
    return (weights_N[counted_N] * logprobs_N[counted_N]).sum()


def _weights(datum: Datum) -> torch.Tensor:
    return datum.loss_fn_inputs["weights"].to_torch()


def _sides(values_D: torch.Tensor) -> Sides:
    return Sides(values_D[0::2], values_D[1::2])

# pyright: basic
"""The arithmetic of the loss table: one pure function per loss value of `losses.py`, where formulas and sources are.

All arrays are float32 tensors of one datum: `N` its tokens, `K` targets per position (cross-entropy only). Every
function returns the **sum over tokens**. Gradients are autograd's.
"""

from typing import assert_never

import torch
from torch import Tensor

from stovetop.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, ImportanceSampling, Loss

LossInputs = dict[str, Tensor]  # the datum's tensors, by the names of the loss table


def loss_sum(loss: Loss, logprobs_N: Tensor, inputs: LossInputs) -> Tensor:
    """The loss of one datum, given the model's log-probabilities of its targets."""
    match loss:
        case CrossEntropy():
            return cross_entropy(logprobs_N, inputs["weights"])
        case ImportanceSampling():
            return importance_sampling(logprobs_N, inputs["logprobs"], inputs["advantages"])
        case PPO():
            ratio_N = torch.exp(logprobs_N - inputs["logprobs"])
            return clipped(ratio_N, inputs["advantages"], loss.clip_low_threshold, loss.clip_high_threshold)
        case CISPO():
            low, high = loss.clip_low_threshold, loss.clip_high_threshold
            return cispo(logprobs_N, inputs["logprobs"], inputs["advantages"], low, high)
        case DRO():
            return dro(logprobs_N, inputs["logprobs"], inputs["advantages"], loss.beta)
        case GSPO():
            ratio_N = sequence_ratio(logprobs_N, inputs["logprobs"], inputs["sequence_ratio_mask"])
            return clipped(ratio_N, inputs["advantages"], loss.clip_low_threshold, loss.clip_high_threshold)
        case _:
            assert_never(loss)


def can_train(loss: Loss, inputs: LossInputs) -> Tensor:
    """Which targets have a gradient that is not zero for every logprob, in the shape of the targets."""
    match loss:
        case CrossEntropy():
            return inputs["weights"] != 0
        case DRO():  # pulls all tokens towards the sampling policy
            return torch.ones_like(inputs["advantages"], dtype=torch.bool)
        case _:
            return inputs["advantages"] != 0


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Both arguments may be (N, K)."""
    return -(logprobs_N * weights_N).sum()


def importance_sampling(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor) -> Tensor:
    return -(torch.exp(logprobs_N - sampled_N) * advantages_N).sum()


def clipped(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """The pessimistic form of PPO: a ratio outside [low, high] earns nothing more, but still costs."""
    return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N).sum()


def cispo(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    coefficient_N = torch.exp(logprobs_N.detach() - sampled_N).clamp(low, high)
    return -(coefficient_N * logprobs_N * advantages_N).sum()


def dro(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, beta: float) -> Tensor:
    return -(logprobs_N * advantages_N - 0.5 * beta * (logprobs_N - sampled_N).square()).sum()


def sequence_ratio(logprobs_N: Tensor, sampled_N: Tensor, mask_N: Tensor) -> Tensor:
    """GSPO's ratio: the value of every token is exp(mean log-ratio over the mask), the gradient of token t is that of
    its own log-probability. A mask without a token has the ratio 1."""
    log_ratio_N = (logprobs_N - sampled_N).detach()
    mean = (log_ratio_N * mask_N).sum() / mask_N.sum().clamp(min=1)
    return torch.exp(mean) * torch.exp(logprobs_N - logprobs_N.detach())

# pyright: basic
"""From logits to one drawn token per row: temperature, truncation, the draw. Pure functions of their arguments.

A draw is the inverse of the cumulative distribution at one uniform number. That number is the row's own, so the rows of
a batch never influence each other.

Shapes: `B` rows, `V` vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Drawn(NamedTuple):
    tokens_B: Tensor
    logprobs_B: Tensor  # at the row's temperature, before truncation


def draw(logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Drawn:
    """Temperature 0 takes the most probable token, and reports its logprob at temperature 1. top_k -1 and top_p 1 are
    off. `uniform_B` is float64 in [0, 1)."""
    greedy_B = temperature_B == 0
    logprobs_BV = (logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(-1)
    probs_BV = logprobs_BV.exp()
    if ((top_k_B > 0) | (top_p_B < 1)).any():
        probs_BV = truncated(probs_BV, top_k_B, top_p_B)
    tokens_B = torch.where(greedy_B, logprobs_BV.argmax(-1), inverse_cdf(probs_BV, uniform_B))
    return Drawn(tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0])


def truncated(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Keeps the k most probable tokens, and of these the fewest whose sum reaches p; the others become 0. Not
    renormalised: the draw does that."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    vocab_size = probs_BV.shape[1]
    rank_V = torch.arange(vocab_size, device=probs_BV.device)
    kept_k_B = torch.where(top_k_B > 0, top_k_B, vocab_size)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    keep_BV = (rank_V < kept_k_B[:, None]) & ((before_BV < top_p_B[:, None]) | (rank_V == 0))
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV * keep_BV)


def inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token at which the cumulative sum exceeds `uniform` times the total: never one of probability 0."""
    cumulative_BV = probs_BV.double().cumsum(-1)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0].clamp(max=probs_BV.shape[1] - 1)

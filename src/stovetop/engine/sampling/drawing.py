# pyright: basic
"""From logits to one drawn token per row: temperature, truncation, the draw. Pure functions of their arguments.

A draw is the inverse of the cumulative distribution at one uniform number. That number is the row's own, so the rows of
a batch never influence each other.

Shapes: `B` rows, `V` vocabulary, `K` the most probable, `R` runs of `W` tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RUN = 128  # tokens
# a thread of a CPU, for the float32 logits that are worked on at one time, which bounds memory; decoding at half and
# double of it: 0.98, 1.01 (benchmarks/constants.py)
CACHE_BYTES = 2 * 2**20


class Drawn(NamedTuple):
    tokens_B: Tensor
    logprobs_B: Tensor  # at the row's temperature, before truncation


def draw(
    outputs_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    uniform_B: Tensor,
    logits_of: Callable[[Tensor], Tensor] = lambda outputs: outputs,
) -> Drawn:
    """Temperature 0 takes the most probable token, and reports its logprob at temperature 1. top_k -1 and top_p 1 are
    off. `uniform_B` is float64 in [0, 1). `logits_of` makes logits of outputs, a few rows at a time."""
    size = _rows_at_once(outputs_BV)
    columns = (outputs_BV, temperature_B, top_k_B, top_p_B, uniform_B)
    chunks = zip(*(column.split(size) for column in columns), strict=True)
    drawn = [_draw(logits_of(outputs), *rest) for outputs, *rest in chunks]
    return Drawn(*(torch.cat(parts) for parts in zip(*drawn, strict=True)))


class MostProbable(NamedTuple):
    tokens_BK: Tensor  # the most probable first
    logprobs_BK: Tensor  # as `draw` reports them


def most_probable(
    outputs_BV: Tensor, temperature_B: Tensor, k: int, logits_of: Callable[[Tensor], Tensor] = lambda outputs: outputs
) -> MostProbable:
    """What else could have been drawn from each row, whatever truncation leaves of it. `logits_of` as in `draw`."""
    size = _rows_at_once(outputs_BV)
    tops = [
        _logprobs(logits_of(outputs), temperature_b).topk(k, dim=-1)
        for outputs, temperature_b in zip(outputs_BV.split(size), temperature_B.split(size), strict=True)
    ]
    return MostProbable(torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops]))


def _rows_at_once(outputs_BV: Tensor) -> int:
    if outputs_BV.device.type == "cpu":
        return max(1, CACHE_BYTES * torch.get_num_threads() // (4 * outputs_BV.shape[1]))
    return max(1, len(outputs_BV))


def _logprobs(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Of temperature 0, those at temperature 1."""
    divisor_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    if (divisor_B != 1).any():
        logits_BV = logits_BV / divisor_B[:, None]
    return logits_BV.log_softmax(-1)


def _draw(logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Drawn:
    """A pass over all logits is made only where some row needs it."""
    greedy_B = temperature_B == 0
    logprobs_BV = _logprobs(logits_BV, temperature_B)
    if greedy_B.all():
        tokens_B = logprobs_BV.argmax(-1)
    else:
        probs_BV = logprobs_BV.exp()
        if ((top_k_B > 0) | (top_p_B < 1)).any():
            probs_BV = truncated(probs_BV, top_k_B, top_p_B)
        tokens_B = inverse_cdf(probs_BV, uniform_B)
        if greedy_B.any():
            tokens_B = torch.where(greedy_B, logprobs_BV.argmax(-1), tokens_B)
    return Drawn(tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0])


def truncated(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Keeps the k most probable tokens, and of these the fewest whose sum reaches p; the others become 0. Not
    renormalised: the draw does that."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    vocab_size = probs_BV.shape[1]
    rank_V = torch.arange(vocab_size, device=probs_BV.device)
    kept_k_B = torch.where(top_k_B > 0, top_k_B, vocab_size)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_p_B = torch.where(top_p_B < 1, top_p_B, math.inf)  # 1 keeps all, to whatever the sums are rounded
    keep_BV = (rank_V < kept_k_B[:, None]) & ((before_BV < kept_p_B[:, None]) | (rank_V == 0))
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV * keep_BV)


def inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token at which the cumulative sum exceeds `uniform` times the total: never one of probability 0.
    Cumulative sums over runs of tokens first, and then within one run. Of a row with a NaN, some token."""
    padding = -probs_BV.shape[1] % RUN
    probs_BRW = (F.pad(probs_BV, (0, padding)) if padding else probs_BV).unflatten(1, (-1, RUN))
    run_sums_BR = probs_BRW.sum(-1).cumsum(-1, dtype=torch.float64)
    threshold_B1 = (uniform_B * run_sums_BR[:, -1])[:, None]
    run_B1 = torch.searchsorted(run_sums_BR, threshold_B1, right=True).clamp_(max=run_sums_BR.shape[1] - 1)
    before_B1 = torch.where(run_B1 > 0, run_sums_BR.gather(1, (run_B1 - 1).clamp_(min=0)), 0.0)
    inside_BW = probs_BRW[torch.arange(len(probs_BV), device=probs_BV.device), run_B1[:, 0]]
    cumulative_BW = inside_BW.cumsum(-1, dtype=torch.float64) + before_B1
    place_B1 = torch.searchsorted(cumulative_BW, threshold_B1, right=True)
    last_B1 = (RUN - 1) - inside_BW.flip(-1).gt(0).int().argmax(-1, keepdim=True)  # where rounding reaches no further
    return (run_B1 * RUN + torch.minimum(place_B1, last_B1))[:, 0].clamp_(max=probs_BV.shape[1] - 1)

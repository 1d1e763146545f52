"""The arithmetic of the recording backend in numpy: a bigram model, its losses and their slopes, AdamW, drawing tokens.

A model is a table of logits: after token i, token t has log-probability `log_softmax(table_VV[i] / temperature)[t]`.
Pure functions only; who owns which table, and when what runs, stands in `recording.py`.

Shapes: `N` tokens of one datum, `K` targets per position, `V` vocabulary. Names without a suffix are (N,) or (N, K).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from stovetop.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, ImportanceSampling, Loss
from stovetop.tokenizing import Tokenizer
from stovetop.types import AdamParams, Datum, SampledSequence, SamplingParams

Floats = npt.NDArray[np.float64]
Table = npt.NDArray[np.float32]


def log_softmax(logits_NV: npt.NDArray[np.floating], temperature: float = 1.0) -> Floats:
    """Row by row, so that a row's bits do not depend on its neighbours."""
    scaled_NV = logits_NV.astype(np.float64) / temperature
    shifted_NV = scaled_NV - scaled_NV.max(axis=-1, keepdims=True)
    return shifted_NV - np.log(np.exp(shifted_NV).sum(axis=-1, keepdims=True))


# ---- losses ----------------------------------------------------------------------------------------------------------


class LossAndSlope(NamedTuple):
    """The loss of one datum, and its slope in the logprob of each target, (N,) or (N, K)."""

    loss: float
    slope: Floats  # of the loss in each log-probability


def loss_and_slope(loss: Loss, p: Floats, inputs: dict[str, Floats]) -> LossAndSlope:
    """The loss of one datum, summed over its tokens. Formulas and sources stand in `losses.py`."""
    if isinstance(loss, CrossEntropy):
        return LossAndSlope(-float((p * inputs["weights"]).sum()), -inputs["weights"])
    q, advantages = inputs["logprobs"], inputs["advantages"]
    match loss:
        case ImportanceSampling():
            gain = np.exp(p - q) * advantages
            return LossAndSlope(-float(gain.sum()), -gain)
        case PPO():
            return _clipped(np.exp(p - q), advantages, loss.clip_low_threshold, loss.clip_high_threshold)
        case CISPO():
            weight = np.clip(np.exp(p - q), loss.clip_low_threshold, loss.clip_high_threshold) * advantages
            return LossAndSlope(-float((weight * p).sum()), -weight)
        case DRO():
            gain = p * advantages - 0.5 * loss.beta * (p - q) ** 2
            return LossAndSlope(-float(gain.sum()), -(advantages - loss.beta * (p - q)))
        case GSPO():
            mask = inputs["sequence_ratio_mask"]
            ratio = np.exp(((p - q) * mask).sum() / max(mask.sum(), 1.0))
            return _clipped(np.full_like(p, ratio), advantages, loss.clip_low_threshold, loss.clip_high_threshold)
        case _:
            assert_never(loss)


def _clipped(ratio: Floats, advantages: Floats, low: float, high: float) -> LossAndSlope:
    """Where the clipped form is the smaller one, the slope is zero."""
    plain, clipped = ratio * advantages, np.clip(ratio, low, high) * advantages
    return LossAndSlope(-float(np.minimum(plain, clipped).sum()), np.where(plain <= clipped, -plain, 0.0))


# ---- the model -------------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """What a table says of a datum: the logprobs of its targets, (N,) or (N, K), and of the whole vocabulary, (N,
    V)."""

    logprobs: Floats  # of the targets
    logprobs_NV: Floats


def score(table_VV: Table, datum: Datum, temperature: float = 1.0) -> Scored:
    """The logprobs of a datum's targets under a table of logits (V, V)."""
    targets = datum.loss_fn_inputs["target_tokens"].array.astype(np.int64)
    logprobs_NV = log_softmax(table_VV[datum.model_input.to_ints()], temperature)
    chosen_NK = np.take_along_axis(logprobs_NV, targets.reshape(len(targets), -1), axis=1)
    return Scored(chosen_NK.reshape(targets.shape), logprobs_NV)


def gradient(scored: Scored, datum: Datum, slope: Floats, temperature: float = 1.0) -> Floats:
    """Of the loss in the table, (V, V), from its slope in the targets' log-probabilities."""
    targets = datum.loss_fn_inputs["target_tokens"].array.astype(np.int64)
    vocab_size = scored.logprobs_NV.shape[-1]
    slope_NK, targets_NK = slope.reshape(len(slope), -1), targets.reshape(len(slope), -1)
    in_logits_NV = -np.exp(scored.logprobs_NV) * slope_NK.sum(axis=1, keepdims=True)
    for targets_N, slope_N in zip(targets_NK.T, slope_NK.T, strict=True):
        in_logits_NV[range(len(targets_N)), targets_N] += slope_N
    in_table_VV = np.zeros((vocab_size, vocab_size))
    np.add.at(in_table_VV, datum.model_input.to_ints(), in_logits_NV / temperature)
    return in_table_VV


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What AdamW remembers: running means of the gradient and of its square."""

    step: int
    mean_VV: Table
    square_VV: Table


class Stepped(NamedTuple):
    """The adapter and the optimizer after a step, and the step's metrics."""

    delta_VV: Table
    moments: Moments
    metrics: dict[str, float]


def adamw(delta_VV: Table, moments: Moments, gradient_VV: Floats, params: AdamParams) -> Stepped:
    """One step, as new arrays: whoever holds the old ones keeps them. A gradient that is not finite changes nothing."""
    norm = float(np.sqrt((gradient_VV**2).sum()))
    if not np.isfinite(norm):
        return Stepped(delta_VV, moments, {"grad_norm": norm, "update_norm": 0.0, "skipped_nonfinite": 1.0})
    if 0 < params.grad_clip_norm < norm:
        gradient_VV = gradient_VV * (params.grad_clip_norm / norm)
    step = moments.step + 1
    mean_VV = params.beta1 * moments.mean_VV + (1 - params.beta1) * gradient_VV
    square_VV = params.beta2 * moments.square_VV + (1 - params.beta2) * gradient_VV**2
    root_VV = np.sqrt(square_VV / (1 - params.beta2**step))
    move_VV = mean_VV / (1 - params.beta1**step) / (root_VV + params.eps)
    decayed_VV = delta_VV * (1 - params.learning_rate * params.weight_decay)
    moved_VV = (decayed_VV - params.learning_rate * move_VV).astype(np.float32)
    update_norm = float(np.sqrt(((moved_VV - delta_VV) ** 2).sum()))
    return Stepped(
        moved_VV,
        Moments(step, mean_VV.astype(np.float32), square_VV.astype(np.float32)),
        {"grad_norm": norm, "update_norm": update_norm, "skipped_nonfinite": 0.0},
    )


# ---- drawing tokens --------------------------------------------------------------------------------------------------


class _Next(NamedTuple):
    """What may follow one token."""

    logprobs_V: npt.NDArray[np.float32]  # before truncation
    cumulative_V: Floats  # of what truncation left, in the order of ids


def draw(
    table_VV: Table, prompt: Sequence[int], num_samples: int, params: SamplingParams, tokenizer: Tokenizer
) -> list[SampledSequence]:
    """`num_samples` continuations. Sample i has its own generator, of (seed, i): no neighbour changes it."""

    @cache
    def next_after(token: int) -> _Next:
        return _next(table_VV[[token]], params)

    return [
        _draw_one(next_after, prompt[-1], np.random.default_rng([params.seed or 0, index]), params, tokenizer)
        for index in range(num_samples)
    ]


def _draw_one(
    next_after: Callable[[int], _Next],
    token: int,
    generator: np.random.Generator,
    params: SamplingParams,
    tokenizer: Tokenizer,
) -> SampledSequence:
    tokens: list[int] = []
    logprobs: list[float] = []
    assert params.max_tokens is not None, "the client completes the params"
    while len(tokens) < params.max_tokens:
        following = next_after(token)
        token = int(np.searchsorted(following.cumulative_V, generator.random(), side="right"))
        tokens.append(token)
        logprobs.append(float(following.logprobs_V[token]))
        if _stops(tokens, params, tokenizer):
            return SampledSequence("stop", tokens, logprobs)
    return SampledSequence("length", tokens, logprobs)


def _next(logits_1V: Table, params: SamplingParams) -> _Next:
    logprobs_V = log_softmax(logits_1V, params.temperature or 1.0)[0]
    ranked: npt.NDArray[np.int64] = np.argsort(-logprobs_V, kind="stable")
    if params.temperature == 0:
        ranked = ranked[:1]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass = np.cumsum(np.exp(logprobs_V[ranked]))
    ranked = ranked[: np.count_nonzero(mass < params.top_p) + 1]
    kept_V = np.zeros_like(logprobs_V)
    kept_V[ranked] = np.exp(logprobs_V[ranked])
    cumulative_V = np.cumsum(kept_V)
    return _Next(logprobs_V.astype(np.float32), cumulative_V / cumulative_V[-1])


def _stops(tokens: list[int], params: SamplingParams, tokenizer: Tokenizer) -> bool:
    """Whether the last token ends the sample. A stop string may end inside it, and may span several."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop
    if stops is not None and len(stops) == 0:
        return False
    if tokens[-1] == tokenizer.eos_token_id:
        return True
    return any(
        stop in tokenizer.decode(tokens[-len(stop.encode()) :]) if isinstance(stop, str) else stop == tokens[-1]
        for stop in stops or ()
    )

"""The table of losses: a name and its config become a loss value, once, here; and a datum is checked against it.

No arithmetic lives here: `engine/loss_math.py` has one function per loss value, and a test says when the two disagree.
Every loss is a **sum over the tokens** of every datum; nothing is averaged. In the formulas p is the current model's
log-probability of a target token, q the sampler's, r = exp(p - q), A the advantage, sg(.) stops the gradient.
Source of names, inputs and defaults: the public Tinker documentation of its losses.

Shapes: `N` tokens of one datum, `K` targets per position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

import numpy as np

from stovetop.checks import check, rules_of, take
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.rules import DictOf, Instance, ListOf, Text, Whole, is_a, number, shown
from stovetop.types import Datum, ImageChunk, ModelInput, TensorData

LossConfig = Mapping[str, float]

Temperature = Annotated[float, number(at_least=1e-10, at_most=1e10)]
Ratio = Annotated[float, number(at_least=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """-Σ w·p. Targets and weights are (N,), or (N, K) for soft targets; weights may be negative."""

    name: ClassVar[str] = "cross_entropy"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling:
    """-Σ r·A: REINFORCE with the ratio that corrects for sampling from slightly other weights."""

    name: ClassVar[str] = "importance_sampling"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    temperature: Temperature = 1.0  # at which the tokens were sampled; logits are divided by it

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO:
    """-Σ min(r·A, clip(r, low, high)·A) (Schulman et al. 2017, arXiv:1707.06347)."""

    name: ClassVar[str] = "ppo"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    clip_low_threshold: Ratio = 0.8  # smallest ratio, absolute (not 1 - epsilon)
    clip_high_threshold: Ratio = 1.2  # largest ratio, absolute
    temperature: Temperature = 1.0

    def __post_init__(self) -> None:
        _check_clipped(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-Σ sg(clip(r, low, high))·p·A (MiniMax-M1, arXiv:2506.13585): the ratio weighs the gradient but has none."""

    name: ClassVar[str] = "cispo"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    clip_low_threshold: Ratio = 0.0
    clip_high_threshold: Ratio = 4.0
    temperature: Temperature = 1.0

    def __post_init__(self) -> None:
        _check_clipped(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """-Σ (p·A - ½·beta·(p - q)²) (Richemond et al. 2024, arXiv:2405.19107)."""

    name: ClassVar[str] = "dro"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    beta: Annotated[float, number(at_least=0)] = 0.05  # strength of the pull towards the sampling policy
    temperature: Temperature = 1.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """PPO's clipped form with one ratio per sequence, s = exp(mean of p - q where sequence_ratio_mask is 1); each token
    carries it as sg(s)·exp(p - sg(p)), so gradients stay per token (Zheng et al. 2025, arXiv:2507.18071)."""

    name: ClassVar[str] = "gspo"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask")
    clip_low_threshold: Ratio = 0.8
    clip_high_threshold: Ratio = 1.2
    temperature: Temperature = 1.0

    def __post_init__(self) -> None:
        _check_clipped(self)


Loss = CrossEntropy | ImportanceSampling | PPO | CISPO | DRO | GSPO
LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in get_args(Loss)}


def parse_loss(name: str, config: LossConfig | None = None) -> Loss:
    """A loss value from its public name and config. A misspelt name or key is refused with the nearest one.

    parse_loss("ppo", {"clip_high_threshold": 1.3}) == PPO(clip_high_threshold=1.3)
    """
    take(Text("the name of a loss, a string"), name, "loss_fn")
    if name == "stable_reinforce":
        raise InvalidRequest(
            "'stable_reinforce' has no public definition, so no open implementation can be faithful to it; "
            "use 'importance_sampling', 'ppo' or 'cispo'"
        )
    if name not in LOSSES:
        raise UnknownName("loss_fn", name, LOSSES)
    given: dict[str, float] = take(DictOf(number()), {} if config is None else config, "loss_fn_config")
    rules = rules_of(LOSSES[name])
    for key, value in given.items():
        if key not in rules:
            raise UnknownName(f"loss_fn_config key of {name}", key, rules)
        take(rules[key], value, f"loss_fn_config[{key!r}] of {name}")
    return LOSSES[name](**given)


def temperature_of(loss: Loss) -> float:
    """By which logits are divided before the log-softmax. Cross-entropy is always at 1."""
    return 1.0 if isinstance(loss, CrossEntropy) else loss.temperature


def _check_clipped(loss: PPO | CISPO | GSPO) -> None:
    check(loss)
    if loss.clip_low_threshold > loss.clip_high_threshold:
        raise InvalidRequest(
            f"{loss.name} needs 0 <= clip_low_threshold <= clip_high_threshold: "
            f"{loss.clip_low_threshold}, {loss.clip_high_threshold}"
        )


# ---- checks of data against a loss and a model -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a base model can read."""

    name: str
    vocab_size: Annotated[int, Whole(1)]
    context_length: Annotated[int, Whole(1)]
    longest_sequence: Annotated[int, Whole(1)] | None = None  # that memory for keys and values allows; None: any

    def __post_init__(self) -> None:
        check(self)


def check_data(data: Sequence[Datum], loss: Loss, limits: ModelLimits) -> None:
    """Refuses what the loss or the model cannot use, naming the datum's index, the field, the value and the limit."""
    check_shapes(data, limits)
    for index, datum in enumerate(data):
        missing = [name for name in loss.inputs if name not in datum.loss_fn_inputs]
        if missing:
            raise InvalidRequest(
                f"datum {index} lacks {', '.join(missing)}; {loss.name} needs {', '.join(loss.inputs)}: "
                f"it has {sorted(datum.loss_fn_inputs)}"
            )
        extra = sorted(set(datum.loss_fn_inputs) - set(loss.inputs))
        if extra:
            raise InvalidRequest(
                f"datum {index} has {', '.join(extra)}, which {loss.name} does not read "
                f"(it reads {', '.join(loss.inputs)}); remove it, so that nothing is silently ignored"
            )
        for name in loss.inputs:
            _check_input(index, name, datum)
        if not isinstance(loss, CrossEntropy) and datum.loss_fn_inputs["target_tokens"].array.ndim != 1:
            raise InvalidRequest(
                f"datum {index}: {loss.name} takes one target per position; target_tokens has shape "
                f"{tuple(datum.loss_fn_inputs['target_tokens'].shape)}. Only cross_entropy takes (N, K)"
            )


_DATA = ListOf(Instance((Datum,)), at_least=1, hint="several sequences make one list: [Datum(...), Datum(...)]")
Data = Annotated[Sequence[Datum], _DATA]


def check_shapes(data: Sequence[Datum], limits: ModelLimits) -> None:
    """The part of `check_data` that holds for every loss, also a custom one: inputs and targets fit the model."""
    for index, datum in enumerate(take(_DATA, data, "data")):
        check_model_input(datum.model_input, limits, what=f"datum {index}: model_input")
        for name, tensor in datum.loss_fn_inputs.items():  # a dictionary, so it may have changed since Datum(...)
            if type(tensor) is not TensorData:
                raise InvalidRequest(
                    f"datum {index}: loss_fn_inputs[{name!r}] must be a TensorData; Datum(...) makes one of what it is "
                    f"given, but this was set later: {shown(tensor)}"
                )
        if "target_tokens" not in datum.loss_fn_inputs:
            raise InvalidRequest(f"datum {index} lacks target_tokens: it has {sorted(datum.loss_fn_inputs)}")
        target = datum.loss_fn_inputs["target_tokens"]
        if target.dtype != "int64":
            raise InvalidRequest(f"datum {index}: target_tokens must be int64: {target.dtype}")
        _check_length(index, "target_tokens", target, datum)
        check_token_ids(target.array, limits, what=f"datum {index}: target_tokens")


def check_model_input(model_input: ModelInput, limits: ModelLimits, *, what: str) -> None:
    for chunk in model_input.chunks:
        if isinstance(chunk, ImageChunk):
            raise InvalidRequest(f"{what} has an image, but {limits.name} reads text only: {chunk.format}")
    length = model_input.length
    if length == 0:
        raise InvalidRequest(f"{what} is empty; it needs at least one token")
    if length > limits.context_length:
        raise InvalidRequest(
            f"{what} has {length} tokens; the context of {limits.name} is {limits.context_length}: "
            f"leave out {length - limits.context_length}"
        )
    tokens = model_input.to_ints()
    ids = np.asarray(tokens)
    check_token_ids(ids, limits, what=what)
    for position in np.flatnonzero(ids < 2):  # where a True or False would be, which numpy takes for 1 and 0
        if is_a(tokens[position], bool):
            raise InvalidRequest(f"{what}: token ids must be integers; at position {position} is: {tokens[position]}")


def check_token_ids(tokens: np.ndarray, limits: ModelLimits, *, what: str) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))
    if bad.size:
        raise InvalidRequest(
            f"{what}: token id {int(tokens.flat[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
            f"{limits.name}, 0..{limits.vocab_size - 1}; make ids with that model's tokenizer"
        )


def _check_length(index: int, name: str, tensor: TensorData, datum: Datum) -> None:
    length = datum.model_input.length
    if tensor.array.ndim not in (1, 2) or tensor.array.shape[0] != length or tensor.array.size == 0:
        raise InvalidRequest(
            f"datum {index}: {name} has shape {tuple(tensor.shape)}; model_input has {length} tokens; both must agree, "
            f"and (N, K) needs a K of at least 1"
        )


def _check_input(index: int, name: str, datum: Datum) -> None:
    tensor, target = datum.loss_fn_inputs[name], datum.loss_fn_inputs["target_tokens"]
    if tensor.shape != target.shape:
        raise InvalidRequest(
            f"datum {index}: {name} has shape {tuple(tensor.shape)}, target_tokens {tuple(target.shape)}; "
            f"model_input has {datum.model_input.length} tokens and all must agree"
        )
    if name == "target_tokens":
        return
    if tensor.dtype != "float32":
        raise InvalidRequest(f"datum {index}: {name} must be float32; convert it first: {tensor.dtype}")
    bad = np.flatnonzero(~np.isfinite(tensor.array))
    if bad.size:
        raise InvalidRequest(
            f"datum {index}: {name} is {tensor.array.flat[bad[0]]} at position {int(bad[0])}; it must be finite"
        )
    if name == "sequence_ratio_mask" and not np.isin(tensor.array, (0, 1)).all():
        raise InvalidRequest(f"datum {index}: sequence_ratio_mask must hold 0 and 1 only")

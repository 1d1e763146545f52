"""The table of losses: a name and its config become a loss value, once, here. Data are checked against it in
`input_checks.py`.

No arithmetic lives here: `engine/training/loss_math.py` has one function per loss value, and a test says when the two
disagree.
Every loss is a **sum over the tokens** of every datum; nothing is averaged. In the formulas p is the current model's
log-probability of a target token, q the sampler's, r = exp(p - q), A the advantage, sg(.) stops the gradient.
Source of names, inputs and defaults: the public Tinker documentation of its losses.

Shapes: `N` tokens of one datum, `K` targets per position.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

from stovetop.checks import check, rules_of, take
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.rules import DictOf, Text, number

LossConfig = Mapping[str, float]

SPOIL = "stovetop:spoil"  # no loss: over the wire, a forward_backward that the client could not make, with its "reason"

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
    temperature: Temperature = 1.0  # at which the tokens were sampled

    def __post_init__(self) -> None:
        _check_clipped(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """-Σ sg(clip(r, low, high))·p·A (MiniMax-M1, arXiv:2506.13585): the ratio weighs the gradient but has none."""

    name: ClassVar[str] = "cispo"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    clip_low_threshold: Ratio = 0.0  # smallest ratio
    clip_high_threshold: Ratio = 4.0  # largest ratio
    temperature: Temperature = 1.0  # at which the tokens were sampled

    def __post_init__(self) -> None:
        _check_clipped(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """-Σ (p·A - ½·beta·(p - q)²) (Richemond et al. 2024, arXiv:2405.19107)."""

    name: ClassVar[str] = "dro"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages")
    beta: Annotated[float, number(at_least=0)] = 0.05  # strength of the pull towards the sampling policy
    temperature: Temperature = 1.0  # at which the tokens were sampled

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """PPO's clipped form with one ratio per sequence, s = exp(mean of p - q where sequence_ratio_mask is 1); each token
    carries it as sg(s)·exp(p - sg(p)), so gradients stay per token (Zheng et al. 2025, arXiv:2507.18071)."""

    name: ClassVar[str] = "gspo"
    inputs: ClassVar[tuple[str, ...]] = ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask")
    clip_low_threshold: Ratio = 0.8  # smallest ratio of a sequence
    clip_high_threshold: Ratio = 1.2  # largest
    temperature: Temperature = 1.0  # at which the tokens were sampled

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

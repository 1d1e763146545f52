"""The losses on pairs of answers, as values: a name, options, a formula. What computes them is in losses; there is no
torch here, so that stages and configs can name them.

In the formulas c and r are the summed logprobs of the chosen and the rejected answer, c' and r' those under the
reference model, |c| and |r| the numbers of tokens, the end of the turn included, and σ is the logistic function.
m = (c - c') - (r - r') is the margin before β.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, get_args

from stovetop.checks import check
from stovetop.rules import number

Beta = Annotated[float, number(above=0)]
Smoothing = Annotated[float, number(at_least=0, below=0.5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """-log σ(β·m) (Rafailov et al. 2023, arXiv:2305.18290)."""

    name: ClassVar[str] = "dpo"
    beta: Beta = 0.1  # how closely the policy is held to the reference

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO:
    """(m̄ - 1/2β)², where m̄ is m of mean logprobs, c/|c| and so on: it stops pushing once the margin is reached
    (Azar et al. 2023, arXiv:2310.12036)."""

    name: ClassVar[str] = "ipo"
    beta: Beta = 0.1  # β

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge:
    """max(0, 1 - β·m) (Zhao et al. 2023, arXiv:2305.10425)."""

    name: ClassVar[str] = "hinge"
    beta: Beta = 0.1  # β

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustDPO:
    """(-(1 - ε)·log σ(β·m) + ε·log σ(-β·m)) / (1 - 2ε): unbiased when a share ε of the labels is flipped
    (Chowdhury et al. 2024, arXiv:2403.00409)."""

    name: ClassVar[str] = "robust"
    beta: Beta = 0.1  # β
    label_smoothing: Smoothing = 0.1  # ε, below one half

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConservativeDPO:
    """-(1 - ε)·log σ(β·m) - ε·log σ(-β·m): cross-entropy with smoothed labels (Mitchell 2023, "A note on DPO with noisy
    preferences")."""

    name: ClassVar[str] = "cdpo"
    beta: Beta = 0.1  # β
    label_smoothing: Smoothing = 0.1  # ε

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPO:
    """-log σ(β·(c/|c| - r/|r|) - γ): no reference (Meng et al. 2024, arXiv:2405.14734)."""

    name: ClassVar[str] = "simpo"
    beta: Beta = 2.0  # β
    gamma: Annotated[float, number()] = 1.0  # the margin that is asked for, after β (the paper's γ/β is gamma / beta)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPO:
    """-c/|c| - λ·log σ(log-odds of c/|c| minus those of r/|r|): likelihood and preference at once, no reference
    (Hong et al. 2024, arXiv:2403.07691). The log-odds of a mean logprob x are x - log(1 - exp(x))."""

    name: ClassVar[str] = "orpo"
    lam: Annotated[float, number(at_least=0)] = 0.1  # λ

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO:
    """½·(1 - σ(β·(c - c' - K))) + ½·(1 - σ(β·(K - r + r'))): each answer for itself is desirable or not. K, at least 0
    and without gradient, estimates the KL of policy and reference from answers to other prompts, so the data need
    `datasets.with_mismatched` (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    name: ClassVar[str] = "kto"
    beta: Beta = 0.1  # β

    def __post_init__(self) -> None:
        check(self)


PreferenceLoss = DPO | IPO | Hinge | RobustDPO | ConservativeDPO | SimPO | ORPO | KTO


PREFERENCE_LOSSES: dict[str, type[PreferenceLoss]] = {loss.name: loss for loss in get_args(PreferenceLoss)}


def needs_reference(loss: PreferenceLoss) -> bool:
    """Whether a loss compares the policy with a reference model. SimPO and ORPO do not."""
    return not isinstance(loss, SimPO | ORPO)

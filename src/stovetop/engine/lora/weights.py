# pyright: basic
"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) as values: for each linear a pair of factors, A and B; and the
moments that an optimizer keeps of them. All are float32, whatever the dtype of the base model.

`routing.py` says which rows of a pass belong to which adapter, `low_rank.py` has the products.

Shapes: `I` inputs, `O` outputs of a linear, `R` rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.errors import InvalidRequest
from stovetop.target_names import Part
from stovetop.types import LoraConfig

BYTES_OF_FACTOR = 16  # of each number: weight, gradient and two moments, in float32

Tensors = dict[str, Tensor]  # one per trained tensor, by name


@dataclass(frozen=True, slots=True)
class Target:
    """A linear that an adapter may train."""

    name: str  # the module's path in the base model
    part: Part
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class AdapterWeights:
    """The factors of one adapter at one moment, by "<target>.A" (R, I) and "<target>.B" (O, R). Never changed in place:
    a step makes new ones, so keeping old weights is keeping a reference."""

    config: LoraConfig
    tensors: Tensors

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Moments:
    """Running means of gradient and squared gradient; empty before the first step."""

    step: int = 0
    mean: Tensors = field(default_factory=dict)
    square: Tensors = field(default_factory=dict)


def chosen(config: LoraConfig, targets: Sequence[Target]) -> list[Target]:
    """The targets that this adapter trains."""
    parts = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    return [target for target in targets if parts[target.part]]


def refuse_too_large(rank: int, targets: Sequence[Target], available_bytes: int) -> None:
    """An adapter that could never be in memory, with its gradient and its optimizer."""
    bytes_a_rank = BYTES_OF_FACTOR * sum(target.num_inputs + target.num_outputs for target in targets)
    if rank * bytes_a_rank > available_bytes:
        raise InvalidRequest(
            f"rank must be at most {available_bytes // bytes_a_rank}: each rank of an adapter of this model takes "
            f"{bytes_a_rank:,} bytes, with gradient and optimizer, and {available_bytes:,} are available: {rank}"
        )


def initial_weights(config: LoraConfig, targets: list[Target], device: torch.device) -> AdapterWeights:
    """For each of `targets`: A uniform in ±1/sqrt(inputs), as PEFT draws it, B zero, so a new adapter changes nothing.
    One generator in the order of the targets: the same seed gives the same bytes on every device."""
    generator = torch.Generator().manual_seed(config.seed or 0)
    tensors = {}
    for target in targets:
        uniform_RI = torch.rand(config.rank, target.num_inputs, generator=generator, dtype=torch.float32) * 2 - 1
        tensors[f"{target.name}.A"] = (uniform_RI / target.num_inputs**0.5).to(device)
        tensors[f"{target.name}.B"] = torch.zeros(target.num_outputs, config.rank, device=device, dtype=torch.float32)
    return AdapterWeights(config, tensors)


def factors_of(adapter: AdapterWeights, name: str) -> tuple[Tensor, Tensor] | None:
    """A and B of one target; None where the adapter does not train it."""
    if f"{name}.A" not in adapter.tensors:
        return None
    return adapter.tensors[f"{name}.A"], adapter.tensors[f"{name}.B"]

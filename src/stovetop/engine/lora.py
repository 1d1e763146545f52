# pyright: basic
"""Low-rank adapters beside every `Linear` of the base model (Hu et al. 2021, arXiv:2106.09685).

The base weights are frozen and shared; an adapter is a value, `AdapterWeights`: for each target a pair A, B, and a
linear acts as  y = x·Wᵀ + (alpha/rank)·(x·Aᵀ)·Bᵀ.  Which rows of a batch belong to which adapter is the `Routing` of
the pass, so adapters of different rank and targets run side by side. Factors and their gradients are float32 whatever
the base dtype.

Shapes: `N` packed tokens, `I` inputs, `O` outputs of a linear, `R` rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stovetop.engine.arithmetic import Arithmetic
from stovetop.engine.packing import Segment
from stovetop.engine.target_names import Part, part_of
from stovetop.errors import InvalidRequest
from stovetop.types import LoraConfig


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
    tensors: dict[str, Tensor]

    @property
    def scale(self) -> float:
        return self.config.alpha / self.config.rank


def chosen(config: LoraConfig, targets: list[Target], untrainable: Mapping[str, str]) -> list[Target]:
    """The targets that this adapter trains. A flag that would do nothing, or do it in part, is refused."""
    parts = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    for part, wanted in parts.items():
        reason = untrainable.get(part) or ("" if any(t.part == part for t in targets) else "it has no such linear")
        if wanted and reason:
            raise InvalidRequest(f"train_{part}=True cannot be honoured by this base model: {reason}; pass False")
    return [target for target in targets if parts[target.part]]


def initial_weights(config: LoraConfig, targets: list[Target], device: torch.device) -> AdapterWeights:
    """For each of `targets`: A uniform in ±1/sqrt(inputs), as PEFT draws it, B zero, so a new adapter changes nothing.
    One generator in the order of the targets: the same seed gives the same bytes on every device."""
    generator = torch.Generator().manual_seed(config.seed or 0)
    tensors = {}
    for target in targets:
        uniform_RI = torch.rand(config.rank, target.num_inputs, generator=generator) * 2 - 1
        tensors[f"{target.name}.A"] = (uniform_RI / target.num_inputs**0.5).to(device)
        tensors[f"{target.name}.B"] = torch.zeros(target.num_outputs, config.rank, device=device)
    return AdapterWeights(config, tensors)


# ---- which rows belong to which adapter ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a pass that one adapter acts on. `rows` None means all."""

    adapter: AdapterWeights
    rows_M: Tensor | None = None


@dataclass(slots=True)
class Routing:
    """Shared by all linears of a model. It holds from one pass to the next, so that layers which are computed again on
    the way back find what they found on the way there. Rows in no part meet the base model as it is."""

    parts: list[Rows] = field(default_factory=list)


def rows_by_owner(
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment], device: torch.device
) -> list[Rows]:
    """Which rows each adapter acts on, where segment i belongs to `owners[i]` (None: the base model as it is)."""
    distinct = {id(owner): owner for owner in owners}
    if len(distinct) == 1:
        return [] if owners[0] is None else [Rows(owners[0])]
    rows: dict[int, list[int]] = {}
    for owner, segment in zip(owners, segments, strict=True):
        rows.setdefault(id(owner), []).extend(segment.rows)
    return [Rows(w, torch.tensor(rows[key], device=device)) for key, w in distinct.items() if w is not None]


# ---- the linear ------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """A frozen linear and whatever adapters the current routing brings."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.base = base
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        out = self.arithmetic.linear(x, self.base.weight, self.base.bias)
        for part in self.routing.parts:
            factors = factors_of(part.adapter, self.name)
            if factors is not None:
                out = _plus_low_rank(out, x, part.rows_M, factors, self.arithmetic)
        return out


def factors_of(adapter: AdapterWeights, name: str) -> tuple[Tensor, Tensor, float] | None:
    """A, B and the scale of one target; None where the adapter does not train it."""
    if f"{name}.A" not in adapter.tensors:
        return None
    return adapter.tensors[f"{name}.A"], adapter.tensors[f"{name}.B"], adapter.scale


def _plus_low_rank(
    out: Tensor, x: Tensor, rows_M: Tensor | None, factors: tuple[Tensor, Tensor, float], arithmetic: Arithmetic
) -> Tensor:
    """`out` plus the low-rank product of `x`, on some rows (dimension -2) or on all."""
    if rows_M is None:
        return out + low_rank(x, *factors, arithmetic=arithmetic)
    return out.index_add(-2, rows_M, low_rank(x.index_select(-2, rows_M), *factors, arithmetic=arithmetic))


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, *, arithmetic: Arithmetic) -> Tensor:
    """scale·(x·Aᵀ)·Bᵀ, computed in float32 and returned in the dtype of x."""
    return _LowRank.apply(x, a_RI, b_OR, scale, arithmetic)


class _LowRank(torch.autograd.Function):
    """Written out so that only x, as it is, and the thin x·Aᵀ are kept for the backward pass: no float32 copy of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, arithmetic: Arithmetic) -> Tensor:
        thin_R = arithmetic.linear(x.to(a_RI.dtype), a_RI)
        ctx.save_for_backward(x, thin_R, a_RI, b_OR)
        ctx.scale = scale
        return arithmetic.linear(thin_R * scale, b_OR).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, thin_R, a_RI, b_OR = ctx.saved_tensors
        dy_NO = gradients[0].to(a_RI.dtype).flatten(0, -2)
        d_thin_NR = (dy_NO @ b_OR) * ctx.scale
        db_OR = (dy_NO.t() @ thin_R.flatten(0, -2)) * ctx.scale if ctx.needs_input_grad[2] else None
        da_RI = d_thin_NR.t() @ x.flatten(0, -2).to(a_RI.dtype) if ctx.needs_input_grad[1] else None
        dx = (d_thin_NR @ a_RI).view(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, da_RI, db_OR, None, None


# ---- finding and wrapping --------------------------------------------------------------------------------------------


def find_targets(trunk: nn.Module, prefix: str) -> Mapping[str, nn.Linear]:
    """Every linear inside the decoder layers. Routers of experts are left alone: they are no projection, and training
    them is not what `train_mlp` means."""
    found = {}
    for name, module in trunk.named_modules():
        pieces = name.split(".")
        if not isinstance(module, nn.Linear) or "layers" not in pieces or pieces[-1] in ("gate", "router"):
            continue
        found[f"{prefix}{name}"] = module
    return found


def untrainable_parts(trunk: nn.Module) -> dict[str, str]:
    """Parts that hold weights which are no `Linear`, and why an adapter cannot train them."""
    for name, module in trunk.named_modules():
        fused = [child for child, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
        if fused and "layers" in name.split("."):
            return {"mlp": f"its experts are fused into one tensor each ({name}.{fused[0]})"}
    return {}


def wrap(trunk: nn.Module, prefix: str, routing: Routing, arithmetic: Arithmetic) -> list[Target]:
    """Puts a `LoraLinear` in the place of every target and returns them in the model's order."""
    targets = []
    for full_name, linear in find_targets(trunk, prefix).items():
        parent_name, _, child = full_name.removeprefix(prefix).rpartition(".")
        setattr(trunk.get_submodule(parent_name), child, LoraLinear(linear, full_name, routing, arithmetic))
        targets.append(Target(full_name, part_of(full_name), linear.in_features, linear.out_features))
    return targets

# pyright: basic
"""The place for adapters beside every `Linear` of a base model, whose weights are frozen and shared."""

from collections.abc import Mapping

from torch import Tensor, nn

from stovetop.engine.arithmetic import Arithmetic, Frozen
from stovetop.engine.lora import Target
from stovetop.engine.low_rank import adapted_linear
from stovetop.engine.routing import Routing
from stovetop.engine.target_names import part_of


class LoraLinear(nn.Module):
    """A frozen linear and whatever adapters the current routing brings."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.base = base
        self.frozen = Frozen(base.weight, base.bias)  # found faster than through the module, 210 times a token
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, *self.frozen, self.routing.of(self.name), self.arithmetic)


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

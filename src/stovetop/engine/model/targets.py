# pyright: basic
"""Which linears of a base model an adapter may train, which of its parts none can, and the place for adapters beside
each of them."""

from collections.abc import Sequence
from typing import Any, get_args

from torch import nn

from stovetop.engine.kernels.arithmetic import Arithmetic
from stovetop.engine.lora.linear import LoraLinear
from stovetop.engine.lora.routing import Routing
from stovetop.engine.lora.weights import Target
from stovetop.engine.model.decoder_layers import DecoderLayers, are_experts, expert_counts
from stovetop.target_names import Part, part_of


def find_targets(found: DecoderLayers, config: Any, prefix: str) -> dict[str, nn.Linear]:
    """Every linear inside the decoder layers. Routers of experts are left alone: they are no projection, and training
    them is not what `train_mlp` means."""
    targets = {}
    for index, layer in enumerate(found.layers):
        left_alone = _routers(layer, expert_counts(config))
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and module not in left_alone:
                targets[f"{prefix}{found.name}.{index}.{name}"] = module
    return targets


def _routers(layer: nn.Module, counts: set[int]) -> set[nn.Module]:
    """Linears beside experts (a list of modules or a tensor of three dimensions) with one output for each of them, or
    with a single one, which is the gate of a shared expert."""
    routers: set[nn.Module] = set()
    for name, part in layer.named_modules():
        experts = [module for module in part.modules() if are_experts(module, counts)]
        if not name or not experts:
            continue
        inside = {inner for module in experts if isinstance(module, nn.ModuleList) for inner in module.modules()}
        linears = (module for module in part.modules() if isinstance(module, nn.Linear) and module not in inside)
        routers |= {module for module in linears if module.out_features in {1, *counts}}
    return routers


def untrainable_parts(found: DecoderLayers, targets: Sequence[Target]) -> dict[str, str]:
    """Parts that an adapter cannot train, or not as a whole, and why: those that hold weights which are no `Linear`,
    and those without a target."""
    reasons: dict[str, str] = {}
    for index, layer in enumerate(found.layers):
        for name, module in layer.named_modules():
            for child, parameter in module.named_parameters(recurse=False):
                full_name = f"{found.name}.{index}.{name}.{child}"
                if parameter.dim() == 3:
                    reason = f"its experts are fused into one tensor each ({full_name})"
                    reasons.setdefault(part_of(full_name), reason)
                elif type(module).__name__ == "Conv1D" and parameter.dim() == 2:
                    reason = f"its weights are no Linear but of GPT-2's kind, transposed ({full_name})"
                    reasons.setdefault(part_of(full_name), reason)
    there_are = {target.part for target in targets}
    return {part: "it has no such linear" for part in get_args(Part) if part not in there_are} | reasons


def wrap(
    trunk: nn.Module, found: DecoderLayers, config: Any, prefix: str, routing: Routing, arithmetic: Arithmetic
) -> list[Target]:
    """Puts a `LoraLinear` in the place of every target and returns them in the model's order."""
    targets = []
    for full_name, linear in find_targets(found, config, prefix).items():
        parent_name, _, child = full_name.removeprefix(prefix).rpartition(".")
        setattr(trunk.get_submodule(parent_name), child, LoraLinear(linear, full_name, routing, arithmetic))
        targets.append(Target(full_name, part_of(full_name), linear.in_features, linear.out_features))
    return targets

# pyright: basic
"""Where the decoder layers of a base model are: those of its text model, not of a vision tower beside it; where in them
experts are; and how a layer runs that is computed again on the way back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


class DecoderLayers(NamedTuple):
    name: str  # of the list, as a path in the trunk
    layers: nn.ModuleList


def find_layers(trunk: PreTrainedModel) -> DecoderLayers | None:
    """The first list of as many modules as the config has layers; None where there is none."""
    decoder = trunk.get_decoder()
    count = trunk.config.get_text_config().num_hidden_layers
    inside = {id(module) for module in decoder.modules()}
    for name, module in trunk.named_modules():
        if id(module) in inside and isinstance(module, nn.ModuleList) and len(module) == count:
            return DecoderLayers(name, module)
    return None


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


def expert_counts(config: Any) -> set[int]:
    values = [getattr(config, name, None) for name in EXPERT_COUNTS]
    return {count for value in values for count in (value if isinstance(value, list) else [value]) if count}


def are_experts(module: nn.Module, counts: set[int]) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) in counts
    return any(parameter.dim() == 3 and len(parameter) in counts for parameter in module.parameters(recurse=False))


def has_experts(found: DecoderLayers, config: Any) -> bool:
    counts = expert_counts(config)
    return any(are_experts(module, counts) for layer in found.layers for module in layer.modules())


def recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a layer's `forward` gives. Of a pass with gradients only its input is kept."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

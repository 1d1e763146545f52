# pyright: basic
"""Where the decoder layers of a base model are: those of its text model, not of a vision tower beside it."""

from typing import NamedTuple

from torch import nn
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

# pyright: basic
"""Activations of a training pass: kept, or computed a second time on the way back (Chen et al. 2016, arXiv:1604.06174).

Recomputing costs one more forward pass and keeps one hidden state per layer and token instead of some dozens. Nothing
else changes: the same arithmetic runs again on the same numbers.
"""

import functools
from dataclasses import replace

from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoder_layers import recomputed

SHARE_OF_AVAILABLE = 0.5  # that activations may take before they are recomputed


def recomputing(model: BaseModel) -> BaseModel:
    """The model, of whose decoder layers a training pass keeps only the input from now on."""
    if model.flat is not None:
        return replace(model, flat=replace(model.flat, recomputes=True))
    for layer in model.layers.layers:
        layer.forward = functools.partial(recomputed, layer.forward)
    return model


def is_needed(model: BaseModel, num_tokens: int) -> bool:
    """Whether the activations of a pass of so many tokens would take more than their share of the available memory.

    Per layer and token: the inputs of two norms, of four attention projections and of three of the feed-forward part,
    and what lies between them.
    """
    config, element_bytes = model.config, model.dtype.itemsize
    width = 12 * config.hidden_size + 5 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    num_bytes = num_tokens * config.num_hidden_layers * width * element_bytes
    return num_bytes > SHARE_OF_AVAILABLE * available_bytes(model.device)

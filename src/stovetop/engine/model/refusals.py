# pyright: basic
"""What no model may have, as its config and its tensors show before anything is computed: each is refused by name."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stovetop.engine.model.proving import LEAST_CONTEXT, TOLERANCE
from stovetop.errors import InvalidRequest, listed


def refuse_at_sight(name: str, model: PreTrainedModel) -> None:
    refuse_other_mixers(name, model.config)
    if model.get_output_embeddings() is None:
        raise InvalidRequest(f"base model {name!r} has no output head, so it is no causal language model")
    refuse_quantised(name, model)
    refuse_not_finite(name, model)


def refuse_other_mixers(name: str, config: Any) -> None:
    """Layers that are no attention keep a state that we neither pack nor cache."""
    config = config.get_text_config()
    other = sorted({*(getattr(config, "layer_types", None) or [])} - {"full_attention", "sliding_attention"})
    if other:
        raise InvalidRequest(
            f"base model {name!r} has layers that are neither full nor sliding attention ({', '.join(other)}); choose "
            "a model whose layers all are"
        )
    if getattr(config, "max_position_embeddings", None) is None:
        raise InvalidRequest(
            f"base model {name!r} has no max_position_embeddings in its config: its tokens have their places from a "
            "recurrent state or from biases of attention (ALiBi), which we do not have; choose another model"
        )
    if config.max_position_embeddings < LEAST_CONTEXT:
        raise InvalidRequest(
            f"base model {name!r} cannot be checked: max_position_embeddings must be at least {LEAST_CONTEXT} in its "
            f"config: {config.max_position_embeddings}"
        )


def refuse_not_finite(name: str, model: PreTrainedModel) -> None:
    bad = [key for key, tensor in model.state_dict().items() if tensor.is_floating_point() and not _is_finite(tensor)]
    if bad:
        raise InvalidRequest(
            f"base model {name!r} has NaN or infinity in {listed(bad)}; its files are damaged, or it diverged before "
            "it was saved: fetch it again"
        )


def refuse_quantised(name: str, model: PreTrainedModel) -> None:
    """Weights that are packed numbers and scales: no adapter stands beside them, and no product of ours reads them."""
    packed = [key for key, tensor in model.named_parameters() if tensor.dtype not in (*TOLERANCE, torch.float16)]
    method = getattr(model, "quantization_method", None)
    if packed or method is not None:
        raise InvalidRequest(
            f"base model {name!r} is stored quantised ({method or listed(packed)}), which adapters cannot be trained "
            "beside here; choose the model in bfloat16 or float32"
        )


def _is_finite(tensor: Tensor) -> bool:
    """One pass without a copy; a sum that overflows is looked at again."""
    with torch.no_grad():
        return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(torch.isfinite(tensor).all())

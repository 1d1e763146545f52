"""Which models run as our own layers, and that none does which computes something else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine import tiny
from engine.model.test_attention import SMALL
from engine.model.test_families import made
from stovetop.engine.kernels.arithmetic import Fast, RowExact
from stovetop.engine.lora.linear import LoraLinear
from stovetop.engine.model.adopting import adopt


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite"])
def test_decoders_of_the_common_kind_run_flat_and_others_do_not(family: str) -> None:
    """Granite has the same parts, and multiplies what they add."""
    assert (adopt(made(family), family, fingerprint="", deterministic=False).flat is None) == (family == "granite")


class NormOverAllHeads(Qwen3RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.flatten(-2)).view_as(hidden_states)


class OtherShapes(tf.Qwen3ForCausalLM):
    """The names of Qwen3's parts, with norms as OLMo 2 has them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            attention.q_norm = NormOverAllHeads(config.num_attention_heads * attention.head_dim)
            attention.k_norm = NormOverAllHeads(config.num_key_value_heads * attention.head_dim)


def test_a_model_whose_parts_have_our_names_and_other_shapes_runs_as_the_librarys() -> None:
    model = OtherShapes(tf.Qwen3Config(**SMALL))
    assert adopt(model, "other shapes", fingerprint="", deterministic=False).flat is None


def with_hook(model: PreTrainedModel) -> None:
    hook: Callable[..., Tensor] = lambda module, inputs, output: output * 1.05  # noqa: E731
    model.get_submodule("model.layers.1.mlp").register_forward_hook(hook)


def with_own_forward(model: PreTrainedModel) -> None:
    norm = model.get_submodule("model.norm")
    forward = norm.forward
    norm.forward = lambda hidden_states: forward(hidden_states) * 1.05


def with_buffer(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.0.self_attn").register_buffer("gain", torch.ones(()))


@pytest.mark.parametrize("change", [with_hook, with_own_forward, with_buffer])
def test_a_model_that_was_changed_after_it_was_made_runs_as_the_librarys(
    change: Callable[[PreTrainedModel], None],
) -> None:
    """In bfloat16 a small change is within what rounding may do."""
    model = tiny.llama().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]  a decorator of the library hides it
    change(model)
    assert adopt(model, "changed", fingerprint="").flat is None


def test_weights_that_are_not_used_are_not_kept_in_a_second_layout() -> None:
    base = adopt(tiny.llama(), "tiny", fingerprint="", deterministic=False)
    replace(base, flat=None).on(RowExact())  # as loading tries it
    assert layouts(base.on(Fast()).trunk) == []


def layouts(trunk: nn.Module) -> list[Tensor]:
    own = [module.projection.linear.layout for module in trunk.modules() if isinstance(module, LoraLinear)]
    return [layout for layout in own if layout is not None]

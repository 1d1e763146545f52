# pyright: basic
"""The decoder that most models share, written once for training and decoding alike: norms before attention and before a
gated feed-forward part, rotary positions, grouped queries. Linears that read the same input are one product.

A model of the library that is built of these parts (Llama, Mistral, Qwen2, Qwen3 and their kin) gets one beside its own
modules, whose weights it shares. Whether it computes the same is proven when the model is loaded (`proving.py`); where
it does not, and for all other models, the library's modules run.

Shapes: `N` packed tokens, `E` hidden size, `H` query heads, `G` key/value heads, `D` head size, `O` outputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from stovetop.engine.kernels.arithmetic import Arithmetic, FrozenLinear
from stovetop.engine.kernels.attention_plans import AttentionPlan
from stovetop.engine.kernels.layer_math import gated, rms_norm, rotated
from stovetop.engine.kernels.sight import How
from stovetop.engine.lora.linear import LoraLinear, Projection
from stovetop.engine.lora.low_rank import Siblings
from stovetop.engine.lora.routing import AdapterRows
from stovetop.engine.model.decoder_layers import recomputed

Change = Callable[[FrozenLinear], FrozenLinear]


class Pass(NamedTuple):
    """What all layers of a pass are given."""

    plan: AttentionPlan
    parts: AdapterRows
    arithmetic: Arithmetic
    cos_N1D: Tensor
    sin_N1D: Tensor


class Norm(NamedTuple):
    weight_E: Tensor
    epsilon: float

    def __call__(self, x_NE: Tensor) -> Tensor:
        return rms_norm(x_NE, self.weight_E, self.epsilon)


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayer:
    """x + attention(norm(x)), and to that gated feed-forward(norm(x))."""

    index: int
    how: How
    head_size: int
    norm: Norm
    query_key_value: Projection
    query_norm: Norm | None  # of each head, before it is rotated
    key_norm: Norm | None
    output: Projection
    second_norm: Norm
    gate_up: Projection
    down: Projection

    def forward(self, x_NE: Tensor, given: Pass) -> Tensor:
        parts, arithmetic = given.parts, given.arithmetic
        heads = self._heads(self.query_key_value(self.norm(x_NE), parts, arithmetic), given)
        query_HND, key_GND, value_GND = (x.transpose(0, 1) for x in heads)
        attended_NHD = given.plan.attend(self.index, query_HND, key_GND, value_GND, self.how)
        x_NE = self.output(attended_NHD.flatten(1), parts, arithmetic, x_NE)
        gate_up_NO = self.gate_up(self.second_norm(x_NE), parts, arithmetic)
        return self.down(gated(gate_up_NO, arithmetic.silu), parts, arithmetic, x_NE)

    def _heads(self, x_NO: Tensor, given: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values."""
        query_heads, key_heads, value_heads = (
            (columns.stop - columns.start) // self.head_size for columns in self.query_key_value.siblings.columns
        )
        x_NHD = x_NO.unflatten(1, (-1, self.head_size))
        turned_NHD, value_NGD = x_NHD.split([query_heads + key_heads, value_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            query_NHD, key_NGD = turned_NHD.split([query_heads, key_heads], 1)
            turned_NHD = torch.cat([self.query_norm(query_NHD), self.key_norm(key_NGD)], 1)
        turned_NHD = rotated(turned_NHD, given.cos_N1D, given.sin_N1D)
        query_NHD, key_NGD = turned_NHD.split([query_heads, key_heads], 1)
        return query_NHD, key_NGD, value_NGD

    def changed(self, change: Change) -> "FlatLayer":
        """With its linears changed."""
        return replace(
            self,
            **{
                name: replace(projection, linear=change(projection.linear))
                for name, projection in self.projections().items()
            },
        )

    def projections(self) -> dict[str, Projection]:
        names = ("query_key_value", "output", "gate_up", "down")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class FlatDecoder:
    weight_VE: Tensor  # of the embedding
    rotary: nn.Module
    layers: Sequence[FlatLayer]
    norm: Norm
    recomputes: bool = False  # each layer on the way back, of which then only the input is kept

    def hidden_states(
        self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, parts: AdapterRows, arithmetic: Arithmetic
    ) -> Tensor:
        """(N, E), after the last norm."""
        x_NE = F.embedding(tokens_N, self.weight_VE)
        cos_1ND, sin_1ND = self.rotary(x_NE[None], positions_N[None])
        given = Pass(plan, parts, arithmetic, cos_1ND[0, :, None], sin_1ND[0, :, None])
        for layer in self.layers:
            x_NE = recomputed(layer.forward, x_NE, given) if self.recomputes else layer.forward(x_NE, given)
        return self.norm(x_NE)

    def linears(self) -> Iterable[FrozenLinear]:
        return (projection.linear for layer in self.layers for projection in layer.projections().values())

    def changed(self, change: Change) -> "FlatDecoder":
        return replace(self, layers=[layer.changed(change) for layer in self.layers])


# ---- out of a model of the library -----------------------------------------------------------------------------------

DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
SILU = {"SiLU", "SiLUActivation", "RowExactSiLU"}


def flattened(trunk: PreTrainedModel, hows: Sequence[How]) -> FlatDecoder | None:
    """The flat form of a model whose linears have been wrapped, `hows` being what each layer asks of attention; None
    for one that is built of other parts. The linears of the model read their weights from it from now on."""
    decoder: Any = trunk.get_decoder()
    is_ours = _has(decoder, DECODER) and all(map(_is_of_our_parts, decoder.layers)) and _is_norm(decoder.norm)
    if not is_ours or any(map(_is_changed, decoder.modules())):
        return None
    layers = [
        _flat_layer(index, layer, how) for index, (layer, how) in enumerate(zip(decoder.layers, hows, strict=True))
    ]
    return FlatDecoder(decoder.embed_tokens.weight, decoder.rotary_emb, layers, _norm(decoder.norm))


def _has(module: nn.Module, children: set[str]) -> bool:
    """These children, and no weights or buffers beside them."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return {name for name, _ in module.named_children()} == children and not own


def _is_changed(module: nn.Module) -> bool:
    """Whether this one module computes something else than others of its class, by hooks or a forward of its own: a
    small copy has neither."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _is_of_our_parts(layer: Any) -> bool:
    if not (_has(layer, LAYER) and _has(layer.mlp, FEED_FORWARD)):
        return False
    attention = layer.self_attn
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if _has(attention, ATTENTION | HEAD_NORMS):
        norms += [attention.q_norm, attention.k_norm]
    elif not _has(attention, ATTENTION):
        return False
    groups = ((attention.q_proj, attention.k_proj, attention.v_proj), (layer.mlp.gate_proj, layer.mlp.up_proj))
    return (
        isinstance(getattr(attention, "head_dim", None), int)
        and type(layer.mlp.act_fn).__name__ in SILU
        and all(map(_is_norm, norms))
        and all(_are_alike(group) for group in groups)
    )


def _is_norm(module: Any) -> bool:
    own = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    return own == ["weight"] and hasattr(module, "variance_epsilon")


def _are_alike(group: Sequence[Any]) -> bool:
    return all(isinstance(each, LoraLinear) for each in group) and len({each.base.bias is None for each in group}) == 1


def _flat_layer(index: int, layer: Any, how: How) -> FlatLayer:
    attention, feed_forward = layer.self_attn, layer.mlp
    has_norms = _has(attention, ATTENTION | HEAD_NORMS)
    return FlatLayer(
        index,
        how,
        attention.head_dim,
        _norm(layer.input_layernorm),
        _together([attention.q_proj, attention.k_proj, attention.v_proj]),
        _norm(attention.q_norm) if has_norms else None,
        _norm(attention.k_norm) if has_norms else None,
        _together([attention.o_proj]),
        _norm(layer.post_attention_layernorm),
        _together([feed_forward.gate_proj, feed_forward.up_proj]),
        _together([feed_forward.down_proj]),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _together(linears: Sequence[LoraLinear]) -> Projection:
    """As one. Each becomes a view of it, so that the weights are there once."""
    if len(linears) == 1:
        return linears[0].projection
    siblings = Siblings.of({linear.name: linear.base.out_features for linear in linears})
    weight_OI = torch.cat([linear.base.weight.data for linear in linears])
    biases = [linear.base.bias.data for linear in linears if linear.base.bias is not None]
    for linear, columns in zip(linears, siblings.columns, strict=True):
        linear.base.weight = nn.Parameter(weight_OI[columns], requires_grad=False)
        linear.projection = Projection(Siblings((linear.name,)), FrozenLinear(linear.base.weight, linear.base.bias))
    return Projection(siblings, FrozenLinear(weight_OI, torch.cat(biases) if biases else None))

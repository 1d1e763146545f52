# pyright: basic
"""The base model: loaded once, frozen, shared by trainer and sampler. Packed rows in, final hidden states out.

Any decoder-only causal LM of transformers whose attention ours can honour; whether it can is proven when the model is
loaded (`proving.py`).

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from stovetop.engine.kernels.arithmetic import Arithmetic, Frozen
from stovetop.engine.kernels.attention_plans import AttentionPlan, PackedAttention, PackKernel
from stovetop.engine.kernels.packing import Pack
from stovetop.engine.lora.linear import LoraLinear
from stovetop.engine.lora.routing import Parts, Routing, low_ranks
from stovetop.engine.lora.weights import Target
from stovetop.engine.model.attention import CurrentPlan
from stovetop.engine.model.decoder_layers import DecoderLayers
from stovetop.engine.model.head import Head
from stovetop.input_checks import ModelLimits
from stovetop.target_names import HEAD, input_of
from stovetop.tokenizing import Tokenizer


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BaseModel:
    """A frozen causal LM with a place for adapters beside every linear."""

    limits: ModelLimits
    fingerprint: str
    targets: list[Target]
    untrainable: dict[str, str]  # parts that no adapter can train, with the reason
    device: torch.device
    num_layers: int
    stop_tokens: frozenset[int]  # the model's own ends of text
    tokenizer: Tokenizer | None  # None for a folder without one
    tokenizer_place: str | None  # the folder or file that it was read from
    config: PreTrainedConfig
    trunk: PreTrainedModel
    layers: DecoderLayers
    weight_VE: Tensor
    bias_V: Tensor | None
    multiplier: float  # of the head's outputs
    softcap: float | None  # of the logits
    routing: Routing
    current_plan: CurrentPlan
    arithmetic: Arithmetic
    attends_plainly: bool = False  # in every layer: without windows, soft caps and sinks
    kv_bytes: tuple[int, ...] = ()  # of the keys and values of one position, by layer
    pack_kernel: PackKernel | None = None  # with which it attends within a pack, where that applies

    def packed_attention(self, packed: Pack) -> PackedAttention:
        return PackedAttention(packed, self.arithmetic, self.device, self.pack_kernel)

    def hidden_states(self, packed: Pack, plan: AttentionPlan, parts: Parts) -> Tensor:
        """(N, E) after the last norm: what the head reads."""
        tokens_N, positions_N = (torch.tensor(t, device=self.device) for t in (packed.tokens_N, packed.positions_N))
        return self.hidden_states_of(tokens_N, positions_N, plan, parts)

    def hidden_states_of(self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, parts: Parts) -> Tensor:
        """The same from tensors that are on the device."""
        self.routing.parts, self.current_plan.plan = parts, plan
        output = self.trunk(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        return output.last_hidden_state[0]

    def frozen_weights(self) -> list[Tensor]:
        """Those of every linear, and of the head."""
        return [linear.weight_OI for siblings in self.frozen_linears() for linear in siblings]

    def frozen_linears(self) -> list[list[Frozen]]:
        """All of them, and the head; those that read the same input together."""
        groups: dict[tuple[object, ...], list[Frozen]] = {}
        for module in self.trunk.modules():
            if isinstance(module, LoraLinear):
                key = (input_of(module.name), module.frozen.weight_OI.shape[1], module.frozen.bias_O is None)
                groups.setdefault(key, []).append(module.frozen)
        return [*groups.values(), [Frozen(self.weight_VE, self.bias_V)]]

    def head(self, parts: Parts) -> Head:
        """The head for rows that belong to `parts`."""
        low = low_ranks(parts, HEAD)
        return Head(self.weight_VE, self.bias_V, low, self.arithmetic, self.multiplier, self.softcap)

# pyright: basic
"""The base model: loaded once, frozen, shared by trainer and sampler. Packed rows in, final hidden states out.

Any decoder-only causal LM of transformers whose attention ours can honour; whether it can is proven when the model is
loaded (`proving.py`).

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from stovetop.engine.kernels.arithmetic import Arithmetic, FrozenLinear
from stovetop.engine.kernels.attention_plans import AttentionPlan, PackedAttention, PackKernel
from stovetop.engine.kernels.packing import Pack
from stovetop.engine.lora.linear import LoraLinear
from stovetop.engine.lora.low_rank import Siblings
from stovetop.engine.lora.routing import AdapterRows, Routing, low_ranks
from stovetop.engine.lora.weights import Target
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.attention import CurrentPlan
from stovetop.engine.model.decoder_layers import DecoderLayers
from stovetop.engine.model.flat_decoder import FlatDecoder
from stovetop.engine.model.head import Head
from stovetop.input_checks import ModelLimits
from stovetop.target_names import HEAD
from stovetop.tokenizing import Tokenizer

PREPACKED_SHARE = 0.25  # of the available memory, that the weights may take a second time


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
    output: FrozenLinear  # the head
    multiplier: float  # of the head's outputs
    softcap: float | None  # of the logits
    routing: Routing
    current_plan: CurrentPlan
    arithmetic: Arithmetic
    attends_plainly: bool = False  # in every layer (`How.is_plain`), so that samples may share a prefix
    kv_bytes: tuple[int, ...] = ()  # of the keys and values of one position, by layer
    pack_kernel: PackKernel | None = None  # with which it attends within a pack, where that applies
    flat: FlatDecoder | None = None  # in place of the trunk, for models that it computes exactly

    @property
    def dtype(self) -> torch.dtype:
        return self.output.weight_OI.dtype

    def packed_attention(self, packed: Pack) -> PackedAttention:
        return PackedAttention(packed, self.arithmetic, self.device, self.pack_kernel)

    def hidden_states(self, packed: Pack, plan: AttentionPlan, parts: AdapterRows) -> Tensor:
        """(N, E) after the last norm: what the head reads."""
        tokens_N, positions_N = (torch.tensor(t, device=self.device) for t in (packed.tokens_N, packed.positions_N))
        return self.hidden_states_of(tokens_N, positions_N, plan, parts)

    def hidden_states_of(
        self, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, parts: AdapterRows
    ) -> Tensor:
        """The same from tensors that are on the device."""
        if self.flat is not None:
            return self.flat.hidden_states(tokens_N, positions_N, plan, parts, self.arithmetic)
        self.routing.parts, self.current_plan.plan = parts, plan
        output = self.trunk(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        return output.last_hidden_state[0]

    def frozen_linears(self) -> list[FrozenLinear]:
        """All that it computes with, and the head."""
        if self.flat is not None:
            return [*self.flat.linears(), self.output]
        return [*(module.projection.linear for module in self._lora_linears()), self.output]

    def _lora_linears(self) -> list[LoraLinear]:
        return [module for module in self.trunk.modules() if isinstance(module, LoraLinear)]

    def on(self, arithmetic: Arithmetic) -> "BaseModel":
        """The same model, computing with this arithmetic. Weights are prepacked where there is memory for it."""
        weight_bytes = sum(linear.weight_OI.nbytes for linear in self.frozen_linears())
        has_room = weight_bytes <= PREPACKED_SHARE * available_bytes(self.device)
        prepacked = arithmetic.prepacked if has_room else _as_it_is
        for module in self._lora_linears():
            module.arithmetic = arithmetic
            linear = replace(module.projection.linear, layout=None)  # nor one that is not used
            linear = prepacked(linear) if self.flat is None else linear
            module.projection = replace(module.projection, linear=linear)
        flat = None if self.flat is None else self.flat.changed(prepacked)
        return replace(self, arithmetic=arithmetic, flat=flat, output=prepacked(replace(self.output, layout=None)))

    def head(self, parts: AdapterRows) -> Head:
        """The head for rows that belong to `parts`."""
        low = low_ranks(parts, Siblings((HEAD,)))
        return Head(self.output, low, self.arithmetic, self.multiplier, self.softcap)


def _as_it_is(linear: FrozenLinear) -> FrozenLinear:
    return linear

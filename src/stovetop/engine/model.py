# pyright: basic
"""The base model: loaded once, frozen, shared by trainer and sampler. Packed rows in, final hidden states out.

Any decoder-only causal LM of transformers whose attention ours can honour; whether it can is proven when the model is
loaded (`proving.py`).

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from stovetop.client import Tokenizer
from stovetop.engine import exactness, recompute
from stovetop.engine.arithmetic import Arithmetic, Fast, Frozen, RowExact
from stovetop.engine.attention import NAME, AttentionPlan, CurrentPlan
from stovetop.engine.decoder_layers import DecoderLayers, find_layers
from stovetop.engine.logprobs import Head
from stovetop.engine.lora import Target
from stovetop.engine.lora_linear import LoraLinear, untrainable_parts, wrap
from stovetop.engine.packing import Pack
from stovetop.engine.proving import (
    check_full_model,
    context_length,
    probe_tokens,
    prove,
    refuse_not_finite,
    refuse_other_mixers,
    refuse_quantised,
)
from stovetop.engine.routing import Parts, Routing, low_ranks
from stovetop.engine.target_names import HEAD, input_of
from stovetop.errors import InvalidRequest
from stovetop.losses import ModelLimits

log = logging.getLogger(__name__)


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

    def needs_recompute(self, max_tokens_per_pass: int) -> bool:
        return recompute.is_needed(self.config, max_tokens_per_pass, self.weight_VE.element_size(), self.device)

    def head(self, parts: Parts) -> Head:
        """The head for rows that belong to `parts`."""
        low = low_ranks(parts, HEAD)
        return Head(self.weight_VE, self.bias_V, low, self.arithmetic, self.multiplier, self.softcap)


def adopt(
    model: PreTrainedModel,
    name: str,
    *,
    fingerprint: str,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    deterministic: bool | None = None,
) -> BaseModel:
    """A base model out of one of the library, which must have been made with `attn_implementation="eager"`. It is
    taken over: its linears are wrapped, its weights frozen.

    `deterministic` asks for the row-exact arithmetic: True refuses a model or machine on which it does not hold, None
    takes it where it holds, False leaves it.
    """
    config = model.config.get_text_config()
    refuse_other_mixers(name, model.config)
    if model.get_output_embeddings() is None:
        raise InvalidRequest(f"base model {name!r} has no output head, so it is no causal language model")
    refuse_quantised(name, model)
    refuse_not_finite(name, model)
    model.eval().requires_grad_(False)
    model.to(device)  # pyright: ignore[reportArgumentType]  a decorator of the library hides the signature
    _report_context(name, config)
    wanted = deterministic is not False
    obstacle = exactness.obstacle(model, config, torch.device(device), model.dtype) if wanted else "not asked for"

    def wrap(small: PreTrainedModel, arithmetic: Arithmetic) -> BaseModel:
        return _taken_over(small, name, "", None, arithmetic)

    obstacle = prove(name, model, wrap, row_exact=obstacle is None) or obstacle
    probe = probe_tokens(config.vocab_size, context_length(config))
    with torch.no_grad():
        expected = [model(torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in probe]
    model.set_attn_implementation(NAME)
    if obstacle is None:
        exactness.prepare(model, context_length(config))
    base = _taken_over(model, name, fingerprint, tokenizer, Fast() if obstacle else RowExact())
    calls = check_full_model(base, probe, expected)
    base = replace(
        base,
        attends_plainly=all(call.how.is_plain for call in calls),
        kv_bytes=tuple(call.kv_bytes for call in calls),
    )
    obstacle = obstacle or exactness.obstacle_found(base)
    if obstacle and deterministic:
        raise InvalidRequest(f"base model {name!r} cannot run deterministically: {obstacle}; pass deterministic=False")
    if obstacle and wanted:
        log.info("base model %r runs without bit-equal sampler and trainer: %s", name, obstacle)
    if obstacle and isinstance(base.arithmetic, RowExact):  # found by trying
        return _prepacked(_with_arithmetic(base, Fast()))
    return base


def _report_context(name: str, config) -> None:
    longest = context_length(config)
    if longest < config.max_position_embeddings:
        log.warning(
            "base model %r: the context is %d tokens, not %d: in a longer sequence its rotary embedding (longrope) "
            "moves the tokens that are there already, so a sample's logprobs would not be those of the whole sequence",
            name,
            longest,
            config.max_position_embeddings,
        )


def _taken_over(
    model: PreTrainedModel, name: str, fingerprint: str, tokenizer: Tokenizer | None, arithmetic: Arithmetic
) -> BaseModel:
    return _prepacked(_wrapped(model, name, fingerprint, tokenizer, arithmetic))


def _wrapped(
    model: PreTrainedModel, name: str, fingerprint: str, tokenizer: Tokenizer | None, arithmetic: Arithmetic
) -> BaseModel:
    config = model.config.get_text_config()
    trunk, head, routing = cast(PreTrainedModel, model.base_model), model.get_output_embeddings(), Routing()
    assert head is not None, "checked when it is taken over"
    layers = find_layers(trunk)
    if layers is None:
        raise InvalidRequest(
            f"base model {name!r} has no list of {config.num_hidden_layers} decoder layers, as its config says; choose "
            "a decoder-only model of transformers"
        )
    targets = wrap(trunk, layers, config, f"{model.base_model_prefix}.", routing, arithmetic)
    targets.append(Target(HEAD, "unembed", head.weight.shape[1], head.weight.shape[0]))
    return BaseModel(
        limits=ModelLimits(name, head.weight.shape[0], context_length(config)),
        fingerprint=fingerprint,
        targets=targets,
        untrainable=untrainable_parts(layers),
        device=head.weight.device,
        num_layers=config.num_hidden_layers,
        stop_tokens=_stop_tokens(model, tokenizer),
        tokenizer=tokenizer,
        config=config,
        trunk=trunk,
        layers=layers,
        weight_VE=head.weight,
        bias_V=getattr(head, "bias", None),
        multiplier=_multiplier(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        routing=routing,
        current_plan=CurrentPlan().given_to(trunk),
        arithmetic=arithmetic,
    )


def _prepacked(base: BaseModel) -> BaseModel:
    for siblings in base.frozen_linears():
        base.arithmetic.prepack(siblings)
    return base


def _with_arithmetic(base: BaseModel, arithmetic: Arithmetic) -> BaseModel:
    for module in base.trunk.modules():
        if isinstance(module, LoraLinear):
            module.arithmetic = arithmetic
    return replace(base, arithmetic=arithmetic)


def _stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ends of text by the model's generation config, and by its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    tokens = [configured] if isinstance(configured, int) else list(configured or [])
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(tokens if own is None else [*tokens, own])


def _multiplier(config) -> float:
    """What the library multiplies the head's outputs by (Cohere), or divides them by (Granite)."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

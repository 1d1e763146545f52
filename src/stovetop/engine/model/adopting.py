# pyright: basic
"""A model of the library, taken over: its linears are wrapped and its weights frozen, once it is proven that we compute
what it computes (`proving.py`). In which form it runs is decided here: with our decoder layers or the library's, on the
row-exact arithmetic or the fast one.
"""

import logging
from dataclasses import replace
from typing import cast

import torch
from transformers import PreTrainedModel

from stovetop.engine.kernels.arithmetic import Arithmetic, Fast, FrozenLinear, RowExact
from stovetop.engine.kernels.attention_plans import PackKernel
from stovetop.engine.lora.routing import Routing
from stovetop.engine.lora.weights import Target
from stovetop.engine.machine import SHARED
from stovetop.engine.model import exactness
from stovetop.engine.model.attention import NAME, CurrentPlan
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoder_layers import find_layers
from stovetop.engine.model.proving import (
    Probe,
    attention_calls,
    check_full_model,
    context_length,
    flat_form,
    prove,
)
from stovetop.engine.model.refusals import refuse_at_sight
from stovetop.engine.model.targets import untrainable_parts, wrap
from stovetop.errors import InvalidRequest
from stovetop.input_checks import ModelLimits
from stovetop.target_names import HEAD
from stovetop.tokenizing import Tokenizer

log = logging.getLogger(__name__)


@SHARED.changed()
def adopt(
    model: PreTrainedModel,
    name: str,
    *,
    fingerprint: str,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    deterministic: bool | None = None,
    pack_kernel: PackKernel | None = None,
) -> BaseModel:
    """A base model out of one of the library, which must have been made with `attn_implementation="eager"`. It is
    taken over: its linears are wrapped, its weights frozen.

    `deterministic` asks for the row-exact arithmetic: True refuses a model or machine on which it does not hold, None
    takes it in float32 where it holds, False leaves it."""
    refuse_at_sight(name, model)
    config = model.config.get_text_config()
    model.eval().requires_grad_(False)
    model.to(device)  # pyright: ignore[reportArgumentType]  a decorator of the library hides the signature
    _report_context(name, config)
    obstacle = "not asked for"
    if deterministic is not False:
        obstacle = exactness.obstacle(model, config, torch.device(device), model.dtype)
    if obstacle is None and deterministic is None and model.dtype == torch.bfloat16:
        obstacle = "in bfloat16 that takes longer, so it is to be asked for with deterministic=True"

    def base_of(model: PreTrainedModel, arithmetic: Arithmetic) -> BaseModel:
        return replace(_wrapped(model, name, fingerprint, tokenizer, arithmetic), pack_kernel=pack_kernel)

    proof = prove(name, model, base_of, row_exact=obstacle is None)
    if obstacle is None and not proof.is_exact:
        obstacle = "the row-exact arithmetic has no form of its attention"
    probe = Probe.of(model)
    model.set_attn_implementation(NAME)
    if obstacle is None:
        exactness.prepare(model, context_length(config))
    base = _checked(base_of(model, Fast()), probe, try_flat=proof.is_flat)
    if obstacle is None:
        exact, obstacle = _row_exact(base)
        if exact is not None:
            return exact
    if deterministic:
        raise InvalidRequest(f"base model {name!r} cannot run deterministically: {obstacle}; pass deterministic=False")
    if deterministic is None:
        log.info("base model %r runs without bit-equal sampler and trainer: %s", name, obstacle)
    return base.on(Fast())


def _checked(base: BaseModel, probe: Probe, *, try_flat: bool) -> BaseModel:
    """Refused unless it computes what the library computes; with our decoder layers where they do."""
    calls = attention_calls(base)
    base = replace(
        base,
        attends_plainly=all(call.how.is_plain for call in calls),
        kv_bytes=tuple(call.kv_bytes for call in calls),
    )
    flat = flat_form(base, calls) if try_flat else None
    if flat is not None:
        try:
            check_full_model(flat, probe)
        except InvalidRequest as error:
            log.warning("base model %r runs with the library's layers: with ours, %s", base.limits.name, error)
        else:
            return flat
    check_full_model(base, probe)
    return base


def _row_exact(base: BaseModel) -> tuple[BaseModel | None, str]:
    """The model on the row-exact arithmetic, or why it does not run on that here."""
    obstacle = ""
    for form in [base] if base.flat is None else [base, replace(base, flat=None)]:
        exact = form.on(RowExact())
        found = exactness.obstacle_found(exact)
        if found is None:
            return exact, ""
        obstacle = obstacle or found
        del exact  # the weights that it has a second time
    return None, obstacle


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
        untrainable=untrainable_parts(layers, targets),
        device=head.weight.device,
        num_layers=config.num_hidden_layers,
        stop_tokens=_stop_tokens(model, tokenizer),
        tokenizer=tokenizer,
        tokenizer_place=None,
        config=config,
        trunk=trunk,
        layers=layers,
        output=FrozenLinear(head.weight, getattr(head, "bias", None)),
        multiplier=_multiplier(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        routing=routing,
        current_plan=CurrentPlan().given_to(trunk),
        arithmetic=arithmetic,
    )


def _stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ends of text by the model's generation config, and by its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    tokens = [configured] if isinstance(configured, int) else list(configured or [])
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(tokens if own is None else [*tokens, own])


def _multiplier(config) -> float:
    """What the library multiplies the head's outputs by (Cohere), or divides them by (Granite)."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

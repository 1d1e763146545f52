# pyright: basic
"""The base model: loaded once, frozen, shared by trainer and sampler. Packed rows in, final hidden states out.

Any decoder-only causal LM of transformers whose attention ours can honour. Whether it can is found out when the model
is loaded: every layer must call our attention once, and our logits must be those of the library's own eager path. A
model that fails is refused by name: a silently wrong model is the worst outcome of all.

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from stovetop.client import Tokenizer
from stovetop.engine import exactness, recompute
from stovetop.engine.arithmetic import Arithmetic, Fast, Frozen, RowExact
from stovetop.engine.attention import NAME, AttentionPlan, CurrentPlan, PackedAttention
from stovetop.engine.decoder_layers import DecoderLayers, find_layers
from stovetop.engine.logprobs import Head
from stovetop.engine.lora import Target
from stovetop.engine.lora_linear import LoraLinear, untrainable_parts, wrap
from stovetop.engine.packing import Pack, pack
from stovetop.engine.routing import Parts, Routing, low_ranks
from stovetop.engine.sight import How
from stovetop.engine.target_names import HEAD, input_of
from stovetop.errors import InvalidRequest
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer
from stovetop.losses import ModelLimits

log = logging.getLogger(__name__)

NUM_PIECES, PIECE_BYTES = 256, 4096  # of a weight file, for its fingerprint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


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


def load_model(
    folder: Path, name: str, *, device: str = "cpu", dtype: str = "float32", deterministic: bool | None = None
) -> BaseModel:
    """The model in `folder` (config.json, safetensors, tokenizer; or a GGUF file), refused by `name` if we would not
    run it exactly."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}: {dtype!r}")
    in_gguf = is_gguf(folder)
    config = load_gguf_config(folder) if in_gguf else AutoConfig.from_pretrained(folder)
    _refuse_other_mixers(name, config)  # before gigabytes are read
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": "eager"}
    if in_gguf:
        model = load_gguf_model(folder, **options)
        tokenizer = cast(Tokenizer, load_gguf_tokenizer(folder, model.config))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
    mark = fingerprint(folder)
    return adopt(model, name, fingerprint=mark, tokenizer=tokenizer, device=device, deterministic=deterministic)


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
    _refuse_other_mixers(name, model.config)
    model.eval().requires_grad_(False)
    model.to(device)  # pyright: ignore[reportArgumentType]  a decorator of the library hides the signature
    config = model.config.get_text_config()
    probe = _probe_tokens(config.vocab_size, config.max_position_embeddings)
    with torch.no_grad():
        expected = [model(torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in probe]
    model.set_attn_implementation(NAME)
    wanted = deterministic is not False
    obstacle = exactness.obstacle(model, config, torch.device(device), expected[0].dtype) if wanted else "not asked for"
    if obstacle is None:
        exactness.prepare(model, config.max_position_embeddings)
    base = _prepacked(_wrapped(model, name, fingerprint, tokenizer, Fast() if obstacle else RowExact()))
    base = replace(base, attends_plainly=all(how.is_plain for how in _checked_against_library(base, probe, expected)))
    obstacle = obstacle or exactness.obstacle_found(base)
    if obstacle and deterministic:
        raise InvalidRequest(f"base model {name!r} cannot run deterministically: {obstacle}; pass deterministic=False")
    if obstacle and wanted:
        log.info("base model %r runs without bit-equal sampler and trainer: %s", name, obstacle)
    if obstacle and isinstance(base.arithmetic, RowExact):  # found by trying
        return _prepacked(_with_arithmetic(base, Fast()))
    return base


def _wrapped(
    model: PreTrainedModel, name: str, fingerprint: str, tokenizer: Tokenizer | None, arithmetic: Arithmetic
) -> BaseModel:
    config = model.config.get_text_config()
    trunk, head, routing = cast(PreTrainedModel, model.base_model), model.get_output_embeddings(), Routing()
    if head is None:
        raise InvalidRequest(f"base model {name!r} has no output head, so it is no causal language model")
    layers = find_layers(trunk)
    if layers is None:
        raise InvalidRequest(
            f"base model {name!r} has no list of {config.num_hidden_layers} decoder layers, as its config says; choose "
            "a decoder-only model of transformers"
        )
    targets = wrap(trunk, layers, config, f"{model.base_model_prefix}.", routing, arithmetic)
    targets.append(Target(HEAD, "unembed", head.weight.shape[1], head.weight.shape[0]))
    return BaseModel(
        limits=ModelLimits(name, head.weight.shape[0], config.max_position_embeddings),
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


def fingerprint(model: Path) -> str:
    """Tells models apart by content, cheaply: the config, and of every weight file its size and pieces from all over it
    (a model that was trained further may differ in some layers only)."""
    digest = hashlib.sha256()
    files = [model]
    if model.is_dir():
        config = json.loads((model / "config.json").read_text())
        for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
            config.pop(key, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
        files = sorted(model.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name if model.is_dir() else 'gguf'} {size}".encode())
        with path.open("rb") as file:
            for piece in range(NUM_PIECES):
                file.seek(size * piece // NUM_PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


def _stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ends of text by the model's generation config, and by its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    tokens = [configured] if isinstance(configured, int) else list(configured or [])
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(tokens if own is None else [*tokens, own])


def _multiplier(config) -> float:
    """What the library multiplies the head's outputs by (Cohere), or divides them by (Granite)."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


# ---- refusals --------------------------------------------------------------------------------------------------------


def _refuse_other_mixers(name: str, config) -> None:
    """Layers that are no attention keep a state that we neither pack nor cache."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    other = sorted(kinds - {"full_attention", "sliding_attention"})
    if getattr(config, "max_position_embeddings", None) is None:
        other = other or [config.model_type]
    if other:
        raise InvalidRequest(
            f"base model {name!r} has layers that are no softmax attention ({', '.join(other)}); "
            "choose a model whose layers all are"
        )


def _probe_tokens(vocab_size: int, context_length: int) -> list[list[int]]:
    """Two short sequences of different length, so that a mistake in packing would show."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(24, context_length), min(15, context_length)]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


class _Counting:
    """A plan that notes which layers attend through it, and how."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.layers: list[int] = []
        self.hows: list[How] = []

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self.layers.append(layer)
        self.hows.append(how)
        return self.plan.attend(layer, query_HND, key_GND, value_GND, how)


@torch.no_grad()
def _checked_against_library(base: BaseModel, probe: list[list[int]], expected: list[Tensor]) -> list[How]:
    """How its layers attend; raises if the model does not compute what the library computes."""
    packed = pack(probe)
    plan = _Counting(PackedAttention(packed, base.arithmetic, base.device))
    name = base.limits.name
    try:
        hidden_NE = base.hidden_states(packed, plan, [])
    except (TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"base model {name!r} does not run with packed attention: {error}") from error
    if sorted(plan.layers) != list(range(base.num_layers)):
        raise InvalidRequest(
            f"base model {name!r} has {base.num_layers} layers, of which {len(set(plan.layers))} attend through our "
            "function; the others would be silently wrong, so this model is refused"
        )
    for index, logits_TV in enumerate(expected):
        ours_TV = base.head([]).logits(hidden_NE[packed.rows_of(index)])
        error = (ours_TV - logits_TV.float()).abs().max().item()
        allowed = _tolerance(logits_TV)
        if not error <= allowed:
            raise InvalidRequest(
                f"base model {name!r}: our logits differ from the library's by {error:.3g} (allowed {allowed:.3g}); it "
                "has something our attention or head does not honour, so this model is refused"
            )
    return plan.hows


def _tolerance(logits_TV: Tensor) -> float:
    """Rounding that many layers may gather: relative to the spread of the logits, by the precision of the dtype."""
    spread = logits_TV.float().std().item() + 1e-6
    return spread * {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.3}[logits_TV.dtype]

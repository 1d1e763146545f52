# pyright: basic
"""The base model: loaded once, frozen, shared by trainer and sampler. Packed rows in, final hidden states out.

Any decoder-only causal LM of transformers whose attention ours can honour. Whether it can is found out when the model
is loaded: every layer must call our attention once, and our logits must be those of the library's own eager path. A
model that fails is refused by name: a silently wrong model is the worst outcome of all.

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from stovetop.client import Tokenizer
from stovetop.engine.attention import NAME, AttentionPlan, How, PackedAttention
from stovetop.engine.logprobs import Head
from stovetop.engine.lora import HEAD, AdapterWeights, Routing, Rows, Target, factors_of, untrainable_parts, wrap
from stovetop.engine.packing import Pack, pack
from stovetop.errors import InvalidRequest
from stovetop.losses import ModelLimits

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
    trunk: nn.Module
    weight_VE: Tensor
    bias_V: Tensor | None
    routing: Routing

    def hidden_states(self, packed: Pack, plan: AttentionPlan, parts: list[Rows]) -> Tensor:
        """(N, E) after the last norm: what the head reads."""
        tokens_1N = torch.tensor([packed.tokens_N], device=self.device)
        positions_1N = torch.tensor([packed.positions_N], device=self.device)
        with self.routing.routed(parts):
            output = self.trunk(input_ids=tokens_1N, position_ids=positions_1N, use_cache=False, attention_plan=plan)
        return output.last_hidden_state[0]

    def head(self, adapter: AdapterWeights | None) -> Head:
        factors = None if adapter is None else factors_of(adapter, HEAD)
        return Head(self.weight_VE, self.bias_V, factors)


def load_model(folder: Path, name: str, *, device: str = "cpu", dtype: str = "float32") -> BaseModel:
    """The model in `folder` (config.json, safetensors, tokenizer), refused by `name` if we would not run it exactly."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}: {dtype!r}")
    _refuse_other_mixers(name, AutoConfig.from_pretrained(folder))  # before gigabytes are read
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer_config.json").exists() else None
    return adopt(model, name, fingerprint=fingerprint(folder), tokenizer=tokenizer, device=device)


def adopt(
    model: PreTrainedModel, name: str, *, fingerprint: str, tokenizer: Tokenizer | None = None, device: str = "cpu"
) -> BaseModel:
    """A base model out of one of the library, which must have been made with `attn_implementation="eager"`. It is
    taken over: its linears are wrapped, its weights frozen."""
    _refuse_other_mixers(name, model.config)
    model.eval().requires_grad_(False)
    model.to(device)  # pyright: ignore[reportArgumentType]  a decorator of the library hides the signature
    config = model.config.get_text_config()
    probe = _probe_tokens(config.vocab_size, config.max_position_embeddings)
    with torch.no_grad():
        expected = [model(torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in probe]
    model.set_attn_implementation(NAME)
    trunk, head, routing = model.base_model, model.get_output_embeddings(), Routing()
    if head is None:
        raise InvalidRequest(f"base model {name!r} has no output head, so it is no causal language model")
    targets = wrap(trunk, f"{model.base_model_prefix}.", routing)
    targets.append(Target(HEAD, "unembed", head.weight.shape[1], head.weight.shape[0]))
    base = BaseModel(
        limits=ModelLimits(name, head.weight.shape[0], config.max_position_embeddings),
        fingerprint=fingerprint,
        targets=targets,
        untrainable=untrainable_parts(trunk),
        device=torch.device(device),
        num_layers=config.num_hidden_layers,
        stop_tokens=_stop_tokens(model, tokenizer),
        tokenizer=tokenizer,
        trunk=trunk,
        weight_VE=head.weight,
        bias_V=getattr(head, "bias", None),
        routing=routing,
    )
    _check_against_library(base, probe, expected)
    return base


def fingerprint(folder: Path) -> str:
    """Tells models apart by content, cheaply: the config, and the size and first megabyte of every weight file."""
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(2**20))
    return digest.hexdigest()[:16]


def _stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ends of text by the model's generation config, and by its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    tokens = [configured] if isinstance(configured, int) else list(configured or [])
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(tokens if own is None else [*tokens, own])


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
    """A plan that counts the layers that attend through it."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.layers: list[int] = []

    def attend(self, layer: int, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, how: How) -> Tensor:
        self.layers.append(layer)
        return self.plan.attend(layer, query_HND, key_GND, value_GND, how)


@torch.no_grad()
def _check_against_library(base: BaseModel, probe: list[list[int]], expected: list[Tensor]) -> None:
    packed = pack(probe)
    plan = _Counting(PackedAttention(packed, base.device))
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
        ours_TV = base.head(None).logits(hidden_NE[packed.rows_of(index)])
        error = (ours_TV - logits_TV.float()).abs().max().item()
        allowed = _tolerance(logits_TV)
        if not error <= allowed:
            raise InvalidRequest(
                f"base model {name!r}: our logits differ from the library's by {error:.3g} (allowed {allowed:.3g}); it "
                "has something our attention or head does not honour, so this model is refused"
            )


def _tolerance(logits_TV: Tensor) -> float:
    """Rounding that many layers may gather: relative to the spread of the logits, by the precision of the dtype."""
    spread = logits_TV.float().std().item() + 1e-6
    return spread * {torch.float64: 1e-4, torch.float32: 2e-3, torch.bfloat16: 0.3}[logits_TV.dtype]

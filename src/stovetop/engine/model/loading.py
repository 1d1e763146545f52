# pyright: basic
"""A base model from its files, or out of one of the library. Of files: every tensor is there, is used, has its shape
and is finite, or the model is refused by its name before anything is computed. What is then checked by computing is in
`proving.py`.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

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
    attention_calls,
    check_full_model,
    context_length,
    flat_form,
    probe_tokens,
    prove,
    refuse_not_finite,
    refuse_other_mixers,
    refuse_quantised,
)
from stovetop.engine.model.targets import untrainable_parts, wrap
from stovetop.errors import InvalidRequest, StovetopError, listed
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer
from stovetop.input_checks import ModelLimits
from stovetop.target_names import HEAD
from stovetop.tokenizing import Tokenizer

log = logging.getLogger(__name__)

NUM_PIECES, PIECE_BYTES = 256, 4096  # of a weight file, for its fingerprint
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

T = TypeVar("T")


def load_model(
    place: Path,
    name: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    deterministic: bool | None = None,
    pack_kernel: PackKernel | None = None,
) -> BaseModel:
    """The model in the folder `place` (config.json, weights in safetensors or .bin files, tokenizer), or in a GGUF
    file; refused by `name` if its files are not whole, or if we would not run it exactly."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}: {dtype!r}")
    mark = fingerprint(place, name)
    config = _config(place, name)
    refuse_other_mixers(name, config)  # before gigabytes are read
    model = _model(place, name, DTYPES[dtype])
    tokenizer = _tokenizer(place, name, model.config)
    base = adopt(
        model,
        name,
        fingerprint=mark,
        tokenizer=tokenizer,
        device=device,
        deterministic=deterministic,
        pack_kernel=pack_kernel,
    )
    return replace(base, tokenizer_place=None if tokenizer is None else str(place))


def fingerprint(place: Path, name: str | None = None) -> str:
    """Tells models apart by content, cheaply: the config, and of every weight file its size and pieces from all over it
    (a model that was trained further may differ in some layers only). Weight files that are damaged or absent are
    refused."""
    digest = hashlib.sha256()
    if place.is_dir():
        config = _read_object(place / "config.json", name or str(place))
        for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
            config.pop(key, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
    for path in _weight_files(place, name or str(place)):
        size = path.stat().st_size
        digest.update(f"{path.name if place.is_dir() else 'gguf'} {size}".encode())
        with path.open("rb") as file:
            for piece in range(NUM_PIECES):
                file.seek(size * piece // NUM_PIECES)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


def _weight_files(place: Path, name: str) -> list[Path]:
    """Every file that transformers might take weights from."""
    if not place.is_dir():
        return [place]
    own = _read_object(place / "config.json", name).get("transformers_weights")  # a file that the config names
    folder = place if own is None else (place / str(own)).parent
    found = sorted({*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")})
    if not found:
        raise InvalidRequest(
            f"base model {name!r} has no weights (*.safetensors or pytorch_model*.bin); fetch it again: {folder}"
        )
    for path in found:
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise InvalidRequest(
                    f"base model {name!r}: {path.name} is damaged or cut off ({error}); fetch it again: {place}"
                ) from error
    return found


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"base model {name!r}: {path.name} is not readable JSON ({error}): {path.parent}"
        ) from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"base model {name!r}: {path.name} must hold an object: {path.parent}")
    return content


def _config(place: Path, name: str) -> PreTrainedConfig:
    if is_gguf(place):
        return _by_library(name, place, "its header", lambda: load_gguf_config(place))
    if (place / "adapter_config.json").exists():  # transformers would load the base that this names, and the adapter
        raise InvalidRequest(
            f"base model {name!r} has an adapter_config.json beside its config.json. To start from that adapter pass "
            f"its folder as a saved state; to use the base alone, move the adapter's files elsewhere: {place}"
        )
    return _by_library(name, place, "config.json", lambda: AutoConfig.from_pretrained(place))


def _model(place: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    """With all its tensors: the library would fill those that are missing at random, and only log it."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported below
    }

    def read() -> tuple[PreTrainedModel, dict[str, Any]]:
        with SHARED.changed():
            loaded: Any = (load_gguf_model if is_gguf(place) else AutoModelForCausalLM.from_pretrained)(
                place, **options
            )
        return loaded  # a pair, by output_loading_info

    files = ", ".join(path.name for path in _weight_files(place, name)[:3])
    model, info = _by_library(name, place, files, read)
    shapes = {key: f"{key} is {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in info["mismatched_keys"]}
    problems = {
        "lacks": sorted(set(info["missing_keys"]) - set(shapes)),
        "has tensors that its config gives no place": sorted(info["unexpected_keys"]),
        "has tensors of another shape than its config says": sorted(shapes.values()),
        "could not be read": sorted(map(str, info["error_msgs"])),
    }
    told = "; ".join(f"{problem}: {listed(tensors)}" for problem, tensors in problems.items() if tensors)
    if told:
        raise InvalidRequest(f"base model {name!r} {told}. Fetch it again, or mend its config.json: {place}")
    return model


def _tokenizer(place: Path, name: str, config: PreTrainedConfig) -> Tokenizer | None:
    """None for a folder without one."""
    if is_gguf(place):
        return cast(Tokenizer, _by_library(name, place, "its tokenizer", lambda: load_gguf_tokenizer(place, config)))
    if not (place / "tokenizer_config.json").exists():
        return None
    read: Callable[[], Any] = lambda: AutoTokenizer.from_pretrained(place)  # noqa: E731
    return _by_library(name, place, "its tokenizer's files", read)


def _by_library(name: str, place: Path, what: str, read: Callable[[], T]) -> T:
    """What `read` returns. The library raises what its parts raise, without the name of the model."""
    try:
        return read()
    except StovetopError:
        raise
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        raise InvalidRequest(
            f"base model {name!r}: transformers cannot read {what} ({type(error).__name__}: {said}); fetch the model "
            f"again, or choose one that this version of transformers knows: {place}"
        ) from error


# ---- a model of the library, taken over ------------------------------------------------------------------------------


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
    takes it where it holds, False leaves it.
    """
    _refuse_at_sight(name, model)
    config = model.config.get_text_config()
    model.eval().requires_grad_(False)
    model.to(device)  # pyright: ignore[reportArgumentType]  a decorator of the library hides the signature
    _report_context(name, config)
    obstacle = "not asked for"
    if deterministic is not False:
        obstacle = exactness.obstacle(model, config, torch.device(device), model.dtype)

    def wrap(model: PreTrainedModel, arithmetic: Arithmetic) -> BaseModel:
        return replace(_wrapped(model, name, fingerprint, tokenizer, arithmetic), pack_kernel=pack_kernel)

    proof = prove(name, model, wrap, row_exact=obstacle is None)
    if obstacle is None and not proof.is_exact:
        obstacle = "the row-exact arithmetic has no form of its attention"
    probe = probe_tokens(config.vocab_size, context_length(config))
    with torch.no_grad():
        expected = [model(torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in probe]
    model.set_attn_implementation(NAME)
    if obstacle is None:
        exactness.prepare(model, context_length(config))
    base = _checked(wrap(model, Fast()), probe, expected, try_flat=proof.is_flat)
    if obstacle is None:
        exact, obstacle = _row_exact(base)
        if exact is not None:
            return exact
    if deterministic:
        raise InvalidRequest(f"base model {name!r} cannot run deterministically: {obstacle}; pass deterministic=False")
    if deterministic is None:
        log.info("base model %r runs without bit-equal sampler and trainer: %s", name, obstacle)
    return base.on(Fast())


def _refuse_at_sight(name: str, model: PreTrainedModel) -> None:
    refuse_other_mixers(name, model.config)
    if model.get_output_embeddings() is None:
        raise InvalidRequest(f"base model {name!r} has no output head, so it is no causal language model")
    refuse_quantised(name, model)
    refuse_not_finite(name, model)


def _checked(base: BaseModel, probe: list[list[int]], expected: list[Tensor], *, try_flat: bool) -> BaseModel:
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
            check_full_model(flat, probe, expected)
        except InvalidRequest as error:
            log.warning("base model %r runs with the library's layers: with ours, %s", base.limits.name, error)
        else:
            return flat
    check_full_model(base, probe, expected)
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

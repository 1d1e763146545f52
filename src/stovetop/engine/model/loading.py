# pyright: basic
"""A base model from its files: every tensor is there, is used and has its shape, or the model is refused by its name
before anything is computed. What becomes of the library's model then is in `adopting.py`.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from stovetop.engine.kernels.attention_plans import PackKernel
from stovetop.engine.machine import SHARED
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.refusals import refuse_other_mixers
from stovetop.errors import InvalidRequest, StovetopError, listed
from stovetop.gguf_files import is_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer
from stovetop.tokenizing import Tokenizer

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

"""Learning rates and parameter counts of known models, by published formulae. Nothing here guesses: a family without a
formula is refused, and the user gives a rate. Weights are never read, only the headers of their files, which may lie on
another machine.
"""

import json
import logging
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.model_store import find_model, known_models

log = logging.getLogger(__name__)

# Width of the residual stream, for models whose config need not be at hand. `-Base`, `-Instruct`, `-Thinking` and dates
# do not change it.
HIDDEN_SIZES = {
    "meta-llama/Llama-3.2-1B": 2048,
    "meta-llama/Llama-3.2-3B": 3072,
    "meta-llama/Meta-Llama-3-8B": 4096,
    "meta-llama/Meta-Llama-3-70B": 8192,
    "meta-llama/Llama-3.1-8B": 4096,
    "meta-llama/Llama-3.1-70B": 8192,
    "meta-llama/Llama-3.1-405B": 16384,
    "meta-llama/Llama-3.3-70B": 8192,
    "Qwen/Qwen3-0.6B": 1024,
    "Qwen/Qwen3-1.7B": 2048,
    "Qwen/Qwen3-4B": 2560,
    "Qwen/Qwen3-8B": 4096,
    "Qwen/Qwen3-14B": 5120,
    "Qwen/Qwen3-32B": 5120,
    "Qwen/Qwen3-30B-A3B": 2048,
    "Qwen/Qwen3-235B-A22B": 4096,
    "moonshotai/Kimi-K2": 7168,
}

# How fast the best rate falls with width, per family: (2000 / width) to this power.
_WIDTH_EXPONENTS = {"llama": 0.781, "qwen": 0.0775, "kimi-k2-thinking": 0.0775}

# Families whose names contain one of those, without a published rate of their own.
_WITHOUT_FORMULA = re.compile(r"qwen3\.\d|nemotron")

# Weights that no LoRA factors are attached to, by a component of their name: the router of a mixture of experts, the
# embedding, and the second halves of projections that are low-rank already.
_NOT_ADAPTED = {"gate", "embed_tokens", "q_b_proj", "kv_b_proj"}

Shape = tuple[int, ...]


class RemoteFiles(Protocol):
    """What is needed of a file system that is elsewhere. Those of fsspec have it: `huggingface_hub.HfFileSystem()` for
    the models of the hub."""

    def glob(self, path: str) -> list[str]:
        """The paths of the files that match."""
        ...

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """The bytes of one file from `start` up to `end`."""
        ...


# ---- learning rates --------------------------------------------------------------------------------------------------


def get_lr(model_name: str, is_lora: bool = True) -> float:
    """5e-5 · (10 if LoRA) · (2000 / hidden size)^k with k per family: the public Tinker cookbook's fit.

    get_lr("meta-llama/Llama-3.1-8B") == 2.856e-4, to four digits
    """
    own_name = model_name.rstrip("/").rpartition("/")[2].lower()
    exponents = [exponent for family, exponent in _WIDTH_EXPONENTS.items() if family in own_name]
    if not exponents or _WITHOUT_FORMULA.search(own_name):
        raise InvalidRequest(
            f"there is no published learning-rate formula for this family (there is for "
            f"{', '.join(_WIDTH_EXPONENTS)}); give a learning_rate, LoRA often works at 1e-4..5e-4: {model_name!r}"
        )
    lora = get_lora_lr_over_full_finetune_lr(model_name) if is_lora else 1.0
    return 5e-5 * lora * (2000 / get_hidden_size(model_name)) ** exponents[0]


GivenRate = float | Literal["auto"]  # in a config: a rate, or the one that `get_lr` derives from the model


def settled_rate(learning_rate: GivenRate, model_name: str) -> float:
    """The rate that a config gives. One that is derived is logged."""
    if learning_rate != "auto":
        return learning_rate
    derived = get_lr(model_name)
    log.info("learning_rate=auto is %.4g for %s", derived, model_name)
    return derived


def get_lora_lr_over_full_finetune_lr(model_name: str, lora_alpha: int = 32) -> float:
    """How many times higher the best LoRA rate is than that of full fine-tuning: 10 for every model, at alpha 32.
    The measurement was made at that alpha only, so another one is refused."""
    if lora_alpha != 32:
        raise InvalidRequest(f"the factor was measured at lora_alpha=32 only ({model_name}): {lora_alpha}")
    return 10.0


def get_full_finetune_lr_multiplier(model_name: str, files: RemoteFiles | None = None) -> float:
    """1 / √(number of parameters). The quotient of two models' multipliers carries a rate from one to the other."""
    return 1 / math.sqrt(get_full_finetune_param_count(model_name, files))


def get_lora_lr_multiplier(model_name: str, files: RemoteFiles | None = None) -> float:
    """The same for LoRA rates."""
    return get_full_finetune_lr_multiplier(model_name, files) * get_lora_lr_over_full_finetune_lr(model_name)


def get_hidden_size(model_name: str) -> int:
    """From the table, else from the model's config.json on this machine. Never from the network."""
    base_name = re.sub(r"(-Base|-Instruct|-Thinking|-\d{4})+$", "", model_name)
    if base_name in HIDDEN_SIZES:
        return HIDDEN_SIZES[base_name]
    folder = find_model(model_name)
    if folder is None:
        known = {*HIDDEN_SIZES, *known_models()}
        raise UnknownName("model", model_name, known, hint="Give a learning_rate, or the folder of the model")
    config = json.loads((folder / "config.json").read_text())
    text_config = config.get("text_config", config)  # models that see nest the part that reads
    if "hidden_size" not in text_config:
        raise InvalidRequest(f"config.json has no hidden_size; give a learning_rate: {folder}")
    return int(text_config["hidden_size"])


# ---- parameter counts ------------------------------------------------------------------------------------------------


def get_full_finetune_param_count(model_name: str, files: RemoteFiles | None = None) -> int:
    """Every number in the model's weight files. Of a model that is not on this machine, `files` has them: 8 bytes and
    the header of each file are read."""
    return sum(math.prod(shape) for shape in _weight_shapes(model_name, files).values())


def get_lora_param_count(
    model_name: str,
    lora_rank: int = 32,
    include_experts: bool = True,
    shared_expert_outer_loras: bool = True,
    files: RemoteFiles | None = None,
) -> int:
    """The sum of `get_lora_param_breakdown`."""
    counts = get_lora_param_breakdown(model_name, lora_rank, include_experts, shared_expert_outer_loras, files)
    return sum(counts.values())


def get_lora_param_breakdown(
    model_name: str,
    lora_rank: int = 32,
    include_experts: bool = True,
    shared_expert_outer_loras: bool = True,
    files: RemoteFiles | None = None,
) -> dict[str, int]:
    """rank · (out + in) for each matrix that LoRA is attached to, by the matrix's name.

    With shared outer factors, the experts of a layer share the factor on the side of the residual stream (the input of
    gate_proj and up_proj, the output of down_proj): it is counted with expert 0. Output heads that are tied to the
    embedding are in no file under a name of their own, and not counted. Of a model that is not on this machine, `files`
    has the weights, and only their headers are read.
    """
    counts: dict[str, int] = {}
    for name, shape in _weight_shapes(model_name, files).items():
        parts = name.split(".")
        is_expert = "experts" in parts
        if is_expert and include_experts and len(shape) > 2:
            raise InvalidRequest(
                f"the experts of {model_name} are fused into one tensor, which this count cannot take apart; "
                f"pass include_experts=False: {name} {shape}"
            )
        if len(shape) != 2 or not name.endswith(".weight") or _NOT_ADAPTED & set(parts):
            continue
        if is_expert and not include_experts:
            continue
        out_size, in_size = shape
        shares_outer = is_expert and shared_expert_outer_loras and parts[parts.index("experts") + 1] != "0"
        if shares_outer:
            counts[name] = lora_rank * (in_size if "down_proj" in parts else out_size)
        else:
            counts[name] = lora_rank * (out_size + in_size)
    return counts


def _weight_shapes(model_name: str, files: RemoteFiles | None) -> Mapping[str, Shape]:
    folder = find_model(model_name)
    if folder is not None:
        headers = [_read_header(str(file), _local_reader(file)) for file in sorted(folder.glob("*.safetensors"))]
    elif files is not None:
        paths = sorted(files.glob(f"{model_name.rstrip('/')}/*.safetensors"))
        headers = [_read_header(path, _remote_reader(files, path)) for path in paths]
    else:
        raise UnknownName(
            "model",
            model_name,
            known_models(),
            hint="Parameters are counted in files on this machine: pass a folder with config.json and *.safetensors. "
            "For a model of the hub, pass files=huggingface_hub.HfFileSystem()",
        )
    if not headers:
        raise InvalidRequest(f"there is no *.safetensors file to count parameters in: {folder or model_name}")
    return {name: shape for header in headers for name, shape in header.items()}


Read = Callable[[int, int], bytes]  # the bytes from one position up to another


def _local_reader(file: Path) -> Read:
    def read(start: int, end: int) -> bytes:
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    return read


def _remote_reader(files: RemoteFiles, path: str) -> Read:
    return lambda start, end: files.cat_file(path, start, end)


def _read_header(path: str, read: Read) -> dict[str, Shape]:
    """Names and shapes: eight bytes of length, then JSON. The tensors behind it are not read."""
    prefix = read(0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= 100_000_000:
        raise InvalidRequest(f"this is not a safetensors file, its header is {length} bytes long: {path}")
    header = json.loads(read(8, 8 + length))
    return {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}

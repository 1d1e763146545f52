# pyright: basic
"""An adapter as files: PEFT's format for the weights, the optimizer beside it, through the crash-safe folders of
`durable.py`. What is read back is what was written, to the bit.

    adapter_model.safetensors   float32 factors under PEFT's names
    adapter_config.json         what PEFT needs to load them
    optimizer.safetensors       AdamW's moments and step, in a saved state only
    manifest.json               digests, base model, LoRA config
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from stovetop.durable import LOCAL_DISK, Disk, read_folder, read_manifest, write_folder
from stovetop.engine.lora import HEAD, AdapterWeights
from stovetop.engine.optim import Moments
from stovetop.errors import CheckpointError
from stovetop.types import LoraConfig

PREFIX = "base_model.model."
FACTORS = {"A": "lora_A.weight", "B": "lora_B.weight"}


class SavedAdapter(NamedTuple):
    weights: AdapterWeights
    moments: Moments


def write_adapter(
    path: Path,
    weights: AdapterWeights,
    moments: Moments | None,
    meta: dict[str, Any],
    *,
    overwrite: bool,
    disk: Disk = LOCAL_DISK,
) -> None:
    """`moments` None writes weights alone, for sampling."""
    files = {
        "adapter_model.safetensors": save({_peft_name(name): _plain(t) for name, t in weights.tensors.items()}),
        "adapter_config.json": json.dumps(_peft_config(weights, meta["base_model"]), indent=1).encode(),
    }
    if moments is not None:
        tensors = {f"mean.{name}": _plain(t) for name, t in moments.mean.items()}
        tensors |= {f"square.{name}": _plain(t) for name, t in moments.square.items()}
        files["optimizer.safetensors"] = save({**tensors, "step": torch.tensor(moments.step)})
    whole = {**meta, "lora": asdict(weights.config), "with_optimizer": moments is not None}
    write_folder(path, files, whole, overwrite=overwrite, disk=disk)


def read_adapter(path: Path, *, with_optimizer: bool, device: torch.device) -> SavedAdapter:
    """Without the optimizer the moments are empty, as before a first step."""
    config = LoraConfig(**read_manifest(path)["lora"])
    files = read_folder(path)
    own_names = {_peft_name(f"{name}.{factor}"): f"{name}.{factor}" for name, factor in _names(files)}
    tensors = {own_names[name]: tensor.to(device) for name, tensor in load(files["adapter_model.safetensors"]).items()}
    weights = AdapterWeights(config, tensors)
    if not with_optimizer:
        return SavedAdapter(weights, Moments())
    if "optimizer.safetensors" not in files:
        raise CheckpointError(f"there is no optimizer beside these weights; use a path of save_state: {path}")
    optimizer = load(files["optimizer.safetensors"])
    step = int(optimizer.pop("step"))
    return SavedAdapter(
        weights, Moments(step, _under("mean.", optimizer, device), _under("square.", optimizer, device))
    )


def _names(files: dict[str, bytes]) -> list[tuple[str, str]]:
    """(target, factor) of every tensor in the adapter file."""
    found = []
    for peft_name in load(files["adapter_model.safetensors"]):
        for factor, ending in FACTORS.items():
            if peft_name.endswith(f".{ending}"):
                found.append((peft_name.removeprefix(PREFIX).removesuffix(f".{ending}"), factor))
    return found


def _under(prefix: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}


def _peft_name(name: str) -> str:
    """ "model.layers.0.self_attn.q_proj.A" -> "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"."""
    target, _, factor = name.rpartition(".")
    return f"{PREFIX}{target}.{FACTORS[factor]}"


def _peft_config(weights: AdapterWeights, base_model: str) -> dict[str, Any]:
    targets = sorted({name.rpartition(".")[0] for name in weights.tensors})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.config.rank,
        "lora_alpha": weights.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({target if target == HEAD else target.rpartition(".")[2] for target in targets}),
        "inference_mode": True,
    }


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()

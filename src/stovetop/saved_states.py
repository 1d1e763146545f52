# pyright: basic
"""What a saved adapter says of itself, read without loading it: our own manifest, or the config of a PEFT folder that
somebody else wrote. No torch. What does not fit is refused here by name; the tensors are read in `adapter_files.py`.

A PEFT adapter is taken over as it is: it may train some projections of a part and not others (q_proj and v_proj, say),
and goes on training just these. Files of ours carry a mark in the metadata of their tensors, so one that has lost its
manifest is a torn checkpoint and not a PEFT adapter.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stovetop.durable import MANIFEST, read_manifest
from stovetop.errors import CheckpointError, TornCheckpoint
from stovetop.target_names import FROZEN_HEAD, part_of, split_peft_name
from stovetop.types import LoraConfig

TENSORS, CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
MARK = {"format": "pt", "written_by": "stovetop"}  # the metadata of our tensor files; PEFT's have only the format

_UNDERSTOOD = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "target_modules"}
_WITHOUT_EFFECT = {  # on what a finished adapter computes; which linears it has, its tensors tell
    "auto_mapping",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",  # off when sampling; we train without
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


@dataclass(frozen=True, slots=True)
class SavedState:
    """Enough to make a client for it."""

    base_model: str
    fingerprint: str | None  # of the base model; None where the folder does not say
    lora: LoraConfig
    with_optimizer: bool
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])  # that saved it, as the manifest describes it
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


def describe(path: Path) -> SavedState:
    """The state at `path`, which is a folder of ours or of PEFT."""
    if is_foreign(path):
        return _describe_peft(path)
    manifest = read_manifest(path)
    try:
        lora = LoraConfig(**manifest["lora"])
        return SavedState(
            manifest["base_model"],
            manifest["fingerprint"],
            lora,
            manifest["with_optimizer"],
            manifest.get("run", {}),
            manifest.get("user_metadata", {}),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"this folder holds no saved adapter (its {MANIFEST} describes something else); pass a path that "
            f"save_state or save_weights_for_sampler returned: {path}"
        ) from error


def base_model_of(path: Path, described: Callable[[Path], SavedState] = describe) -> str:
    """The name of the base model that the state at `path` was trained on."""
    name = described(path).base_model
    if not name:
        raise CheckpointError(f"{CONFIG} of the adapter names no base model; pass base_model=...: {path}")
    return name


def is_foreign(path: Path) -> bool:
    """A PEFT folder. One without a manifest that holds our optimizer, or tensors with our mark, has lost it and is
    torn."""
    if (path / MANIFEST).exists() or (path / OPTIMIZER).exists() or not (path / CONFIG).is_file():
        return False
    return not (path / TENSORS).is_file() or _metadata(path) != MARK


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path / TENSORS, framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise TornCheckpoint(f"{TENSORS} of the adapter is damaged ({error}); use an earlier one: {path}") from error


def _describe_peft(path: Path) -> SavedState:
    config = _checked_config(path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(
            f"r must be a positive integer and lora_alpha a number in {CONFIG}, not {rank!r} and {alpha!r}: {path}"
        )
    targets = _targets(path, rank)
    parts = {part_of(target) for target in targets}
    lora = LoraConfig(
        rank=rank,
        alpha=alpha * (rank**0.5 if config.get("use_rslora") else 1.0),  # which divides by sqrt(rank)
        train_attn="attn" in parts,
        train_mlp="mlp" in parts,
        train_unembed="unembed" in parts,
    )
    return SavedState(config.get("base_model_name_or_path") or "", None, lora, with_optimizer=False)


def _checked_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_bytes())
    except ValueError as error:
        raise TornCheckpoint(f"{CONFIG} of the adapter is not JSON: {path}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG} of the adapter must hold an object, not {type(config).__name__}: {path}")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"only adapters of peft_type LORA can be taken over, not {config.get('peft_type')!r}: {path}"
        )
    for name, value in config.items():
        if name in _UNDERSTOOD | _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        if value or name in _NEUTRAL:
            raise CheckpointError(
                f"this PEFT adapter uses {name}={value!r}, which we do not; merge it into its base model with PEFT "
                f"(merge_and_unload) and start from that: {path}"
            )
    return config


def _targets(path: Path, rank: int) -> set[str]:
    """The linears that the file has factors for, all of them of this rank."""
    if (path / "adapter_model.bin").is_file() and not (path / TENSORS).is_file():
        raise CheckpointError(f"the adapter has no {TENSORS}; save it with safe_serialization=True: {path}")
    if not (path / TENSORS).is_file():
        raise TornCheckpoint(f"the adapter has lost its {TENSORS}; use another copy: {path}")
    found: dict[str, set[str]] = {}
    try:
        with safe_open(path / TENSORS, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  a file is no mapping
                if name == FROZEN_HEAD:  # the base model's own, compared with it when the adapter is loaded
                    continue
                split = split_peft_name(name)
                if split is None:
                    raise CheckpointError(f"the adapter holds a tensor that is no factor of a linear, {name!r}: {path}")
                target, factor = split
                found.setdefault(target, set()).add(factor)
                shape = file.get_slice(name).get_shape()
                if len(shape) != 2 or shape[0 if factor == "A" else 1] != rank:
                    raise CheckpointError(f"r is {rank} in {CONFIG}, but {name} is {shape}: {path}")
    except SafetensorError as error:
        raise TornCheckpoint(f"{TENSORS} of the adapter is damaged ({error}): {path}") from error
    halves = sorted(target for target, factors in found.items() if len(factors) < 2)
    if halves or not found:
        raise TornCheckpoint(f"the adapter has one factor of two for {halves or 'no linear at all'}: {path}")
    return set(found)

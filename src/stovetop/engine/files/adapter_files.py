# pyright: basic
"""An adapter as files: PEFT's format for the weights, the optimizer beside it, through the crash-safe folders of
`durable.py`. What is read back is what was written, to the bit.

    adapter_model.safetensors   float32 factors under PEFT's names
    adapter_config.json         what PEFT needs to load them
    optimizer.safetensors       AdamW's moments and step, in a saved state only
    manifest.json               digests, base model, LoRA config

A folder that PEFT wrote has the first two, and is read as well.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from stovetop.durable import LOCAL_DISK, Disk, read_folder, write_folder
from stovetop.engine.lora.weights import AdapterWeights, Moments, Target
from stovetop.engine.ops import Snapshot
from stovetop.errors import CheckpointError, listed
from stovetop.saved_states import CONFIG, MARK, OPTIMIZER, TENSORS, describe, is_foreign
from stovetop.target_names import FROZEN_HEAD, peft_name, split_peft_name

PIECE_BYTES = 2**23  # at least, of a tensor file at a time
_DTYPES = {torch.float32: "F32", torch.int64: "I64"}


class SavedAdapter(NamedTuple):
    weights: AdapterWeights
    moments: Moments
    frozen_head_VE: Tensor | None = None  # of the base model that PEFT trained it on, where it has saved that


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
    files: dict[str, bytes | Iterator[bytes]] = {
        TENSORS: _saved({_peft_name(name): tensor for name, tensor in weights.tensors.items()}),
        CONFIG: json.dumps(_peft_config(weights, meta["base_model"]), indent=1).encode(),
    }
    if moments is not None:
        tensors = {f"mean.{name}": tensor for name, tensor in moments.mean.items()}
        tensors |= {f"square.{name}": tensor for name, tensor in moments.square.items()}
        files[OPTIMIZER] = _saved({**tensors, "step": torch.tensor(moments.step)})
    whole = {**meta, "lora": asdict(weights.config), "with_optimizer": moments is not None}
    write_folder(path, files, whole, overwrite=overwrite, disk=disk)


def snapshot(
    path: Path,
    weights: AdapterWeights,
    moments: Moments | None,
    meta: dict[str, Any],
    *,
    overwrite: bool,
    disk: Disk = LOCAL_DISK,
) -> Snapshot:
    """The same, to be written later. `moments` are left alone by the caller; weights are never changed, but where their
    tensors lie may be."""
    weights = replace(weights, tensors=dict(weights.tensors))
    return Snapshot(partial(write_adapter, path, weights, moments, meta, overwrite=overwrite, disk=disk))


def _saved(tensors: dict[str, Tensor]) -> Iterator[bytes]:
    """A safetensors file in pieces: the length of the header, the header, and the tensors, by dtype and name. Equal
    tensors give equal bytes. The library's own `save` holds the interpreter's lock for the whole file, so that no other
    thread runs meanwhile, and writes the metadata in an order that changes from call to call."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": MARK}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    piece, size = [len(text).to_bytes(8, "little"), text], 0
    for name in names:
        piece.append(_plain(tensors[name]).numpy().tobytes())
        size += len(piece[-1])
        if size >= PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    yield b"".join(piece)


def read_adapter(path: Path, *, with_optimizer: bool, device: torch.device) -> SavedAdapter:
    """Without the optimizer the moments are empty, as before a first step. Numbers that are not finite are refused."""
    lora = describe(path).lora
    files = {TENSORS: (path / TENSORS).read_bytes()} if is_foreign(path) else read_folder(path)
    found = load(files[TENSORS])
    frozen_head_VE = found.pop(FROZEN_HEAD, None)
    tensors = {_own_name(name): tensor.to(device, torch.float32) for name, tensor in found.items()}
    _check_finite(tensors, TENSORS, path)
    weights = AdapterWeights(lora, tensors)
    if not with_optimizer:
        return SavedAdapter(weights, Moments(), frozen_head_VE)
    if OPTIMIZER not in files:
        raise CheckpointError(f"there is no optimizer beside these weights; use a path of save_state: {path}")
    optimizer = load(files[OPTIMIZER])
    step = int(optimizer.pop("step"))
    _check_finite(optimizer, OPTIMIZER, path)
    moments = Moments(step, _under("mean.", optimizer, device), _under("square.", optimizer, device))
    return SavedAdapter(weights, moments)


def _check_finite(tensors: dict[str, Tensor], file: str, path: Path) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    if bad:
        raise CheckpointError(
            f"{file} holds NaN or infinity in {listed(bad)}: the adapter diverged before it was saved, or the file was "
            f"changed since; use an earlier one: {path}"
        )


def check_fits(saved: SavedAdapter, targets: list[Target], head_VE: Tensor, path: Path) -> None:
    """Every factor has its linear in this base model, with its size; and a head that PEFT has saved is the model's."""
    rank = saved.weights.config.rank
    sizes = {f"{t.name}.A": (rank, t.num_inputs) for t in targets}
    sizes |= {f"{t.name}.B": (t.num_outputs, rank) for t in targets}
    for name, tensor in sorted(saved.weights.tensors.items()):
        if name not in sizes:
            raise CheckpointError(
                f"the base model has no linear {name.rpartition('.')[0]!r} that an adapter may train: {path}"
            )
        if tuple(tensor.shape) != sizes[name]:
            raise CheckpointError(f"{name} is {tuple(tensor.shape)}, the base model needs {sizes[name]}: {path}")
    check_head(saved.frozen_head_VE, head_VE, path)


def check_head(saved_VE: Tensor | None, head_VE: Tensor, path: Path) -> None:
    """A head that PEFT has saved beside an adapter is the base model's, as far as their two dtypes tell."""
    if saved_VE is None:
        return
    saved_VE = saved_VE.to(head_VE.device)
    same = saved_VE.shape == head_VE.shape and (
        torch.equal(saved_VE.to(head_VE.dtype), head_VE) or torch.equal(head_VE.to(saved_VE.dtype), saved_VE)
    )
    if not same:
        raise CheckpointError(
            f"{FROZEN_HEAD}, which PEFT saved beside the adapter, is not the base model's head: it was resized, "
            f"trained, or belongs to another model. Merge the adapter into its base with PEFT and start from that: "
            f"{path}"
        )


def _under(prefix: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """In memory of their own: the optimizer works on them in place."""
    return {
        name.removeprefix(prefix): t.to(device, copy=True) for name, t in tensors.items() if name.startswith(prefix)
    }


def _peft_name(name: str) -> str:
    target, _, factor = name.rpartition(".")
    return peft_name(target, factor)


def _own_name(name: str) -> str:
    split = split_peft_name(name)
    assert split is not None, "a file of ours was written with such names, another's has been checked"
    return ".".join(split)


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
        "target_modules": targets,  # full names: a bare "q_proj" would be adapted in a vision tower too
        "inference_mode": True,
    }


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()

# pyright: basic
"""An adapter merged into its base model: W + (alpha/rank)·B·A for every linear that it trains, as a model folder that
transformers loads. The base is read and written one file at a time, so memory holds the largest file, not the model.

A head that shares its weights with the input embedding cannot be changed alone: such a model is untied, that is, the
merged head is stored beside the embedding and the config says so.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stovetop.durable import LOCAL_DISK, new_folder
from stovetop.engine.lora.weights import AdapterWeights, factors_of
from stovetop.errors import CheckpointError, InvalidRequest, listed
from stovetop.target_names import HEAD

INDEX = "model.safetensors.index.json"
LEFT_BEHIND = {"manifest.json", INDEX}  # about the base's own files
STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was written, and what rounding to the stored dtype has cost."""

    folder: Path
    num_merged: int  # linears
    dtype: str  # that the merged weights are stored in
    max_error: float  # largest difference of a stored weight from the exact sum
    lost_share: float  # norm of all these differences, relative to the norm of what the adapter adds
    untied_bytes: int  # what untying the head has added; 0 where nothing was untied


@dataclass(slots=True)
class _Rounding:
    """Sums over all merged weights."""

    max_error: float = 0.0
    error_squares: float = 0.0
    delta_squares: float = 0.0

    def add(self, exact_OI: Tensor, stored_OI: Tensor, delta_OI: Tensor) -> None:
        error_OI = stored_OI.double() - exact_OI
        self.max_error = max(self.max_error, error_OI.abs().max().item())
        self.error_squares += error_OI.square().sum().item()
        self.delta_squares += delta_OI.square().sum().item()


@torch.inference_mode()
def write_merged(base: Path, weights: AdapterWeights, folder: Path, *, dtype: str | None = None) -> MergeReport:
    """`folder` appears whole, or not at all. `dtype` None keeps what the base stores."""
    if dtype is not None and dtype not in STORED_DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(STORED_DTYPES)}: {dtype!r}")
    if folder.exists():
        raise InvalidRequest(f"there is something at this path already; choose another: {folder}")
    plan = _Plan.of(base, weights)
    rounding = _Rounding()
    with new_folder(folder) as fresh:
        stored = [plan.write(file, fresh, dtype, rounding) for file in plan.files]
        _write_rest(base, fresh, plan, stored)
        for path in fresh.iterdir():
            LOCAL_DISK.sync(path)
    lost = math.sqrt(rounding.error_squares / rounding.delta_squares) if rounding.delta_squares else 0.0
    untied_bytes = sum(part.untied_bytes for part in stored)
    names = sorted({part.dtype for part in stored if part.dtype})
    return MergeReport(folder, len(plan.targets), ", ".join(names), rounding.max_error, lost, untied_bytes)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One file that was written."""

    file: str
    tensors: list[str]
    num_bytes: int
    untied_bytes: int
    dtype: str  # of its merged weights; empty where it has none


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which weight of the base takes which factors: known, or refused, before anything is written."""

    weights: AdapterWeights
    files: list[Path]
    targets: dict[str, str]  # name of a weight -> target that is added to it
    untied_from: str | None  # the embedding that the head is tied to, where the adapter trains the head

    @classmethod
    def of(cls, base: Path, weights: AdapterWeights) -> "_Plan":
        files = _weight_files(base)
        names = {name for file in files for name in _names(file)}
        trained = sorted({name.rpartition(".")[0] for name in weights.tensors})
        targets = {f"{target}.weight": target for target in trained}
        untied_from = None
        if f"{HEAD}.weight" in targets and f"{HEAD}.weight" not in names:
            untied_from = _embedding(names, base)
        missing = sorted(targets.keys() - names - ({f"{HEAD}.weight"} if untied_from else set()))
        if missing:
            raise CheckpointError(
                f"these weights, which the adapter changes, are not in the base model's *.safetensors under their own "
                f"names, so it cannot be merged: {listed(missing)} ({base})"
            )
        if f"{HEAD}.weight" in targets and untied_from is None and _is_the_embedding_too(files, base):
            raise CheckpointError(
                f"the base model stores its head in place of the embedding that it is tied to, so the adapter's change "
                f"of the head would change the embedding as well. Load it with transformers, save it again and merge "
                f"into that: {base}"
            )
        return cls(weights, files, targets, untied_from)

    def write(self, file: Path, folder: Path, dtype: str | None, rounding: _Rounding) -> _Stored:
        tensors: dict[str, Tensor] = {}
        untied_bytes, merged_dtype = 0, ""
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            for name in opened.keys():  # noqa: SIM118  a file is no mapping
                tensor = opened.get_tensor(name)
                stored = STORED_DTYPES[dtype] if dtype and tensor.is_floating_point() else tensor.dtype
                if name == self.untied_from:
                    tensors[f"{HEAD}.weight"] = self._merged(tensor, HEAD, stored, rounding)
                    untied_bytes = tensors[f"{HEAD}.weight"].nbytes
                target = self.targets.get(name)
                tensors[name] = self._merged(tensor, target, stored, rounding) if target else tensor.to(stored)
                if target or name == self.untied_from:
                    merged_dtype = str(stored).removeprefix("torch.")
        save_file(tensors, folder / file.name, metadata or {"format": "pt"})
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return _Stored(file.name, list(tensors), num_bytes, untied_bytes, merged_dtype)

    def _merged(self, weight_OI: Tensor, target: str, stored: torch.dtype, rounding: _Rounding) -> Tensor:
        factors = factors_of(self.weights, target)
        assert factors is not None, "a target comes from the adapter"
        a_RI, b_OR = factors
        if (b_OR.shape[0], a_RI.shape[1]) != tuple(weight_OI.shape):
            raise CheckpointError(f"{target} is {tuple(weight_OI.shape)} in the base, not as the adapter was trained")
        delta_OI = (b_OR.cpu().double() @ a_RI.cpu().double()) * self.weights.scale
        exact_OI = weight_OI.double() + delta_OI
        merged_OI = exact_OI.to(stored)
        rounding.add(exact_OI, merged_OI, delta_OI)
        return merged_OI


def _weight_files(base: Path) -> list[Path]:
    """Those that transformers reads. Beside them there may be copies under other names, or of an earlier time."""
    whole, index = base / "model.safetensors", base / INDEX
    if whole.exists():
        return [whole]
    if index.exists():
        return sorted({base / file for file in json.loads(index.read_text())["weight_map"].values()})
    return sorted(base.glob("*.safetensors"))


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _embedding(names: set[str], base: Path) -> str | None:
    """The weight that a model which ties them has for its head too; None for one that does not."""
    config = json.loads((base / "config.json").read_text())
    found = [name for name in names if name.endswith("embed_tokens.weight")]
    return found[0] if config.get("tie_word_embeddings", True) and len(found) == 1 else None


def _is_the_embedding_too(files: list[Path], base: Path) -> bool:
    """Whether a head that is stored is tied to an embedding that is not, for there is no other matrix of its shape."""
    if not json.loads((base / "config.json").read_text()).get("tie_word_embeddings", True):
        return False
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return list(shapes.values()).count(shapes[f"{HEAD}.weight"]) == 1


def stored_head(base: Path) -> Tensor | None:
    """The head's weight in the base's files, or that of the embedding which it is tied to; None where neither is."""
    names = {name: file for file in _weight_files(base) for name in _names(file)}
    name = f"{HEAD}.weight" if f"{HEAD}.weight" in names else _embedding(set(names), base)
    if name is None:
        return None
    with safe_open(names[name], framework="pt") as opened:
        return opened.get_tensor(name)


def _write_rest(base: Path, folder: Path, plan: _Plan, stored: list[_Stored]) -> None:
    """Tokenizer and config as they are, but for the tie; an index where there are several files."""
    for path in base.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in LEFT_BEHIND:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((base / "config.json").read_text())
    if f"{HEAD}.weight" in plan.targets:  # some programs would take the embedding, whatever is stored beside it
        config["tie_word_embeddings"] = False
    dtypes = sorted({part.dtype for part in stored if part.dtype})
    if len(dtypes) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = dtypes[0]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if len(stored) > 1:
        places = {name: part.file for part in stored for name in part.tensors}
        total = {"total_size": sum(part.num_bytes for part in stored)}
        (folder / INDEX).write_text(json.dumps({"metadata": total, "weight_map": places}, indent=2))

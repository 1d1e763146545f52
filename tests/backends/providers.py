"""The backends that must pass the conformance suite. A new one is added to this table, and to nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import tiny
from stovetop.backends import local, recording
from stovetop.client import ServiceClient
from stovetop.durable import Disk


@dataclass(frozen=True, slots=True)
class Provider:
    """How to open a backend, and what the suite must know of its models."""

    open: Callable[..., ServiceClient]  # saving under a path, through a disk, with more options that all have
    base_model: str
    other_model: str  # of the same shape, with other weights
    learning_rate: float  # at which some dozens of steps teach it a short sequence
    tolerance: float  # of a logprob that two ways of computing give; 0 where they are exact


def open_recording(storage: Path, disk: Disk, **options: Any) -> ServiceClient:
    return recording.open_service(storage, disk=disk, models=["tiny", "other"], **options)


def recording_provider(folder: Path) -> Provider:
    return Provider(open_recording, "tiny", "other", learning_rate=0.5, tolerance=0.0)


def local_provider(folder: Path) -> Provider:
    """Two seeded random Llamas of vocabulary 512, loaded from disk."""
    models = [str(tiny.save_model(folder / name, tiny.llama(seed))) for seed, name in enumerate(("tiny", "other"))]

    def open_local(storage: Path, disk: Disk, **options: Any) -> ServiceClient:
        return local.open_service(storage=storage, disk=disk, threads=1, download=None, **options)

    return Provider(open_local, *models, learning_rate=0.02, tolerance=1e-4)


PROVIDERS: dict[str, Callable[[Path], Provider]] = {  # each gets a folder of its own, for models it has to make
    "recording": recording_provider,
    "local": local_provider,
}

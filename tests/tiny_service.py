"""The embedded backend over random transformers of two layers, for runs that must hold with attention too. What they
learn takes a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine import tiny
from stovetop.backends import local
from stovetop.client import ServiceClient


class TinyService(NamedTuple):
    service: ServiceClient
    model: str
    other: str  # a model with other weights


@contextmanager
def open_tiny(folder: Path) -> Iterator[TinyService]:
    names = [str(tiny.save_model(folder / name, tiny.llama(seed))) for seed, name in enumerate(("model", "other"))]
    with local.open_service(storage=folder / "states", threads=1, download=None) as service:
        yield TinyService(service, *names)

"""Some of the modes on the engine of this machine, where sampler and trainer agree to the bit, with a random model of
two layers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from engine import tiny
from kitchen.modes import Config, Mode, preference, reinforcement, supervised
from stovetop.backends import local
from stovetop.backends.recording import Fault
from stovetop.client import ServiceClient
from stovetop.kitchen.workflows import PREFERENCE, REINFORCEMENT, SUPERVISED


def open_local(config: Config, *, seed: int, faults: Sequence[Fault]) -> AbstractContextManager[ServiceClient]:
    assert not faults
    return local.open_service(storage=config.log_path, threads=1, download=None, deterministic=True)


def with_tiny_model(make: Callable[[Path], Config]) -> Callable[[Path], Config]:
    def config(folder: Path) -> Config:
        model = str(tiny.save_model(folder / "model"))
        return replace(make(folder), model_name=model, renderer_name="role_colon", learning_rate=0.01)

    return config


MODES = {
    "supervised": Mode(SUPERVISED, with_tiny_model(supervised), open_local),
    "preference": Mode(PREFERENCE, with_tiny_model(preference), open_local),
    "reinforcement": Mode(REINFORCEMENT, with_tiny_model(reinforcement(0)), open_local),
    "one step ahead": Mode(REINFORCEMENT, with_tiny_model(reinforcement(1)), open_local),
}

# pyright: basic
"""Custom losses that wait, and what is left of them."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from examples import datum
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.types import AdamParams, ModelInput

Loss = Callable[[Any, Any], Any]

PROMPT = ModelInput.from_ints([1, 2, 3])
STEP = AdamParams(learning_rate=0.01)


def total(data: Any, scored: Any) -> Any:
    return -sum(p.sum() for p in scored), {}


def another(provider: Provider, backend: ServiceClient, seed: int = 2) -> TrainingClient:
    return backend.create_lora_training_client(provider.base_model, rank=4, seed=seed).result()


def left_behind(client: Any) -> dict[str, Any]:
    """What an engine and its thread keep for custom losses, once all is done."""
    thread = vars(client)["_base"].thread
    engine = thread.engine
    deadline_s = time.monotonic() + 5
    while (thread.waiting or not engine.idle) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    owners = [engine, *(vars(engine)[name] for name in ("adapters", "_scheduler") if "_scheduler" in vars(engine))]
    kept = {name: value for owner in owners for name, value in vars(owner).items() if name in ("_scored", "_held")}
    kept |= {"waiting": thread.waiting, "expected": vars(vars(thread)["_expected"])["_all"]}
    return {name: value for name, value in kept.items() if value}


class Gate:
    """A loss that waits, and knows when it has begun."""

    def __init__(self, then: Loss = total) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self._then = then

    def __call__(self, data: Any, scored: Any) -> Any:
        self.begun.set()
        self.opened.wait(20)
        return self._then(data, scored)


@contextmanager
def held(client: TrainingClient, then: Loss = total) -> Generator[tuple[Gate, Any]]:
    """While a loss of this client runs. It returns at the end."""
    gate = Gate(then)
    future = client.forward_backward_custom([datum()], gate)
    assert gate.begun.wait(10)
    try:
        yield gate, future
    finally:
        gate.opened.set()

"""Callbacks on the futures of calls run in the thread that brings the results of all calls: they never wait there."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from custom_losses import STEP, another, held
from examples import datum
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK
from stovetop.errors import InvalidRequest, ServiceClosed

Queue = Callable[[Any], Any]

CALLS: dict[str, Queue] = {
    "forward_backward": lambda client: client.forward_backward([datum()], "cross_entropy"),  # in the engine's thread
    "save_state": lambda client: client.save_state("callback", overwrite=True),  # in the writer's
}


def in_callback(client: TrainingClient, queue: Queue, call: Callable[[], object]) -> object:
    """What `call` returned or raised in a callback on the future of what `queue` calls."""
    outcome: list[object] = []
    ended = threading.Event()

    def callback(_done: object) -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)
        ended.set()

    with held(client):  # so that it is not done before it has its callback
        queue(client).future().add_done_callback(callback)
    assert ended.wait(10), "the callback waits"
    return outcome[0]


@pytest.mark.parametrize("queue", CALLS.values(), ids=list(CALLS))
def test_a_callback_may_call_and_is_refused_to_wait(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, queue: Queue
) -> None:
    called: list[Any] = []

    def call_and_wait(wait: str) -> object:
        called.append(trainer.forward_backward([datum()], "cross_entropy"))
        return getattr(called[-1] if wait == "result" else called[-1].future(), wait)(timeout=8)

    for wait in ("result", "exception"):
        error = in_callback(trainer, queue, lambda wait=wait: call_and_wait(wait))
        assert isinstance(error, InvalidRequest)
        assert str(error).startswith(f"{wait}: a callback on a future runs in the thread that brings the results")
        assert called[-1].result(timeout=10).metrics
    trainer.optim_step(STEP).result(timeout=10)
    another(provider, backend).forward_backward([datum()], "cross_entropy").result(timeout=10)


@pytest.mark.parametrize("queue", CALLS.values(), ids=list(CALLS))
def test_a_service_closed_by_a_callback_ends(provider: Provider, tmp_path: Path, queue: Queue) -> None:
    service = provider.open(tmp_path, LOCAL_DISK)
    client = another(provider, service)
    assert not isinstance(in_callback(client, queue, service.close), BaseException)
    service.close()  # waits
    with pytest.raises(ServiceClosed):
        client.optim_step(STEP)

"""Callbacks on futures of calls run in threads of their own: whatever they do, only callbacks of their client wait."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from custom_losses import STEP, another, held
from examples import datum
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK
from stovetop.errors import ServiceClosed

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
def test_a_callback_may_call_and_wait(trainer: TrainingClient, queue: Queue) -> None:
    def call_and_wait() -> object:
        called = trainer.forward_backward([datum()], "cross_entropy")
        assert called.future().exception(timeout=8) is None
        return called.result().metrics

    assert isinstance(in_callback(trainer, queue, call_and_wait), dict)
    trainer.optim_step(STEP).result(timeout=10)


@pytest.mark.parametrize("queue", CALLS.values(), ids=list(CALLS))
def test_a_callback_that_takes_long_holds_only_callbacks_of_its_client(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, queue: Queue
) -> None:
    begun, goes_on, others = threading.Event(), threading.Event(), list[str]()
    other = another(provider, backend)

    def takes_long(_done: object) -> None:
        begun.set()
        goes_on.wait(20)
        others.append("long")

    with held(trainer), held(other):
        first, second = queue(trainer), queue(trainer)
        first.future().add_done_callback(takes_long)
        second.future().add_done_callback(lambda _: others.append("next"))
        its = other.forward([datum()], "cross_entropy")
        called_back = threading.Event()
        its.future().add_done_callback(lambda _: called_back.set())
    try:
        assert begun.wait(10)
        second.result(10)  # results come
        trainer.optim_step(STEP).result(10)
        assert called_back.wait(10)  # and callbacks of others
        assert others == []
    finally:
        goes_on.set()
    deadline_s = time.monotonic() + 10
    while len(others) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert others == ["long", "next"]


def test_callbacks_run_once_each_in_the_order_of_the_results_whatever_they_raise(trainer: TrainingClient) -> None:
    seen: list[int] = []
    all_there = threading.Event()

    def callback(number: int) -> Callable[[Any], None]:
        def call(done: Any) -> None:
            assert done.done()
            time.sleep(0.002 * (number % 3))
            seen.append(number)
            if len(seen) == 60:
                all_there.set()
            if number % 4 == 0:
                raise SystemExit(f"in callback {number}, which is logged")

        return call

    with held(trainer):
        futures = [trainer.forward([datum()], "cross_entropy") for _ in range(20)]
        for number, future in enumerate(futures):
            for again in range(3):
                future.future().add_done_callback(callback(3 * number + again))
    assert all_there.wait(20)
    assert seen == list(range(60))


def test_closing_a_service_waits_for_callbacks(provider: Provider, tmp_path: Path) -> None:
    service, ended = provider.open(tmp_path, LOCAL_DISK), list[str]()

    def takes_long(_done: object) -> None:
        time.sleep(0.2)
        ended.append("callback")

    client = another(provider, service)
    with held(client):
        client.forward([datum()], "cross_entropy").future().add_done_callback(takes_long)
    service.close()
    assert ended == ["callback"]


@pytest.mark.parametrize("queue", CALLS.values(), ids=list(CALLS))
def test_a_service_closed_by_a_callback_ends(provider: Provider, tmp_path: Path, queue: Queue) -> None:
    service = provider.open(tmp_path, LOCAL_DISK)
    client = another(provider, service)
    assert not isinstance(in_callback(client, queue, service.close), BaseException)
    service.close()  # waits
    with pytest.raises(ServiceClosed):
        client.optim_step(STEP)


def test_an_interrupted_program_ends_whatever_a_callback_does(tmp_path: Path) -> None:
    from processes import run_python

    program = f"""
import threading, time, stovetop as st
service = st.ServiceClient("recording", storage={str(tmp_path)!r})
client = service.create_lora_training_client("any/model").result()
begun = threading.Event()

def never_returns(_):
    begun.set()
    while True:
        time.sleep(0.01)

for _ in range(20):
    client.save_state("s", overwrite=True).future().add_done_callback(never_returns)
begun.wait(10)
raise SystemExit(3)
"""
    before_s = time.monotonic()
    assert run_python("-c", program).returncode == 3
    assert time.monotonic() - before_s < 10

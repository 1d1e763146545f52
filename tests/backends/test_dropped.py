"""Services that nobody closes: what is let go, and when. With the engine's thread goes the model."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from custom_losses import Gate, another
from examples import datum
from providers import Provider
from wrong_values import PROMPT

from engine import tiny
from stovetop.backends import local
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels
from stovetop.backends.recording.service import RecordingEngine
from stovetop.backends.saved_runs import RunLabels
from stovetop.durable import LOCAL_DISK
from stovetop.types import AdamParams, SamplingParams


class Watched:
    """A service over engines that are watched."""

    def __init__(self, folder: Path, latency_s: float = 0.0) -> None:
        self.folder, self.latency_s = folder, latency_s
        self.engines: weakref.WeakSet[RecordingEngine] = weakref.WeakSet()

    def engine(self, name: str) -> RecordingEngine:
        engine = RecordingEngine(name, 0, self.latency_s, [], LOCAL_DISK)
        self.engines.add(engine)
        return engine

    def service(self) -> InProcessServiceClient:
        return InProcessServiceClient.over(self.engine, self.folder, models=NamedModels(), labels=RunLabels())

    @property
    def names(self) -> list[str]:
        gc.collect()
        return sorted(engine.description.limits.name for engine in self.engines)


def threads_of_services() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("engine ", "watch "))}


def eventually(true: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 20
    while not true() and time.monotonic() < end_s:
        time.sleep(0.005)
    return true()


def test_a_service_that_is_dropped_lets_its_models_and_threads_go(tmp_path: Path) -> None:
    before = threads_of_services()
    watched = Watched(tmp_path)
    service = watched.service()
    clients = [service.create_lora_training_client(name).result() for name in ("a", "b")]
    assert watched.names == ["a", "b"]
    del service, clients
    assert eventually(lambda: watched.names == [])
    assert eventually(lambda: threads_of_services() <= before)


def test_a_client_keeps_its_own_model_and_no_other(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    client: Any = [watched.service()]
    client += [client[0].create_lora_training_client(name).result() for name in ("a", "b")]
    client = client[1]
    assert eventually(lambda: watched.names == ["a"])
    client.forward_backward([datum()], "cross_entropy")
    assert client.optim_step(AdamParams()).result().metrics["grad_norm"] > 0
    sampler = client.save_weights_and_get_sampling_client().result()
    del client
    assert watched.names == ["a"]
    del sampler
    assert eventually(lambda: watched.names == [])


@pytest.mark.slow
def test_a_notebook_cell_that_runs_three_times_holds_one_model(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    cell: dict[str, Any] = {"open_service": watched.service, "datum": datum}
    for _ in range(3):
        exec(
            "service = open_service()\n"
            "client = service.create_lora_training_client('a').result()\n"
            "loss = client.forward_backward([datum()], 'cross_entropy').result()\n",
            cell,
        )
    assert eventually(lambda: watched.names == ["a"])
    cell["service"].close()
    assert eventually(lambda: watched.names == []), "a closed service keeps no model, whoever still has its clients"


def test_what_was_accepted_is_finished_though_nothing_but_its_future_is_left(tmp_path: Path) -> None:
    watched = Watched(tmp_path, latency_s=0.01)
    service = watched.service()
    client = service.create_lora_training_client("a").result()
    futures = [client.forward_backward([datum()], "cross_entropy") for _ in range(20)]
    on_its_way = service.create_lora_training_client("a")
    del service, client
    gc.collect()
    assert all(future.result(timeout=20).metrics for future in futures)
    on_its_way.forward([datum()], "cross_entropy")
    del on_its_way
    assert eventually(lambda: watched.names == [])


def test_an_engines_thread_keeps_nothing_of_the_last_call(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with watched.service() as service:
        client = service.create_lora_training_client("a").result()
        last = datum()
        client.forward_backward([last], "cross_entropy").result()
        chunk = weakref.ref(last.loss_fn_inputs["target_tokens"].array)
        service.calls.clear()
        del last
        assert eventually(lambda: gc.collect() >= 0 and chunk() is None)


def test_an_adapter_and_frozen_weights_go_with_their_clients(tmp_path: Path) -> None:
    watched = Watched(tmp_path, latency_s=0.01)
    with watched.service() as service:
        kept, dropped = (service.create_lora_training_client("a").result() for _ in range(2))
        (engine,) = watched.engines
        samplers: Any = [dropped.save_weights_and_get_sampling_client().result() for _ in range(2)]
        assert (len(engine.adapters), len(engine._frozen)) == (2, 2)  # pyright: ignore[reportPrivateUsage]
        last = dropped.forward_backward([datum()], "cross_entropy")
        sample = samplers[0].sample(PROMPT, 1, SamplingParams(max_tokens=1))
        del dropped, samplers
        assert last.result(timeout=20).metrics, "what was accepted is done before"
        assert len(sample.result(timeout=20).sequences) == 1
        assert eventually(lambda: gc.collect() >= 0 and len(engine.adapters) == 1)
        assert eventually(lambda: not engine._frozen)  # pyright: ignore[reportPrivateUsage]
        kept.forward_backward([datum()], "cross_entropy")
        assert kept.optim_step(AdamParams()).result(timeout=20).metrics["grad_norm"] > 0


def kept_by(engine: Any) -> tuple[int, int]:
    """How many adapters and frozen weights an engine has."""
    adapters = engine.adapters
    return (len(adapters), len(engine._frozen)) if isinstance(adapters, dict) else (
        len(adapters.by_id), len(adapters.weights)
    )  # fmt: skip


def test_what_a_client_drops_while_its_custom_loss_runs_goes_and_the_adapter_goes_after_it(
    provider: Provider, tmp_path: Path
) -> None:
    with provider.open(tmp_path, LOCAL_DISK) as service:
        client: Any = another(provider, service)
        engine = client._base.thread.engine
        frozen: Any = client.save_weights_and_get_sampling_client().result()
        assert kept_by(engine) == (1, 1)
        gate = Gate()
        loss = client.forward_backward_custom([datum()], gate)
        assert gate.begun.wait(10)
        try:
            sample = frozen.sample(PROMPT, 1, SamplingParams(max_tokens=2, seed=1))
            del frozen
            assert len(sample.result(10).sequences) == 1
            gc.collect()
            assert eventually(lambda: kept_by(engine) == (1, 0)), "no loss holds frozen weights"
            del client
            gc.collect()
            assert another(provider, service).forward([datum()], "cross_entropy").result(10).metrics
            assert kept_by(engine)[0] >= 1, "the adapter is there for its loss"
        finally:
            gate.opened.set()
        assert loss.result(10).metrics["loss:sum"] > 0
        gc.collect()
        assert eventually(lambda: kept_by(engine) == (0, 0))


def test_the_embedded_backend_lets_its_model_go(tmp_path: Path) -> None:
    folder = str(tiny.save_model(tmp_path / "tiny"))
    service = local.open_service(storage=tmp_path, threads=1, download=None)
    client = service.create_lora_training_client(folder, rank=2).result()
    client.forward_backward([datum()], "cross_entropy").result()
    engine = weakref.ref(service._bases.open(folder).thread.engine)  # pyright: ignore[reportPrivateUsage]
    del service
    assert engine() is not None
    del client
    assert eventually(lambda: gc.collect() >= 0 and engine() is None)


def test_a_client_that_is_released_leaves_memory_and_its_id_can_be_taken_again(tmp_path: Path) -> None:
    """Behind all that was called on it, and from what it saved."""
    watched = Watched(tmp_path)
    with watched.service() as service:
        client = service.create_lora_training_client("a/b", 4, 1, model_id="mine").result()
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.1))
        weights = client.forward([datum()], "cross_entropy")
        saved = client.save_state("s")
        service.release(client)
        (engine,) = watched.engines
        assert eventually(lambda: not engine.adapters)
        again = service.create_training_client_from_state_with_optimizer(saved.result().path, model_id="mine").result()
        assert again.forward([datum()], "cross_entropy").result().metrics == weights.result().metrics
        assert len(engine.adapters) == 1

"""Many clients of one service, with faults and delays of all kinds: each gets what it gets alone, to the bit."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine import tiny
from engine.recorded import digest
from stovetop.backends import local, recording
from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import Cancelled, StovetopError
from stovetop.types import AdamParams, Datum, ModelInput, SamplingParams

STEP = AdamParams(learning_rate=1e-2, eps=1e-8)
SECONDS = 60  # that one answer may take
FAULTS = ["a nan in the data", "a loss that raises", "a loss that exits", "a state that is not there", "taken back"]

Service = Callable[[Path], ServiceClient]


@dataclass(frozen=True, slots=True)
class Backend:
    open: Service
    base_model: str


@pytest.fixture(scope="module", params=["local", "recording"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    if request.param == "recording":
        return Backend(lambda storage: recording.open_service(storage, latency_s=_latency(0)), "any/model")
    model = str(tiny.save_model(tmp_path_factory.mktemp("model") / "tiny"))
    return Backend(
        lambda storage: local.open_service(
            storage=storage, threads=1, max_tokens_per_pass=32, max_adapter_bytes=0, download=None
        ),
        model,
    )


def _latency(seed: int) -> Callable[[str], float]:
    chosen = random.Random(seed)
    return lambda verb: chosen.choice([0.0, 0.0, 0.001, 0.003])


@dataclass(slots=True)
class Client:
    """One program, which depends on its seed alone; and what came of it."""

    seed: int
    pauses: random.Random  # which depend on the company
    answers: list[str] = field(default_factory=list)
    num_failed: int = 0

    def run(self, service: ServiceClient, base_model: str, length: int) -> None:
        chosen = random.Random(self.seed)
        client = service.create_lora_training_client(base_model, rank=2, seed=self.seed).result(SECONDS)
        waiting: list[Future[Any]] = []
        for number in range(length):
            time.sleep(self.pauses.choice([0.0, 0.0, 0.001, 0.004]))
            asked = self.ask(client, chosen, number)
            waiting += [future.future() for future in asked]
        sampler = client.save_weights_and_get_sampling_client().result(SECONDS)
        waiting.append(sampler.compute_logprobs(ModelInput.from_ints([1, 2, 3, 4])).future())
        self.answers = [self.told(future) for future in waiting]

    def told(self, future: "Future[Any]") -> str:
        error = future.exception(SECONDS)
        self.num_failed += error is not None
        if error is None:
            return digest(future.result()) if not hasattr(future.result(), "sample") else "a sampling client"
        assert isinstance(error, StovetopError), error
        return str(error).partition("(call")[0]  # without the name of the client

    def data(self, number: int) -> list[Datum]:
        return [tiny.datum([token % 256 for token in tiny.tokens(6 + index, number)]) for index in range(3)]

    def ask(self, client: TrainingClient, chosen: random.Random, number: int) -> list[Any]:
        seed = 1000 * self.seed + number
        data = self.data(seed)
        match chosen.choice(["train", "train", "custom", "sample", "forward", "fault"]):
            case "train":
                return [client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)]
            case "custom":
                pause_s = self.pauses.choice([0.0, 0.005])
                return [client.forward_backward_custom(data, lambda *a: _loss(pause_s, *a)), client.optim_step(STEP)]
            case "sample":
                sampler = client.save_weights_and_get_sampling_client().result(SECONDS)
                params = SamplingParams(chosen.randint(1, 8), number, [], chosen.choice([0.0, 1.0]))
                return [sampler.sample(ModelInput.from_ints([1, 2, number % 256]), 2, params)]
            case "forward":
                return [client.forward(data, "cross_entropy")]
            case _:
                return self.ask_wrong(client, chosen.choice(FAULTS), data)

    def ask_wrong(self, client: TrainingClient, fault: str, data: list[Datum]) -> list[Any]:
        match fault:
            case "a nan in the data":  # its gradient is refused by the step
                bad = [tiny.datum([1, 2, 3], weight=3e38), tiny.datum([1, 2, 3], weight=3e38)]
                return [client.forward_backward(bad, "cross_entropy"), client.optim_step(STEP)]
            case "a loss that raises":
                return [client.forward_backward_custom(data, _raises), client.optim_step(STEP)]
            case "a loss that exits":
                return [client.forward_backward_custom(data, _exits), client.optim_step(STEP)]
            case "a state that is not there":
                with pytest.raises(StovetopError):
                    client.load_state("/nothing/here")
                return []
            case _:  # it waits behind a custom loss, so that it has not begun
                seen = threading.Event()
                held = client.forward_backward_custom(data, lambda *a: _loss(0.0, *a, until=seen))
                taken_back = client.forward_backward(data, "cross_entropy")
                taken_back.cancel()
                assert isinstance(taken_back.future().exception(SECONDS), Cancelled)
                seen.set()
                return [held, client.optim_step(STEP)]


def _loss(pause_s: float, data: Any, logprobs: Any, until: threading.Event | None = None) -> Any:
    time.sleep(pause_s)
    assert until is None or until.wait(SECONDS)
    return sum((own**2).sum() for own in logprobs), {}


def _raises(data: Any, logprobs: Any) -> Any:
    raise ZeroDivisionError("of a test")


def _exits(data: Any, logprobs: Any) -> Any:
    raise SystemExit(3)


@contextmanager
def opened(backend: Backend, folder: Path) -> Iterator[ServiceClient]:
    with backend.open(folder) as service:
        yield service


def together(backend: Backend, folder: Path, seeds: list[int], length: int, pauses: int) -> list[Client]:
    clients = [Client(seed, random.Random(pauses + seed)) for seed in seeds]
    failures: list[BaseException] = []

    def run(client: Client, service: ServiceClient) -> None:
        try:
            client.run(service, backend.base_model, length)
        except BaseException as error:
            failures.append(error)

    with opened(backend, folder) as service:
        threads = [threading.Thread(target=run, args=(client, service)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
    if failures:
        raise failures[0]
    return clients


@pytest.mark.parametrize(
    ("num_clients", "length"), [(3, 6), pytest.param(8, 30, marks=pytest.mark.slow)], ids=["three", "many"]
)
def test_clients_with_faults_and_delays_get_what_each_gets_alone(
    backend: Backend, num_clients: int, length: int, tmp_path: Path
) -> None:
    seeds = list(range(num_clients))
    mixed = together(backend, tmp_path / "together", seeds, length, 100)
    assert sum(client.num_failed for client in mixed) > 0
    for client in mixed:
        (alone,) = together(backend, tmp_path / f"alone {client.seed}", [client.seed], length, 200)
        assert client.answers == alone.answers

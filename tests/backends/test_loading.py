"""How base models are opened: off the thread that asks, several at once, each once; under names of one's own."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from examples import datum

import stovetop
from engine import tiny
from stovetop.backends import local, recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels
from stovetop.backends.recording.service import RecordingEngine
from stovetop.backends.saved_runs import RunLabels
from stovetop.client import ServiceClient
from stovetop.durable import LOCAL_DISK
from stovetop.engine import ops
from stovetop.errors import CheckpointError, InvalidRequest, RequestFailedError, UnknownName
from stovetop.types import AdamParams


class Door:
    """Engines that load for as long as it is shut."""

    def __init__(self) -> None:
        self.may_open = threading.Event()
        self.asked: list[str] = []

    def engine(self, name: str) -> ops.Engine:
        self.asked.append(name)
        assert self.may_open.wait(30)
        if "broken" in name:
            raise InvalidRequest(f"base model {name!r} is broken")
        return RecordingEngine(name, 0, 0.0, [], LOCAL_DISK)

    def service(self, folder: Path, preload: list[str] | None = None) -> InProcessServiceClient:
        return InProcessServiceClient.over(
            self.engine, folder, models=NamedModels(), labels=RunLabels(), preload=preload or []
        )


def eventually(true: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10
    while not true() and time.monotonic() < end_s:
        time.sleep(0.002)
    return true()


def test_creators_return_before_the_model_is_loaded_and_models_load_at_the_same_time(tmp_path: Path) -> None:
    door = Door()
    with door.service(tmp_path) as service:
        made = [service.create_lora_training_client(name) for name in ("a", "b", "a")]
        made.append(service.create_sampling_client(base_model="c"))
        assert not any(future.done() for future in made)
        assert eventually(lambda: sorted(door.asked) == ["a", "b", "c"])
        lengths = {m.model_name: m.max_context_length for m in service.get_server_capabilities().supported_models}
        assert lengths == {"a": None, "b": None, "c": None}
        door.may_open.set()
        clients = [future.result(timeout=10) for future in made]
        assert [client.get_info().model_name for client in clients[:3]] == ["a", "b", "a"]
        assert {m.max_context_length for m in service.get_server_capabilities().supported_models} == {8192}


def test_an_event_loop_goes_on_while_a_model_loads(tmp_path: Path) -> None:
    door = Door()

    async def program() -> int:
        ticks = 0
        async with door.service(tmp_path) as service:
            waiting = service.create_lora_training_client("a")
            while not waiting.done():
                await asyncio.sleep(0.001)
                ticks += 1
                if ticks == 20:
                    door.may_open.set()
            client = await waiting
            await client.forward_backward([datum()], "cross_entropy")
        return ticks

    assert asyncio.run(program()) >= 20


@pytest.mark.slow
@pytest.mark.real_model
def test_an_event_loop_goes_on_while_a_real_model_loads(smollm2: Path) -> None:
    async def program() -> tuple[float, float]:
        start_s = last_s = time.monotonic()
        longest_s = 0.0
        async with local.open_service(threads=1) as service:
            waiting = service.create_sampling_client(base_model=str(smollm2))
            while not waiting.done():
                await asyncio.sleep(0.005)
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
            await waiting
        return longest_s, last_s - start_s

    longest_s, in_all_s = asyncio.run(program())
    assert longest_s < max(0.5, in_all_s / 2), "the longest time without a tick"


def test_what_only_a_loaded_model_can_refuse_is_refused_by_the_future_and_then_by_the_call(tmp_path: Path) -> None:
    folder = str(tiny.save_model(tmp_path / "tiny"))
    with recording.open_service(tmp_path) as other:
        state = other.create_lora_training_client("other").result().save_state("s").result().path
    with local.open_service(storage=tmp_path, threads=1, download=None) as service:
        with pytest.raises(CheckpointError, match="trained on 'other'"):  # by the call where loading was quick
            service.create_training_client_from_state(state, base_model=folder, model_id="first").result(timeout=60)
        assert service.create_lora_training_client(folder, model_id="first").result().model_id == "first"
        with pytest.raises(CheckpointError, match="trained on 'other'"):
            service.create_training_client_from_state(state, base_model=folder)


def test_what_needs_no_model_is_refused_by_the_call(tmp_path: Path) -> None:
    with local.open_service(storage=tmp_path, threads=1, download=None) as service:
        with pytest.raises(UnknownName, match="create_lora_training_client: unknown base_model 'nowhere'"):
            service.create_lora_training_client("nowhere")
        with pytest.raises(UnknownName, match="create_sampling_client: unknown base_model"):
            service.create_sampling_client(base_model="nowhere")
        with pytest.raises(CheckpointError):
            service.create_training_client_from_state(str(tmp_path / "no-state"))


def test_a_model_that_cannot_be_loaded_is_refused_to_all_who_wait_and_tried_again_by_the_next(tmp_path: Path) -> None:
    door = Door()
    with door.service(tmp_path) as service:
        made = [service.create_lora_training_client("broken"), service.create_sampling_client(base_model="broken")]
        door.may_open.set()
        for future in made:
            with pytest.raises(InvalidRequest, match="'broken' is broken"):
                future.result(timeout=10)
        with pytest.raises(InvalidRequest, match="'broken' is broken"):
            service.create_lora_training_client("broken").result(timeout=10)
        assert door.asked == ["broken", "broken"]
        assert service.get_server_capabilities().supported_models == []


def test_a_model_that_is_preloaded_loads_when_the_service_is_opened(tmp_path: Path) -> None:
    door = Door()
    with door.service(tmp_path, preload=["a", "b"]) as service:
        assert eventually(lambda: sorted(door.asked) == ["a", "b"])
        door.may_open.set()
        service.create_lora_training_client("a").result(timeout=10)
        assert sorted(door.asked) == ["a", "b"]


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_models_own_name_is_told_everywhere_and_its_place_nowhere(tmp_path: Path) -> None:
    place = tiny.save_model(tmp_path / "place")
    models = {"policy": place, "judge": tiny.save_model(tmp_path / "judge", tiny.llama(1))}
    with stovetop.ServiceClient(
        "local", storage=tmp_path / "states", threads=1, models=models, preload=True
    ) as service:
        told = [model.model_name for model in service.get_server_capabilities().supported_models]
        client = service.create_lora_training_client("policy", rank=2).result()
        assert (told, client.model_id.startswith("policy-")) == (["judge", "policy"], True)
        path = client.save_state("s").result().path
        assert (client.get_info().model_name, client.get_info().model_data.tokenizer_id) == ("policy", "policy")
        assert service.create_rest_client().get_training_run(client.model_id).result().base_model == "policy"
        with pytest.raises(InvalidRequest, match="vocabulary of policy") as refused:
            client.forward([datum([10**6] * 4)], "cross_entropy")
        assert str(place) not in str(refused.value)
        again = service.create_training_client_from_state(path).result()
        assert again.create_sampling_client(path).result().get_base_model() == "policy"
        assert service.create_sampling_client(base_model=str(place)).result().get_base_model() == "policy"
        with pytest.raises(CheckpointError, match="trained on 'policy', not on 'judge'"):
            service.create_training_client_from_state(path, base_model="judge").result()
        with pytest.raises(UnknownName, match=r"unknown base_model 'smollm2'; known: judge, policy"):
            service.create_lora_training_client("smollm2")


def test_a_named_model_that_cannot_be_loaded_is_told_by_its_name(tmp_path: Path) -> None:
    place = tiny.save_model(tmp_path / "place")
    (place / "config.json").write_text("{")
    with local.open_service(storage=tmp_path, threads=1, models={"policy": place}) as service:
        with pytest.raises(InvalidRequest, match=r"base model 'policy': config\.json is not readable") as refused:
            service.create_lora_training_client("policy").result(timeout=60)
        assert str(tmp_path) not in str(refused.value)


def open_recording(folder: Path) -> ServiceClient:
    return recording.open_service(folder)


def test_a_client_can_have_a_name_of_ones_own_and_no_two_of_a_service_have_the_same(tmp_path: Path) -> None:
    with open_recording(tmp_path) as service:
        client = service.create_lora_training_client("any/model", model_id="mine").result()
        path = client.save_state("s").result().path
        assert path == str(tmp_path / "checkpoints" / "mine" / "weights" / "s")
        for create in (
            lambda: service.create_lora_training_client("any/model", model_id="mine"),
            lambda: service.create_training_client_from_state(path, model_id="mine"),
            lambda: service.create_training_client_from_state_with_optimizer(path, model_id="mine"),
        ):
            with pytest.raises(InvalidRequest, match=r"model_id must be new to this service.*'mine'"):
                create()
        with pytest.raises(RequestFailedError, match="call 2 of mine"):
            client.optim_step(AdamParams()).result()
    with open_recording(tmp_path) as service:  # a later process goes on under the name
        client = service.create_training_client_from_state_with_optimizer(path, model_id="mine").result()
        assert client.model_id == "mine"


def test_asked_for_by_many_threads_at_once_a_model_is_loaded_once(tmp_path: Path) -> None:
    door = Door()
    with door.service(tmp_path) as service, ThreadPoolExecutor(8) as pool:
        made = list(pool.map(service.create_lora_training_client, ["a"] * 8))
        door.may_open.set()
        assert len({future.result(timeout=10).model_id for future in made}) == 8
    assert door.asked == ["a"]

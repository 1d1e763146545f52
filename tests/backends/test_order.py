"""Submission order is program order: pipelined calls give what waiting for each one gives, whatever the latencies."""

import asyncio
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from examples import OTHER_TOKENS, TOKENS, datum, logprobs

from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels
from stovetop.backends.recording.service import RecordingEngine
from stovetop.backends.saved_runs import RunLabels
from stovetop.client import SamplingClient, TrainingClient
from stovetop.concurrency import together
from stovetop.durable import LOCAL_DISK
from stovetop.types import AdamParams, ModelInput, SampleResponse, SamplingParams


def random_latency(seed: int) -> recording.Latency:
    generator = random.Random(seed)
    return lambda verb: generator.choice([0.0, 0.0005, 0.002])


def program(client: TrainingClient, *, wait: bool) -> list[float]:
    """Ten steps, each with two forward_backwards; the losses they report."""
    futures = []
    for index in range(10):
        for tokens in (TOKENS[index % 3 :], OTHER_TOKENS):
            futures.append(client.forward_backward([datum(tokens)], "cross_entropy"))
        step = client.optim_step(AdamParams(learning_rate=0.1))
        if wait:
            step.result()
    return [future.result().metrics["loss:sum"] for future in futures]


@pytest.mark.parametrize("seed", range(3))
def test_pipelined_calls_take_effect_in_the_order_they_were_made(seed: int) -> None:
    with recording.open_service(latency_s=random_latency(seed)) as slow, recording.open_service() as fast:
        pipelined = slow.create_lora_training_client("any/model", seed=1).result()
        waiting = fast.create_lora_training_client("any/model", seed=1).result()
        assert program(pipelined, wait=False) == program(waiting, wait=True)
        np.testing.assert_array_equal(logprobs(pipelined), logprobs(waiting))


def test_two_submits_are_in_flight_before_the_first_is_awaited() -> None:
    async def run(client: TrainingClient) -> tuple[bool, bool]:
        forward_backward = await client.forward_backward_async([datum()], "cross_entropy")
        optim_step = await client.optim_step_async(AdamParams())
        in_flight = forward_backward.done(), optim_step.done()
        await forward_backward.result_async()
        await optim_step.result_async()
        return in_flight

    with recording.open_service(latency_s=0.05) as service:
        client = service.create_lora_training_client("any/model").result()
        assert asyncio.run(run(client)) == (False, False)
        assert [call.verb for call in service.calls][1:] == ["forward_backward", "optim_step"]


def test_calls_made_while_a_call_is_awaited_stay_in_order() -> None:
    """A client that is only on its way takes calls too; they wait for it."""
    with recording.open_service(latency_s=random_latency(5)) as service:
        on_its_way = service.create_lora_training_client("any/model", seed=1)
        losses = program(on_its_way, wait=False)
    assert losses[-1] < losses[1]


def test_clients_of_one_model_train_side_by_side_without_waiting_for_each_other() -> None:
    with recording.open_service(latency_s=lambda verb: 0.2 if verb == "forward_backward" else 0.0) as service:
        clients = [service.create_lora_training_client("any/model", seed=seed).result() for seed in range(10)]
        start = time.perf_counter()
        for future in [client.forward_backward([datum()], "cross_entropy") for client in clients]:
            future.result()
        assert time.perf_counter() - start < 5 * 0.2  # 10 times that, one after the other


def test_two_thousand_samples_in_flight_all_come_back() -> None:
    params = SamplingParams(max_tokens=2, stop=[])

    async def run(sampler: SamplingClient) -> list[SampleResponse]:
        prompts = [ModelInput.from_ints([index % 256]) for index in range(2000)]
        return await together(sampler.sample(prompt, 1, params) for prompt in prompts)

    with recording.open_service() as service:
        sampler = service.create_sampling_client(base_model="any/model").result()
        assert all(len(response.sequences[0].tokens) == 2 for response in asyncio.run(run(sampler)))


def test_threads_may_share_a_service_and_lose_nothing() -> None:
    with recording.open_service() as service:
        losses: dict[int, list[float]] = {}

        def work(seed: int) -> None:
            client = service.create_lora_training_client("any/model", seed=seed).result()
            losses[seed] = program(client, wait=seed % 2 == 0)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(losses) == 4
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_threads_that_ask_for_a_model_at_once_load_it_once() -> None:
    opened: list[str] = []

    def open_engine(name: str) -> RecordingEngine:
        opened.append(name)
        time.sleep(0.02)
        return RecordingEngine(name, 0, 0.0, [], LOCAL_DISK)

    with InProcessServiceClient.over(open_engine, Path("unused"), models=NamedModels(), labels=RunLabels()) as service:
        threads = [
            threading.Thread(target=service.create_sampling_client, kwargs={"base_model": "any/model"})
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert opened == ["any/model"]

"""Calls that are taken back, and queues that are full; every backend."""

import threading
from pathlib import Path
from typing import Any

import pytest
from custom_losses import another, held
from examples import datum
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import LOCAL_DISK
from stovetop.errors import Cancelled, QueueFull
from stovetop.types import AdamParams, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints([1, 2, 3])


def test_every_call_that_has_not_begun_can_be_taken_back_and_is_as_if_it_never_was(
    trainer: TrainingClient, backend: ServiceClient
) -> None:
    """They wait behind a custom loss. Samples of weights that are not made are told so."""
    goes_on = threading.Event()

    def loss_fn(data: Any, logprobs: Any) -> Any:
        assert goes_on.wait(30)
        return sum(own.sum() for own in logprobs), {}

    path = trainer.save_state("before").result(30).path
    assert path is not None
    held = trainer.forward_backward_custom([datum()], loss_fn)
    futures = [
        trainer.forward([datum()], "cross_entropy"),
        trainer.forward_backward([datum()], "cross_entropy"),
        trainer.forward_backward_custom([datum()], loss_fn),
        trainer.optim_step(AdamParams()),
        trainer.save_state("after"),
        trainer.save_weights_for_sampler("after"),
        trainer.load_state(path),
        trainer.load_state_with_optimizer(path),
        trainer.save_weights_and_get_sampling_client(),
    ]
    for future in futures:
        future.cancel()
    for future in futures:
        assert isinstance(future.future().exception(30), Cancelled)
    goes_on.set()
    assert held.result(30).metrics["loss:sum"] < 0
    assert trainer.optim_step(AdamParams()).result(30).metrics["grad_norm"] > 0
    assert trainer.save_state("after").result(30).path is not None


def test_a_sample_that_runs_can_be_stopped_and_others_go_on(provider: Provider, backend: ServiceClient) -> None:
    sampler = backend.create_sampling_client(base_model=provider.base_model).result()
    long, short = (sampler.sample(PROMPT, 1, SamplingParams(max_tokens=n, seed=1, stop=[])) for n in (200, 2))
    long.cancel()
    assert len(short.result(30).sequences[0].tokens) <= 2
    assert isinstance(long.future().exception(30), Cancelled) or long.done()
    long.cancel()  # no use any more, and no harm


def fill(trainer: TrainingClient, waiting: list[Any]) -> None:
    for _ in range(100):
        waiting.append(trainer.forward([datum()], "cross_entropy"))


def test_a_full_queue_refuses_at_the_call_and_has_room_again_when_results_are_there(
    provider: Provider, tmp_path: Path
) -> None:
    with provider.open(tmp_path, LOCAL_DISK, max_queued_calls=3) as service:
        trainer, waiting = another(provider, service), list[Any]()
        told = r"forward .*at most 3 calls .* may wait \(max_queued_calls .*\); wait for their results.*: 3 wait"
        with held(trainer) as (_, future):
            with pytest.raises(QueueFull, match=told):
                fill(trainer, waiting)
            another(provider, service).forward([datum()], "cross_entropy").result(30)  # a queue for each client
        for each in (future, *waiting):
            each.result(30)
        trainer.forward([datum()], "cross_entropy").result(30)


def test_a_queue_that_holds_too_many_tokens_refuses_more(provider: Provider, tmp_path: Path) -> None:
    """But not the first, however large it is."""
    with provider.open(tmp_path, LOCAL_DISK, max_queued_tokens=1) as service:
        trainer = another(provider, service)
        trainer.forward([datum()], "cross_entropy").result(30)
        with pytest.raises(QueueFull, match="with 1 tokens may wait"):
            fill(trainer, [])

# pyright: basic
"""The ops of a run with custom losses, written down and done again by another engine, give the same bits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from custom_losses import held, total
from examples import OTHER_TOKENS, datum

from engine import tiny
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels
from stovetop.backends.recording.service import RecordingEngine
from stovetop.backends.saved_runs import RunLabels
from stovetop.durable import LOCAL_DISK
from stovetop.engine import ops
from stovetop.types import AdamParams


def local_weights(engine: Any) -> dict[str, Mapping[str, np.ndarray]]:
    return {
        name: {factor: tensor.numpy() for factor, tensor in adapter.weights.tensors.items()}
        for name, adapter in engine.adapters.by_id.items()
    }


def recording_weights(engine: Any) -> dict[str, Mapping[str, np.ndarray]]:
    return {name: {"delta": adapter.delta_VV} for name, adapter in engine.adapters.items()}


ENGINES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Mapping[str, np.ndarray]]]]] = {
    "local": (tiny.engine, local_weights),
    "recording": (lambda: RecordingEngine("tiny", 0, 0.0, (), LOCAL_DISK), recording_weights),
}


def mean(data: Any, scored: Any) -> Any:
    return -sum(p.mean() for p in scored), {}


def fails(data: Any, scored: Any) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize("kind", ENGINES)
def test_ops_of_a_run_with_custom_losses_give_the_same_bits_again(kind: str, tmp_path: Path) -> None:
    """All of them are there at once, the second time, so that answers are submitted before their losses are due."""
    make, weights_of = ENGINES[kind]
    engine, submitted = make(), list[ops.Op]()
    submit = engine.submit

    def record(op: ops.Op) -> ops.Ticket:
        submitted.append(op)
        return submit(op)

    engine.submit = record
    labels = RunLabels()
    with InProcessServiceClient.over(lambda name: engine, tmp_path, models=NamedModels(), labels=labels) as service:
        clients = [service.create_lora_training_client("tiny", rank=2, seed=seed).result() for seed in range(3)]
        futures = []
        for index in range(4):
            for client in clients:
                client.forward_backward([datum(OTHER_TOKENS)], "cross_entropy")
                loss = fails if index == 2 else (total, mean)[index % 2]
                futures.append(client.forward_backward_custom([datum(), datum(OTHER_TOKENS)], loss))
                futures.append(client.optim_step(AdamParams(learning_rate=0.01)))
        with held(clients[0]) as (_, cancelled):
            cancelled.cancel()
            futures.append(clients[0].forward_backward([datum()], "cross_entropy"))
            futures.append(clients[0].optim_step(AdamParams(learning_rate=0.01)))
        for future in futures:
            future.future().exception(20)
        expected = {name: dict(weights) for name, weights in weights_of(engine).items()}
    assert {type(op) for op in submitted} >= {ops.Score, ops.BackwardFrom, ops.Spoil, ops.TakeBack}

    again = make()
    for op in submitted:
        if not isinstance(op, ops.DropAdapter):
            again.submit(op)
    while not again.idle:
        again.step()
    replayed = weights_of(again)
    assert replayed.keys() == expected.keys()
    for name, weights in expected.items():
        for factor, tensor in weights.items():
            np.testing.assert_array_equal(replayed[name][factor], tensor)

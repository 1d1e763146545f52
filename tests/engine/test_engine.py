"""The engine as a whole: order, isolation of adapters, failures."""

import random

import pytest
import torch

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.training import Adapter
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import AdamParams, LoraConfig, ModelInput, SamplingParams

CONFIGS = [
    LoraConfig(rank=2, seed=0),
    LoraConfig(rank=8, seed=1, train_mlp=False),
    LoraConfig(rank=5, seed=2, train_attn=False),
    LoraConfig(rank=3, seed=3, train_unembed=False),
]


def program(adapter: Adapter, owner: int, num_steps: int) -> list[ops.Op]:
    """What one client does: gather gradients, step, now and then sample from its weights."""
    chosen = random.Random(owner)
    made: list[ops.Op] = []
    for step in range(num_steps):
        data = [tiny.datum(tiny.tokens(chosen.randint(2, 12), 100 * owner + step))]
        made.append(ops.ForwardBackward(adapter, data, CrossEntropy()))
        if step % 3 != 1:
            made.append(ops.OptimStep(adapter, AdamParams(learning_rate=0.01 * (owner + 1))))
    return [*made, ops.OptimStep(adapter, AdamParams())] if not isinstance(made[-1], ops.OptimStep) else made


def finish(engine: Engine) -> None:
    while not engine.idle:
        assert all(done.error is None for done in engine.step())


def test_adapters_trained_in_turn_end_where_each_ends_alone() -> None:
    engine = tiny.engine()
    alone, mixed = ([tiny.run(engine, ops.CreateAdapter(config)) for config in CONFIGS] for _ in range(2))
    for owner, adapter in enumerate(alone):
        for op in program(adapter, owner, 15):
            tiny.run(engine, op)
    queues = [program(adapter, owner, 15) for owner, adapter in enumerate(mixed)]
    chosen = random.Random(0)
    while any(queues):
        queue = chosen.choice([queue for queue in queues if queue])
        engine.submit(queue.pop(0))
        if chosen.random() < 0.3:
            frozen = mixed[chosen.randrange(4)].weights
            prompt = ModelInput.from_ints(tiny.tokens(4, 7))
            engine.submit(ops.Sample(frozen, prompt, 2, SamplingParams(3, 0), False, 0))
        if chosen.random() < 0.5:
            engine.step()
    finish(engine)
    for one, other in zip(alone, mixed, strict=True):
        assert one.weights.tensors.keys() == other.weights.tensors.keys()
        for name, tensor in one.weights.tensors.items():
            assert torch.equal(tensor, other.weights.tensors[name])


def test_frozen_weights_stay_when_training_goes_on() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    frozen = tiny.run(engine, ops.Freeze(adapter))
    before = {name: tensor.clone() for name, tensor in frozen.tensors.items()}
    tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()))
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen.tensors.items())
    assert adapter.weights is not frozen


def test_a_failed_op_fails_its_own_ticket_only() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    data = [tiny.datum(tiny.tokens(9, 0))]
    bad = engine.submit(ops.ForwardBackwardCustom(adapter, data, lambda data, logprobs: 1 / 0))
    good = engine.submit(ops.Forward(adapter, data, CrossEntropy()))
    done = {finished.ticket: finished for _ in range(2) for finished in engine.step()}
    assert isinstance(done[bad].error, InvalidRequest)
    assert "ZeroDivisionError" in str(done[bad].error)
    assert done[good].error is None


def test_a_step_does_one_training_op_and_one_token() -> None:
    """Neither kind of work waits for the other to run dry."""
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    sampling = engine.submit(ops.Sample(None, ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(3, 0, []), False, 0))
    training = [engine.submit(ops.Forward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy())) for _ in range(5)]
    order = [done.ticket for _ in range(5) for done in engine.step()]
    assert order == [*training[:3], sampling, *training[3:]]


def test_a_flag_that_would_do_nothing_is_refused() -> None:
    engine = tiny.engine()
    model = tiny.base_model()
    attn_only = [target for target in model.targets if target.part == "attn"]
    from stovetop.engine.lora import chosen

    with pytest.raises(InvalidRequest, match="train_mlp=True cannot be honoured"):
        chosen(LoraConfig(train_unembed=False), attn_only, {})
    assert len(chosen(LoraConfig(train_mlp=False, train_unembed=False), attn_only, {})) == len(attn_only)
    assert engine.idle

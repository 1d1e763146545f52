"""The engine as a whole: order, isolation of adapters, failures."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import tiny
from stovetop.durable import read_folder
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.model.targets import untrainable_parts
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig, ModelInput, SamplingParams

META = {"base_model": "tiny", "fingerprint": "tiny"}


def test_frozen_weights_stay_when_training_goes_on() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    frozen = tiny.freeze(engine, adapter)
    before = {name: tensor.clone() for name, tensor in frozen.tensors.items()}
    tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()))
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen.tensors.items())
    assert adapter.weights is not frozen


def test_a_failed_op_fails_its_own_ticket_only() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    data = [tiny.datum(tiny.tokens(9, 0))]
    bad = tiny.submit(engine, ops.Freeze(ops.AdapterId("none"), ops.WeightsId("frozen")))
    good = tiny.submit(engine, ops.Forward(adapter, data, CrossEntropy()))
    done = {finished.ticket: finished for _ in range(2) for finished in engine.step()}
    assert isinstance(done[bad].error, InvalidRequest)
    assert "there is no adapter of this name" in str(done[bad].error)
    assert done[good].error is None


def test_a_step_does_one_training_op_and_one_token() -> None:
    """Neither kind of work waits for the other to run dry."""
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    sampling = tiny.submit(
        engine, ops.Sample(None, ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(3, 0, []), False, 0)
    )
    training = [
        tiny.submit(engine, ops.Forward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy())) for _ in range(5)
    ]
    order = [done.ticket for _ in range(5) for done in engine.step()]
    assert order == [*training[:3], sampling, *training[3:]]


def test_a_flag_that_would_do_nothing_is_refused() -> None:
    model = tiny.base_model()
    assert model.untrainable == {}
    attn_only = [target for target in model.targets if target.part == "attn"]
    untrainable = untrainable_parts(model.layers, attn_only)
    assert untrainable == {"mlp": "it has no such linear", "unembed": "it has no such linear"}
    engine = Engine(replace(model, targets=attn_only, untrainable=untrainable))
    assert engine.description.untrainable == untrainable
    with pytest.raises(InvalidRequest, match="train_mlp=True cannot be honoured by this base model: it has no such"):
        tiny.create(engine, LoraConfig(train_unembed=False))
    only = tiny.create(engine, LoraConfig(rank=2, train_mlp=False, train_unembed=False))
    assert len(only.weights.tensors) == 2 * len(attn_only)


def test_a_rank_that_memory_cannot_hold_is_refused_with_the_largest_that_it_can() -> None:
    model = tiny.base_model()
    wide = [replace(target, num_inputs=10**9, num_outputs=10**9) for target in model.targets]
    engine = Engine(replace(model, targets=wide), max_adapter_bytes=0)
    with pytest.raises(InvalidRequest, match=r"rank must be at most 0: each rank .* bytes, .* are available: 32"):
        tiny.create(engine, LoraConfig())
    assert engine.idle
    assert not engine.adapters.by_id


def test_what_saves_or_loads_waits_at_the_gate_with_what_comes_after_it_and_nothing_else_does(tmp_path: Path) -> None:
    engine = tiny.engine()
    adapter, other = tiny.trained_adapter(engine, 1), tiny.trained_adapter(engine, 2)
    tiny.run(engine, ops.SaveAdapter(other, tmp_path / "a", META, False, False))
    forward = [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()
    open_for: list[type] = []
    engine.set_gate(lambda ticket: type(ticket.op) in open_for)
    weights, prompt = ops.WeightsId("loaded"), ModelInput.from_ints([1, 2, 3])
    waiting = [
        engine.submit(ops.SaveAdapter(adapter, tmp_path / "b", META, True, False)),
        engine.submit(ops.Forward(adapter, *forward)),
        engine.submit(ops.LoadWeights(weights, tmp_path / "a")),
        engine.submit(ops.Sample(weights, prompt, 1, SamplingParams(1, 0, []), False, 0)),
    ]
    free = engine.submit(ops.Forward(other, *forward))

    def done() -> list[ops.Ticket]:
        tickets: list[ops.Ticket] = []
        while not engine.idle:
            tickets += [each.ticket for each in engine.step() if each.error is None]
        return tickets

    assert done() == [free]
    open_for.append(ops.LoadWeights)
    assert done() == waiting[2:]
    open_for.append(ops.SaveAdapter)
    assert done() == waiting[:2]


def test_weights_are_saved_as_they_were_frozen_also_where_they_are_still_in_the_making_and_dropped_at_once(
    tmp_path: Path,
) -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    tiny.run(engine, ops.SaveAdapter(adapter, tmp_path / "expected", META, False, False))
    weights = ops.WeightsId("frozen")
    engine.submit(ops.Freeze(adapter, weights))
    saving = engine.submit(ops.SaveWeights(weights, tmp_path / "saved", META))
    engine.submit(ops.DropWeights(weights))
    results = [each.result for _ in range(3) for each in engine.step() if each.ticket is saving]
    assert isinstance(results[0], ops.Snapshot)
    tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()))
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    results[0].write()
    assert read_folder(tmp_path / "saved") == read_folder(tmp_path / "expected")

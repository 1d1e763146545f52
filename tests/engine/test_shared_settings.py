"""The settings of torch that a process has once: loading a model changes them for a while, and nothing else sees it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from costly import slow_but
from engine import tiny
from engine.recorded import META, digest
from stovetop.backends.custom_loss import judge
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import Moments
from stovetop.engine.machine import SharedSettings
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.loading import load_model
from stovetop.engine.training.optimizer import adamw
from stovetop.losses import CrossEntropy
from stovetop.types import AdamParams, LoraConfig, ModelInput, SamplingParams, TensorData

MODELS = {
    "row-exact": lambda: adopt(tiny.llama(), "m", fingerprint="m", deterministic=True),
    "fast": lambda: adopt(tiny.llama(), "m", fingerprint="m", deterministic=False),
    "bfloat16": lambda: adopt(tiny.llama().bfloat16(), "m", fingerprint="m"),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def some_of_everything(model: BaseModel, folder: Path) -> list[Any]:
    """What comes of each op, done while others wait and sample."""
    engine, found = Engine(model, max_tokens_per_pass=32, micro_batch_invariant=False), []
    a, b = ops.AdapterId("a"), ops.AdapterId("b")
    data = [tiny.datum(tiny.tokens(9, seed)) for seed in range(3)]
    slopes = [TensorData([0.1 * index for index in range(8)], "float32") for _ in data]
    prompt = ModelInput.from_ints(tiny.tokens(40, 7))
    given: list[ops.Op] = []
    for adapter in (a, b):
        given += [
            ops.CreateAdapter(adapter, LoraConfig(rank=2, seed=1)),
            ops.ForwardBackward(adapter, data, CrossEntropy()),
            ops.OptimStep(adapter, tiny.SGD),
            ops.Score(adapter, data[:2], ops.ScoreId(adapter)),
            ops.BackwardFrom(adapter, ops.ScoreId(adapter), slopes[:2]),
            ops.OptimStep(adapter, tiny.SGD),
            ops.Forward(adapter, data, CrossEntropy()),
            ops.Freeze(adapter, ops.WeightsId(adapter)),
            ops.SaveAdapter(adapter, folder / adapter, META, True, False),
        ]
    for weights in (None, ops.WeightsId(a), ops.WeightsId(b)):
        params = SamplingParams(4, 1, [], temperature=0.7, top_k=30, top_p=0.9)
        given += [ops.Sample(weights, prompt, 3, params, True, 2), ops.ComputeLogprobs(weights, prompt)]
    tickets = [engine.submit(op) for op in given]
    answers: dict[ops.Ticket, Any] = {}
    while not engine.idle:
        for done in engine.step():
            assert done.error is None
            answers[done.ticket] = done.result
            if isinstance(done.result, ops.Snapshot):
                done.result.write()
    for ticket in tickets:
        result = answers[ticket]
        found.append(None if isinstance(result, ops.Snapshot) else digest(result))
    for op in (
        ops.LoadAdapter(ops.AdapterId("c"), folder / a, True),
        ops.RestoreAdapter(b, folder / a, True),
        ops.LoadWeights(ops.WeightsId("d"), folder / b),
        ops.ForwardBackward(ops.AdapterId("c"), data, CrossEntropy()),
        ops.OptimStep(ops.AdapterId("c"), tiny.SGD),
        ops.ComputeLogprobs(ops.WeightsId("d"), prompt),
    ):
        found.append(digest(tiny.run(engine, op)))
    for adapter in engine.adapters.by_id.values():
        assert {tensor.dtype for tensor in adapter.weights.tensors.values()} == {torch.float32}
        found.append(digest([adapter.weights.tensors, adapter.moments]))
    return found


@pytest.mark.parametrize("kind", slow_but(1, MODELS))
@pytest.mark.parametrize("dtype", slow_but(1, [torch.bfloat16, torch.float64]), ids=str)
def test_an_engine_computes_the_same_bits_whatever_the_default_dtype_is_meanwhile(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = MODELS[kind]()
    usual = some_of_everything(model, tmp_path / "usual")
    with default_dtype(dtype):
        assert some_of_everything(model, tmp_path / "other") == usual


def test_an_optimizer_counts_its_steps_whatever_the_default_dtype_is() -> None:
    """More than bfloat16 can count."""
    full = lambda value: {"w": torch.full((2, 3), value, dtype=torch.float32)}  # noqa: E731

    def stepped() -> torch.Tensor:
        moments = Moments(1001, full(0.1), full(0.2))
        return adamw(full(1.0), full(0.5), moments, AdamParams(learning_rate=0.1), keep_moments=True).weights["w"]

    usual = stepped()
    with default_dtype(torch.bfloat16):
        assert torch.equal(stepped(), usual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_model_loads_as_usual_whatever_the_default_dtype_is(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path)
    with default_dtype(dtype):
        assert load_model(folder, "m", deterministic=True).dtype == torch.float32
        assert torch.get_default_dtype() == dtype


# ---- who changes them ------------------------------------------------------------------------------------------------


def test_one_thread_changes_them_at_a_time_and_puts_them_back() -> None:
    shared, order, inside = SharedSettings(), list[str](), threading.Event()

    def other() -> None:
        inside.wait(10)
        with shared.changed():
            order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with default_dtype(torch.float64):
        with shared.changed():
            inside.set()
            thread.join(0.02)
            assert torch.get_default_dtype() == torch.float32
            torch.set_default_dtype(torch.bfloat16)
            assert shared.default_dtype == torch.float64
            order.append("first")
        assert torch.get_default_dtype() == shared.default_dtype == torch.float64
        thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("loads", ["begins", "ends"])
def test_a_custom_loss_that_runs_beside_a_load_leaves_the_default_dtype_alone(
    loads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a bfloat16 model is made, that is the default; a loss neither ends that nor keeps it."""
    shared = SharedSettings()
    monkeypatch.setattr("stovetop.engine.machine.SHARED", shared)
    load = shared.changed()

    def enter() -> None:
        load.__enter__()
        torch.set_default_dtype(torch.bfloat16)

    def leave() -> None:
        load.__exit__(None, None, None)

    def loss_fn(data: Any, logprobs: Any) -> Any:
        enter() if loads == "begins" else leave()
        return logprobs[0].sum(), {}

    if loads == "ends":
        enter()
    judge(loss_fn, [], [TensorData([-1.0], "float32")])
    if loads == "begins":
        assert torch.get_default_dtype() == torch.bfloat16
        leave()
    assert torch.get_default_dtype() == torch.float32


def test_a_custom_loss_that_sets_the_default_dtype_waits_for_a_load_to_put_it_back() -> None:
    shared, begun = SharedSettings(), threading.Event()
    torch.set_default_dtype(torch.float64)  # which a loss has set; it was float32

    def load() -> None:
        with shared.changed():
            begun.set()
            torch.set_default_dtype(torch.bfloat16)

    thread = threading.Thread(target=load)
    thread.start()
    assert begun.wait(10)
    shared.restore_default_dtype(torch.float32)
    thread.join(10)
    assert torch.get_default_dtype() == torch.float32

"""A step is bounded and fair: one training pass, and a token for every running sample; queues take turns."""

from pathlib import Path
from typing import Any

import pytest

from costly import slow_but
from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling import admission
from stovetop.errors import Cancelled, InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import AdamParams, LoraConfig, ModelInput, SamplingParams

LOSS = CrossEntropy()
STEP = AdamParams(learning_rate=1e-2, eps=1e-8)


@pytest.fixture(scope="module", params=["deterministic", "shared passes"])
def model(request: pytest.FixtureRequest) -> BaseModel:
    if request.param == "deterministic":
        return tiny.base_model()
    return adopt(tiny.llama(), "fast", fingerprint="", deterministic=False)


def backward(adapter: Any, seed: int, num_datums: int = 1, **queue: str) -> ops.ForwardBackward:
    data = [tiny.datum(tiny.tokens(8, 1000 * seed + index)) for index in range(num_datums)]
    return ops.ForwardBackward(adapter, data, LOSS, **queue)


def sample(weights: ops.WeightsId | None, max_tokens: int) -> ops.Sample:
    return ops.Sample(weights, ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(max_tokens, 0, []), False, 0)


def finished(engine: Engine, num_steps: int) -> list[ops.Ticket]:
    return [done.ticket for _ in range(num_steps) for done in engine.step()]


def test_with_100_operations_queued_by_one_client_the_first_of_another_is_done_in_two_passes(model: BaseModel) -> None:
    engine = Engine(model, max_tokens_per_pass=16)
    first, second = (tiny.create(engine, LoraConfig(rank=2, seed=seed)) for seed in range(2))
    for number in range(50):
        engine.submit(backward(first, number, 2))
        engine.submit(ops.OptimStep(first, STEP))
    late = engine.submit(backward(second, 99))
    assert late in finished(engine, 2)


def test_an_owner_with_many_adapters_has_as_many_turns_as_one_with_one(model: BaseModel) -> None:
    """The name of an op's queue is what a server gives: here that of an owner."""
    engine = Engine(model, max_tokens_per_pass=16)
    many = [tiny.create(engine, LoraConfig(rank=1, seed=seed)) for seed in range(6)]
    one = tiny.create(engine, LoraConfig(rank=1, seed=6))
    for number, adapter in enumerate(many):
        engine.submit(backward(adapter, number, 2, queue="many"))
    alone = [engine.submit(backward(one, 10 + number, 2, queue="one")) for number in range(3)]
    done = finished(engine, 6)
    assert [ticket in alone for ticket in done] == [False, True] * 3
    while not engine.idle:
        engine.step()


def test_a_sample_beside_a_forward_backward_of_200_datums_draws_a_token_in_every_pass(model: BaseModel) -> None:
    engine = Engine(model, max_tokens_per_pass=80)  # ten datums a pass
    adapter = tiny.create(engine, LoraConfig(rank=1, seed=0))
    passes = engine.submit(backward(adapter, 0, 200))
    samples = {num_tokens: engine.submit(sample(None, num_tokens)) for num_tokens in (1, 5, 15)}
    ended: dict[ops.Ticket, int] = {}
    for number in range(1, 60):
        ended |= {done.ticket: number for done in engine.step()}
        if passes in ended:
            break
    assert ended[passes] > 15
    for num_tokens, ticket in samples.items():
        assert ended[ticket] <= num_tokens + 1


# ---- weights in the making -------------------------------------------------------------------------------------------


def test_samples_of_weights_whose_making_fails_or_is_taken_back_are_told_so(tmp_path: Path) -> None:
    engine, never, cancelled = Engine(tiny.base_model()), ops.WeightsId("never"), ops.WeightsId("cancelled")
    loading = engine.submit(ops.LoadWeights(never, tmp_path / "nothing"))
    waiting = [engine.submit(sample(never, 1)), engine.submit(ops.DropWeights(never))]
    freezing = engine.submit(ops.Freeze(ops.AdapterId("later"), cancelled))
    waiting.append(engine.submit(sample(cancelled, 1)))
    stopped = engine.submit(sample(cancelled, 1))
    engine.cancel(stopped)
    engine.cancel(freezing)
    answers: dict[ops.Ticket, BaseException | None] = {}
    while not engine.idle:
        for done in engine.step():
            assert done.ticket not in answers
            answers[done.ticket] = done.error
    assert isinstance(answers[freezing], Cancelled)
    assert isinstance(answers[stopped], Cancelled)
    assert answers.keys() == {loading, freezing, stopped, *waiting}
    for ticket in waiting:
        assert isinstance(answers[ticket], InvalidRequest)
        assert "they could not be made: " in str(answers[ticket])


def test_an_answer_to_logprobs_that_are_not_there_is_refused_by_name() -> None:
    engine = Engine(tiny.base_model())
    adapter = tiny.create(engine, LoraConfig(rank=1, seed=0))
    with pytest.raises(InvalidRequest, match=r"there are no logprobs of this name.*: 'none'"):
        tiny.run(engine, ops.BackwardFrom(adapter, ops.ScoreId("none"), []))


# ---- failures of an op -----------------------------------------------------------------------------------------------


def test_a_forward_backward_that_fails_before_or_after_its_pass_spoils_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the step would use what the others have gathered."""
    engine = Engine(tiny.base_model())
    adapter = tiny.create(engine, LoraConfig(rank=1, seed=0))
    for owner, name in ((engine.adapters, "micro_batches"), (engine._residency, "use"), (engine.adapters, "task")):  # pyright: ignore[reportPrivateUsage]
        tiny.run(engine, backward(adapter, 1))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, exits)
            failed = engine.submit(backward(adapter, 2))
            (done,) = engine.step()
        assert (done.ticket, type(done.error)) == (failed, SystemExit)
        with pytest.raises(InvalidRequest, match="a forward_backward before it failed"):
            tiny.run(engine, ops.OptimStep(adapter, STEP))
    tiny.run(engine, backward(adapter, 3))
    assert tiny.run(engine, ops.OptimStep(adapter, STEP)).metrics["update_norm"] > 0


def test_a_forward_backward_that_was_taken_back_is_as_if_it_never_was() -> None:
    engine = Engine(tiny.base_model())
    adapter = tiny.create(engine, LoraConfig(rank=1, seed=0))
    engine.submit(backward(adapter, 1))
    taken_back = engine.submit(backward(adapter, 2))
    engine.cancel(taken_back)
    assert "update_norm" in tiny.run(engine, ops.OptimStep(adapter, STEP)).metrics


def exits(*_: object) -> None:
    raise SystemExit("of a test")


@pytest.mark.parametrize(("most_running", "num_positions"), slow_but(1, [(16, None), (512, 640)]))
def test_who_has_queued_many_samples_delays_the_first_of_another_by_little(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, most_running: int, num_positions: int | None
) -> None:
    """Whatever is short: places in the batch, or the memory for keys and values."""
    monkeypatch.setattr(admission, "MAX_RUNNING", most_running)
    engine = Engine(model, max_kv_bytes=None if num_positions is None else tiny.kv_bytes(num_positions, model))
    params = SamplingParams(8, 0, [])
    many = [
        engine.submit(ops.Sample(None, ModelInput.from_ints(tiny.tokens(8, number)), 8, params, False, 0, queue="many"))
        for number in range(20)
    ]
    before = finished(engine, 10)
    late = engine.submit(ops.Sample(None, ModelInput.from_ints([1, 2, 3]), 1, params, False, 0, queue="one"))
    while late not in before:
        before += finished(engine, 1)
    assert 0 < len([ticket for ticket in many if ticket in before]) <= 8
    while not engine.idle:
        before += finished(engine, 1)
    assert sorted(before, key=lambda ticket: ticket.number) == [*many, late]


def test_one_request_of_many_samples_delays_that_of_another_by_little(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_RUNNING", 8)
    engine = Engine(model)
    prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(5, 0, [])
    engine.submit(ops.Sample(None, prompt, 400, params, False, 0, queue="many"))
    finished(engine, 3)
    late = engine.submit(ops.Sample(None, prompt, 2, params, False, 0, queue="one"))
    assert late in finished(engine, 20)

"""Keys and values never take more than their bytes, and what has to wait, leave or come back gives the same results."""

import dataclasses
import gc
import itertools
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costly import costly
from engine import tiny
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels
from stovetop.backends.saved_runs import RunLabels
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling.admission import Admission
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.sampler import Sampler
from stovetop.errors import InvalidRequest
from stovetop.types import ModelInput, SampledSequence, SamplingParams

LONG_CONTEXT = 131_072


@pytest.fixture(scope="module")
def long_model() -> BaseModel:
    return adopt(tiny.llama(max_position_embeddings=LONG_CONTEXT), "long", fingerprint="long", deterministic=True)


class Measured:
    """The bytes of keys and values that exist, and the most at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def start(self) -> None:
        gc.collect()
        self.most = self.now

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor.untyped_storage(), self._freed, size)
        return tensor

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    found, original = Measured(), KVCache._resized  # pyright: ignore[reportPrivateUsage]  where all of them are made

    def resized(*arguments: Any) -> torch.Tensor:
        tensor = original(*arguments)
        return found.made(tensor)

    monkeypatch.setattr(KVCache, "_resized", resized)
    return found


def op(prompt: list[int], n: int, max_tokens: int, weights: AdapterWeights | None = None, **params: Any) -> ops.Sample:
    queue = params.pop("queue", None)
    wanted = SamplingParams(**{"max_tokens": max_tokens, "seed": 7, "stop": []} | params)
    return ops.Sample(tiny.named(weights), ModelInput.from_ints(prompt), n, wanted, False, 0, queue=queue)


def inside(engine: Engine) -> Sampler:
    return engine._sampler  # pyright: ignore[reportPrivateUsage]  memory is nowhere else to be seen


def answers(engine: Engine, asked: list[ops.Sample], limit_bytes: int | None = None) -> list[list[SampledSequence]]:
    """What each request is answered with when all come at once."""
    tickets, done = [tiny.submit(engine, each) for each in asked], {}
    while not engine.idle:
        for finished in engine.step():
            assert finished.error is None
            done[finished.ticket] = finished.result.sequences
        if limit_bytes is not None:
            memory = inside(engine)._admission.memory  # pyright: ignore[reportPrivateUsage]
            assert memory.allocated <= memory.limit
    return [done[ticket] for ticket in tickets]


def alone(model: BaseModel, asked: list[ops.Sample]) -> list[list[SampledSequence]]:
    return [answers(Engine(model), [each])[0] for each in asked]


def same(ours: list[list[SampledSequence]], theirs: list[list[SampledSequence]]) -> bool:
    """To the bit."""
    return [[(s.tokens, s.logprobs, s.stop_reason) for s in each] for each in ours] == [
        [(s.tokens, s.logprobs, s.stop_reason) for s in each] for each in theirs
    ]


def test_what_a_position_takes_is_found_in_the_model() -> None:
    assert tiny.base_model().kv_bytes == (2 * 2 * 16 * 4,) * 2  # keys and values, 2 heads of 16 float32 numbers
    budget = KVBudget(10 * (512 + 256) * 64, tiny.base_model().kv_bytes)
    assert (budget.num_positions, budget.longest_sequence) == (640, 576)


def test_samples_without_max_tokens_on_a_long_context_run_together_within_their_bytes(
    long_model: BaseModel, measured: Measured
) -> None:
    """16 at a time, for their room is claimed as they grow."""
    limit = tiny.kv_bytes(LONG_CONTEXT + 128, long_model)
    engine = Engine(long_model, max_kv_bytes=limit)
    asked = op(tiny.tokens(12, 0), 16, LONG_CONTEXT - 12, stop=list(range(0, tiny.VOCAB_SIZE, 20)))
    ticket = tiny.submit(engine, asked)
    engine.step()
    running = inside(engine)._batch.running  # pyright: ignore[reportPrivateUsage]
    assert running[0].request.num_left == 0  # all have begun, and few ended with their first token
    assert len(running) >= 12
    together = []
    while not engine.idle:
        together += [done.result.sequences for done in engine.step() if done.ticket is ticket]
    assert measured.most <= limit
    assert same(together, alone(long_model, [asked]))


@pytest.mark.parametrize("prompt_length", [5, pytest.param(70, marks=pytest.mark.slow)])
def test_when_room_runs_out_in_the_middle_some_leave_and_come_back_with_the_same_results(
    prompt_length: int, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = []
    original = Admission._preempt  # pyright: ignore[reportPrivateUsage]  that it happens is the test's point
    monkeypatch.setattr(Admission, "_preempt", lambda self, one: (preempted.append(one), original(self, one)))
    limit = tiny.kv_bytes(4 * prompt_length + 4 * 128)
    asked = [op(tiny.tokens(prompt_length, seed), 3, 130, seed=seed) for seed in range(2)]
    expected = alone(tiny.base_model(), asked)
    measured.start()
    together = answers(tiny.engine(max_kv_bytes=limit), asked, limit)
    assert same(together, expected)
    assert measured.most <= limit
    assert preempted


@costly(1)
@given(st.data())
def test_any_traffic_within_any_bytes_gives_what_each_request_gives_alone(data: st.DataObject) -> None:
    model = tiny.base_model()
    lengths = st.sampled_from([1, 5, 40, 70, 130])
    asked = [
        op(
            tiny.tokens(data.draw(lengths), data.draw(st.integers(0, 3))),
            data.draw(st.integers(1, 4)),
            data.draw(st.sampled_from([1, 10, 70])),
            seed=index,
        )
        for index in range(data.draw(st.integers(1, 4)))
    ]
    longest = max(each.prompt.length + (each.params.max_tokens or 0) for each in asked)
    least = 64 * (2 + math.ceil(longest / 64))
    limit = tiny.kv_bytes(data.draw(st.sampled_from([least, least + 64, 2 * least, 1000 + least])))
    assert same(answers(Engine(model, max_kv_bytes=limit), asked, limit), alone(model, asked))


def test_a_sequence_that_fills_all_memory_runs_alone_and_its_request_goes_on(measured: Measured) -> None:
    """Its prompt is not copied, for there is no room for it twice."""
    limit = tiny.kv_bytes(320)
    asked = [op(tiny.tokens(200, 1), 3, 12), op(tiny.tokens(10, 2), 2, 8)]
    expected = alone(tiny.base_model(), asked)
    measured.start()
    assert same(answers(tiny.engine(max_kv_bytes=limit), asked, limit), expected)
    assert measured.most <= limit


def test_a_sequence_runs_alone_though_the_same_prompt_waits_longer_in_a_queue_that_had_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The queue that was served less has its turn; its prompt is the newer of the two that are ready."""
    engine, prompt = tiny.engine(max_kv_bytes=tiny.kv_bytes(320)), tiny.tokens(200, 1)
    asked = op(prompt, 1, 3)
    for earlier in (op([1, 2], 1, 30, queue="drew much"), op(tiny.tokens(60, 2), 1, 1, queue="read much")):
        tiny.run(engine, earlier)
    both = [dataclasses.replace(asked, queue=queue) for queue in ("drew much", "read much")]
    assert same(answers(engine, both), alone(tiny.base_model(), [asked, asked]))
    assert not caplog.records


@pytest.mark.parametrize("scored", [False, True])
def test_a_long_prompt_gets_its_turn_though_short_ones_keep_coming(scored: bool) -> None:
    """At once more wait to be continued than there is room for, so a long prompt finds none by chance."""
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(512))
    more = (tiny.submit(engine, op(tiny.tokens(10, seed), 6, 4, seed=seed)) for seed in itertools.count())
    for _ in range(12):
        next(more)
    engine.step()
    prompt = ModelInput.from_ints(tiny.tokens(200, 1000))
    long = tiny.submit(engine, ops.ComputeLogprobs(None, prompt) if scored else op(prompt.to_ints(), 1, 3))
    later = []
    while not any(done.ticket is long for done in later):
        finished = engine.step()
        for _ in finished:
            next(more)
        later += finished
        assert len(later) < 25


def test_what_could_never_fit_is_refused_with_its_numbers() -> None:
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(192))
    assert engine.description.limits.longest_sequence == 128
    with pytest.raises(InvalidRequest, match=r"129 tokens.*enough for 128 tokens of 512 bytes.*raise max_kv_bytes"):
        tiny.run(engine, op(tiny.tokens(100, 0), 1, 29))
    assert tiny.run(engine, op(tiny.tokens(100, 0), 1, 28)).sequences
    with pytest.raises(InvalidRequest, match=r"max_kv_bytes must be at least \d+, .*: 1000"):
        tiny.engine(max_kv_bytes=1000)


def test_logprobs_of_a_prompt_come_once_though_it_is_computed_again() -> None:
    limit = tiny.kv_bytes(448)
    scored = [
        ops.Sample(None, ModelInput.from_ints(tiny.tokens(90, seed)), 2, SamplingParams(45, seed, []), True, 2)
        for seed in range(3)
    ]
    engine = tiny.engine(max_kv_bytes=limit)
    tickets, found = [tiny.submit(engine, each) for each in scored], {}
    while not engine.idle:
        found |= {done.ticket: done.result for done in engine.step()}
    for ticket, asked in zip(tickets, scored, strict=True):
        expected = tiny.run(tiny.engine(), asked)
        assert found[ticket].prompt_logprobs == expected.prompt_logprobs
        assert found[ticket].topk_prompt_logprobs == expected.topk_prompt_logprobs
        assert same([found[ticket].sequences], [expected.sequences])


def test_the_call_is_refused_and_what_was_left_out_ends_with_the_memory(tmp_path: Path) -> None:
    make = lambda name: tiny.engine(max_kv_bytes=tiny.kv_bytes(192))  # noqa: E731
    labels = RunLabels({}, None, None)
    with InProcessServiceClient.over(make, tmp_path, models=NamedModels(["tiny"]), labels=labels) as service:
        client = service.create_sampling_client(base_model="tiny").result()
        prompt = ModelInput.from_ints(tiny.tokens(100, 0))
        with pytest.raises(
            InvalidRequest, match=r"100 tokens and max_tokens is 29; 129 .* enough for 128; .*max_kv_bytes"
        ):
            client.sample(prompt, 1, SamplingParams(max_tokens=29))
        with pytest.raises(InvalidRequest, match="exceed the context of tiny, 256; lower max_tokens to 156"):
            client.sample(prompt, 1, SamplingParams(max_tokens=157))
        with pytest.raises(InvalidRequest, match=r"compute_logprobs: the prompt has 130 tokens; .* enough for 128"):
            client.compute_logprobs(ModelInput.from_ints(tiny.tokens(130, 0)))
        (sequence,) = client.sample(prompt, 1, SamplingParams(stop=[], seed=1)).result().sequences
        assert (len(sequence.tokens), sequence.stop_reason) == (28, "length")

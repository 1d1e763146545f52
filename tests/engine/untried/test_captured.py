"""Recorded passes of decoding. The recorder here repeats a pass by running it again on the tensors that it was recorded
with, so whatever a recording does not read from them is what it was: too few rows or keys, or an adapter of before."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.sampler import Sampler
from stovetop.engine.untried.captured import CapturedDecoding, rounded_up
from stovetop.types import ModelInput, SampledSequence, SamplingParams


class Tape:
    """Counts what it records and repeats, and sees that nothing has moved between."""

    def __init__(self) -> None:
        self.num_recorded = self.num_repeated = 0
        self.sampler: Sampler | None = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.num_recorded += 1
        out, where = run(), self.addresses()

        def repeat() -> None:
            self.num_repeated += 1
            now = self.addresses()
            assert {name: now.get(name) for name in where} == where
            out.copy_(run())

        return repeat, out

    def addresses(self) -> dict[object, int]:
        """Of all that a pass reads besides its inputs and the model."""
        assert self.sampler is not None
        batch = self.sampler._batch  # pyright: ignore[reportPrivateUsage]
        layers = {("layer", i): pair for i, pair in enumerate(batch.cache._layers)}  # pyright: ignore[reportPrivateUsage]
        factors = batch._stack._factors.items()  # pyright: ignore[reportPrivateUsage]
        stacked = {name: (own.a_KRI, *own.b_KOR) for name, own in factors if own is not None}
        found = {name: tensors for name, tensors in layers.items() if tensors is not None} | stacked
        return {name: sum(tensor.data_ptr() for tensor in tensors) for name, tensors in found.items()}


class Broken(Tape):
    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


class Wrong(Tape):
    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        out = torch.zeros_like(run())
        return (lambda: None), out


@pytest.fixture
def base() -> BaseModel:
    return adopt(tiny.llama(), "tiny", fingerprint="tiny", deterministic=False)


def recording_engine(base: BaseModel, tape: Tape) -> Engine:
    engine = Engine(base)
    tape.sampler = Sampler(base, KVBudget.of(base, None), lambda model: CapturedDecoding(model, tape))
    engine._sampler = tape.sampler  # pyright: ignore[reportPrivateUsage]  on CUDA it is made with a recorder
    return engine


def wave(engine: Engine, weights: list[AdapterWeights | None], seed: int = 0) -> list[SampledSequence]:
    """Requests of different lengths, which come one after another."""
    tickets, answers = [], {}
    for index in range(12):
        params = SamplingParams(max_tokens=4 + 7 * index % 23, stop=[], seed=seed + index)
        prompt = ModelInput.from_ints(tiny.tokens(5 + 9 * index % 40, index))
        tickets.append(
            tiny.submit(
                engine, ops.Sample(tiny.named(weights[index % len(weights)]), prompt, 1 + index % 2, params, False, 0)
            )
        )
        answers |= {done.ticket: done.result for done in engine.step()}
    while not engine.idle:
        answers |= {done.ticket: done.result for done in engine.step()}
    return [sequence for ticket in tickets for sequence in answers[ticket].sequences]


def assert_alike(ours: list[SampledSequence], theirs: list[SampledSequence]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_adapters", [0, 1, 3])
@pytest.mark.parametrize("with_base", [True, False])
def test_recorded_passes_give_what_ordinary_ones_give(base: BaseModel, num_adapters: int, with_base: bool) -> None:
    plain, tape = Engine(base), Tape()
    engine = recording_engine(base, tape)
    adapters = [tiny.trained_adapter(plain, seed, rank=4 + 2 * seed).weights for seed in range(num_adapters)]
    weights = [*adapters, *([None] if with_base or not adapters else [])]
    assert_alike(wave(engine, weights), wave(plain, weights))
    assert tape.num_repeated > 0


def test_in_the_deterministic_mode_they_give_the_same_bits() -> None:
    tape = Tape()
    ours, theirs = wave(recording_engine(tiny.base_model(), tape), [None]), wave(tiny.engine(), [None])
    assert [one.logprobs for one in ours] == [other.logprobs for other in theirs]
    assert tape.num_repeated > tape.num_recorded


def test_the_next_version_of_the_weights_is_sampled_with_the_same_recordings(base: BaseModel) -> None:
    """It takes the place of the old one, in the stack and in the cache; also where it leaves the head alone."""
    plain, tape = Engine(base), Tape()
    engine = recording_engine(base, tape)
    versions = [tiny.trained_adapter(plain, seed, train_unembed=False).weights for seed in range(3)]
    for _ in range(3):
        wave(engine, versions[:1])
    recorded = tape.num_recorded
    for version in versions[1:]:
        assert_alike(wave(engine, [version]), wave(plain, [version]))
    assert tape.num_recorded == recorded


@pytest.mark.parametrize("tape", [Broken(), Wrong()], ids=["raises", "differs"])
def test_what_cannot_be_recorded_is_computed_as_ever(
    base: BaseModel, tape: Tape, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_alike(wave(recording_engine(base, tape), [None]), wave(Engine(base), [None]))
    assert len([record for record in caplog.records if "without recordings" in record.message]) == 1


def test_sizes_are_rounded_up_by_a_quarter_at_most_so_that_there_are_few() -> None:
    for count in range(1, 5000):
        assert count <= rounded_up(count) < count * 1.25 + 1
    assert len({rounded_up(count) for count in range(1, 5000)}) < 50

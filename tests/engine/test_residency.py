"""Idle adapters are moved out of the way and come back bit for bit."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import tiny
from stovetop.backends.local import open_service
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import AdapterWeights, Moments
from stovetop.engine.residency import Residency
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import LoraConfig, ModelInput, SamplingParams

CPU = torch.device("cpu")


def weights(seed: int, size: int = 10) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"x.A": torch.randn(1, size, generator=generator), "x.B": torch.randn(size, 1, generator=generator)}
    return AdapterWeights(LoraConfig(rank=1), tensors)


def test_the_least_recently_used_goes_first_and_returns_with_the_same_bits(tmp_path: Path) -> None:
    values = [weights(seed) for seed in range(4)]
    expected = [{name: t.clone() for name, t in value.tensors.items()} for value in values]
    residency = Residency(CPU, limit_bytes=2 * 80, folder=tmp_path)
    where = [value.tensors["x.A"].data_ptr() for value in values]
    residency.use(values)
    residency.use(values[:1])
    residency.tidy(in_use=[])
    assert residency.num_idle == 2
    moved = [value.tensors["x.A"].data_ptr() != old for value, old in zip(values, where, strict=True)]
    assert moved == [False, True, True, False]
    for _ in range(3):
        for value, before in zip(values, expected, strict=True):
            residency.use([value])
            residency.tidy(in_use=[])
            assert all(torch.equal(value.tensors[name], before[name]) for name in before)
    assert list(tmp_path.iterdir()) == []  # files without a name


class Watched(dict[str, torch.Tensor]):
    """Lists a folder while its tensors are gone through."""

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path) -> None:
        super().__init__(tensors)
        self.folder, self.seen = folder, list[str]()

    def values(self) -> Any:
        for tensor in super().values():
            yield tensor
            self.seen += [path.name for path in self.folder.iterdir()]


def test_the_file_of_an_idle_adapter_has_no_name_even_while_it_is_written(tmp_path: Path) -> None:
    value = weights(0)
    watched = Watched(value.tensors, tmp_path)
    value = replace(value, tensors=watched)
    residency = Residency(CPU, limit_bytes=0, folder=tmp_path)
    residency.use([value])
    residency.tidy(in_use=[])
    assert residency.num_idle == 1
    assert watched.seen == []


def test_what_is_in_use_stays_and_what_nobody_holds_is_forgotten(tmp_path: Path) -> None:
    values = [weights(seed) for seed in range(3)]
    residency = Residency(CPU, limit_bytes=0, folder=tmp_path)
    residency.use([*values, Moments(1, {"x.A": torch.ones(3)}, {"x.A": torch.ones(3)})])
    residency.tidy(in_use=values[1:])
    assert residency.num_idle == 1
    del values[0]
    assert residency.num_idle == 0


def test_where_nothing_can_be_written_adapters_stay_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    residency = Residency(CPU, limit_bytes=0, folder=tmp_path / "file")
    value = weights(0)
    residency.use([value])
    residency.tidy(in_use=[])
    assert residency.num_idle == 0
    assert "idle adapters stay in memory" in caplog.text
    assert torch.equal(value.tensors["x.A"], weights(0).tensors["x.A"])


@pytest.mark.parametrize(("num_adapters", "num_turns"), [(6, 8), pytest.param(64, 100, marks=pytest.mark.slow)])
def test_many_adapters_in_the_room_of_four_train_and_sample_as_if_each_were_alone(
    num_adapters: int, num_turns: int, tmp_path: Path
) -> None:
    """Clients come in any order, with and without an optimizer step between; nobody is refused."""
    crowded = tiny.engine(max_adapter_bytes=4 * 3 * 40_000, idle_folder=tmp_path)
    roomy, chosen = tiny.engine(), random.Random(0)

    def visit(engine: Engine, adapters: list[Any], index: int, turn: int) -> object:
        data = [tiny.datum(tiny.tokens(12, 100 * index + turn))]
        tiny.run(engine, ops.ForwardBackward(adapters[index], data, CrossEntropy()))
        tiny.run(engine, ops.OptimStep(adapters[index], tiny.SGD))
        params = SamplingParams(4, turn, [])
        op = ops.Sample(
            tiny.named(adapters[index].weights), ModelInput.from_ints(tiny.tokens(5, turn)), 2, params, False, 0
        )
        return tiny.run(engine, op).sequences

    lora = [LoraConfig(rank=1 + seed % 5, seed=seed, train_unembed=seed % 2 == 0) for seed in range(num_adapters)]
    both = [[tiny.create(engine, config) for config in lora] for engine in (crowded, roomy)]
    for turn in range(num_turns):
        index = chosen.randrange(num_adapters)
        answers = [visit(engine, own, index, turn) for engine, own in zip((crowded, roomy), both, strict=True)]
        assert [(s.tokens, s.logprobs) for s in answers[0]] == [(s.tokens, s.logprobs) for s in answers[1]]
    for one, other in zip(*both, strict=True):
        assert all(torch.equal(t, other.weights.tensors[name]) for name, t in one.weights.tensors.items())
        assert all(torch.equal(t, other.moments.square[name]) for name, t in one.moments.square.items())


def test_weights_that_wait_for_their_turn_in_the_sampler_are_not_moved(tmp_path: Path) -> None:
    engine = tiny.engine(max_adapter_bytes=0, idle_folder=tmp_path)
    adapters = [tiny.trained_adapter(engine, seed) for seed in range(3)]

    def sample(index: int, seed: int) -> ops.Sample:
        weights = tiny.named(adapters[index].weights)
        return ops.Sample(weights, ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(10, seed, []), False, 0)

    expected = [tiny.run(tiny.engine(), sample(index, index)).sequences for index in range(3)]
    tickets = [tiny.submit(engine, sample(index, index)) for index in range(3)]
    answers = {}
    while not engine.idle:
        answers |= {done.ticket: done.result.sequences for done in engine.step()}
    for ticket, sequences in zip(tickets, expected, strict=True):
        assert [s.logprobs for s in answers[ticket]] == [s.logprobs for s in sequences]


def test_a_limit_below_zero_is_refused_when_the_service_is_opened(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"max_adapter_bytes must be an integer of at least 0.*leave it out.*: -1"):
        open_service(storage=tmp_path, max_adapter_bytes=-1)

"""Adapters: what a flag trains, how factors start, and that each acts on its own rows only."""

import math
import random

import pytest
import torch

from engine import tiny
from stovetop.engine.arithmetic import Fast
from stovetop.engine.lora import (
    AdapterWeights,
    LoraLinear,
    Routing,
    Rows,
    Stack,
    initial_weights,
    rows_by_owner,
    stacked_rows,
)
from stovetop.engine.low_rank import LowRank, adapted_linear
from stovetop.engine.packing import Segment
from stovetop.types import LoraConfig

HIDDEN, MLP, KEYS, LAYERS, RANK = 64, 96, 32, 2, 8


def num_parameters(**flags: bool) -> int:
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    adapter = tiny.trained_adapter(tiny.engine(), rank=RANK, **off | flags)
    return sum(tensor.numel() for tensor in adapter.weights.tensors.values())


def test_each_flag_trains_its_part_and_nothing_else() -> None:
    attn = LAYERS * RANK * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS))
    mlp = LAYERS * RANK * 3 * (HIDDEN + MLP)
    unembed = RANK * (HIDDEN + tiny.VOCAB_SIZE)
    assert num_parameters(train_attn=True) == attn
    assert num_parameters(train_mlp=True) == mlp
    assert num_parameters(train_unembed=True) == unembed
    assert num_parameters(train_attn=True, train_mlp=True, train_unembed=True) == attn + mlp + unembed


def test_a_new_adapter_starts_at_zero_with_the_spread_that_peft_gives() -> None:
    weights = initial_weights(LoraConfig(rank=64, seed=3), tiny.base_model().targets, torch.device("cpu"))
    for name, tensor in weights.tensors.items():
        if name.endswith(".B"):
            assert tensor.abs().max() == 0
        else:
            bound = 1 / math.sqrt(tensor.shape[1])
            assert tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_seed_decides_the_factors() -> None:
    first, again, other = (
        initial_weights(LoraConfig(rank=4, seed=seed), tiny.base_model().targets, torch.device("cpu"))
        for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.A"
    assert torch.equal(first.tensors[name], again.tensors[name])
    assert not torch.equal(first.tensors[name], other.tensors[name])


def test_the_written_out_linear_has_autograds_gradient_in_every_adapter_of_a_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 5, 6), (3, 6), (4, 3), (2, 6), (4, 2)]
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    weight_OI = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def linear(x_1NI: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        first, second = factors[:2], factors[2:]
        parts = [LowRank(*first, 0.7, slice(0, 2)), LowRank(*second, 1.5, torch.tensor([4, 2]))]
        return adapted_linear(x_1NI, weight_OI, None, parts, Fast())

    assert torch.autograd.gradcheck(linear, leaves)


def adapter(rank: int, generator: torch.Generator, name: str = "x") -> AdapterWeights:
    tensors = {
        f"{name}.A": torch.randn(rank, 6, generator=generator),
        f"{name}.B": torch.randn(4, rank, generator=generator),
    }
    return AdapterWeights(LoraConfig(rank=rank), tensors)


@torch.no_grad()
def test_adapters_of_different_rank_and_targets_act_on_their_own_rows_looped_or_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    linear, routing = torch.nn.Linear(6, 4, bias=False).requires_grad_(False), Routing()
    lora = LoraLinear(linear, "x", routing, Fast())
    x_1NI = torch.randn(1, 7, 6, generator=generator)
    first, second, elsewhere = adapter(2, generator), adapter(3, generator), adapter(3, generator, name="y")
    owners = [first, second, None, first, second, elsewhere, second]
    segments, cpu = [Segment(row, 1) for row in range(7)], torch.device("cpu")
    plain_1NO = lora(x_1NI)
    stacked = stacked_rows(owners, segments, cpu, Stack(torch.float32))
    assert stacked is not None
    for parts in (rows_by_owner(owners, segments, cpu), [stacked]):
        routing.parts = parts
        mixed_1NO = lora(x_1NI)
        for rows, owner in (([0, 3], first), ([1, 4, 6], second)):
            routing.parts = [Rows(owner)]
            torch.testing.assert_close(mixed_1NO[:, rows], lora(x_1NI)[:, rows])
        assert torch.equal(mixed_1NO[:, [2, 5]], plain_1NO[:, [2, 5]])


@torch.no_grad()
def test_a_stack_serves_any_sequence_of_batches_as_each_adapter_alone() -> None:
    """Adapters join, leave and come again; ranks and numbers of rows change; some rows are the base model's."""
    generator, cpu, chosen = torch.Generator().manual_seed(0), torch.device("cpu"), random.Random(0)
    linear, routing, stack = torch.nn.Linear(6, 4, bias=False), Routing(), Stack(torch.float32)
    lora = LoraLinear(linear.requires_grad_(False), "x", routing, Fast())
    adapters = [adapter(1 + index % 3, generator, name="y" if index == 5 else "x") for index in range(9)]
    sizes = set()
    for _ in range(60):
        present = chosen.sample(adapters, chosen.randint(1, len(adapters)))
        owners = [chosen.choice([*present, None]) for _ in range(chosen.randint(1, 20))]
        segments = [Segment(row, 1) for row in range(len(owners))]
        stacked = stacked_rows(owners, segments, cpu, stack)
        assert (stacked is None) == (set(owners) == {None})
        x_1NI = torch.randn(1, len(owners), 6, generator=generator)
        routing.parts = [] if stacked is None else [stacked]
        ours = lora(x_1NI)
        routing.parts = rows_by_owner(owners, segments, cpu)
        torch.testing.assert_close(ours, lora(x_1NI))
        sizes.add(stack.num_slots)
    assert len(sizes) > 2


def test_a_stack_is_refused_where_it_would_be_mostly_filling() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    first, *others = (adapter(2, generator) for _ in range(8))
    owners = [*[first] * 93, *others]
    assert stacked_rows(owners, [Segment(row, 1) for row in range(100)], cpu, Stack(torch.float32)) is None

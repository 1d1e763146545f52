"""Adapters: what a flag trains, how factors start, and that each acts on its own rows only."""

import math

import pytest
import torch

from engine import tiny
from stovetop.engine.arithmetic import Fast
from stovetop.engine.lora import AdapterWeights, LoraLinear, Routing, Rows, initial_weights, low_rank
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


def test_the_written_out_low_rank_product_has_autograds_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 5, 6), (3, 6), (4, 3)]
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda x, a, b: low_rank(x, a, b, 0.7, arithmetic=Fast()), leaves)


def test_adapters_of_different_rank_act_on_their_own_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    linear, routing = torch.nn.Linear(6, 4, bias=False).requires_grad_(False), Routing()
    lora = LoraLinear(linear, "x", routing, Fast())
    x_1NI = torch.randn(1, 5, 6, generator=generator)

    def adapter(rank: int) -> AdapterWeights:
        tensors = {"x.A": torch.randn(rank, 6, generator=generator), "x.B": torch.randn(4, rank, generator=generator)}
        return AdapterWeights(LoraConfig(rank=rank), tensors)

    first, second = adapter(2), adapter(3)
    plain_1NO = lora(x_1NI)
    routing.parts = [Rows(first, torch.tensor([0, 3])), Rows(second, torch.tensor([1, 4]))]
    mixed_1NO = lora(x_1NI)
    for rows, owner in (([0, 3], first), ([1, 4], second)):
        routing.parts = [Rows(owner)]
        torch.testing.assert_close(mixed_1NO[:, rows], lora(x_1NI)[:, rows])
    assert torch.equal(mixed_1NO[:, 2], plain_1NO[:, 2])

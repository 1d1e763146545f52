"""Adapters: what a flag trains, how factors start, and the products that are made of them."""

import math

import pytest
import torch

from engine import tiny
from stovetop.engine.kernels.arithmetic import Fast, FrozenLinear
from stovetop.engine.lora.low_rank import Factors, LowRank, Siblings, adapted
from stovetop.engine.lora.weights import initial_weights
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
    shapes = [(5, 6), (5, 7), (3, 6), (4, 3), (3, 6), (3, 3), (2, 6), (3, 2)]
    leaves = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    weight_OI = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    siblings = Siblings.of({"q": 4, "k": 3})

    def linear(x_NI: torch.Tensor, residual_NO: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        both, second_only = [Factors(*factors[:2]), Factors(*factors[2:4])], [None, Factors(*factors[4:])]
        parts = [
            LowRank(siblings, both, 0.7, slice(0, 2)),
            LowRank(siblings, second_only, 1.5, torch.tensor([4, 2])),
        ]
        return adapted(x_NI, FrozenLinear(weight_OI), parts, Fast(), residual_NO)

    assert torch.autograd.gradcheck(linear, leaves)

"""Each adapter acts on its own rows only, by itself or in a stack."""

import random
import weakref
from itertools import accumulate

import pytest
import torch

from stovetop.engine.kernels.arithmetic import Fast
from stovetop.engine.kernels.packing import Segment
from stovetop.engine.lora.linear import LoraLinear
from stovetop.engine.lora.low_rank import Siblings
from stovetop.engine.lora.routing import (
    BatchRows,
    Routing,
    Rows,
    Stack,
    StackRows,
    batched_rows,
    prompt_rows,
    rows_by_owner,
    stacked_rows,
)
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.types import LoraConfig


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


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3, 3], [4, 2, 3, 4, 3]])
@pytest.mark.parametrize("alike", [False, True])
def test_adapters_that_train_in_a_batched_product_get_the_gradients_that_each_gets_alone(
    lengths: list[int], alike: bool
) -> None:
    """Alike, or of different rank and one of them without this linear; with rows to fill up, and without."""
    generator = torch.Generator().manual_seed(0)
    linear, routing = torch.nn.Linear(6, 4, bias=False).double().requires_grad_(False), Routing()
    lora = LoraLinear(linear, "x", routing, Fast())
    ranks, elsewhere = ([2] * 5, None) if alike else ([1, 2, 3, 1, 2], 3)
    adapters = [adapter(rank, generator, "y" if index == elsewhere else "x") for index, rank in enumerate(ranks)]
    for own in adapters:
        own.tensors.update({name: tensor.double().requires_grad_() for name, tensor in own.tensors.items()})
    leaves = [tensor for own in adapters for tensor in own.tensors.values()]
    ends = list(accumulate(lengths))
    rows = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    x_NI = torch.randn(ends[-1], 6, generator=generator, dtype=torch.float64, requires_grad=True)
    d_out_NO = torch.randn(ends[-1], 4, generator=generator, dtype=torch.float64)
    found = []
    segments = [Segment(own.start, len(own)) for own in rows]
    batched = batched_rows(adapters, segments, torch.device("cpu"), torch.float64)
    assert isinstance(batched[0], BatchRows)
    for parts in (batched, [Rows(own, slice(r.start, r.stop)) for own, r in zip(adapters, rows, strict=True)]):
        routing.parts = parts
        out_NO = lora(x_NI)
        gradients = torch.autograd.grad(out_NO, [x_NI, *leaves], d_out_NO, allow_unused=True)
        assert [index for index, gradient in enumerate(gradients) if gradient is None] == ([] if alike else [7, 8])
        found.append([out_NO, *(gradient for gradient in gradients if gradient is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_not_finite_in_one_adapters_rows_does_not_reach_the_gradients_of_others() -> None:
    generator, lengths = torch.Generator().manual_seed(0), [3, 2, 2, 2]
    linear, routing = torch.nn.Linear(6, 4, bias=False).requires_grad_(False), Routing()
    lora, adapters = LoraLinear(linear, "x", routing, Fast()), [adapter(2, generator) for _ in lengths]
    leaves = [tensor.requires_grad_() for own in adapters for tensor in own.tensors.values()]
    starts = [0, 3, 5, 7]
    segments = [Segment(start, length) for start, length in zip(starts, lengths, strict=True)]
    routing.parts = batched_rows(adapters, segments, torch.device("cpu"), torch.float32)
    assert isinstance(routing.parts[0], BatchRows)
    x_NI = torch.randn(9, 6, generator=generator)
    x_NI[0] = torch.nan
    gradients = torch.autograd.grad(lora(x_NI).sum(), leaves)
    assert [bool(gradient.isfinite().all()) for gradient in gradients[2:]] == [True] * 6


def test_adapters_whose_rows_differ_much_are_not_batched() -> None:
    generator = torch.Generator().manual_seed(0)
    adapters = [adapter(2, generator) for _ in range(4)]
    segments = [Segment(0, 90), Segment(90, 1), Segment(91, 1), Segment(92, 1)]
    parts = batched_rows(adapters, segments, torch.device("cpu"), torch.float32)
    assert [type(part) for part in parts] == [Rows] * 4


def test_a_stack_is_refused_where_it_would_be_mostly_filling() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    first, *others = (adapter(2, generator) for _ in range(8))
    owners = [*[first] * 93, *others]
    assert stacked_rows(owners, [Segment(row, 1) for row in range(100)], cpu, Stack(torch.float32)) is None


def test_in_the_order_of_the_stack_as_many_rows_of_each_adapter_need_no_gathering() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    stack, adapters = Stack(torch.float32), [adapter(2, generator) for _ in range(5)]
    segments = [Segment(row, 1) for row in range(8)]
    for present in (adapters[:4], adapters[1:]):  # the last takes the slot of the first
        owners = present * 2
        unordered = stacked_rows(owners, segments, cpu, stack)
        ordered = stacked_rows([owners[index] for index in stack.in_order(owners)], segments, cpu, stack)
        assert unordered is not None
        assert ordered is not None
        assert (unordered.groups.is_dense, ordered.groups.is_dense) == (False, True)


def test_a_stack_keeps_nobody_alive_and_who_comes_back_finds_his_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, copied = torch.Generator().manual_seed(0), []
    stack, adapters = Stack(torch.float32), [adapter(2, generator) for _ in range(6)]
    assert stack.slots_of(adapters[:4]) == [0, 1, 2, 3]
    monkeypatch.setattr(Stack, "_fill", lambda _, slot, __: copied.append(slot))
    assert stack.slots_of(adapters[:2]) == [0, 1]
    assert stack.slots_of(adapters[:4]) == [0, 1, 2, 3]
    assert copied == []
    gone = weakref.ref(adapters.pop(2))
    assert gone() is None
    assert stack.slots_of([adapters[0], adapters[1], adapters[3]]) == [0, 1, 2], "nobody can come back to slot 2"
    assert copied == [2]


def test_a_linear_that_is_asked_for_late_is_read_from_those_in_use_only() -> None:
    """The tensors of who left may have been moved to other memory."""
    generator = torch.Generator().manual_seed(0)
    stack, adapters = Stack(torch.float32), [adapter(2, generator) for _ in range(4)]
    stack.slots_of(adapters)
    assert stack.slots_of(adapters[1:]) == [1, 2, 3]
    adapters[0].tensors.clear()
    adapters[0].tensors.update({name: tensor.to("meta") for name, tensor in adapter(2, generator).tensors.items()})
    factors = stack.factors(Siblings(("x",)), 4)
    assert factors is not None
    assert not factors.a_KRI[0].any()
    assert torch.equal(factors.a_KRI[1], adapters[1].tensors["x.A"])


def test_prompts_take_factors_from_the_stack_where_most_of_it_has_rows() -> None:
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    adapters = [adapter(2, generator) for _ in range(16)]
    segments, stack = [Segment(3 * index, 3) for index in range(8)], Stack(torch.float32)
    (part,) = prompt_rows(adapters[:8], segments, cpu, stack, running=[])
    assert isinstance(part, StackRows)
    assert stack.num_slots == 8
    assert isinstance(prompt_rows(adapters[8:], segments, cpu, stack, running=adapters[:8])[0], BatchRows)
    assert stack.slots_of(adapters[:8]) == list(range(8)), "those who run keep their places"
    (part,) = prompt_rows(adapters[:8], segments, cpu, Stack(torch.float32), running=adapters[8:10])
    assert isinstance(part, BatchRows), "the stack would be too large for the two that run"
    assert isinstance(prompt_rows(adapters[:3], segments[:3], cpu, stack, running=adapters[:8])[0], Rows)

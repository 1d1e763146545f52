# pyright: basic
"""Custom losses that raise, exit, or leave disorder: that is the failure of their own call alone."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from custom_losses import STEP, Loss, another, left_behind, total
from examples import OTHER_TOKENS, datum, descent, logprobs
from providers import Provider

from stovetop.client import ServiceClient, TrainingClient
from stovetop.errors import Cancelled, RequestFailedError, ServiceClosed


def leaves(error: BaseException) -> Loss:
    def loss_fn(data: Any, scored: Any) -> Any:
        raise error

    return loss_fn


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Exits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SystemExit(3)


class Lazy(dict[str, float]):
    def items(self) -> Any:
        raise KeyboardInterrupt


async def asynchronous() -> None: ...


KEPT: list[Any] = []

HARMFUL: dict[str, Loss] = {
    **{
        type(error).__name__: leaves(error)
        for error in (
            SystemExit(1),
            KeyboardInterrupt(),
            asyncio.CancelledError(),
            GeneratorExit(),
            MemoryError(),
            OSError(5, "io"),
            StopIteration(),
            RecursionError(),
            BaseExceptionGroup("many", [SystemExit(1)]),
            Unspeakable(),
            ServiceClosed("another one"),
            Cancelled(),
        )
    },
    "a backward that exits": lambda data, p: (Exits.apply(p[0]).sum(), {}),
    "a tensor without values": lambda data, p: (p[0].sum().to("meta"), {}),
    "metrics that raise": lambda data, p: (p[0].sum(), Lazy(a=1.0)),
    "a coroutine as loss": lambda data, p: (asynchronous(), {}),
    "in place": lambda data, p: ((p[0].exp() ** 2).sum() + p[0].detach().zero_().sum() * p[0].mul_(2).sum(), {}),
    "without gradients": lambda data, p: (torch.set_grad_enabled(False), total(data, p))[1],
    "in inference mode": lambda data, p: (KEPT.append(torch.inference_mode()), KEPT[-1].__enter__(), total(data, p))[2],
    "on no device": lambda data, p: (torch.set_default_device("meta"), (torch.zeros(()), {}))[1],
    "infinite": lambda data, p: (p[0].sum() / 0, {}),
    "complex": lambda data, p: (p[0].sum() * 1j, {}),
    "a gradient too large": lambda data, p: ((p[0].double() * 1e300).sum() * 1e-10, {}),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_a_harmful_loss_fails_its_call_leaves_no_gradient_and_the_next_step_says_why(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient, what: str
) -> None:
    other, before = another(provider, backend), logprobs(trainer)
    good = trainer.forward_backward([datum()], "cross_entropy")
    bad = trainer.forward_backward_custom([datum(), datum(OTHER_TOKENS)], HARMFUL[what])
    step, beside = trainer.optim_step(STEP), other.forward_backward_custom([datum()], total)
    with pytest.raises(RequestFailedError, match=r"forward_backward_custom .*failed: ") as refusal:
        bad.result(10)
    with pytest.raises(RequestFailedError, match=r"optim_step .* its gradients are dropped") as stepped:
        step.result(10)
    assert str(refusal.value).partition(" failed: ")[2] in str(stepped.value)
    assert good.result(10)
    assert beside.result(10)
    np.testing.assert_array_equal(logprobs(trainer), before)
    with pytest.raises(RequestFailedError, match="there is no gradient"):
        trainer.optim_step(STEP).result(10)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not left_behind(trainer)


MESSY: dict[str, Loss] = {
    "keeps what it was given": lambda data, p: (KEPT.append((data, p)), total(data, p))[1],
    "overwrites what it was given": lambda data, p: (total(data, p), [q.data.zero_() for q in p])[0],
    "changes the data": lambda data, p: (
        total(data, p),
        [one.loss_fn_inputs.clear() for one in data],
        data.clear(),
        p.clear(),
    )[0],
    "computes in float64": lambda data, p: (torch.set_default_dtype(torch.float64), total(data, p))[1],
    "computes coarsely": lambda data, p: (torch.set_float32_matmul_precision("medium"), total(data, p))[1],
    "changes the threads": lambda data, p: (torch.set_num_threads(2), total(data, p))[1],
    "leaves torch without gradients": lambda data, p: (total(data, p), torch.set_grad_enabled(False))[0],
    "changes the seed": lambda data, p: (torch.manual_seed(5), np.random.seed(5), total(data, p))[2],
}


@pytest.mark.parametrize("what", MESSY)
def test_a_loss_that_leaves_disorder_counts_and_changes_no_bit_of_what_follows(
    provider: Provider, backend: ServiceClient, what: str
) -> None:
    def trained(loss_fn: Loss) -> Any:
        client, other = another(provider, backend), another(provider, backend, 3)
        output = client.forward_backward_custom([datum(), datum(OTHER_TOKENS)], loss_fn).result(10)
        client.forward_backward([datum()], "cross_entropy")
        for one in (client, other):
            one.forward_backward([datum()], "cross_entropy")
            one.optim_step(descent(0.1)).result(10)
        return output, [logprobs(client).tolist(), logprobs(other).tolist()]

    num_threads = torch.get_num_threads()
    try:
        assert trained(MESSY[what]) == trained(total)
    finally:
        torch.set_num_threads(num_threads)
        KEPT.clear()
    assert torch.get_default_dtype() == torch.float32

"""What one training client owns, and what is shared of it with a save."""

import pytest
import torch

from stovetop.engine.lora.weights import AdapterWeights, Moments
from stovetop.engine.training import optimizer
from stovetop.engine.training.adapter import Adapter
from stovetop.errors import InvalidRequest
from stovetop.types import AdamParams, LoraConfig

STEP = AdamParams(learning_rate=0.1, eps=1e-8)
NAMES = ("x.A", "x.B")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, generator=generator) for name in NAMES}


def trained() -> Adapter:
    adapter = Adapter(AdapterWeights(LoraConfig(rank=1), tensors(0)))
    step(adapter, 1)
    return adapter


def step(adapter: Adapter, seed: int) -> None:
    adapter.gradients = tensors(seed)
    adapter.optim_step(STEP)


def copied(moments: Moments) -> list[torch.Tensor]:
    return [tensor.clone() for tensors in (moments.mean, moments.square) for tensor in tensors.values()]


def same(moments: Moments, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(copied(moments), before, strict=True))


def test_shared_moments_stay_and_the_next_steps_are_those_that_would_have_been() -> None:
    plain, sharing = trained(), trained()
    shared = sharing.share_moments()
    before = copied(shared)
    for seed in (2, 3):
        step(plain, seed)
        step(sharing, seed)
    assert same(shared, before)
    assert shared.step == 1
    assert same(sharing.moments, copied(plain.moments))
    assert all(torch.equal(sharing.weights.tensors[name], plain.weights.tensors[name]) for name in NAMES)


def test_a_step_makes_new_moments_only_while_they_are_shared() -> None:
    adapter = trained()
    own = adapter.moments.mean["x.A"].data_ptr()
    shared = adapter.share_moments()
    assert adapter.share_moments() is shared, "two saves of the same step share one value"
    del shared
    step(adapter, 2)
    assert adapter.moments.mean["x.A"].data_ptr() == own
    shared = adapter.share_moments()
    step(adapter, 3)
    second = adapter.moments.mean["x.A"].data_ptr()
    assert second != own
    step(adapter, 4)
    assert adapter.moments.mean["x.A"].data_ptr() == second, "the new ones are not shared"
    assert adapter.share_moments() is not shared


def test_a_step_that_is_skipped_leaves_shared_moments_shared() -> None:
    adapter = trained()
    shared = adapter.share_moments()
    before = copied(shared)
    adapter.gradients = {name: torch.full((3,), torch.nan) for name in NAMES}
    assert adapter.optim_step(STEP).metrics["skipped_nonfinite"] == 1.0
    step(adapter, 2)
    assert same(shared, before)


@pytest.mark.parametrize("name", ["library_adamw", "_norm_of_changes"])
def test_moments_that_a_failed_step_has_used_up_are_lost_until_a_state_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, weights = trained(), tensors(7)
    before = {name: tensor.clone() for name, tensor in adapter.weights.tensors.items()}
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, name, no_memory)
        with pytest.raises(MemoryError, match="of a test"):
            step(adapter, 2)
    assert all(torch.equal(adapter.weights.tensors[name], tensor) for name, tensor in before.items())
    for use in (adapter.share_moments, lambda: step(adapter, 3)):
        with pytest.raises(InvalidRequest, match="the optimizer's moments were lost when an optim_step failed"):
            use()
    adapter.restore(AdapterWeights(LoraConfig(rank=1), weights), Moments())
    step(adapter, 4)
    assert adapter.moments.step == 1


def test_moments_that_are_shared_outlive_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = trained()
    shared = adapter.share_moments()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "library_adamw", no_memory)
        with pytest.raises(MemoryError):
            step(adapter, 2)
    step(adapter, 2)
    assert (shared.step, adapter.moments.step) == (1, 2)


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("of a test")

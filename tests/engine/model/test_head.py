"""The chunked head against the plain one."""

from dataclasses import replace

import pytest
import torch

from stovetop.engine.kernels.arithmetic import FrozenLinear, RowExact
from stovetop.engine.lora.low_rank import Factors, LowRank, Siblings
from stovetop.engine.model import head as logprobs
from stovetop.engine.model.head import Head, pair_logprobs, top_logprobs


def made(dtype: torch.dtype = torch.float64, rank: int = 3) -> tuple[torch.Tensor, Head]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    factors = Factors(normal(rank, 8).requires_grad_(), normal(20, rank).requires_grad_())
    lora = LowRank(Siblings(("head",)), [factors], 0.7)
    return normal(6, 8).requires_grad_(), Head(FrozenLinear(normal(20, 8), normal(20)), [lora])


BENDS = [(1.0, None), (0.3, None), (1.0, 5.0), (0.3, 2.0)]  # multiplier and softcap

ROWS = torch.tensor([5, 0, 0, 2, 5, 2, 2])
TARGETS = torch.tensor([1, 4, 4, 19, 0, 3, 7])


@pytest.fixture(autouse=True)
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "chunk_rows", lambda _: 2)


def plain(hidden_NE: torch.Tensor, head: Head, temperature: float) -> torch.Tensor:
    assert head.trained is not None
    assert head.linear.bias_O is not None
    (a_RE, b_VR), scale = head.trained
    logits_NV = (hidden_NE @ (head.linear.weight_OI + scale * b_VR @ a_RE).t() + head.linear.bias_O) * head.multiplier
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    return (logits_NV / temperature).log_softmax(-1)[ROWS, TARGETS]


@pytest.mark.parametrize("bend", BENDS)
def test_pairs_in_any_order_get_the_logprob_of_the_plain_head(bend: tuple[float, float | None]) -> None:
    hidden_NE, head = made()
    head = replace(head, multiplier=bend[0], softcap=bend[1])
    torch.testing.assert_close(pair_logprobs(head, hidden_NE, ROWS, TARGETS, 0.6), plain(hidden_NE, head, 0.6))


@pytest.mark.parametrize("bend", BENDS)
def test_the_written_out_backward_pass_is_autograds(bend: tuple[float, float | None]) -> None:
    hidden_NE, head = made()
    head = replace(head, multiplier=bend[0], softcap=bend[1])
    assert head.trained is not None
    leaves = [hidden_NE, *head.trained[0]]
    weight_P = torch.linspace(-1, 1, 7, dtype=torch.float64)
    ours = torch.autograd.grad((pair_logprobs(head, hidden_NE, ROWS, TARGETS, 0.6) * weight_P).sum(), leaves)
    expected = torch.autograd.grad((plain(hidden_NE, head, 0.6) * weight_P).sum(), leaves)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_that_nothing_trains_is_no_special_case_for_the_row_exact_head() -> None:
    hidden_NE, head = made(torch.float32)
    head = replace(head, low_ranks=(), arithmetic=RowExact())
    out_P = pair_logprobs(head, hidden_NE, ROWS, TARGETS, 1.0, torch.zeros(len(ROWS), dtype=torch.bool))
    assert torch.equal(out_P, pair_logprobs(head, hidden_NE.detach(), ROWS, TARGETS))


@pytest.mark.parametrize("multiplier", [1.0, 0.3])
def test_what_is_computed_on_the_way_there_gives_the_same_gradient(multiplier: float) -> None:
    """Rows 1 and 3 have one pair each, and no adapter trains the head."""
    hidden_NE, head = made()
    head = replace(head, low_ranks=(), multiplier=multiplier)
    rows_P, targets_P = torch.tensor([5, 3, 0, 0, 1]), torch.tensor([1, 4, 4, 19, 0])
    weight_P = torch.linspace(-1, 1, 5, dtype=torch.float64) + 0.1

    def gradient(scored_P: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((scored_P * weight_P).sum(), [hidden_NE])[0]

    logits_NV = (hidden_NE @ head.linear.weight_OI.t() + head.linear.bias_O) * multiplier / 0.6
    expected = logits_NV.log_softmax(-1)[rows_P, targets_P]
    expected_gradient = gradient(expected)
    for trained_P in (None, torch.tensor([True, False, True, True, True]), torch.zeros(5, dtype=torch.bool)):
        ours = pair_logprobs(head, hidden_NE, rows_P, targets_P, 0.6, trained_P)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradient(ours), expected_gradient)


def test_rows_whose_gradient_is_zero_get_none() -> None:
    hidden_NE, head = made()
    weight_P = torch.tensor([1.0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((pair_logprobs(head, hidden_NE, ROWS, TARGETS) * weight_P).sum(), [hidden_NE])
    assert gradient[:5].abs().max() == 0
    assert gradient[5].abs().max() > 0


def test_all_gradients_zero_is_no_special_case() -> None:
    hidden_NE, head = made()
    (gradient,) = torch.autograd.grad((pair_logprobs(head, hidden_NE, ROWS, TARGETS) * 0).sum(), [hidden_NE])
    assert gradient.abs().max() == 0


def test_logprobs_of_a_bfloat16_model_are_float32() -> None:
    hidden_NE = torch.randn(6, 8, dtype=torch.bfloat16)
    out_P = pair_logprobs(Head(FrozenLinear(torch.randn(20, 8, dtype=torch.bfloat16))), hidden_NE, ROWS, TARGETS)
    assert out_P.dtype == torch.float32


def test_no_pairs_is_no_special_case() -> None:
    hidden_NE, head = made()
    none = torch.empty(0, dtype=torch.int64)
    assert pair_logprobs(head, hidden_NE, none, none).shape == (0,)


def test_top_logprobs_are_the_largest_in_order() -> None:
    hidden_NE, head = made()
    tokens_NK, logprobs_NK = top_logprobs(head, hidden_NE, 3)
    expected = head.logits(hidden_NE).log_softmax(-1).topk(3, dim=-1)
    assert torch.equal(tokens_NK, expected.indices)
    torch.testing.assert_close(logprobs_NK, expected.values.detach())


def test_float32_factors_are_trained_beside_a_float64_head() -> None:
    hidden_NE, head = made()
    (part,) = head.low_ranks
    assert isinstance(part, LowRank)
    assert part.by_sibling[0] is not None
    doubles = part.by_sibling[0]
    singles = Factors(*(factor.detach().float().requires_grad_() for factor in doubles))
    expected = torch.autograd.grad(pair_logprobs(head, hidden_NE, ROWS, TARGETS).sum(), doubles)
    head = replace(head, low_ranks=[replace(part, by_sibling=[singles])])
    found = torch.autograd.grad(pair_logprobs(head, hidden_NE, ROWS, TARGETS).sum(), singles)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-5)

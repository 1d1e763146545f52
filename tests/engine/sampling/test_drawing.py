"""Draws, truncation and the logprobs that come with them."""

import pytest
import torch

from stovetop.engine.sampling.drawing import draw, inverse_cdf, truncated

LOGITS_BV = torch.tensor([[2.0, 1.0, 0.0]])
PROBS_BV = LOGITS_BV.softmax(-1)  # .6652, .2447, .0900


def drawn(uniform: float, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> tuple[int, float]:
    out = draw(
        LOGITS_BV,
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([uniform], dtype=torch.float64),
    )
    return int(out.tokens_B[0]), float(out.logprobs_B[0])


def test_the_uniform_number_picks_by_cumulative_probability() -> None:
    assert [drawn(u)[0] for u in (0.0, 0.66, 0.67, 0.90, 0.92, 0.999999)] == [0, 0, 1, 1, 2, 2]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probs_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(3, 1)
    assert inverse_cdf(probs_BV, torch.tensor([0.0, 0.5, 1 - 1e-16], dtype=torch.float64)).tolist() == [1, 3, 3]


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.3])
def test_logprobs_are_those_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS_BV / temperature).log_softmax(-1)[0]
    token, logprob = drawn(0.99, temperature)
    assert logprob == pytest.approx(expected[token].item())


def test_temperature_zero_is_the_argmax_with_its_logprob_at_temperature_one() -> None:
    assert drawn(0.999, temperature=0.0) == (0, pytest.approx(PROBS_BV[0, 0].log().item()))


def test_logprobs_are_those_before_truncation() -> None:
    token, logprob = drawn(0.999, top_k=2)
    assert token == 1
    assert logprob == pytest.approx(PROBS_BV[0, 1].log().item())


def test_top_k_keeps_the_k_most_probable() -> None:
    kept_BV = truncated(PROBS_BV, torch.tensor([2]), torch.tensor([1.0]))
    assert kept_BV.sum().item() == pytest.approx(0.90997, abs=1e-5)
    assert (kept_BV > 0).tolist() == [[True, True, False]]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    def kept(p: float) -> int:
        return int((truncated(PROBS_BV, torch.tensor([-1]), torch.tensor([p])) > 0).sum())

    assert [kept(p) for p in (1e-6, 0.66, 0.67, 0.90, 0.92)] == [1, 1, 2, 2, 3]


def test_rows_are_truncated_by_their_own_settings() -> None:
    probs_BV = PROBS_BV.repeat(3, 1)
    kept_BV = truncated(probs_BV, torch.tensor([1, -1, 2]), torch.tensor([1.0, 1.0, 0.1]))
    assert (kept_BV > 0).sum(-1).tolist() == [1, 3, 1]


def test_a_row_that_keeps_all_tokens_keeps_them_beside_rows_that_do_not() -> None:
    """Though its cumulative sums are rounded to 1 before its last tokens."""
    logits_BV = torch.zeros(2, 40_000)
    logits_BV[:, 1:] = -30.0
    kept_BV = truncated(logits_BV.softmax(-1), torch.tensor([-1, -1]), torch.tensor([1.0, 0.5])) > 0
    assert kept_BV.sum(1).tolist() == [40_000, 1]

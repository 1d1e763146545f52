"""What measurements of some examples say of all examples like them: means with standard errors, pass@k, differences of
two models. Pure functions; nothing here samples or reads.

The examples of a set are taken for a draw from all that could have been asked (Miller 2024, "Adding Error Bars to
Evals", arXiv:2411.00640). Several samples of one example are no further draws of an example: they are averaged first,
and a standard error is that of the examples' means, so it is clustered by example.

Shape suffixes: `P` problems (examples).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stovetop.errors import InvalidRequest

NORMAL_95 = 1.96  # standard errors to each side, of an interval that holds the true value in 95 % of all evaluations


class Estimate(NamedTuple):
    """A number, and how far it may be from that of all examples; None where that is not known, as with one example."""

    value: float
    stderr: float | None = None

    def interval(self) -> tuple[float, float] | None:
        """From, to: with 95 % confidence, if there are some dozens of examples."""
        if self.stderr is None:
            return None
        return self.value - NORMAL_95 * self.stderr, self.value + NORMAL_95 * self.stderr


def mean_of_examples(values_P: Sequence[float]) -> Estimate:
    """The mean, with the standard error √(Σ(v - v̄)² / (P·(P - 1))). An example has one value: the mean of its samples.

    mean_of_examples([1, 0, 0.5]) is .5 with a standard error of .289.
    """
    if not values_P:
        raise InvalidRequest("a mean needs at least one example; there is none")
    values = np.array(values_P, np.float64)
    stderr = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(float(values.mean()), stderr)


def ratio_of_examples(totals_P: Sequence[float], sizes_P: Sequence[float]) -> Estimate:
    """r = Σ totals / Σ sizes, such as nats per token, where long examples count more. The standard error is that of a
    ratio of means (Cochran 1977, Sampling Techniques, 2.11): √(P/(P - 1)·Σ(total - r·size)²) / Σ sizes."""
    totals, sizes = np.array(totals_P, np.float64), np.array(sizes_P, np.float64)
    if len(totals) != len(sizes) or not sizes.sum() > 0:
        raise InvalidRequest(
            f"a ratio needs a total and a size of each example, and sizes that do not sum to 0; totals: {len(totals)}, "
            f"sizes: {len(sizes)} with the sum {sizes.sum():g}"
        )
    ratio, num = float(totals.sum() / sizes.sum()), len(totals)
    if num == 1:
        return Estimate(ratio)
    scatter = float(((totals - ratio * sizes) ** 2).sum())
    return Estimate(ratio, math.sqrt(num / (num - 1) * scatter) / float(sizes.sum()))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that of k samples, drawn without replacement from those of one problem, at least one is correct:
    1 - C(n - c, k) / C(n, k), the estimator without bias of Chen et al. 2021 (arXiv:2107.03374).

    pass_at_k(num_samples=4, num_correct=1, k=2) is .5.
    """
    if not 1 <= k <= num_samples:
        raise InvalidRequest(f"pass@k needs k in 1..{num_samples}, the number of samples of a problem: {k}")
    if not 0 <= num_correct <= num_samples:
        raise InvalidRequest(f"of {num_samples} samples 0..{num_samples} can be correct: {num_correct}")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def paired_difference(first_P: Sequence[float], second_P: Sequence[float]) -> Estimate:
    """How much larger the second are, of two models on the same examples, in the same order. Its standard error is that
    of the differences: smaller than from two separate evaluations, since what is hard for one model mostly is for the
    other too."""
    if len(first_P) != len(second_P):
        raise InvalidRequest(f"a paired difference needs the same examples twice: {len(first_P)}, {len(second_P)}")
    return mean_of_examples([second - first for first, second in zip(first_P, second_P, strict=True)])

"""The negative log-likelihood of data: how surprised a model is by what it is trained, or tested, on.

Shape suffixes: `D` datums, `N` positions of one datum.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stovetop.client import TrainingClient
from stovetop.types import Datum, ForwardBackwardOutput, TensorData

log = logging.getLogger(__name__)


def compute_mean_nll(logprobs_D: Sequence[TensorData], weights_D: Sequence[TensorData]) -> float:
    """-Σ w·logp / Σ w over the positions of all datums. Without any weight there is no mean: NaN, and a warning.

    compute_mean_nll([[-1, -3]], [[1, 1]]) is 2.
    """
    total = weight = 0.0
    for logprobs_N, weights_N in zip(logprobs_D, weights_D, strict=True):
        weights, logprobs = weights_N.array.astype(np.float64), logprobs_N.array.astype(np.float64)
        counted = weights != 0  # elsewhere a logprob may be anything, -inf too
        total -= float(weights[counted] @ logprobs[counted])
        weight += float(weights.sum())
    if weight == 0:
        log.warning("the weights of these %d datums sum to zero: their mean NLL is not a number", len(weights_D))
        return math.nan
    return total / weight


def mean_nll(output: ForwardBackwardOutput, data_D: Sequence[Datum]) -> float:
    """That of what a forward pass, with or without a backward one, said of this data."""
    logprobs_D = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
    return compute_mean_nll(logprobs_D, [datum.loss_fn_inputs["weights"] for datum in data_D])


@dataclass(frozen=True, slots=True)
class NLLEvaluator:
    """A TrainingClientEvaluator: the mean NLL of held-out data, as `<name>/nll`."""

    data_D: Sequence[Datum]
    name: str = "test"

    async def __call__(self, client: TrainingClient) -> dict[str, float]:
        return {f"{self.name}/nll": mean_nll(await client.forward(self.data_D, "cross_entropy"), self.data_D)}

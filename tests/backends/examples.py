"""Data for the conformance suite, and the one way it looks into a model: through logprobs.

Gradients are observed from outside. With a huge eps and no memory AdamW is plain gradient descent, so `grad_norm` gives
the length of the gradient and the logprobs after one such step its direction.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stovetop.client import TrainingClient
from stovetop.types import AdamParams, Datum, ModelInput, TensorData

TOKENS = [5, 17, 42, 8, 99, 3, 61, 17, 42, 80]  # within every vocabulary of the suite
OTHER_TOKENS = [70, 42, 8, 8, 33]


def datum(tokens: Sequence[int] = TOKENS, weight: float = 1.0) -> Datum:
    """Each token predicts the next."""
    weights = [weight] * (len(tokens) - 1)
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": list(tokens[1:]), "weights": weights})


def policy_datum(
    tokens: Sequence[int] = TOKENS, logprob: float = -5.0, advantage: float = 1.0, **more: TensorData
) -> Datum:
    """As if sampled elsewhere: `logprob` stands for what the other sampler had reported."""
    num_tokens = len(tokens) - 1
    generator = np.random.default_rng(num_tokens)
    inputs = {
        "target_tokens": TensorData(tokens[1:], "int64"),
        "logprobs": TensorData(logprob + generator.normal(scale=0.5, size=num_tokens), "float32"),
        "advantages": TensorData(advantage * generator.choice([-1.0, 0.5, 1.0], size=num_tokens), "float32"),
    }
    return Datum(ModelInput.from_ints(tokens[:-1]), {**inputs, **more})


def descent(step_size: float, *, clip: float = 0.0) -> AdamParams:
    return AdamParams(learning_rate=step_size * 1e6, beta1=0.0, beta2=0.0, eps=1e6, grad_clip_norm=clip)


def logprobs(client: TrainingClient, data: Sequence[Datum] | None = None) -> npt.NDArray[np.generic]:
    """Of all targets, flat: equal bits mean equal weights, as far as these data can tell."""
    output = client.forward(data or [datum(), datum(OTHER_TOKENS)], "cross_entropy").result()
    return np.concatenate([outputs["logprobs"].to_numpy().ravel() for outputs in output.loss_fn_outputs])


def train(client: TrainingClient, steps: int, learning_rate: float, tokens: Sequence[int] = TOKENS) -> None:
    for _ in range(steps):
        client.forward_backward([datum(tokens)], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=learning_rate))


def teach(client: TrainingClient, tokens: Sequence[int], learning_rate: float) -> None:
    """Trains until every token is the likely one."""
    for _ in range(20):
        train(client, 15, learning_rate, tokens)
        if float(logprobs(client, [datum(tokens)]).min()) > -0.5:
            return
    raise AssertionError(f"300 steps at {learning_rate} did not teach {tokens}")

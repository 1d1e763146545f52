"""What frozen weights make of data: a reference, a teacher, or the policy after a step. Weights in training answer the
same question with `forward`.

Shape suffixes: `D` datums, `N` positions of one datum.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stovetop.client import SamplingClient
from stovetop.concurrency import together
from stovetop.errors import RequestFailedError
from stovetop.types import Datum, ModelInput

Logprobs = npt.NDArray[np.float32]


def full_sequence(datum: Datum) -> ModelInput:
    """The model input and the last target: all the tokens that the datum was made from."""
    return datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].array[-1]))


async def compute_reference_logprobs(client: SamplingClient, data_D: Sequence[Datum]) -> list[Logprobs]:
    """Of each datum the logprobs of its target tokens, (N,), at temperature 1: what `forward` returns for such weights.
    All are asked for at once."""
    return await compute_logprobs_by([client] * len(data_D), data_D)


async def compute_logprobs_by(clients_D: Sequence[SamplingClient], data_D: Sequence[Datum]) -> list[Logprobs]:
    """The same, each datum by a client of its own."""
    submitted = [client.compute_logprobs(full_sequence(datum)) for client, datum in zip(clients_D, data_D, strict=True)]
    answers_D = await together(submitted, name="logprobs")
    return [_of_targets(answer, datum) for answer, datum in zip(answers_D, data_D, strict=True)]


def _of_targets(logprobs: Sequence[float | None], datum: Datum) -> Logprobs:
    """All but that of the first token, which is no target."""
    of_targets_N = logprobs[1:]
    if len(of_targets_N) != datum.model_input.length or None in of_targets_N:
        raise RequestFailedError(
            f"of a sequence of {datum.model_input.length + 1} tokens all but the first must have a logprob; the "
            f"backend returned {len(logprobs)}, {logprobs.count(None)} of them empty"
        )
    return np.array(of_targets_N, np.float32)

"""Off-policy distillation: the teacher shows what it would say, by samples or by its distribution at each position of
given data, and the student learns it by cross-entropy or a divergence.

Shape suffixes: `D` datums, `N` positions of one datum, `K` alternatives at a position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stovetop.client import SamplingClient
from stovetop.completers import MessageCompleter
from stovetop.concurrency import map_together, together
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.renderers.messages import Message
from stovetop.supervised.logprobs import full_sequence
from stovetop.types import Datum, ForwardBackwardOutput, SampleResponse, SamplingParams


async def sample_teacher_chats(
    teacher: MessageCompleter, prompts: Sequence[Sequence[Message]], *, limit: int = 64
) -> list[list[Message]]:
    """Each prompt with the teacher's answer, in order: chats to train on. At most `limit` are asked for at a time."""
    answers = await map_together(teacher, prompts, limit=limit, name="teacher answer")
    return [[*prompt, answer] for prompt, answer in zip(prompts, answers, strict=True)]


# ---- a teacher's likeliest tokens --------------------------------------------------------------------------------


class TopK(NamedTuple):
    """The K likeliest tokens of a teacher at every position of a datum, and their logprobs."""

    tokens_NK: npt.NDArray[np.int64]
    logprobs_NK: npt.NDArray[np.float32]


async def compute_teacher_topk(teacher: SamplingClient, data_D: Sequence[Datum], num_targets: int = 20) -> list[TopK]:
    """For each datum the teacher's most likely tokens at every position, beside the targets that stand there. What the
    teacher says of the token at i + 1 is about position i, whose target that token is."""
    params = SamplingParams(max_tokens=1, seed=0)
    futures = [teacher.sample(full_sequence(datum), 1, params, topk_prompt_logprobs=num_targets) for datum in data_D]
    responses_D = await together(futures, name="teacher top k")
    return [_topk(response, datum, num_targets) for response, datum in zip(responses_D, data_D, strict=True)]


def _topk(response: SampleResponse, datum: Datum, num_targets: int) -> TopK:
    rows_N = (response.topk_prompt_logprobs or [None])[1:]
    complete = [row for row in rows_N if row is not None and len(row) == num_targets]
    if len(complete) != datum.model_input.length:
        raise RequestFailedError(
            f"a datum of {datum.model_input.length} positions needs {num_targets} alternatives at each; the teacher "
            f"returned them for {len(complete)}"
        )
    pairs_NK2 = np.array(complete, np.float64)
    return TopK(pairs_NK2[:, :, 0].astype(np.int64), pairs_NK2[:, :, 1].astype(np.float32))


def topk_cross_entropy_datum(datum: Datum, teacher: TopK) -> Datum:
    """The datum with (N, K) soft targets for `cross_entropy`: the teacher's top tokens, weighted by their
    probabilities, which are made to sum to 1, times the weight of the position. The least loss is not 0 but the
    teacher's entropy; how far off a student is, `mean_topk_kl` says."""
    weights_N1 = _weights_of(datum, teacher)[:, None]
    probabilities_NK = np.exp(_normalised(teacher.logprobs_NK))
    return Datum(
        datum.model_input,
        {"target_tokens": teacher.tokens_NK, "weights": (weights_N1 * probabilities_NK).astype(np.float32)},
    )


def topk_divergence_datum(datum: Datum, teacher: TopK) -> Datum:
    """The datum for `losses.divergence_loss_fn`: (N, K) targets, the teacher's logprobs of them, and weights (N,)."""
    return Datum(
        datum.model_input,
        {
            "target_tokens": teacher.tokens_NK,
            "teacher_logprobs": teacher.logprobs_NK,
            "weights": _weights_of(datum, teacher),
        },
    )


def mean_topk_kl(output: ForwardBackwardOutput, data_D: Sequence[Datum]) -> float:
    """Of what a forward pass said of data made by `topk_cross_entropy_datum`: KL(teacher ‖ student) over the K
    alternatives alone, both made to sum to 1, as a mean over positions by their weights."""
    total = weight = 0.0
    for outputs, datum in zip(output.loss_fn_outputs, data_D, strict=True):
        weights_NK = datum.loss_fn_inputs["weights"].array.astype(np.float64)
        counted_N = weights_NK.any(axis=1)
        teacher_NK = weights_NK[counted_N]
        with np.errstate(divide="ignore"):  # an alternative of no weight counts nothing
            student_NK = outputs["logprobs"].array.astype(np.float64)[counted_N]
            gap_NK = _normalised(np.log(teacher_NK)) - _normalised(student_NK)
        total += float((teacher_NK * np.where(teacher_NK > 0, gap_NK, 0.0)).sum())
        weight += float(teacher_NK.sum())
    if weight == 0:
        raise InvalidRequest(f"none of these {len(data_D)} datums has a weight, so there is no position to measure")
    return total / weight


def _normalised(logprobs_NK: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return logprobs_NK - np.logaddexp.reduce(logprobs_NK, axis=1, keepdims=True)


def _weights_of(datum: Datum, teacher: TopK) -> npt.NDArray[np.float32]:
    weights_N = datum.loss_fn_inputs["weights"].array.astype(np.float32)
    if len(weights_N) != len(teacher.tokens_NK):
        raise InvalidRequest(
            f"a teacher's tokens must stand beside the datum's positions: it has {len(teacher.tokens_NK)} rows for "
            f"{len(weights_N)} positions"
        )
    return weights_N

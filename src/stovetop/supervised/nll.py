"""The negative log-likelihood of data, per token and per byte: how surprised a model is by what it is trained, or
tested, on; and the evaluators that report it.

Shape suffixes: `D` datums, `N` positions of one datum.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from stovetop.client import TrainingClient
from stovetop.datasets import load_chats
from stovetop.supervised.data import ChatDatasetBuilderCommonConfig, conversations_to_data
from stovetop.tokenizing import Tokenizer
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


def compute_bpb(
    logprobs_D: Sequence[TensorData],
    weights_D: Sequence[TensorData],
    targets_D: Sequence[TensorData],
    tokenizer: Tokenizer,
) -> float:
    """Bits per byte: what the text costs, -Σ log₂ p, over its length in UTF-8. Unlike an NLL per token it compares
    models of different tokenizers.

    Tokens count that have a weight, whatever it is, and are text: those of the tokenizer's added vocabulary, the end of
    a turn among them, count neither as cost nor as length. Without any text: NaN, and a warning.
    """
    costs = [
        text_cost(logprobs_N, weights_N, targets_N, tokenizer)
        for logprobs_N, weights_N, targets_N in zip(logprobs_D, weights_D, targets_D, strict=True)
    ]
    num_bytes = sum(cost.num_bytes for cost in costs)
    if num_bytes == 0:
        log.warning("none of these %d datums trains on text: they have no bits per byte", len(targets_D))
        return math.nan
    return sum(cost.bits for cost in costs) / num_bytes


class TextCost(NamedTuple):
    """Of the text of one datum."""

    bits: float
    num_bytes: int  # in UTF-8


def text_cost(logprobs_N: TensorData, weights_N: TensorData, targets_N: TensorData, tokenizer: Tokenizer) -> TextCost:
    """What `compute_bpb` sums over the datums."""
    ends = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    special = [*tokenizer.get_added_vocab().values(), *ends]
    is_text_N = (weights_N.array != 0) & ~np.isin(targets_N.array, special)
    nats, num_bytes = -float(logprobs_N.array[is_text_N].sum(dtype=np.float64)), 0
    # Neighbours are decoded together, as a character may be made of several tokens.
    for is_text, run in groupby(zip(targets_N.array.tolist(), is_text_N.tolist(), strict=True), itemgetter(1)):
        if is_text:
            num_bytes += len(tokenizer.decode([token for token, _ in run]).encode())
    return TextCost(nats / math.log(2), num_bytes)


@dataclass(frozen=True, slots=True)
class NLLEvaluator:
    """A TrainingClientEvaluator: the mean NLL of held-out data, as `<name>/nll`; with a tokenizer also its bits per
    byte, as `<name>/bpb`."""

    data_D: Sequence[Datum]
    name: str = "test"
    tokenizer: Tokenizer | None = None

    async def __call__(self, client: TrainingClient) -> dict[str, float]:
        output = await client.forward(self.data_D, "cross_entropy")
        metrics = {f"{self.name}/nll": mean_nll(output, self.data_D)}
        if self.tokenizer is not None:
            logprobs_D = [outputs["logprobs"] for outputs in output.loss_fn_outputs]
            weights_D, targets_D = (
                [datum.loss_fn_inputs[name] for datum in self.data_D] for name in ("weights", "target_tokens")
            )
            metrics[f"{self.name}/bpb"] = compute_bpb(logprobs_D, weights_D, targets_D, self.tokenizer)
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationFileEvaluatorBuilder:
    """An NLLEvaluator of all chats of a file, each token counted alike."""

    common_config: ChatDatasetBuilderCommonConfig  # batch_size is not read: the file is one batch
    file_path: str  # or any other source that `datasets.load_chats` knows
    name: str = "test"

    def __call__(self) -> NLLEvaluator:
        config, renderer = self.common_config, self.common_config.renderer()
        chats = load_chats(self.file_path)
        data_D = conversations_to_data(chats, renderer, config.max_length, config.train_on_what, reduction="none")
        return NLLEvaluator(data_D, self.name, renderer.tokenizer)

"""Comparisons from rows, and data from comparisons: pairs for the losses on pairs, chats for preference models. How
the rows of a named dataset are read is in its task.

Shape suffixes: `D` datums, `N` positions of one datum, `P` pairs.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from stovetop.datasets import Row, load_rows, shuffled, split_rows
from stovetop.errors import InvalidRequest
from stovetop.preference.comparison_renderer import ComparisonRenderer, ComparisonRendererFromChatRenderer
from stovetop.preference.types import LabeledComparison, labeled_comparison_from_json
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.supervised.data import (
    SupervisedDataset,
    SupervisedDatasetFromRows,
    conversation_to_datum,
    datum_from_model_input_weights,
    make_renderer,
)
from stovetop.supervised.logprobs import full_sequence
from stovetop.supervised.untrainable import OnUntrainable
from stovetop.types import Datum, ModelInput

log = logging.getLogger(__name__)


# ---- rows to comparisons -----------------------------------------------------------------------------------------


class RowSets(NamedTuple):
    """Rows to train on and rows held out."""

    train: Sequence[Row]
    test: Sequence[Row]


class LabeledComparisons(NamedTuple):
    """What a source came to. No comparison is in both sets."""

    train: Sequence[LabeledComparison]
    test: Sequence[LabeledComparison]
    num_skipped: int  # rows that were no comparison


class ComparisonDatasetBuilder(Protocol):
    """The config from which comparisons are made."""

    def get_labeled_comparisons(self) -> LabeledComparisons:
        """All comparisons, read now: those to train on and those held out."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonDatasetBuilderFromRows:
    """Comparisons of a source that `datasets.load_rows` knows, or of a training and a test source. A row that
    `example_to_labeled_comparison` has no use for (None) is left out, and counted."""

    source: str
    example_to_labeled_comparison: Callable[[Row], LabeledComparison | None]
    split: str | None = None  # of a hub's dataset
    test_source: str | None = None  # None: test_size comparisons of the source
    test_split: str | None = None  # of a hub's dataset; alone: of the same one
    test_size: int = 0  # comparisons held out: at most so many, and never more than half
    shuffle_seed: int = 0  # of the order, and thereby of which are held out

    def get_train_and_test_datasets(self) -> RowSets:
        """The rows, shuffled, before anything is made of them."""
        rows = load_rows(self.source, split=self.split)
        if self.test_source is None and self.test_split is None:
            train_rows, test_rows = split_rows(rows, min(self.test_size, len(rows) // 2), self.shuffle_seed)
            return RowSets(train_rows, test_rows)
        test_rows = load_rows(self.test_source or self.source, split=self.test_split)
        return RowSets(shuffled(rows, self.shuffle_seed), test_rows)

    def get_labeled_comparisons(self) -> LabeledComparisons:
        train_rows, test_rows = self.get_train_and_test_datasets()
        train = self._comparisons(train_rows, self.source)
        test = self._comparisons(test_rows, self.test_source or self.source)
        num_rows = len(train_rows) + len(test_rows)
        num_skipped = num_rows - len(train) - len(test)
        if not train:
            raise InvalidRequest(f"none of the {len(train_rows)} rows to train on is a comparison: {self.source!r}")
        if num_skipped:
            log.warning("%d of %d rows of %s are no comparison and left out", num_skipped, num_rows, self.source)
        return LabeledComparisons(train, test, num_skipped)

    def _comparisons(self, rows: Sequence[Row], source: str) -> list[LabeledComparison]:
        comparisons: list[LabeledComparison] = []
        for row in rows:
            try:
                comparison = self.example_to_labeled_comparison(row)
            except InvalidRequest as error:
                raise InvalidRequest(f"{source}: {error}: {str(row)[:200]}") from error
            comparisons.extend([] if comparison is None else [comparison])
        return comparisons


def comparisons_from_jsonl(
    train_path: str, test_path: str | None = None, *, test_size: int = 0
) -> ComparisonDatasetBuilderFromRows:
    """From files of your own. A line is `types.labeled_comparison_to_json`, or has `prompt`, `chosen` and `rejected`,
    each a string or a list of messages (`types.chosen_and_rejected`). A row that is neither is an error."""
    return ComparisonDatasetBuilderFromRows(
        source=train_path,
        example_to_labeled_comparison=labeled_comparison_from_json,
        test_source=test_path,
        test_size=test_size,
    )


# ---- comparisons to pairs ----------------------------------------------------------------------------------------


def comparison_to_pair(labeled: LabeledComparison, renderer: Renderer, max_length: int | None = None) -> list[Datum]:
    """The chosen answer and the rejected one, each after the prompt; nothing for a tie. The tokens of the answers have
    weight 1, the end of the turn included, and those of the prompt 0: the losses on pairs need sums, so nothing is
    divided by lengths here."""
    answers = labeled.answers()
    if answers is None:
        return []
    prompt = [_marked(message, trainable=False) for message in labeled.comparison.prompt_conversation]
    return [
        conversation_to_datum(
            [*prompt, *(_marked(message, trainable=message["role"] == "assistant") for message in answer)],
            renderer,
            max_length,
            TrainOnWhat.CUSTOMIZED,
            reduction="none",
        )
        for answer in answers
    ]


def with_mismatched(data_D: Sequence[Datum]) -> list[Datum]:
    """Pairs, and behind them as many datums in which each prompt is followed by the answer, of the same side, of the
    next pair; the last by that of the first. That is what `losses.KTO` estimates its KL from. No answer meets its own
    prompt, so it takes at least two pairs."""
    if len(data_D) < 4 or len(data_D) % 2:
        raise InvalidRequest(
            "answers to other prompts need at least two pairs, for the answer of a single pair has no other prompt; "
            f"raise the batch size. Datums: {len(data_D)}"
        )
    split_D = [_split(datum) for datum in data_D]
    rotated_D = [*split_D[2:], *split_D[:2]]
    return [*data_D, *(_joined(own, other) for own, other in zip(split_D, rotated_D, strict=True))]


class _Split(NamedTuple):
    """The tokens of a datum before its first weight, and from there on with their weights."""

    prompt: list[int]
    answer: list[int]
    answer_weights: list[float]


def _split(datum: Datum) -> _Split:
    weights_N = datum.loss_fn_inputs["weights"].array
    tokens = full_sequence(datum).to_ints()
    if not weights_N.any():
        raise InvalidRequest(f"an answer needs a token with a weight; this datum has none: {tokens[:20]} ...")
    start = int(np.flatnonzero(weights_N)[0])
    return _Split(tokens[: start + 1], tokens[start + 1 :], weights_N[start:].tolist())


def _joined(own: _Split, other: _Split) -> Datum:
    tokens = [*own.prompt, *other.answer]
    weights = [0.0] * (len(own.prompt) - 1) + other.answer_weights
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def _marked(message: Message, *, trainable: bool) -> Message:
    marked = message.copy()
    marked["trainable"] = trainable
    return marked


class DPODataset:
    """A SupervisedDataset of pairs: at every even index of a batch a chosen answer, behind it the rejected one.
    `batch_size` counts comparisons. Ties teach nothing here: they are left out, and counted in `num_ties`. A pair with
    more than `max_length` tokens on a side loses the end of that answer; `num_cut` counts those given out so far. Where
    nothing is left of an answer the pair is left out, and `untrainable` says why."""

    def __init__(
        self,
        comparisons: Sequence[LabeledComparison],
        batch_size: int,
        renderer: Renderer,
        *,
        max_length: int | None = None,
        drop_last: bool = False,
        on_untrainable: OnUntrainable = "skip",
    ) -> None:
        decided = [labeled for labeled in comparisons if labeled.answers() is not None]
        self.num_ties = len(comparisons) - len(decided)
        self.num_cut = 0
        self._renderer = renderer
        self._max_length = max_length
        self._pairs = SupervisedDatasetFromRows(
            decided, batch_size, flatmap_fn=self._pair, drop_last=drop_last, on_untrainable=on_untrainable
        )
        self.untrainable = self._pairs.untrainable  # why each pair that is left out is, by its index without the ties
        self.num_cut = 0  # those that were made to find what cannot be trained on were not given out

    def set_epoch(self, seed: int) -> None:
        self._pairs.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._pairs)

    def get_batch(self, index: int) -> list[Datum]:
        """Datums of batch `index`: chosen, rejected, chosen, rejected ... Rows that have nothing to train are left
        out."""
        return self._pairs.get_batch(index)

    def _pair(self, labeled: LabeledComparison) -> list[Datum]:
        pair = comparison_to_pair(labeled, self._renderer)
        if self._max_length is None or all(datum.model_input.length < self._max_length for datum in pair):
            return pair
        if self.num_cut == 0:
            log.warning("a pair has more than max_length=%d tokens on a side: it loses its end", self._max_length)
        self.num_cut += 1
        return comparison_to_pair(labeled, self._renderer, self._max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class DPODatasetBuilderFromComparisons:
    """Pairs to train on, and to test on if the comparisons have a test set."""

    comparison_builder: ComparisonDatasetBuilder
    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int  # comparisons
    max_length: int | None = None  # tokens of prompt and answer; None: as long as they are
    model_name_for_images: str | None = None  # whose image processor counts their tokens; None: there are no images

    def __call__(self) -> tuple[DPODataset, DPODataset | None]:
        renderer = make_renderer(self.renderer_name, self.model_name_for_tokenizer, self.model_name_for_images)
        train, test, _ = self.comparison_builder.get_labeled_comparisons()
        return (
            DPODataset(train, self.batch_size, renderer, max_length=self.max_length),
            DPODataset(test, self.batch_size, renderer, max_length=self.max_length) if test else None,
        )


# ---- comparisons to data for a preference model ------------------------------------------------------------------


def comparison_to_datum(
    labeled: LabeledComparison, comparison_renderer: ComparisonRenderer, max_length: int | None = None
) -> Datum:
    """The comparison as a judge reads it, with its label as the one token to train on."""
    example = comparison_renderer.to_model_input_weights(labeled)
    return datum_from_model_input_weights(example.model_input, example.weights, max_length)


def preference_model_dataset(
    comparisons: Sequence[LabeledComparison],
    batch_size: int,
    comparison_renderer: ComparisonRenderer,
    *,
    max_length: int | None = None,
    swap: bool = True,
    drop_last: bool = False,
    on_untrainable: OnUntrainable = "skip",
) -> SupervisedDataset:
    """Batches of `batch_size` comparisons, ties included; with `swap` each in both orders, one behind the other. A
    comparison whose label lies beyond `max_length` is left out and reported."""

    def data(labeled: LabeledComparison) -> list[Datum]:
        orders = [labeled, labeled.swap()] if swap else [labeled]
        return [comparison_to_datum(one, comparison_renderer, max_length) for one in orders]

    return SupervisedDatasetFromRows(
        comparisons, batch_size, flatmap_fn=data, drop_last=drop_last, on_untrainable=on_untrainable
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDatasetBuilderFromComparisons:
    """Comparisons to train a preference model on. Those to test on come in both orders, so that a model which has
    learned a position to be the better one is right in half of them."""

    comparison_builder: ComparisonDatasetBuilder
    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int  # comparisons
    max_length: int | None = None  # tokens; a longer comparison has lost its label, and is left out and reported
    swap: bool = True  # each comparison to train on in both orders, so that no position is learned to be the better

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        renderer = make_renderer(self.renderer_name, self.model_name_for_tokenizer, None)
        dataset = partial(
            preference_model_dataset,
            batch_size=self.batch_size,
            comparison_renderer=ComparisonRendererFromChatRenderer(renderer),
            max_length=self.max_length,
        )
        train, test, _ = self.comparison_builder.get_labeled_comparisons()
        return dataset(train, swap=self.swap), dataset(test, swap=True) if test else None

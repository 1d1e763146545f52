"""From chats to data for supervised learning: one chat to datums, many to batches. How a chat becomes tokens and
weights is its renderer's business; where rows come from, and in which order, that of `datasets`.

Every datum made here has exactly `target_tokens` and `weights`, and at least one weight that is not zero.

Shape suffixes: `N` tokens of one example.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from stovetop.datasets import interleave, load_chats, shuffled, split_rows
from stovetop.errors import InvalidRequest, NothingToTrain, UnknownName
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer, TrainOnWhat
from stovetop.renderers.images import get_image_processor
from stovetop.renderers.messages import Message
from stovetop.supervised.untrainable import OnUntrainable, Row, make_rows, naming_row
from stovetop.tokenizer import get_tokenizer
from stovetop.types import Datum, EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk

log = logging.getLogger(__name__)

Reduction = Literal["mean", "sum", "none"]
"""What the loss of one example is, as losses sum over tokens. "mean": weights are divided by their sum, so that a long
answer counts as much as a short one. "sum" and "none": each token keeps the weight that the renderer gave it."""

_WORTH_A_WARNING = 0.1  # share of examples that were cut


# ---- one example -------------------------------------------------------------------------------------------------


def create_rightshifted_model_input_and_leftshifted_targets(
    chunks: Sequence[ModelInputChunk],
) -> tuple[ModelInput, list[int]]:
    """Inputs without the last token, and the token that follows each input: [1, 2, 3] -> [1, 2], [2, 3]. Where an image
    follows there is no token to predict, so the target is 0, to be given weight 0. The last chunk must be text."""
    targets: list[int] = []
    for chunk in chunks:
        targets += _tokens_or_zeros(chunk)
    if len(targets) < 2:
        raise InvalidRequest(f"a sequence needs at least two tokens, to predict one from another: {len(targets)}")
    *before, last = chunks
    if isinstance(last, ImageChunk) or not last.tokens:
        raise InvalidRequest(f"a sequence must end with text, for there is no token to predict in: {last}")
    del targets[0]
    shortened = [last.first(-1)] if len(last.tokens) > 1 else []
    return ModelInput([*before, *shortened]), targets


def datum_from_model_input_weights(
    model_input: ModelInput,
    weights_N: Sequence[float] | npt.NDArray[np.floating],
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> Datum:
    """A datum of at most `max_length` tokens, the last target included. What is over is cut from the right: images as a
    whole, and then those at the end. Weights are those of the tokens, and move with the targets."""
    weights_N = np.asarray(weights_N, np.float32)
    if len(weights_N) != model_input.length:
        raise InvalidRequest(f"weights and tokens differ in number: {len(weights_N)}, {model_input.length}")
    kept = ModelInput(_cut(model_input.chunks, max_length))
    weights = weights_N[1 : kept.length]
    if not weights.any():
        raise NothingToTrain(_nothing_to_train_on(weights_N, max_length))
    shifted, target_tokens = create_rightshifted_model_input_and_leftshifted_targets(kept.chunks)
    return Datum(shifted, {"target_tokens": target_tokens, "weights": _reduced(weights, reduction)})


def conversation_to_datum(
    conversation: Sequence[Message],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> Datum:
    """The whole chat as one datum."""
    example = renderer.build_supervised_example(conversation, train_on_what)
    return datum_from_model_input_weights(example.model_input, example.weights, max_length, reduction)


def conversations_to_data(
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
    *,
    on_untrainable: OnUntrainable = "skip",
) -> list[Datum]:
    """The data of all chats in one list: `data_of_chats` says which."""
    by_chat = data_of_chats(
        conversations, renderer, max_length, train_on_what, reduction, on_untrainable=on_untrainable
    )
    return list(chain.from_iterable(by_chat.data_of_chat))


class ChatData(NamedTuple):
    """The data of each chat that has something to train on, in the order of the chats; and why the others, by their
    index, have not."""

    data_of_chat: list[list[Datum]]
    untrainable: dict[int, str]
    what: str = "chats"  # as messages call them


def data_of_chats(
    conversations: Sequence[Sequence[Message]],
    renderer: Renderer,
    max_length: int | None,
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
    *,
    on_untrainable: OnUntrainable = "skip",
    context_length: int | None = None,
    indices: Sequence[int] | None = None,
) -> ChatData:
    """All chats, in their order. Each is one datum, or as many as its renderer needs to show every trained message as
    it would be sampled (`build_supervised_examples`). Errors name the chat by its index, or by what `indices` has for
    it: where it was in its source. Chats with nothing to train on are left out; the log names them, and says so if many
    others had to be cut. One that is longer than `context_length`, the model's own, is refused."""
    maker = _DatumMaker(renderer, max_length, train_on_what, reduction, context_length)
    made = make_rows(conversations, maker, on_untrainable, indices)
    maker.warn_of_cuts()
    return ChatData(list(made.made.values()), made.untrainable)


@dataclass(slots=True)
class _DatumMaker:
    """Makes data of chats, and counts the examples that it had to cut."""

    renderer: Renderer
    max_length: int | None
    train_on_what: TrainOnWhat
    reduction: Reduction
    context_length: int | None = None
    num_examples: int = 0
    num_cut: int = 0

    def __call__(self, conversation: Sequence[Message]) -> list[Datum]:
        examples = self.renderer.build_supervised_examples(conversation, self.train_on_what)
        self.num_examples += len(examples)
        if self.max_length is not None:
            self.num_cut += sum(example.model_input.length > self.max_length for example in examples)
        data: list[Datum] = []
        for number, (tokens, weights_N) in enumerate(examples, start=1):
            try:
                data.append(datum_from_model_input_weights(tokens, weights_N, self.max_length, self.reduction))
            except NothingToTrain:  # a later answer lies beyond max_length: the earlier ones are trained
                if number == len(examples) and not data:
                    raise
        self._refuse_too_long(data)
        return data

    def _refuse_too_long(self, data: list[Datum]) -> None:
        longest = max((datum.model_input.length for datum in data), default=0)
        if self.context_length is not None and longest > self.context_length:
            raise InvalidRequest(
                f"it has {longest} tokens, and the model's context is {self.context_length}; set max_length to "
                f"{self.context_length} to cut off what is over, or leave the row out"
            )

    def warn_of_cuts(self) -> bool:
        """Warns if many were cut, and says whether it did."""
        many = self.num_cut > _WORTH_A_WARNING * self.num_examples
        if many:
            log.warning(
                "%d of %d examples have more than max_length=%s tokens, and lost their end",
                self.num_cut,
                self.num_examples,
                self.max_length,
            )
        return many


def _reduced(weights_N: npt.NDArray[np.float32], reduction: Reduction) -> npt.NDArray[np.float32]:
    match reduction:
        case "mean":
            total = float(weights_N.sum(dtype=np.float64))
            if not total > 0:
                raise InvalidRequest(f"reduction='mean' needs weights with a positive sum: {total}")
            return (weights_N / total).astype(np.float32)
        case "sum" | "none":
            return weights_N
        case _:
            raise UnknownName("reduction", reduction, get_args(Reduction))


def _cut(chunks: Sequence[ModelInputChunk], max_length: int | None) -> list[ModelInputChunk]:
    kept: list[ModelInputChunk] = []
    room = ModelInput(chunks).length if max_length is None else max_length
    for chunk in chunks:
        if chunk.length > room:
            if isinstance(chunk, EncodedTextChunk) and room > 0:
                kept.append(chunk.first(room))
            break
        kept.append(chunk)
        room -= chunk.length
    while kept and (isinstance(kept[-1], ImageChunk) or kept[-1].length == 0):
        kept.pop()
    return kept


def _tokens_or_zeros(chunk: ModelInputChunk) -> Sequence[int]:
    return chunk.tokens if isinstance(chunk, EncodedTextChunk) else [0] * chunk.length


def _nothing_to_train_on(weights_N: npt.NDArray[np.float32], max_length: int | None) -> str:
    trained = np.flatnonzero(weights_N[1:]) + 1
    if len(trained) == 0:
        return f"an example has no token to train on: none of its {len(weights_N)} tokens has a weight"
    return (
        f"max_length={max_length} cuts off all that would be trained on: of the example's {len(weights_N)} tokens the "
        f"first with a weight is number {trained[0] + 1}. Raise max_length or leave the row out"
    )


# ---- batches -----------------------------------------------------------------------------------------------------


class SupervisedDataset(Protocol):
    """Batches of one epoch, in an order that the epoch's seed decides."""

    def get_batch(self, index: int) -> list[Datum]: ...

    def __len__(self) -> int:
        """How many batches an epoch has."""
        ...

    def set_epoch(self, seed: int) -> None:
        """Shuffles anew: the rows come in the order of numpy's `default_rng(seed).permutation(num_rows)`."""
        ...


class SupervisedDatasetFromRows(Generic[Row]):
    """Rows, `batch_size` at a time, made into data when their batch is asked for: each row into one datum by `map_fn`,
    or into several by `flatmap_fn`, which stay together. `batch_size` counts rows, however many datums they make. The
    last batch of an epoch is smaller where rows are left; with `drop_last` these rows are left out of the epoch (each
    epoch's order leaves out others).

    Rows with nothing to train on are found once, when the dataset is made, and left out: `untrainable` has the reason
    of each, by its index. With on_untrainable="refuse" the first one is an error when its batch is asked for."""

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        *,
        map_fn: Callable[[Row], Datum] | None = None,
        flatmap_fn: Callable[[Row], Sequence[Datum]] | None = None,
        drop_last: bool = False,
        on_untrainable: OnUntrainable = "skip",
    ) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._make = data_maker(map_fn, flatmap_fn)
        self.untrainable: dict[int, str] = {}
        self._indices: Sequence[int] = range(len(rows))  # of the rows to train on
        if on_untrainable != "refuse":
            made = make_rows(rows, lambda row: bool(self._make(row)), on_untrainable)
            self._indices, self.untrainable = list(made.made), made.untrainable
        num_rows = len(self._indices)
        if batch_size < 1 or num_rows < (batch_size if drop_last else 1):
            raise InvalidRequest(f"batch_size must be in 1..{num_rows}, the number of rows: {batch_size}")
        self._num_batches = num_rows // batch_size if drop_last else -(-num_rows // batch_size)
        self.set_epoch(0)

    def set_epoch(self, seed: int) -> None:
        self._order = shuffled(self._indices, seed)

    def __len__(self) -> int:
        return self._num_batches

    def get_batch(self, index: int) -> list[Datum]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        chosen = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        data: list[Datum] = []
        for row_index in chosen:
            with naming_row(row_index):
                data += self._make(self._rows[row_index])
        return data


def data_maker(
    map_fn: Callable[[Row], Datum] | None, flatmap_fn: Callable[[Row], Sequence[Datum]] | None
) -> Callable[[Row], Sequence[Datum]]:
    """The one of the two that there is, as a function to several datums."""
    if map_fn is not None and flatmap_fn is None:
        return lambda row: [map_fn(row)]
    if flatmap_fn is not None and map_fn is None:
        return flatmap_fn
    raise InvalidRequest("a dataset takes exactly one of map_fn and flatmap_fn")


class ChatDataset:
    """A SupervisedDataset of chats: as `data_of_chats`, but batch by batch; `batch_size` counts chats. When more than a
    tenth of the examples of an epoch so far had to be cut, the log says so, once."""

    def __init__(
        self,
        chats: Sequence[Sequence[Message]],
        batch_size: int,
        renderer: Renderer,
        *,
        max_length: int | None = None,
        train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        reduction: Reduction = "mean",
        drop_last: bool = False,
        on_untrainable: OnUntrainable = "skip",
    ) -> None:
        self._maker = _DatumMaker(renderer, max_length, train_on_what, reduction)
        self._batches = SupervisedDatasetFromRows(
            chats, batch_size, flatmap_fn=self._maker, drop_last=drop_last, on_untrainable=on_untrainable
        )
        self.untrainable = self._batches.untrainable  # why each chat that is left out is, by its index
        self.set_epoch(0)

    def set_epoch(self, seed: int) -> None:
        self._maker.num_examples = self._maker.num_cut = 0
        self._warned = False
        self._batches.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._batches)

    def get_batch(self, index: int) -> list[Datum]:
        data = self._batches.get_batch(index)
        self._warned = self._warned or self._maker.warn_of_cuts()
        return data


# ---- configs -----------------------------------------------------------------------------------------------------


def make_renderer(renderer_name: str, model_name_for_tokenizer: str, model_name_for_images: str | None) -> Renderer:
    """A renderer from names. The image processor of the last counts the tokens of images; None: there are none."""
    image_processor = None if model_name_for_images is None else get_image_processor(model_name_for_images)
    return get_renderer(renderer_name, get_tokenizer(model_name_for_tokenizer), image_processor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDatasetBuilderCommonConfig:
    """What every dataset of chats needs to be told."""

    model_name_for_tokenizer: str
    renderer_name: str
    batch_size: int  # chats; the last batch of an epoch may have fewer
    max_length: int | None = None  # tokens of one example; None: as long as it is
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    model_name_for_images: str | None = None  # whose image processor counts their tokens; None: chats have no images
    drop_last: bool = False  # leave out of each epoch the chats that do not fill a last batch
    on_untrainable: OnUntrainable = "skip"  # of chats with nothing to train on: leave out and report, or "refuse"

    def renderer(self) -> Renderer:
        return make_renderer(self.renderer_name, self.model_name_for_tokenizer, self.model_name_for_images)

    def dataset(self, chats: Sequence[Sequence[Message]], *, drop_last: bool | None = None) -> ChatDataset:
        """`drop_last` instead of the config's: a test set is used whole."""
        return ChatDataset(
            chats,
            self.batch_size,
            self.renderer(),
            max_length=self.max_length,
            train_on_what=self.train_on_what,
            drop_last=self.drop_last if drop_last is None else drop_last,
            on_untrainable=self.on_untrainable,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FromConversationFileBuilder:
    """Chats of a JSONL file, one `{"messages": [...]}` a line. No chat is in both sets."""

    common_config: ChatDatasetBuilderCommonConfig
    file_path: str  # or any other source that `datasets.load_chats` knows
    test_size: int = 0  # chats held out
    shuffle_seed: int = 0  # decides which

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        split = split_rows(load_chats(self.file_path), self.test_size, self.shuffle_seed)
        train = self.common_config.dataset(split.train)
        return train, self.common_config.dataset(split.test, drop_last=False) if split.test else None


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedChatDatasetBuilder:
    """Chats of several files, each with its share of the chats of an epoch. A file that is smaller than its share gives
    chats again, though none twice before all others of it once."""

    common_config: ChatDatasetBuilderCommonConfig
    file_paths: tuple[str, ...]  # or other sources that `datasets.load_chats` knows
    weights: tuple[float, ...]  # of the files, in any unit
    num_chats: int  # of an epoch
    test_size: int = 0  # chats held out of each file
    shuffle_seed: int = 0  # decides which, and the order of the rest

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        splits = [split_rows(load_chats(path), self.test_size, self.shuffle_seed) for path in self.file_paths]
        chats = interleave([split.train for split in splits], self.weights, self.num_chats, self.shuffle_seed)
        train = self.common_config.dataset(chats)
        test = [chat for split in splits for chat in split.test]
        return train, self.common_config.dataset(test, drop_last=False) if test else None

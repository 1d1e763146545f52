"""The values that go into and come out of the four verbs. Names and fields follow the public Tinker SDK.

Glossary. A *token* is an int. A *chunk* is a run of tokens or one image. A *model input* is a sequence of chunks.
A *datum* is one sequence to train on: a model input and the named tensors its loss needs. An *adapter* is the set of
LoRA factors that one training client owns. To *sample* is to draw tokens from a model.

Shape suffixes: `N` tokens of one datum, `K` alternatives per position.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from stovetop.errors import InvalidRequest
from stovetop.rest_types import AdamOptimizerConfig as AdamOptimizerConfig
from stovetop.rest_types import Checkpoint as Checkpoint
from stovetop.rest_types import CheckpointsListResponse as CheckpointsListResponse
from stovetop.rest_types import CheckpointType as CheckpointType
from stovetop.rest_types import Cursor as Cursor
from stovetop.rest_types import OptimizerConfig as OptimizerConfig
from stovetop.rest_types import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
from stovetop.rest_types import TrainingRun as TrainingRun
from stovetop.rest_types import TrainingRunsResponse as TrainingRunsResponse
from stovetop.rest_types import WeightsInfoResponse as WeightsInfoResponse
from stovetop.value import Value

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["int64", "float32"]
StopReason = Literal["stop", "length"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]  # see losses.py
SamplingClientKind = Literal["snapshot"]
ModelID = str

_NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {"int64": np.dtype(np.int64), "float32": np.dtype(np.float32)}


# ---- what the model reads ----------------------------------------------------------------------------------------


def _token_ids(tokens: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(tokens)
    if _are_plain(ids):
        return ids
    try:
        return tuple(map(operator.index, ids))
    except TypeError as error:
        raise InvalidRequest(f"token ids must be integers: {error}") from error


def _are_plain(ids: tuple[int, ...]) -> bool:
    """Whether all are Python's own integers: only their sum is one, and nothing tells it faster. (Those of numpy, which
    would overflow in a sum, are seen by the first.)"""
    try:
        return not ids or (type(ids[0]) is int and type(sum(ids)) is int)
    except TypeError:
        return False


@dataclass(frozen=True, slots=True)
class EncodedTextChunk(Value):
    """A run of token ids."""

    tokens: tuple[int, ...]
    type: Literal["encoded_text"] = "encoded_text"

    def __init__(self, tokens: Iterable[int], type: Literal["encoded_text"] = "encoded_text") -> None:
        object.__setattr__(self, "tokens", _token_ids(tokens))
        object.__setattr__(self, "type", type)

    @property
    def length(self) -> int:
        """Positions in the context: one for each token."""
        return len(self.tokens)

    def first(self, num_tokens: int) -> "EncodedTextChunk":
        """So many tokens from the left; with a negative number, all but so many."""
        return EncodedTextChunk._of_checked(self.tokens[:num_tokens])

    def followed_by(self, tokens: Iterable[int]) -> "EncodedTextChunk":
        """A new chunk with these tokens behind its own."""
        return EncodedTextChunk._of_checked(self.tokens + _token_ids(tokens))

    @classmethod
    def _of_checked(cls, tokens: tuple[int, ...]) -> Self:
        chunk = object.__new__(cls)
        object.__setattr__(chunk, "tokens", tokens)
        object.__setattr__(chunk, "type", "encoded_text")
        return chunk


@dataclass(frozen=True, slots=True)
class ImageChunk(Value):
    """One image as encoded bytes. `expected_tokens` is how many positions it takes in the context."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        """Positions in the context. Refused while `expected_tokens` is None."""
        if self.expected_tokens is None:
            raise InvalidRequest("an ImageChunk has a length only when expected_tokens is set: expected_tokens=None")
        return self.expected_tokens


ModelInputChunk = EncodedTextChunk | ImageChunk


@dataclass(frozen=True, slots=True)
class ModelInput(Value):
    """What the model reads: chunks in order. Values never change; `append` returns a new one."""

    chunks: tuple[ModelInputChunk, ...]

    def __init__(self, chunks: Iterable[ModelInputChunk] = ()) -> None:
        object.__setattr__(self, "chunks", tuple(chunks))

    @classmethod
    def empty(cls) -> Self:
        """No chunks: what an environment shows after its last step."""
        return cls(())

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> Self:
        """One chunk of these token ids; of none, no chunk."""
        chunk = EncodedTextChunk(tokens)
        return cls((chunk,) if chunk.tokens else ())

    def to_ints(self) -> list[int]:
        """All token ids; refused when there is an image among the chunks."""
        tokens: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if isinstance(chunk, ImageChunk):
                raise InvalidRequest(f"to_ints needs text chunks only; chunk {index} is an image: {chunk.format}")
            tokens.extend(chunk.tokens)
        return tokens

    @property
    def length(self) -> int:
        """Positions taken in the context, images included."""
        return sum([chunk.length for chunk in self.chunks])

    def append(self, chunk: ModelInputChunk) -> "ModelInput":
        """A new input with this chunk behind its own."""
        return ModelInput((*self.chunks, chunk))

    def append_int(self, token: int) -> "ModelInput":
        """One more token; it joins the last chunk if that is text."""
        if self.chunks and isinstance(last := self.chunks[-1], EncodedTextChunk):
            return ModelInput((*self.chunks[:-1], last.followed_by((token,))))
        return self.append(EncodedTextChunk((token,)))


# ---- what a loss reads -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A tensor of int64 or float32 that belongs to no framework. The array is read-only; two are equal when
    dtype, shape and every value are.

        TensorData.from_numpy(np.zeros(3, np.float32)).to_torch()
    """

    array: npt.NDArray[np.generic]

    def __init__(
        self, data: Iterable[float] | npt.NDArray[np.generic], dtype: TensorDtype, shape: Sequence[int] | None = None
    ) -> None:
        if dtype not in _NUMPY_DTYPES:
            raise InvalidRequest(f"TensorData dtype must be 'int64' or 'float32': {dtype!r}")
        array = _own_array(data, dtype)
        if shape is not None:
            if math.prod(shape) != array.size:
                raise InvalidRequest(f"TensorData has {array.size} values, which do not fill shape {tuple(shape)}")
            array = array.reshape(tuple(shape))
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    @classmethod
    def from_numpy(cls, array: npt.NDArray[np.generic]) -> Self:
        """Integers become int64, floats float32; anything else is refused."""
        if array.dtype.kind not in "iuf":
            raise InvalidRequest(f"TensorData holds integers or floats, not {array.dtype}")
        return cls(array, "float32" if array.dtype.kind == "f" else "int64")

    @classmethod
    def adopt(cls, array: npt.NDArray[np.generic]) -> Self:
        """Takes an int64 or float32 array as it is, without a copy: it becomes read-only, and nobody may hold another
        view of it that can be written to."""
        if array.dtype not in _NUMPY_DTYPES.values():
            raise InvalidRequest(f"TensorData adopts int64 and float32, not {array.dtype}")
        tensor = object.__new__(cls)
        array.flags.writeable = False
        object.__setattr__(tensor, "array", array)
        return tensor

    @classmethod
    def from_torch(cls, tensor: "torch.Tensor") -> Self:
        """A copy on the CPU, without gradient. Integers become int64, floats float32."""
        tensor = tensor.detach().cpu()
        return cls.from_numpy((tensor.float() if tensor.is_floating_point() else tensor).numpy())

    @property
    def dtype(self) -> TensorDtype:
        """ "int64" or "float32"."""
        return "int64" if self.array.dtype == np.int64 else "float32"

    @property
    def shape(self) -> list[int]:
        """One number for each axis; [] of a scalar."""
        return list(self.array.shape)

    @property
    def data(self) -> list[float]:
        """The values as one flat list."""
        return self.array.ravel().tolist()

    def tolist(self) -> list[float]:
        """The values in nested lists of this shape."""
        return self.array.tolist()

    def to_numpy(self) -> npt.NDArray[np.generic]:
        """The array itself, which is read-only."""
        return self.array

    def to_torch(self) -> "torch.Tensor":
        """A new tensor, which may be written to."""
        import torch

        return torch.tensor(self.array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.array, other.array, equal_nan=self.dtype == "float32")

    __hash__ = None  # pyright: ignore[reportAssignmentType]  an array has no cheap hash; equality is by value


def _own_array(data: Iterable[float] | npt.NDArray[np.generic], dtype: TensorDtype) -> npt.NDArray[np.generic]:
    """The same numbers in an array that nobody else holds."""
    given = _numbers(data)
    if given.dtype == _NUMPY_DTYPES[dtype]:
        return given.copy() if isinstance(data, np.ndarray) else given
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(_NUMPY_DTYPES[dtype])
    if dtype == "int64" and (changed := given[array != given]).size:
        raise InvalidRequest(f"TensorData of int64 needs whole numbers of 64 bits: {changed[0]}")
    return array


def _numbers(data: Iterable[float] | npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    try:
        array = np.asarray(data if isinstance(data, (np.ndarray, list, tuple)) else list(data))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"TensorData needs a rectangular array of numbers: {error}") from error
    if array.dtype.kind not in "iufb":
        raise InvalidRequest(f"TensorData needs a rectangular array of numbers, not of {array.dtype}")
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan:
    """A run of tokens that stood at `offset` and behind it in the prompt of the sampled sequence of this id."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan:
    """A run of tokens that stand at `offset` and behind it in the sampled sequence of this id."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self)


LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]
ProvenanceSpan = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans = Sequence[ProvenanceSpan]


def _check_span(span: ProvenanceSpan) -> None:
    name = type(span).__name__
    _require(span.sequence_id != "", f"{name}.sequence_id must not be empty", span.sequence_id)
    _require(span.offset >= 0, f"{name}.offset must not be negative", span.offset)
    _require(span.length >= 0, f"{name}.length must not be negative", span.length)


def _covering(what: str, spans: ProvenanceSpans, length: int) -> tuple[ProvenanceSpan, ...]:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise InvalidRequest(
            f"the provenance spans of {what} must cover its {length} positions, one after the other: {covered}"
        )
    return tuple(spans)


if TYPE_CHECKING:
    TensorLike = TensorData | npt.NDArray[np.generic] | torch.Tensor | Sequence[float]


def _tensor(name: str, value: "TensorLike") -> TensorData:
    """Lists take the dtype of their name: `target_tokens` int64, all others float32."""
    if isinstance(value, TensorData):
        return value
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    if isinstance(value, Sequence):
        return TensorData(value, "int64" if name == "target_tokens" else "float32")
    return TensorData.from_torch(value)


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to train on.

    Position i of `model_input` predicts `target_tokens[i]`: inputs and targets are the same sequence shifted by one.
    Which tensors a loss needs, and their shapes, stands in `losses.py`, and is checked when the datum is submitted.
    A custom loss may find any further tensor here under a name of its own.
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = field(default_factory=dict[str, TensorData])
    model_input_spans: tuple[ProvenanceSpan, ...] | None = None  # set by with_provenance
    loss_fn_input_spans: tuple[ProvenanceSpan, ...] | None = None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: "Mapping[str, TensorLike] | None" = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        inputs = {name: _tensor(name, value) for name, value in (loss_fn_inputs or {}).items()}
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", inputs)
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidRequest("a Datum has both model_input_spans and loss_fn_input_spans, or neither")
        if model_input_spans is not None:
            model_input_spans = _covering("model_input", model_input_spans, model_input.length)
        if loss_fn_input_spans is not None and (targets := inputs.get("target_tokens")) is not None:
            loss_fn_input_spans = _covering("target_tokens", loss_fn_input_spans, len(targets.array))
        object.__setattr__(self, "model_input_spans", model_input_spans)
        object.__setattr__(self, "loss_fn_input_spans", loss_fn_input_spans)

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> "Datum":
        """The same datum, which also says what each of its tokens was when it was sampled: `model_input` for the
        positions of the input, `loss_fn_inputs` for those of `target_tokens`. No loss of ours reads it."""
        return Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)


# ---- how to train and sample ---------------------------------------------------------------------------------------


def _require(ok: bool, what: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{what}: {value!r}")


@dataclass(frozen=True, slots=True)
class AdamParams(Value):
    """One AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101). beta2 is 0.95, not 0.999: with the few thousand
    steps of a post-training run a shorter memory of the squared gradient is the stable choice."""

    learning_rate: float = 1e-4  # step size; every step may have its own
    beta1: float = 0.9  # decay of the mean of the gradient
    beta2: float = 0.95  # decay of the mean of its square
    eps: float = 1e-12  # added to the root in the denominator
    weight_decay: float = 0.0  # decoupled: weights shrink by learning_rate * weight_decay
    grad_clip_norm: float = 0.0  # largest global gradient norm; 0 is off

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"AdamParams.{name} must be finite and at least 0", value)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"AdamParams.{name} must be in [0, 1)", value)
        _require(math.isfinite(self.eps) and self.eps > 0, "AdamParams.eps must be above 0", self.eps)


OptimParams = AdamParams  # the SDK's name for the parameters of any optimizer


@dataclass(frozen=True, slots=True)
class LoraConfig(Value):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): each chosen weight W acts as W + (alpha/rank)·B·A."""

    rank: int = 32
    seed: int | None = None  # of the initial A; B starts at zero
    train_unembed: bool = True  # the output head
    train_mlp: bool = True  # the feed-forward projections
    train_attn: bool = True  # the query, key, value and output projections
    alpha: float = 32.0

    def __post_init__(self) -> None:
        _require(self.rank > 0 and self.rank % 1 == 0, "LoRA rank must be a positive integer", self.rank)
        _require(math.isfinite(self.alpha) and self.alpha > 0, "LoRA alpha must be above 0", self.alpha)
        _require(
            self.train_unembed or self.train_mlp or self.train_attn,
            "at least one of train_attn, train_mlp, train_unembed must be true",
            False,
        )


@dataclass(frozen=True, slots=True)
class SamplingParams(Value):
    """How to draw tokens. Returned logprobs are those of the distribution at this temperature, before top-k and top-p
    (for temperature 0, those at temperature 1)."""

    max_tokens: int | None = None  # None: what the context leaves
    seed: int | None = None  # the same seed gives the same samples, whatever else runs; None: a fresh one
    stop: str | Sequence[str] | Sequence[int] | None = None  # besides the end-of-text token; [] turns all stops off
    temperature: float = 1.0  # 0 is argmax
    top_k: int = -1  # -1 is off
    top_p: float = 1.0  # 1 is off

    def __post_init__(self) -> None:
        max_tokens, stop, top_k = self.max_tokens, self.stop, self.top_k
        _require(max_tokens is None or max_tokens > 0, "SamplingParams.max_tokens must be positive", max_tokens)
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "SamplingParams.temperature must be finite and at least 0",
            self.temperature,
        )
        _require(top_k == -1 or top_k > 0, "SamplingParams.top_k must be -1 (off) or positive", top_k)
        _require(0 < self.top_p <= 1, "SamplingParams.top_p must be in (0, 1]", self.top_p)
        _require(self.seed is None or self.seed >= 0, "SamplingParams.seed must not be negative", self.seed)
        if stop is not None and not isinstance(stop, str):
            kinds = {str if isinstance(item, str) else int for item in stop}
            _require(len(kinds) <= 1, "SamplingParams.stop must hold strings or token ids, not both", list(stop))
        stops = (stop,) if isinstance(stop, str) else stop or ()
        _require("" not in stops, "SamplingParams.stop must not hold an empty string", stop)


# ---- what comes back -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """`loss_fn_outputs[i]["logprobs"]` has the shape of datum i's `target_tokens`; `metrics["loss:sum"]` is the loss,
    summed over the tokens of all datums."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OptimStepResponse(Value):
    """`grad_norm` (before clipping), `update_norm` (of the change of the weights), `skipped_nonfinite` (0 or 1)."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One drawn continuation. The stop token, where there is one, is the last token and has its logprob. The
    `sequence_id` is another for every sequence that is drawn."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    sequence_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """The continuations of one prompt. Prompt logprobs are at temperature 1; their first entry is None."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse(Value):
    """Where `save_state` has written: an absolute path, to be loaded or resumed from."""

    path: str


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse(Value):
    """Where `save_weights_for_sampler` has written: an absolute path, to be sampled from."""

    path: str


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse(Value):
    """What was loaded, as it was named."""

    path: str


@dataclass(frozen=True, slots=True)
class ModelData(Value):
    """`tokenizer_id` is a name or directory that `get_tokenizer` understands."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True, slots=True)
class GetInfoResponse(Value):
    """What a training client was made with."""

    model_data: ModelData
    model_id: ModelID
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None
    optimizer_config: OptimizerConfig = field(default_factory=AdamOptimizerConfig)
    user_metadata: dict[str, str] | None = None  # of the service and the client


@dataclass(frozen=True, slots=True)
class SupportedModel(Value):
    """A base model, its longest context in tokens, and what it can be used for."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse(Value):
    """What a service offers."""

    supported_models: list[SupportedModel]

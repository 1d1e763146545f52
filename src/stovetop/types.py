"""The values that go into and come out of the four verbs. Names and fields follow the public Tinker SDK.

Glossary. A *token* is an int. A *chunk* is a run of tokens or one image. A *model input* is a sequence of chunks.
A *datum* is one sequence to train on: a model input and the named tensors its loss needs. An *adapter* is the set of
LoRA factors that one training client owns. To *sample* is to draw tokens from a model.

Shape suffixes: `N` tokens of one datum, `K` alternatives per position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from stovetop.checks import check, take
from stovetop.errors import InvalidRequest
from stovetop.model_input import MODEL_INPUT as _MODEL_INPUT
from stovetop.model_input import EncodedTextChunk as EncodedTextChunk
from stovetop.model_input import ImageChunk as ImageChunk
from stovetop.model_input import ModelInput as ModelInput
from stovetop.model_input import ModelInputChunk as ModelInputChunk
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
from stovetop.rules import (
    ANY_NUMBER,
    Anything,
    DictOf,
    Instance,
    ListOf,
    Maybe,
    Text,
    Unfit,
    Whole,
    is_a,
    is_torch,
    number,
    shown,
)
from stovetop.tensors import TensorData as TensorData
from stovetop.tensors import TensorDtype as TensorDtype
from stovetop.value import Value

if TYPE_CHECKING:
    import torch

StopReason = Literal["stop", "length"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]  # see losses.py
SamplingClientKind = Literal["snapshot"]
ModelID = str

_NOT_EMPTY = Text("a string that is not empty", bool)


# ---- what a loss reads -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan:
    """A run of tokens that stood at `offset` and behind it in the prompt of the sampled sequence of this id."""

    sequence_id: Annotated[str, _NOT_EMPTY]
    offset: Annotated[int, Whole(0)] = 0
    length: Annotated[int, Whole(0)]

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan:
    """A run of tokens that stand at `offset` and behind it in the sampled sequence of this id."""

    sequence_id: Annotated[str, _NOT_EMPTY]
    offset: Annotated[int, Whole(0)] = 0
    length: Annotated[int, Whole(0)]

    def __post_init__(self) -> None:
        check(self)


LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]
ProvenanceSpan = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans = Sequence[ProvenanceSpan]
_SPANS = ListOf(Instance((PromptProvenanceSpan, SampledProvenanceSpan)))


def _covering(what: str, spans: ProvenanceSpans, length: int) -> tuple[ProvenanceSpan, ...]:
    spans = take(_SPANS, spans, f"Datum.{what}_spans")
    covered = sum(span.length for span in spans)
    if covered != length:
        raise InvalidRequest(
            f"Datum.{what}_spans: the spans of {what} must cover its {length} positions, one after the other: {covered}"
        )
    return tuple(spans)


if TYPE_CHECKING:
    TensorLike = TensorData | npt.NDArray[np.generic] | torch.Tensor | Sequence[float]


_FLOATS = frozenset({"weights", "logprobs", "advantages", "sequence_ratio_mask"})


def _tensor(name: str, value: "TensorLike") -> TensorData:
    """Lists take the dtype of their name: `target_tokens` int64, all others float32. So do the whole numbers of arrays
    and tensors under the names that the losses read as float32: a mask of 0 and 1 need not be made of floats."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  callers are not all typed
        raise InvalidRequest(f"Datum.loss_fn_inputs must have strings as keys: {shown(name)}")
    if isinstance(value, TensorData):
        return value
    try:
        if isinstance(value, Sequence):
            return TensorData(value, "int64" if name == "target_tokens" else "float32")
        if isinstance(value, np.ndarray) or is_torch(value):
            tensor = TensorData.from_numpy(value) if isinstance(value, np.ndarray) else TensorData.from_torch(value)
            return TensorData(tensor.array, "float32") if name in _FLOATS and tensor.dtype == "int64" else tensor
    except InvalidRequest as error:
        raise InvalidRequest(f"Datum.loss_fn_inputs[{name!r}]: {error}") from error
    raise InvalidRequest(
        f"Datum.loss_fn_inputs[{name!r}] must be a TensorData, a numpy array, a torch tensor or a list of numbers: "
        f"{shown(value)}"
    )


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
        inputs: Any = {} if loss_fn_inputs is None else loss_fn_inputs
        if type(inputs) is not dict and not is_a(inputs, Mapping):
            raise InvalidRequest(f"Datum.loss_fn_inputs must be a dictionary of tensors by name: {shown(inputs)}")
        if type(model_input) is not ModelInput:
            take(_MODEL_INPUT, model_input, "Datum.model_input")
        inputs = {name: _tensor(name, value) for name, value in cast("Mapping[str, TensorLike]", inputs).items()}
        object.__setattr__(self, "model_input", model_input)
        object.__setattr__(self, "loss_fn_inputs", inputs)
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidRequest("a Datum has both model_input_spans and loss_fn_input_spans, or neither")
        if model_input_spans is not None:
            model_input_spans = _covering("model_input", model_input_spans, model_input.length)
        if loss_fn_input_spans is not None and (targets := inputs.get("target_tokens")) is not None:
            loss_fn_input_spans = _covering("loss_fn_input", loss_fn_input_spans, len(targets.array))
        object.__setattr__(self, "model_input_spans", model_input_spans)
        object.__setattr__(self, "loss_fn_input_spans", loss_fn_input_spans)

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> "Datum":
        """The same datum, which also says what each of its tokens was when it was sampled: `model_input` for the
        positions of the input, `loss_fn_inputs` for those of `target_tokens`. No loss of ours reads it."""
        return Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)


# ---- how to train and sample ---------------------------------------------------------------------------------------


Rank = Annotated[int, Whole(1, 65_536)]  # no linear of any model is wider
Seed = Annotated[int, Whole(0)]


@dataclass(frozen=True, slots=True)
class AdamParams(Value):
    """One AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101). beta2 is 0.95, not 0.999: with the few thousand
    steps of a post-training run a shorter memory of the squared gradient is the stable choice."""

    learning_rate: Annotated[float, number(at_least=0)] = 1e-4  # step size; every step may have its own
    beta1: Annotated[float, number(at_least=0, below=1)] = 0.9  # decay of the mean of the gradient
    beta2: Annotated[float, number(at_least=0, below=1)] = 0.95  # decay of the mean of its square
    eps: Annotated[float, number(above=0)] = 1e-12  # added to the root in the denominator
    weight_decay: Annotated[float, number(at_least=0)] = (
        0.0  # decoupled: weights shrink by learning_rate * weight_decay
    )
    grad_clip_norm: Annotated[float, number(at_least=0)] = 0.0  # largest global gradient norm; 0 is off


OptimParams = AdamParams  # the SDK's name for the parameters of any optimizer


@dataclass(frozen=True, slots=True)
class LoraConfig(Value):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): each chosen weight W acts as W + (alpha/rank)·B·A."""

    rank: Rank = 32
    seed: Seed | None = None  # of the initial A; B starts at zero
    train_unembed: bool = True  # the output head
    train_mlp: bool = True  # the feed-forward projections
    train_attn: bool = True  # the query, key, value and output projections
    alpha: Annotated[float, number(above=0)] = 32.0

    def __post_init__(self) -> None:
        check(self)
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise InvalidRequest("at least one of train_attn, train_mlp, train_unembed must be true: all are False")


@dataclass(frozen=True, slots=True)
class _Stop:
    """What `SamplingParams.stop` takes. A list is copied."""

    says: str = (
        "a string, or a list of strings or token ids, not both ([] for no stop at all); strings are not empty, ids not "
        "negative"
    )

    def fits(self, value: Any) -> bool:
        return False  # a list is copied, and a string is seen as soon

    def taken(self, value: Any) -> Any:
        if _is_plain(value):
            return value[:]
        if is_a(value, str):
            return _NOT_EMPTY.taken(value)
        items = value.tolist() if is_a(value, np.ndarray) else value
        if not is_a(items, Sequence) or is_a(items, bytes, bytearray):
            raise Unfit(self, value)
        kinds: set[type] = set(map(type, items))
        strings = [issubclass(kind, str) for kind in kinds]
        if any(strings) and not all(strings):
            raise Unfit(self, value)
        return (_STRINGS if any(strings) else _TOKENS).taken(items)


def _is_plain(stop: Any) -> bool:
    """A list of strings, as most are."""
    return stop.__class__ is list and all([type(item) is str and item != "" and item.isascii() for item in stop])


_STRINGS, _TOKENS = ListOf(_NOT_EMPTY), ListOf(Whole(0))


@dataclass(frozen=True, slots=True)
class SamplingParams(Value):
    """How to draw tokens. Returned logprobs are those of the distribution at this temperature, before top-k and top-p
    (for temperature 0, those at temperature 1)."""

    max_tokens: Annotated[int, Whole(1)] | None = None  # None: what the context leaves
    seed: Seed | None = None  # the same seed gives the same samples, whatever else runs; None: a fresh one
    # besides the end-of-text token; [] turns all stops off
    stop: Annotated[str | Sequence[str] | Sequence[int], _Stop()] | None = None
    # 0 is argmax; beyond the bounds float32 could not hold a logit divided by it
    temperature: Annotated[float, number(at_least=1e-10, at_most=1e10, also=0.0, meaning="argmax")] = 1.0
    top_k: Annotated[int, Whole(1, also=-1, meaning="off")] = -1
    top_p: Annotated[float, number(above=0, at_most=1)] = 1.0  # 1 is off


# ---- what comes back -----------------------------------------------------------------------------------------------

Metrics = Annotated[dict[str, float], DictOf(ANY_NUMBER)]


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """`loss_fn_outputs[i]["logprobs"]` has the shape of datum i's `target_tokens`; `metrics["loss:sum"]` is the loss,
    summed over the tokens of all datums."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: Metrics = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class OptimStepResponse(Value):
    """`grad_norm` (before clipping), `update_norm` (of the change of the weights), `skipped_nonfinite` (0 or 1)."""

    metrics: Metrics = field(default_factory=dict[str, float])


# (token id, logprob) of the most probable tokens, in this order, for each position
_TopLogprobs = Annotated[list[list[tuple[int, float]] | None], ListOf(Maybe(ListOf(Anything("(token id, logprob)"))))]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One drawn continuation. The stop token, where there is one, is the last token and has its logprob. The
    `sequence_id` is another for every sequence that is drawn."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: Annotated[list[float], ListOf(ANY_NUMBER)] | None = None  # one a token
    sequence_id: str = field(default="", compare=False)
    topk_logprobs: _TopLogprobs | None = None  # in place of each token

    def __post_init__(self) -> None:
        check(self)
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
            raise InvalidRequest(
                f"SampledSequence.logprobs must have one number a token, {len(self.tokens)}: {len(self.logprobs)}"
            )


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """The continuations of one prompt. Prompt logprobs are at temperature 1; their first entry is None."""

    sequences: list[SampledSequence]
    prompt_logprobs: Annotated[list[float | None], ListOf(Maybe(ANY_NUMBER))] | None = None
    topk_prompt_logprobs: _TopLogprobs | None = None
    prompt_cache_hit_tokens: Annotated[int, Whole(0)] = 0
    target_prompt_logprobs: TensorData | None = None  # (tokens of the prompt - 1, K), 0 where no token was named

    def __post_init__(self) -> None:
        check(self)


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
    lora_rank: Rank | None = None
    model_name: str | None = None
    optimizer_config: OptimizerConfig = field(default_factory=AdamOptimizerConfig)
    user_metadata: dict[str, str] | None = None  # of the service and the client


@dataclass(frozen=True, slots=True)
class SupportedModel(Value):
    """A base model, its longest context in tokens, and what it can be used for."""

    model_name: str | None = None
    max_context_length: Annotated[int, Whole(1)] | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse(Value):
    """What a service offers."""

    supported_models: list[SupportedModel]

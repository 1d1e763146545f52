"""What a client can ask of an engine, as values, and what an engine is. No torch: any engine can be driven by these.

An op holds nothing that lives: it can be written down, sent elsewhere and done again, with the same result to the bit.
Adapters, frozen weights and the logprobs of a custom loss have ids, which the submitter chooses and the engine keeps a
table of. Everything that a client sends has been checked (`input_checks.py`); what fails here fails its own ticket.

An op waits in a queue: that of its adapter, unless `queue` names another one. Queues are served in turn, and ops of one
adapter keep their order in any case (`scheduler.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NewType, Protocol

from stovetop.engine.counts import Counts
from stovetop.input_checks import ModelLimits
from stovetop.losses import Loss
from stovetop.tokenizing import Tokenizer
from stovetop.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    TensorData,
)

AdapterId = NewType("AdapterId", str)  # an adapter in training, with its gradients and its optimizer
WeightsId = NewType("WeightsId", str)  # factors that never change: frozen at one moment, or read from a folder
ScoreId = NewType("ScoreId", str)  # the logprobs that a custom loss is computed from

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    queue: str | None = field(default=None, kw_only=True)  # None: that of its adapter, or of its weights


@dataclass(frozen=True, slots=True, eq=False)
class CreateAdapter(_Queued):
    """Makes `adapter`. Refused where the base model lacks what it is to train, or the machine the memory."""

    adapter: AdapterId
    config: LoraConfig


@dataclass(frozen=True, slots=True, eq=False)
class LoadAdapter(_Queued):
    """Makes `adapter`, with the rank and targets that the folder says."""

    adapter: AdapterId
    path: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Forward(_Queued):
    """-> ForwardBackwardOutput; leaves no gradient."""

    adapter: AdapterId
    data: Sequence[Datum]
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward(_Queued):
    """-> ForwardBackwardOutput; adds to the adapter's gradients."""

    adapter: AdapterId
    data: Sequence[Datum]
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class Score(_Queued):
    """-> ForwardBackwardOutput with the logprobs that a custom loss is computed from. Ops of the adapter that come
    after it wait until a `LossAnswer` has told what became of the loss."""

    adapter: AdapterId
    data: Sequence[Datum]
    scored: ScoreId


@dataclass(frozen=True, slots=True, eq=False)
class BackwardFrom(_Queued):
    """Adds to the adapter's gradients those of a loss whose `gradients` with respect to the logprobs of `scored` are
    these, by datum. It runs before what waits behind the `Score`."""

    adapter: AdapterId
    scored: ScoreId
    gradients: Sequence[TensorData]


@dataclass(frozen=True, slots=True, eq=False)
class Spoil(_Queued):
    """A forward_backward was refused: the next optim_step fails with the `reason`, for part of what was to be learned
    is missing. With `scored`, it was a custom loss, and this runs before what waits behind the `Score`."""

    adapter: AdapterId
    reason: str
    scored: ScoreId | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TakeBack(_Queued):
    """A custom loss was cancelled while it ran: as if there had been no `Score`. It runs before what waits behind
    that."""

    adapter: AdapterId
    scored: ScoreId


@dataclass(frozen=True, slots=True, eq=False)
class OptimStep(_Queued):
    """-> OptimStepResponse; consumes the gradients."""

    adapter: AdapterId
    params: AdamParams


@dataclass(frozen=True, slots=True, eq=False)
class SaveAdapter(_Queued):
    """-> Snapshot of a folder at `path`."""

    adapter: AdapterId
    path: Path
    meta: Mapping[str, Json]  # goes into the manifest
    with_optimizer: bool
    overwrite: bool


@dataclass(frozen=True, slots=True, eq=False)
class RestoreAdapter(_Queued):
    """The adapter takes over what is at `path`, its gradients are dropped."""

    adapter: AdapterId
    path: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class DropAdapter(_Queued):
    """Forgets the adapter."""

    adapter: AdapterId


@dataclass(frozen=True, slots=True, eq=False)
class Freeze(_Queued):
    """Makes `weights`: those of the adapter at this point of its program."""

    adapter: AdapterId
    weights: WeightsId


@dataclass(frozen=True, slots=True, eq=False)
class LoadWeights(_Queued):
    """Makes `weights`, from a folder."""

    weights: WeightsId
    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class DropWeights(_Queued):
    """Forgets the weights. What was submitted before still samples from them."""

    weights: WeightsId


@dataclass(frozen=True, slots=True, eq=False)
class Sample(_Queued):
    """-> SampleResponse. `weights` None: the base model as it is. They may be still in the making."""

    weights: WeightsId | None
    prompt: ModelInput
    num_samples: int
    params: SamplingParams  # max_tokens and seed are set
    include_prompt_logprobs: bool
    topk_prompt_logprobs: int
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None  # token ids, -1 for none: (tokens of the prompt - 1, K)


@dataclass(frozen=True, slots=True, eq=False)
class ComputeLogprobs(_Queued):
    """-> list[float | None], one a token of the prompt."""

    weights: WeightsId | None
    prompt: ModelInput


@dataclass(frozen=True, slots=True, eq=False)
class SaveWeights(_Queued):
    """-> Snapshot of a folder at `path`, which must not be there. `weights` may be still in the making."""

    weights: WeightsId
    path: Path
    meta: Mapping[str, Json]  # goes into the manifest


PassesOp = Forward | ForwardBackward | Score | BackwardFrom  # done in passes over the model, one a step
LossAnswer = BackwardFrom | Spoil | TakeBack  # what became of a custom loss
AdapterOp = (
    CreateAdapter
    | LoadAdapter
    | PassesOp
    | LossAnswer
    | OptimStep
    | SaveAdapter
    | RestoreAdapter
    | DropAdapter
    | Freeze
)
OrderedOp = AdapterOp | LoadWeights
SamplingOp = Sample | ComputeLogprobs
WeightsOp = SamplingOp | SaveWeights | DropWeights
Op = OrderedOp | WeightsOp
SavingOp = SaveAdapter | SaveWeights
LoadingOp = LoadAdapter | LoadWeights | RestoreAdapter


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a save is to write, as of the save's place in the program: nothing changes it any more."""

    write: Callable[[], None]  # returns when the folder is whole and synced; may run in any thread


Result = ForwardBackwardOutput | OptimStepResponse | SampleResponse | list[float | None] | Snapshot | None


def lane_of(op: OrderedOp) -> str:
    """What it keeps its order with: the other ops of its adapter. Each reading of weights is alone."""
    return op.weights if isinstance(op, LoadWeights) else op.adapter


def queue_of(op: Op) -> str:
    match op:
        case _ if op.queue is not None:
            return op.queue
        case Sample() | ComputeLogprobs():
            return "" if op.weights is None else op.weights
        case SaveWeights() | DropWeights():
            return op.weights
        case _:
            return lane_of(op)


def num_tokens(op: Op) -> int:
    """That it asks to be computed, drawn ones included."""
    match op:
        case Forward() | ForwardBackward() | Score():
            return sum(datum.model_input.length for datum in op.data)
        case Sample():
            return op.prompt.length + op.num_samples * (op.params.max_tokens or 0)
        case ComputeLogprobs():
            return op.prompt.length
        case _:
            return 0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One op that was accepted. Tickets count upwards in the order of submission."""

    number: int
    op: Op


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A ticket with its result or its error."""

    ticket: Ticket
    result: Result = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """What a client needs to know of an engine, asked once."""

    limits: ModelLimits
    fingerprint: str  # tells base models apart by content, so that a state meets only the model it was trained on
    tokenizer: str | None  # the folder or file that its tokenizer was read from; None for a model without one
    untrainable: Mapping[str, str] = field(default_factory=dict[str, str])  # parts that no adapter can train, and why


class Engine(Protocol):
    """Does what tickets ask. Not thread-safe: one thread submits and steps. Ops of one adapter take effect in the order
    of submission; everything else may be reordered and batched, which never changes a result."""

    @property
    def description(self) -> Description: ...

    @property
    def counts(self) -> Counts:
        """What it has done so far."""
        ...

    def set_gate(self, may_begin: Callable[[Ticket], bool]) -> None:
        """Asked before a `SaveAdapter` or a loading op begins: while it says no, the op waits, with what comes after it
        in its lane. No to one save is no to all of them. Asked in the thread that steps."""
        ...

    def submit(self, op: Op) -> Ticket:
        """Accepts any op: what is wrong with it is the error that its ticket is answered with. After an exception the
        engine is not to be used any more."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ends what has not begun, and samples that run: the ticket is answered with the error `Cancelled`. What has
        begun to train goes on."""
        ...

    def step(self) -> list[Finished]:
        """Does a bounded piece of work (one training pass, one token for every running sample) and returns what
        ended. Each ticket ends once. After an exception the engine is not to be used any more."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing can be done now. What waits for the gradients of a custom loss, or at the gate, may be left."""
        ...

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer itself, in the engine's process."""
        ...

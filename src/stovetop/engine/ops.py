"""What a client can ask of an engine, as values, and what an engine is. No torch: any engine can be driven by these.

Everything a client sends has been checked (`input_checks.py`); what fails here fails its own ticket. An `adapter` is an
engine's own object and is only handed back to it; so is a `weights`, an adapter's factors frozen at one moment (None:
the base model as it is). Whoever drops the last reference frees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stovetop.client import Tokenizer
from stovetop.input_checks import ModelLimits
from stovetop.losses import Loss
from stovetop.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

Adapter = Any
Weights = Any


@dataclass(frozen=True, slots=True, eq=False)
class CreateAdapter:
    """-> Adapter."""

    config: LoraConfig


@dataclass(frozen=True, slots=True, eq=False)
class LoadAdapter:
    """-> Adapter, with the rank and targets that the folder says."""

    path: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """-> ForwardBackwardOutput; leaves no gradient."""

    adapter: Adapter
    data: Sequence[Datum]
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward:
    """-> ForwardBackwardOutput; adds to the adapter's gradients."""

    adapter: Adapter
    data: Sequence[Datum]
    loss: Loss


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardCustom:
    """-> ForwardBackwardOutput. `loss_fn(data, logprobs)` runs on the engine's thread."""

    adapter: Adapter
    data: Sequence[Datum]
    loss_fn: Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class OptimStep:
    """-> OptimStepResponse; consumes the gradients."""

    adapter: Adapter
    params: AdamParams


@dataclass(frozen=True, slots=True, eq=False)
class SaveAdapter:
    """-> None; a folder at `path`."""

    adapter: Adapter
    path: Path
    meta: dict[str, Any]  # goes into the manifest
    with_optimizer: bool
    overwrite: bool


@dataclass(frozen=True, slots=True, eq=False)
class RestoreAdapter:
    """-> None; the adapter takes over what is at `path`, its gradients are dropped."""

    adapter: Adapter
    path: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True, eq=False)
class Freeze:
    """-> Weights of the adapter at this point of its program."""

    adapter: Adapter


@dataclass(frozen=True, slots=True, eq=False)
class LoadWeights:
    """-> Weights, from a folder."""

    path: Path


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """-> SampleResponse."""

    weights: Weights | None
    prompt: ModelInput
    num_samples: int
    params: SamplingParams  # max_tokens and seed are set
    include_prompt_logprobs: bool
    topk_prompt_logprobs: int


@dataclass(frozen=True, slots=True, eq=False)
class ComputeLogprobs:
    """-> list[float | None], one a token of the prompt."""

    weights: Weights | None
    prompt: ModelInput


AdapterOp = Forward | ForwardBackward | ForwardBackwardCustom | OptimStep | SaveAdapter | RestoreAdapter | Freeze
SamplingOp = Sample | ComputeLogprobs
Op = AdapterOp | SamplingOp | CreateAdapter | LoadAdapter | LoadWeights


def num_tokens(op: Forward | ForwardBackward) -> int:
    return sum(datum.model_input.length for datum in op.data)


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One op that was accepted. Tickets count upwards in the order of submission."""

    number: int
    op: Op


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A ticket with its result or its error."""

    ticket: Ticket
    result: Any = None
    error: BaseException | None = None


class Engine(Protocol):
    """Does what tickets ask. Not thread-safe: one thread submits and steps. Ops of one adapter take effect in the order
    of submission; everything else may be reordered and batched, which never changes a result."""

    @property
    def limits(self) -> ModelLimits: ...
    @property
    def fingerprint(self) -> str:
        """Tells base models apart by content, so that a state meets only the model it was trained on."""
        ...

    def check_lora(self, config: LoraConfig) -> None:
        """Refuses an adapter that this base model, or this machine, cannot have."""
        ...

    def submit(self, op: Op) -> Ticket: ...
    def step(self) -> list[Finished]:
        """Does a bounded piece of work (a training op, one token for every running sample) and returns what ended."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing is left to do."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...

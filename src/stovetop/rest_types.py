"""What a `RestClient` returns: runs and what was saved of them. Names and fields follow the public Tinker SDK; what it
calls a `tinker_path` is here the folder of the checkpoint."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from stovetop.errors import InvalidRequest
from stovetop.value import Value

CheckpointType = Literal["training", "sampler", "external"]
KIND_OF_FOLDER: dict[str, CheckpointType] = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True, slots=True)
class AdamOptimizerConfig(Value):
    """AdamW, the one optimizer that there is."""

    type: Literal["adamw"] = "adamw"


OptimizerConfig = AdamOptimizerConfig


@dataclass(frozen=True, slots=True)
class Checkpoint(Value):
    """One saved state, or the weights of one for sampling."""

    checkpoint_id: str  # "weights/000020", "sampler_weights/final"
    checkpoint_type: CheckpointType
    time: datetime  # when it was written, in UTC
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None  # by its ttl_seconds; nothing is deleted by itself


@dataclass(frozen=True, slots=True)
class ParsedCheckpointTinkerPath(Value):
    """What the path of a checkpoint says."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Of `.../<training run>/weights/<name>` or `.../<training run>/sampler_weights/<name>`."""
        run, kind, name = ("", "", *Path(tinker_path).parts)[-3:]
        if kind not in KIND_OF_FOLDER or not run:
            raise InvalidRequest(
                f"a checkpoint's path ends in <run>/weights/<name> or <run>/sampler_weights/<name>: {tinker_path!r}"
            )
        return cls(tinker_path, run, KIND_OF_FOLDER[kind], f"{kind}/{name}")


@dataclass(frozen=True, slots=True)
class TrainingRun(Value):
    """One training client and what it has saved."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime  # in UTC; of a run of an earlier process, when it last saved
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None  # of the service and the client


@dataclass(frozen=True, slots=True)
class WeightsInfoResponse(Value):
    """Of which kind the weights at a path are."""

    base_model: str
    is_lora: bool
    optimizer_config: OptimizerConfig = field(default_factory=AdamOptimizerConfig)
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@dataclass(frozen=True, slots=True)
class Cursor(Value):
    """Which part of a list this is."""

    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True, slots=True)
class CheckpointsListResponse(Value):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class TrainingRunsResponse(Value):
    training_runs: list[TrainingRun]
    cursor: Cursor

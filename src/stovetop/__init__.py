"""A post-training kitchen for language models that you own.

    import stovetop as tinker

is enough to move a script here that was written for the Tinker SDK (docs/from_tinker.md says what differs). Eager are
the values, the clients and the errors; every other module (`stovetop.renderers`, `stovetop.supervised`, ...) is
imported when it is first named.
"""

import importlib
import pkgutil
from types import ModuleType

from stovetop import client, errors, futures, losses, types
from stovetop.client import RestClient, SamplingClient, ServiceClient, TrainingClient
from stovetop.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    Cancelled,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    ConflictError,
    Diverged,
    EnvError,
    ExperimentalWarning,
    GradeError,
    InternalServerError,
    InvalidRequest,
    MissingExtra,
    NotFoundError,
    NothingToTrain,
    PermissionDeniedError,
    QueueFull,
    RateLimitError,
    RequestFailedError,
    RunNotFound,
    SandboxError,
    SandboxUnavailable,
    ServiceClosed,
    SeveralProblems,
    StageFailed,
    StovetopError,
    TinkerError,
    TornCheckpoint,
    UnknownName,
    UnprocessableEntityError,
    WorkerDied,
    WriteFailed,
)
from stovetop.futures import APIFuture
from stovetop.types import (
    AdamOptimizerConfig,
    AdamParams,
    Checkpoint,
    CheckpointType,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    ImageChunk,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    ModelID,
    ModelInput,
    ModelInputChunk,
    OptimParams,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    StopReason,
    SupportedModel,
    TensorData,
    TensorDtype,
    TrainingRun,
)

__version__ = "0.1.0"

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "Diverged",
    "EncodedTextChunk",
    "EnvError",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "GradeError",
    "ImageChunk",
    "InternalServerError",
    "InvalidRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "MissingExtra",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "NothingToTrain",
    "OptimParams",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "QueueFull",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "RunNotFound",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SandboxError",
    "SandboxUnavailable",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "ServiceClient",
    "ServiceClosed",
    "SeveralProblems",
    "StageFailed",
    "StopReason",
    "StovetopError",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TornCheckpoint",
    "TrainingClient",
    "TrainingRun",
    "UnknownName",
    "UnprocessableEntityError",
    "WorkerDied",
    "WriteFailed",
    "client",
    "errors",
    "futures",
    "losses",
    "types",
]


def __getattr__(name: str) -> ModuleType:
    if name not in _modules():
        raise AttributeError(f"module 'stovetop' has no attribute {name!r}")
    return importlib.import_module(f"stovetop.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *_modules()})


def _modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)}

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
    ConflictError,
    ExperimentalWarning,
    InternalServerError,
    InvalidRequest,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    StovetopError,
    TinkerError,
    UnknownName,
    UnprocessableEntityError,
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
    "Checkpoint",
    "CheckpointType",
    "ConflictError",
    "Datum",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "ImageChunk",
    "InternalServerError",
    "InvalidRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "RestClient",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "ServiceClient",
    "StopReason",
    "StovetopError",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnknownName",
    "UnprocessableEntityError",
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

"""A post-training kitchen for language models that you own.

    import stovetop as tinker

is enough to move a script here that was written for the Tinker SDK. Eager are the values, the clients' protocols and
the errors; every other module (`stovetop.renderers`, `stovetop.supervised`, ...) is imported when it is first named.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

from stovetop import client, errors, futures, losses, types
from stovetop.client import SamplingClient, TrainingClient, UserMetadata
from stovetop.errors import InvalidRequest, RequestFailedError, StovetopError, UnknownName
from stovetop.futures import APIFuture
from stovetop.types import (
    AdamParams,
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
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    StopReason,
    SupportedModel,
    TensorData,
    TensorDtype,
)

__version__ = "0.1.0"

TinkerError = StovetopError  # what scripts written for the SDK catch

__all__ = [
    "APIFuture",
    "AdamParams",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "ImageChunk",
    "InvalidRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimStepResponse",
    "RequestFailedError",
    "SampleResponse",
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
    "UnknownName",
    "client",
    "errors",
    "futures",
    "losses",
    "types",
]


def ServiceClient(  # noqa: N802  it stands where the SDK has a class
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    user_metadata: UserMetadata | None = None,
    storage: str | Path | None = None,
    **engine: Any,
) -> client.ServiceClient:
    """The way in: makes training and sampling clients.

    base_url       None or "local": models run in this process. "recording": a deterministic fake for tests
    api_key        read by remote services alone
    user_metadata  goes into every checkpoint
    storage        where checkpoints are saved; each backend has a default
    engine         options of the backend, see `open_service` in `backends/local.py` and `backends/recording.py`
    """
    match base_url:
        case None | "local":
            from stovetop.backends import local

            return local.open_service(storage=storage, user_metadata=user_metadata, **engine)
        case "recording":
            from stovetop.backends import recording

            return recording.open_service(storage=storage, user_metadata=user_metadata, **engine)
        case _:
            raise _no_backend(base_url)


def _no_backend(base_url: object) -> InvalidRequest:
    if not isinstance(base_url, str):
        return InvalidRequest(f"base_url must be a string; pass user_metadata=... by name: {base_url!r}")
    if base_url == "tinker" or base_url.startswith(("http://", "https://")):
        return InvalidRequest(
            "this version has no client for remote services; pass base_url='local' to train in this process, or use "
            f"the official SDK (import tinker) for: {base_url!r}"
        )
    return UnknownName("base_url", base_url, ["local", "recording"], hint="None is 'local'")


def __getattr__(name: str) -> ModuleType:
    if name not in _modules():
        raise AttributeError(f"module 'stovetop' has no attribute {name!r}")
    return importlib.import_module(f"stovetop.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *_modules()})


def _modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__)}

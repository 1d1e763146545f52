# pyright: basic
"""The SDK's errors as ours. A server of ours names the class of what it refuses, in the body of an answer or before the
reason of a failure; of another one the status tells."""

import re
from concurrent.futures import CancelledError
from typing import Any

import tinker

from stovetop.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    Cancelled,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    ConflictError,
    InternalServerError,
    InvalidRequest,
    NotFoundError,
    PermissionDeniedError,
    QueueFull,
    RateLimitError,
    RequestFailedError,
    RunNotFound,
    StovetopError,
    TornCheckpoint,
    UnprocessableEntityError,
)

_BY_STATUS: dict[int, type[StovetopError]] = {
    400: InvalidRequest,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequest,
    422: UnprocessableEntityError,
    429: RateLimitError,
}
_BY_NAME: dict[str, type[StovetopError]] = {
    each.__name__: each
    for each in (CheckpointError, CheckpointExists, CheckpointNotFound, QueueFull, RunNotFound, TornCheckpoint)
}
# What the SDK writes around the reason of a failure, and what our server writes before it.
_OF_SDK = re.compile(r"Request failed: (.*) for self\.request_id=.* and expected type self\.model_cls=.*", re.DOTALL)
_OF_SERVER = re.compile(r"\w+ \((?:seq_id \d+ of )?\S+\) failed: ")


def error_of(error: BaseException, what: str, missing: type[StovetopError] = NotFoundError) -> BaseException:
    """The error that a call, which messages name so, fails with. `missing` is what the call asks for, where the answer
    is that there is no such thing."""
    ours = _ours(error, what, missing)
    if ours is not error:
        ours.__cause__ = error
    return ours


def _ours(error: BaseException, what: str, missing: type[StovetopError]) -> BaseException:
    match error:
        case StovetopError():
            return error
        case CancelledError():
            return Cancelled()
        case tinker.RequestFailedError():
            return _failed(error, what)
        case tinker.APIStatusError():
            return _refused(error, what, missing)
        case _ if isinstance(error.__cause__, tinker.APIStatusError):  # a result that could not be fetched
            return _refused(error.__cause__, what, missing)
        case tinker.APITimeoutError():
            return APITimeoutError(f"{what}: the server did not answer in time; {_RUNS}: {error}")
        case tinker.APIConnectionError():
            return unreachable(what, str(error))
        case tinker.APIResponseValidationError():
            return APIResponseValidationError(f"{what}: the answer is not of the protocol: {error}")
        case tinker.TinkerError():  # the key, before anything was asked
            return AuthenticationError(f"{what}: {error}")
        case _:
            return RequestFailedError(f"{what} failed: {str(error) or type(error).__name__}")


_RUNS = "check that it runs, and that base_url is its address"


def unreachable(what: str, why: str) -> APIConnectionError:
    """A call, which messages name so, found no server."""
    return APIConnectionError(f"{what}: the server could not be reached; {_RUNS}: {why}")


def _failed(error: tinker.RequestFailedError, what: str) -> StovetopError:
    of_sdk = _OF_SDK.fullmatch(error.message)
    reason = error.message if of_sdk is None else of_sdk[1]
    of_server = _OF_SERVER.match(reason)
    if of_server is not None:
        reason = reason[of_server.end() :]
        name, _, said = reason.partition(": ")
        if name in _BY_NAME:
            return _BY_NAME[name](said)
    return RequestFailedError(f"{what} failed: {reason}", str(error.category))


def _refused(error: tinker.APIStatusError, what: str, missing: type[StovetopError]) -> StovetopError:
    body: Any = error.body
    told = body if isinstance(body, dict) else {}
    reason = str(told.get("detail") or error.message)
    kind = _BY_NAME.get(str(told.get("type")))
    if kind is None:
        kind = missing if error.status_code == 404 else _BY_STATUS.get(error.status_code)
    if kind is None:
        kind = InternalServerError if error.status_code >= 500 else APIStatusError
    return kind(f"{what}: {reason}")

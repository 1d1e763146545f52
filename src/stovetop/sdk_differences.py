"""Where we differ from the Tinker SDK 0.38.0 on purpose, and why: names, methods and parameters, in tables. Clients
refuse with these reasons, docs/from_tinker.md lists them, and a test compares everything else with the SDK.

A parameter for what does not exist in this process accepts the values that change nothing, so that a program may pass
it; any other value is refused, so that nothing is ignored without a word.
"""

from typing import NamedTuple, NoReturn

from stovetop.errors import InvalidRequest
from stovetop.types import AdamOptimizerConfig


class Parameter(NamedTuple):
    neutral: tuple[object, ...]  # the values that are accepted
    reason: str


_ACCOUNTS = "there are no accounts here"
_FOLDERS = "a path is a folder of this machine, and what may be done with it the file system says"
_HOSTED = "it belongs to the hosted service and its web pages"
_FUNCTIONS = "a custom loss is a plain function, passed to forward_backward_custom"
_HANDLES = "a sampling client is made by a service or a training client, in the process that samples"
_PEFT = "every checkpoint here is a folder in PEFT's format already"
_STABILITY = "only the loss stable_reinforce reads it, which has no public definition"
_OPTIMIZERS = "AdamW is the one optimizer"
_SPARSE = "no loss takes sparse tensors"
_WIRE = "it belongs to the wire protocol"
_NOT_YET = "it is not offered yet"

PARAMETERS = {
    "access_scope": Parameter(("owned", "accessible"), _ACCOUNTS),
    "default_headers_overrides": Parameter((None, {}), "nothing is sent in this process, so there are no headers"),
    "kind": Parameter(("snapshot",), "every sampling client keeps the weights that it was made from"),
    "loss_type_input": Parameter((None, "logprobs"), "a custom loss reads logprobs"),
    "optimizer": Parameter((None, AdamOptimizerConfig()), _OPTIMIZERS),
    "prompt_alt_tokens_k": Parameter((0,), _NOT_YET),
    "record_stability_info": Parameter((False,), _STABILITY),
    "retry_config": Parameter((None,), "nothing is retried in this process: a call is done, or fails with its reason"),
    "weights_access_token": Parameter((None,), f"access tokens are the hosted service's; here {_FOLDERS}"),
}

PARAMETERS_LEFT_OUT = {
    "TensorData.sparse_crow_indices": _SPARSE,
    "TensorData.sparse_col_indices": _SPARSE,
    "TensorData.to_numpy.pad_value": _SPARSE,
    "TensorData.to_torch.pad_value": _SPARSE,
    "TensorData.tolist.pad_value": _SPARSE,
}

METHODS = {
    "ServiceClient.copy_weights": _FOLDERS,
    "ServiceClient.get_console_url": _HOSTED,
    "ServiceClient.get_telemetry": _HOSTED,
    "ServiceClient.holder": _WIRE,
    "ServiceClient.create_custom_loss": _FUNCTIONS,
    "TrainingClient.get_console_url": _HOSTED,
    "TrainingClient.get_telemetry": _HOSTED,
    "TrainingClient.save_weights_external": _PEFT,
    "TrainingClient.save_weights_external_async": _PEFT,
    "SamplingClient.get_telemetry": _HOSTED,
    "SamplingClient.on_queue_state_change": _WIRE,
    "SamplingClient.create": _HANDLES,
    "SamplingClient.from_sampler_handle": _HANDLES,
    "SamplingClient.get_sampler_handle": _HANDLES,
    "RestClient.assign_session_project": _HOSTED,
    "RestClient.copy_weights": _FOLDERS,
    "RestClient.export_session_trace": _HOSTED,
    "RestClient.get_audit_log": _ACCOUNTS,
    "RestClient.get_billing_usage": _ACCOUNTS,
    "RestClient.get_current_checkpoint_storage_usage": _FOLDERS,
    "RestClient.get_external_weights_urls": _PEFT,
    "RestClient.get_sampler": _HOSTED,
    "RestClient.get_session": _HOSTED,
    "RestClient.get_telemetry": _HOSTED,
    "RestClient.list_sessions": _HOSTED,
    "RestClient.publish_checkpoint_from_tinker_path": _FOLDERS,
    "RestClient.search_sessions": _HOSTED,
    "RestClient.set_checkpoint_ttl_from_tinker_path": "nothing is deleted by itself",
    "RestClient.unpublish_checkpoint_from_tinker_path": _FOLDERS,
    "RestClient.whoami": _ACCOUNTS,
    "TensorData.from_torch_sparse": _SPARSE,
}

_OF_ACCOUNTS = """
AuditLogEntry AuditLogResponse AuthTokenResponse BillingEventInfo BillingUsageEvent BillingUsageResponse
BillingUsageSession CheckpointBillingEvent CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse
GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest SamplingPrefillBillingEvent SamplingSampleBillingEvent
StorageBillingEvent TrainingBillingEvent WhoamiResponse
"""

_OF_SESSIONS = """
AccessibleSearchOwner ActiveSessionStatusQuery CancelledSessionStatusQuery ClientFinishedSessionStatusQuery
ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason ClientSessionFinishReasonType
ClientSessionFinishSuccess ClientSessionFinished EventType ExternalWeightsUrlsResponse FailedSessionStatusQuery
GetSamplerResponse GetSessionResponse ListSessionsResponse OwnSearchOwner SearchOwner SessionActive SessionCancelled
SessionEndEvent SessionFailed SessionFailedReason SessionFailedRequestReason SessionFailedSamplingSessionReason
SessionFailedTrainingRunReason SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionStartEvent
SessionStatus SessionStatusQuery SessionSummary Severity TelemetryBatch TelemetryEvent TelemetryResponse
TelemetrySendRequest UnhandledExceptionEvent UserSearchOwner
"""

_OF_THE_WIRE = """
ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse CopyWeightsRequest CopyWeightsResponse
CreateCustomLossRequest CreateCustomLossResponse CreateModelRequest CreateModelResponse CreateSamplingSessionRequest
CreateSamplingSessionResponse CreateSessionRequest CreateSessionResponse ForwardBackwardInput ForwardBackwardRequest
ForwardRequest FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest FutureRetrieveResponse
FuturesRetrieveRequest FuturesRetrieveResponse GetInfoRequest HealthResponse JoinSamplingSessionRequest
JoinSamplingSessionResponse LoadWeightsRequest OptimStepRequest RequestErrorCategory RequestFailedResponse RequestID
RequestOptions SampleRequest SamplingSessionFuturesTarget SaveWeightsExternalRequest SaveWeightsExternalResponse
SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest SaveWeightsForSamplerResponseInternal
SaveWeightsRequest SessionHeartbeatRequest SessionHeartbeatResponse Timeout UnloadModelRequest UnloadModelResponse
UntypedAPIFuture
"""

NAMES = {  # of the modules tinker and tinker.types
    "AdminClient": _ACCOUNTS,
    "auth": _ACCOUNTS,
    "BackcompatSamplingClientFuture": "it is a ClientFuture here",
    "BackcompatTrainingClientFuture": "it is a ClientFuture here",
    "DimuonOptimizerConfig": _OPTIMIZERS,
    "DimuonParams": _OPTIMIZERS,
    "DmelChunk": "no model here hears",
    "ImageAssetPointerChunk": "an image is sent as its bytes, in an ImageChunk",
    "LossHandle": _FUNCTIONS,
    "PerDatumLossFn": _FUNCTIONS,
    "PromptAltTokens": _NOT_YET,
    "__title__": "no program reads it",
    **dict.fromkeys(["CustomLossGraph", "CustomLossInput", "CustomLossInputRank", "CustomLossNode"], _FUNCTIONS),
    **dict.fromkeys(_OF_ACCOUNTS.split(), _ACCOUNTS),
    **dict.fromkeys(_OF_SESSIONS.split(), _HOSTED),
    **dict.fromkeys(_OF_THE_WIRE.split(), _WIRE),
}


def require_neutral(**values: object) -> None:
    """Refuses each value, by its parameter's name, that would have an effect at Tinker and can have none here. For
    functions that are `checked`, which puts their name before it."""
    for name, value in values.items():
        parameter = PARAMETERS[name]
        if not any(type(value) is type(neutral) and value == neutral for neutral in parameter.neutral):
            accepted = " or ".join(map(repr, parameter.neutral))
            raise InvalidRequest(f"{name} must be {accepted}; {parameter.reason}: {value!r}")


def refuse_to_pickle(owner: str) -> NoReturn:
    """For the `__reduce__` of a client, which cannot go to another process."""
    raise InvalidRequest(
        f"a {owner} cannot be pickled or copied: a client works in the process that made it. Pass what makes one, the "
        "name of a base model or the path of a checkpoint"
    )


def missing_attribute(owner: str, name: str) -> object:
    """For the `__getattr__` of a client: a method that refuses, if the SDK's client has one of this name."""
    reason = METHODS.get(f"{owner}.{name}", METHODS.get(f"{owner}.{name.removesuffix('_async')}"))
    if reason is None:
        raise AttributeError(f"{owner} has no attribute {name!r}")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise InvalidRequest(f"{owner}.{name} is not offered: {reason}")

    return refuse

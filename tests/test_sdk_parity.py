"""Our names, parameters and defaults are the SDK's, minus what the tables below leave out and why.

Each entry of a table must still be needed: one that is not is an error too.
"""

import inspect
from dataclasses import fields
from typing import Any, get_args

import pytest

import stovetop
from stovetop import types
from stovetop.backends import in_process
from stovetop.futures import APIFuture
from stovetop.losses import LOSSES

try:
    import tinker
except ImportError:
    pytest.skip("tinker==0.38.0 is not installed (pip install -e '.[dev]')", allow_module_level=True)

NOT_SERVED = "belongs to the hosted service, its accounts and its web pages"
RETRIES = "nothing is retried in process; a remote backend configures itself"
STABILITY = "only stable_reinforce reads it, which has no public definition"
OPTIMIZERS = "AdamW is the one optimizer"
TOKENS = "access tokens are the hosted service's"
SPARSE = "no loss takes sparse tensors"
SPANS = "only stable_reinforce reads provenance spans"

NAMES_LEFT_OUT = {
    "AdminClient": NOT_SERVED,
    "RestClient": NOT_SERVED,
    "auth": NOT_SERVED,
    "Checkpoint": NOT_SERVED,
    "CheckpointType": NOT_SERVED,
    "ParsedCheckpointTinkerPath": NOT_SERVED,
    "TrainingRun": NOT_SERVED,
    "OptimStepRequest": "the wire's",
    "SampleRequest": "the wire's",
    "RequestOptions": "the wire's",
    "Timeout": "the wire's",
    "AdamOptimizerConfig": OPTIMIZERS,
    "DimuonOptimizerConfig": OPTIMIZERS,
    "DimuonParams": OPTIMIZERS,
    "OptimParams": OPTIMIZERS,
    "BackcompatSamplingClientFuture": "our ClientFuture",
    "BackcompatTrainingClientFuture": "our ClientFuture",
    "LossHandle": "custom losses are plain functions",
    "PerDatumLossFn": "custom losses are plain functions",
    "DmelChunk": "no model here hears",
    "PromptProvenanceSpan": SPANS,
    "SampledProvenanceSpan": SPANS,
    "ExperimentalWarning": "nothing warns",
    "__title__": "no use",
    **dict.fromkeys(
        [
            "APIError",
            "APIStatusError",
            "APITimeoutError",
            "APIConnectionError",
            "APIResponseValidationError",
            "BadRequestError",
            "AuthenticationError",
            "BillingError",
            "PermissionDeniedError",
            "NotFoundError",
            "ConflictError",
            "UnprocessableEntityError",
            "RateLimitError",
            "InternalServerError",
        ],
        "errors of HTTP, which is not spoken in process; TinkerError catches ours",
    ),
}

METHODS_LEFT_OUT = {
    "ServiceClient.copy_weights": NOT_SERVED,
    "ServiceClient.create_rest_client": NOT_SERVED,
    "ServiceClient.get_console_url": NOT_SERVED,
    "ServiceClient.get_telemetry": NOT_SERVED,
    "ServiceClient.holder": NOT_SERVED,
    "ServiceClient.create_custom_loss": "custom losses are plain functions",
    "TrainingClient.get_console_url": NOT_SERVED,
    "TrainingClient.get_telemetry": NOT_SERVED,
    "TrainingClient.save_weights_external": NOT_SERVED,
    "TrainingClient.save_weights_external_async": NOT_SERVED,
    "SamplingClient.get_telemetry": NOT_SERVED,
    "SamplingClient.on_queue_state_change": NOT_SERVED,
    "SamplingClient.create": "made by a service or training client",
    "SamplingClient.from_sampler_handle": "handles are the hosted service's",
    "SamplingClient.get_sampler_handle": "handles are the hosted service's",
    "TensorData.from_torch_sparse": SPARSE,
    "Datum.with_provenance": SPANS,
}

PARAMETERS_LEFT_OUT = {
    "ServiceClient.project_id": NOT_SERVED,
    "ServiceClient.display_name": NOT_SERVED,
    "ServiceClient.default_headers_overrides": NOT_SERVED,
    "ServiceClient.close.status": NOT_SERVED,
    "ServiceClient.close.detail": NOT_SERVED,
    "ServiceClient.create_lora_training_client.optimizer": OPTIMIZERS,
    "ServiceClient.create_training_client_from_state.optimizer": OPTIMIZERS,
    "ServiceClient.create_training_client_from_state.weights_access_token": TOKENS,
    "ServiceClient.create_training_client_from_state_with_optimizer.weights_access_token": TOKENS,
    "ServiceClient.create_sampling_client.retry_config": RETRIES,
    "ServiceClient.create_sampling_client.record_stability_info": STABILITY,
    "TrainingClient.create_sampling_client.retry_config": RETRIES,
    "TrainingClient.create_sampling_client.record_stability_info": STABILITY,
    "TrainingClient.save_weights_and_get_sampling_client.retry_config": RETRIES,
    "TrainingClient.save_weights_and_get_sampling_client.record_stability_info": STABILITY,
    "TrainingClient.save_weights_and_get_sampling_client.kind": "every sampling client is a snapshot",
    "TrainingClient.forward_backward_custom.loss_type_input": "a custom loss reads logprobs, as is the default",
    "TrainingClient.optim_step.adam_params": "the older name of optim_params",
    "TrainingClient.load_state.weights_access_token": TOKENS,
    "TrainingClient.load_state_with_optimizer.weights_access_token": TOKENS,
    "SamplingClient.sample.topk_sample_logprobs": "not offered yet",
    "SamplingClient.sample.target_prompt_logprobs": "not offered yet",
    "SamplingClient.sample.prompt_alt_tokens_k": "not offered yet",
    "SamplingClient.sample.prompt_logprobs_last_n": "not offered yet",
    "SamplingClient.compute_logprobs.prompt_logprobs_last_n": "not offered yet",
    "TensorData.sparse_crow_indices": SPARSE,
    "TensorData.sparse_col_indices": SPARSE,
    "TensorData.to_numpy.pad_value": SPARSE,
    "TensorData.to_torch.pad_value": SPARSE,
    "TensorData.tolist.pad_value": SPARSE,
    "Datum.model_input_spans": SPANS,
    "Datum.loss_fn_input_spans": SPANS,
}

PARAMETERS_ADDED = {
    "ServiceClient.storage": "where an embedded backend saves",
    "ServiceClient.engine": "options of an embedded backend",
    "LoraConfig.alpha": "fixed at the service, a choice here",
}

OTHER_DEFAULTS = {
    "LoraConfig.rank": "the default of create_lora_training_client",
    "TensorData.data": "an empty tensor is asked for, never assumed",
    "TensorData.dtype": "the SDK raises without one too",
    "ModelInput.chunks": "empty",
    "Datum.loss_fn_inputs": "both empty",
    "TrainingClient.optim_step.optim_params": "the SDK's is None only because adam_params may stand in",
}

CLIENTS = {
    "ServiceClient": in_process.InProcessServiceClient,
    "TrainingClient": in_process.InProcessTrainingClient,
    "SamplingClient": in_process.InProcessSamplingClient,
}
INPUTS = [
    "EncodedTextChunk",
    "ImageChunk",
    "ModelInput",
    "TensorData",
    "Datum",
    "AdamParams",
    "LoraConfig",
    "SamplingParams",
]
RESULTS = [
    "ForwardBackwardOutput",
    "OptimStepResponse",
    "SampledSequence",
    "SampleResponse",
    "SaveWeightsResponse",
    "SaveWeightsForSamplerResponse",
    "LoadWeightsResponse",
    "GetInfoResponse",
    "ModelData",
    "GetServerCapabilitiesResponse",
    "SupportedModel",
]


def sdk_type(name: str) -> Any:
    if name == "ModelData":
        return inspect.get_annotations(tinker.types.GetInfoResponse, eval_str=True)["model_data"]
    return getattr(tinker.types, name, None) or getattr(tinker, name)


def public_methods(cls: type) -> set[str]:
    """What the class itself defines; pydantic's own methods are no part of the SDK's interface."""
    return {name for name in vars(cls) if not name.startswith(("_", "model_config", "validate_", "serialize_"))}


def parameters(callable_: Any) -> dict[str, Any]:
    listed = inspect.signature(callable_).parameters.values()
    required = inspect.Parameter.empty
    return {
        p.name: "required" if p.default is required else p.default for p in listed if p.name not in ("self", "kwargs")
    }


def compare(owner: str, ours: Any, sdks: Any) -> None:
    our, their = parameters(ours), parameters(sdks)
    kept = [name for name in their if f"{owner}.{name}" not in PARAMETERS_LEFT_OUT]
    assert [name for name in our if f"{owner}.{name}" not in PARAMETERS_ADDED] == kept, owner
    for name in kept:
        if f"{owner}.{name}" in OTHER_DEFAULTS:
            assert our[name] != their[name], f"{owner}.{name} is the same by now: take it out of OTHER_DEFAULTS"
        else:
            assert our[name] == their[name], f"{owner}.{name}"


@pytest.mark.parametrize("client", CLIENTS)
def test_every_method_of_the_sdks_clients_is_here_or_said_to_be_left_out(client: str) -> None:
    theirs = {name for name, _ in inspect.getmembers(getattr(tinker, client)) if not name.startswith("_")}
    left_out = {name for name in theirs if f"{client}.{name}" in METHODS_LEFT_OUT}
    assert {name for name in theirs if hasattr(CLIENTS[client], name)} == theirs - left_out


@pytest.mark.parametrize("client", CLIENTS)
def test_shared_methods_take_the_same_parameters(client: str) -> None:
    ours, sdks, protocol = CLIENTS[client], getattr(tinker, client), getattr(stovetop.client, client)
    for name in sorted(public_methods(protocol)):
        assert parameters(getattr(ours, name)) == parameters(getattr(protocol, name)), f"{client}.{name} in process"
        compare(f"{client}.{name}", getattr(ours, name), getattr(sdks, name))


def test_the_way_in_takes_the_sdks_keywords() -> None:
    ours, theirs = parameters(stovetop.ServiceClient), parameters(tinker.ServiceClient.__init__)
    assert {name for name in ours if f"ServiceClient.{name}" not in PARAMETERS_ADDED} == {
        name for name in theirs if f"ServiceClient.{name}" not in PARAMETERS_LEFT_OUT
    }
    assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_made_from_the_same_fields(name: str) -> None:
    ours, sdks = getattr(types, name), sdk_type(name)
    compare(name, ours, sdks)
    for method in sorted(public_methods(sdks) - public_fields(sdks)):
        if f"{name}.{method}" not in METHODS_LEFT_OUT:
            assert hasattr(ours, method), f"{name}.{method}"
            if callable(getattr(sdks, method)):
                compare(f"{name}.{method}", getattr(ours, method), getattr(sdks, method))


def public_fields(cls: Any) -> set[str]:
    return {*getattr(cls, "model_fields", {}), *inspect.get_annotations(cls)}


@pytest.mark.parametrize("name", RESULTS)
def test_every_field_of_a_result_has_its_name_in_the_sdk(name: str) -> None:
    sdks = sdk_type(name)
    assert {field.name for field in fields(getattr(types, name))} <= public_fields(sdks) | set(dir(sdks))


def test_every_public_name_of_the_sdk_is_here_or_said_to_be_left_out() -> None:
    missing = {name for name in tinker.__all__ if not hasattr(stovetop, name)}
    assert missing == set(NAMES_LEFT_OUT)


def test_literals_have_the_same_values() -> None:
    assert set(get_args(types.StopReason)) == set(get_args(tinker.StopReason))
    assert set(get_args(types.TensorDtype)) == set(get_args(tinker.TensorDtype))
    assert set(get_args(tinker.types.LossFnType)) - set(LOSSES) == {"stable_reinforce", "custom"}


def test_a_future_is_waited_for_in_the_same_ways() -> None:
    ways = ["result", "result_async", "future", "coroutine", "__await__"]
    assert all(hasattr(APIFuture, way) and hasattr(tinker.APIFuture, way) for way in ways)
    assert parameters(APIFuture.result) == parameters(tinker.APIFuture.result)


def test_no_table_names_what_the_sdk_does_not_have() -> None:
    for path in METHODS_LEFT_OUT:
        owner, method = path.split(".")
        assert hasattr(sdk_type(owner), method), path
    for path in PARAMETERS_LEFT_OUT:
        owner, *method, name = path.split(".")
        assert name in parameters(getattr(sdk_type(owner), method[0]) if method else sdk_type(owner)), path

"""Our names, parameters and defaults are the SDK's, but for what `sdk_differences.py` leaves out, with the reason, and
what the tables below add.

Each entry of a table must still be needed: one that is not is an error too.
"""

import inspect
from dataclasses import fields
from types import ModuleType
from typing import Any, get_args

import pytest
import tinker

import stovetop
from stovetop import types
from stovetop.backends import in_process, sampling_client, saved_runs, training_client
from stovetop.checks import checked
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture
from stovetop.losses import LOSSES
from stovetop.sdk_differences import METHODS, NAMES, PARAMETERS, PARAMETERS_LEFT_OUT, require_neutral

PARAMETERS_ADDED = {
    "ServiceClient.storage": "where an embedded backend saves",
    "ServiceClient.engine": "options of an embedded backend",
    "RestClient.storage": "where an embedded backend saves",
    **{
        f"ServiceClient.{creator}.model_id": "a name that stays when a server starts again"
        for creator in (
            "create_lora_training_client",
            "create_training_client_from_state",
            "create_training_client_from_state_with_optimizer",
        )
    },
    "LoraConfig.alpha": "fixed at the service, a choice here",
}

METHODS_ADDED = {
    "ServiceClient.at": "several runs in one process",
    "ServiceClient.listening": "what the calls of a run took",
    "ServiceClient.engine_figures": "what an engine in this process did meanwhile",
    "SamplingClient.save": "what was frozen in memory, for another process",
    "TrainingClient.spoil": "a server accepts a forward_backward before it knows whether it can use it",
}

FIELDS_ADDED = {"GetInfoResponse.user_metadata": "what the client was made with"}

OTHER_DEFAULTS = {
    "LoraConfig.rank": "the default of create_lora_training_client",
    "TensorData.data": "an empty tensor is asked for, never assumed",
    "TensorData.dtype": "the SDK raises without one too",
    "ModelInput.chunks": "empty",
    "Datum.loss_fn_inputs": "both empty",
    "ServiceClient.close.status": "a service that is closed by hand has done its work",
}

CLIENTS = {
    "ServiceClient": in_process.InProcessServiceClient,
    "TrainingClient": training_client.InProcessTrainingClient,
    "SamplingClient": sampling_client.InProcessSamplingClient,
    "RestClient": saved_runs.SavedRuns,
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
    "Checkpoint",
    "CheckpointsListResponse",
    "Cursor",
    "ParsedCheckpointTinkerPath",
    "TrainingRun",
    "TrainingRunsResponse",
    "WeightsInfoResponse",
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
    left_out = {name for name in theirs if f"{client}.{name.removesuffix('_async')}" in METHODS}
    assert {name for name in theirs if hasattr(CLIENTS[client], name)} == theirs - left_out


@pytest.mark.parametrize("client", CLIENTS)
def test_shared_methods_take_the_same_parameters(client: str) -> None:
    ours, sdks, protocol = CLIENTS[client], getattr(tinker, client), getattr(stovetop.client, client)
    for name in sorted(public_methods(protocol) - {"model_id"}):
        assert name in vars(ours), f"{client}.{name}"
        assert parameters(getattr(ours, name)) == parameters(getattr(protocol, name)), f"{client}.{name} in process"
        if f"{client}.{name}" in METHODS_ADDED:
            assert not hasattr(sdks, name), f"{client}.{name} is in the SDK by now: take it out of METHODS_ADDED"
        else:
            compare(f"{client}.{name}", getattr(ours, name), getattr(sdks, name))


@pytest.mark.parametrize("client", ["ServiceClient", "RestClient"])
def test_the_ways_in_take_the_sdks_keywords(client: str) -> None:
    ours, theirs = parameters(getattr(stovetop, client)), parameters(getattr(tinker, client).__init__)
    theirs.pop("_holder", None)
    assert {name for name in ours if f"{client}.{name}" not in PARAMETERS_ADDED} == set(theirs)
    assert all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_made_from_the_same_fields(name: str) -> None:
    ours, sdks = getattr(types, name), sdk_type(name)
    compare(name, ours, sdks)
    for method in sorted(public_methods(sdks) - public_fields(sdks)):
        if f"{name}.{method}" not in METHODS:
            assert hasattr(ours, method), f"{name}.{method}"
            if callable(getattr(sdks, method)):
                compare(f"{name}.{method}", getattr(ours, method), getattr(sdks, method))


def public_fields(cls: Any) -> set[str]:
    return {*getattr(cls, "model_fields", {}), *inspect.get_annotations(cls)}


@pytest.mark.parametrize("name", RESULTS)
def test_every_field_of_a_result_has_its_name_in_the_sdk(name: str) -> None:
    sdks = sdk_type(name)
    ours = {field.name for field in fields(getattr(types, name)) if f"{name}.{field.name}" not in FIELDS_ADDED}
    assert ours <= public_fields(sdks) | set(dir(sdks))
    assert hasattr(getattr(types, name), "model_dump") >= hasattr(sdks, "model_dump")


def test_every_public_name_of_the_sdk_is_here_or_said_to_be_left_out() -> None:
    public = {name for name in tinker.__all__ if not hasattr(stovetop, name)}
    values = {name for name, value in vars(tinker.types).items() if not isinstance(value, ModuleType)} - {"annotations"}
    in_types = {name for name in values if not name.startswith("_") and not hasattr(types, name)}
    assert public | in_types == set(NAMES)


def test_literals_have_the_same_values() -> None:
    assert set(get_args(types.StopReason)) == set(get_args(tinker.StopReason))
    assert set(get_args(types.TensorDtype)) == set(get_args(tinker.TensorDtype))
    assert set(get_args(tinker.types.LossFnType)) - set(LOSSES) == {"stable_reinforce", "custom"}


def test_a_future_is_waited_for_in_the_same_ways() -> None:
    ways = ["result", "result_async", "future", "coroutine", "__await__"]
    assert all(hasattr(APIFuture, way) and hasattr(tinker.APIFuture, way) for way in ways)
    assert parameters(APIFuture.result) == parameters(tinker.APIFuture.result)


def test_no_table_names_what_the_sdk_does_not_have() -> None:
    for path in METHODS:
        owner, method = path.split(".")
        assert hasattr(sdk_type(owner), method), path
    for path in PARAMETERS_LEFT_OUT:
        owner, *method, name = path.split(".")
        assert name in parameters(getattr(sdk_type(owner), method[0]) if method else sdk_type(owner)), path


@checked
def verb(**values: object) -> None:
    """A verb of a client, as each of them asks."""
    require_neutral(**values)


def test_a_parameter_without_effect_takes_the_sdks_default_and_no_other_value() -> None:
    methods = [getattr(cls, name) for cls in CLIENTS.values() for name in vars(cls) if not name.startswith("_")]
    taken = [parameters(each) for each in [*methods, stovetop.ServiceClient] if callable(each)]
    for name, parameter in PARAMETERS.items():
        defaults = [each[name] for each in taken if name in each]
        assert defaults, name
        for value in {*defaults, *parameter.neutral} if name != "default_headers_overrides" else [None, {}]:
            verb(**{name: value})
        with pytest.raises(InvalidRequest, match=f"verb: {name} must be .*; .*: 'other'"):
            verb(**{name: "other"})


@pytest.mark.parametrize("path", METHODS)
def test_a_method_that_is_not_offered_says_why(path: str, service: stovetop.ServiceClient) -> None:
    owner, method = path.split(".")
    training = service.create_lora_training_client("any/model").result()
    clients = {
        "ServiceClient": service,
        "TrainingClient": training,
        "SamplingClient": training.save_weights_and_get_sampling_client().result(),
        "RestClient": service.create_rest_client(),
    }
    if owner in clients:
        with pytest.raises(InvalidRequest, match=f"{path} is not offered: "):
            getattr(clients[owner], method)()

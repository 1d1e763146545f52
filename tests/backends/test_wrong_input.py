"""Wrong input is refused where it is passed: at the call, in under a second, as a StovetopError with the name of the
field, what it must be, and the value; and nothing has changed.

The catalogue is held against the signatures: a field of a value or an argument of a call that has no wrong values
in `wrong_values.py` fails `test_every_field_and_argument_has_wrong_values`. For a new one add a row there:
`"verb.argument": [wrong values]` to VERBS, `"Value.field"` to VALUES, `"provider.option"` to OPTIONS, or an option to
OPTIONS_THAT_TAKE_ANYTHING with the reason why there are none.
"""

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import datum
from providers import Provider
from wrong_values import (
    BY_ANNOTATION,
    INF,
    NAN,
    OPTIONS,
    OPTIONS_THAT_TAKE_ANYTHING,
    PROMPT,
    REST,
    VALID,
    VALUES,
    VERBS,
    asynchronous,
)

import stovetop
from stovetop import client, input_checks, losses, rest_types, types
from stovetop.backends import local, recording
from stovetop.client import ServiceClient
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.futures import APIFuture, resolved
from stovetop.types import AdamParams, ModelInput, SamplingParams, TensorData

INPUTS: list[type[Any]] = [
    types.EncodedTextChunk,
    types.ImageChunk,
    types.ModelInput,
    types.TensorData,
    types.Datum,
    types.AdamParams,
    types.LoraConfig,
    types.SamplingParams,
    types.PromptProvenanceSpan,
    types.SampledProvenanceSpan,
    input_checks.ModelLimits,
    *losses.LOSSES.values(),
    recording.Raises,
    recording.NonFiniteGradient,
]
RESULTS = [
    value
    for module in (types, rest_types)
    for value in vars(module).values()
    if isinstance(value, type)
    and is_dataclass(value)
    and value.__module__ == module.__name__
    and value not in INPUTS
    and not value.__name__.startswith("_")
]


def wrong_values_of(value: type[Any], field: str) -> list[Any]:
    return VALUES.get(f"{value.__name__}.{field}", VALUES.get(f"Span.{field}", []))


def parameters_of(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.Parameter
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "_") and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]


def verbs_of(protocol: type[Any]) -> dict[str, Callable[..., Any]]:
    return {name: f for name, f in vars(protocol).items() if inspect.isfunction(f) and not name.startswith("_")}


def fields_and_arguments() -> Iterator[tuple[str, list[Any]]]:
    """Everything that a user can pass, and what of it is wrong."""
    for value in INPUTS:
        for name in parameters_of(value):
            yield f"{value.__name__}.{name}", wrong_values_of(value, name)
    for protocol in (client.SamplingClient, client.TrainingClient, client.ServiceClient, client.RestClient):
        table = REST if protocol is client.RestClient else VERBS
        for verb, function in verbs_of(protocol).items():
            shared = protocol is client.TrainingClient and verb == "create_sampling_client"
            for name in parameters_of(function):
                path = f"{'training.' if shared else ''}{verb}.{name}"
                yield path, table.get(path, [])
    for name in parameters_of(stovetop.ServiceClient):
        yield f"ServiceClient.{name}", OPTIONS.get(name, [])
    for provider, function in (("local", local.open_service), ("recording", recording.open_service)):
        for name in parameters_of(function):
            if name not in OPTIONS and name not in OPTIONS_THAT_TAKE_ANYTHING:
                yield f"{provider}.{name}", OPTIONS.get(f"{provider}.{name}", [])


def test_every_field_and_argument_has_wrong_values() -> None:
    listed = dict(fields_and_arguments())
    assert [path for path, wrong in listed.items() if not wrong] == [], "add a row, see the top of this file"
    assert sum(map(len, listed.values())) >= 150


def test_no_row_of_the_catalogue_is_left_over() -> None:
    listed = {path for path, _ in fields_and_arguments()}
    rows = {*VERBS, *REST, *(path for path in VALUES if not path.startswith("Span."))}
    rows |= {path if "." in path else f"ServiceClient.{path}" for path in OPTIONS}
    assert rows - listed == set()


# ---- what a refusal must be ------------------------------------------------------------------------------------------


def complaint_about(call: Callable[[], object], field: str, value: object, begins: str = "") -> str | None:
    """What is wrong with the refusal of a call; None if it is as it must be."""
    start = time.monotonic()
    try:
        returned = call()
    except StovetopError as error:
        message = str(error)
    except Exception as error:
        return f"{type(error).__name__}, which is not ours: {error}"
    else:
        return f"accepted: {returned!r}"
    if time.monotonic() - start > 1:
        return "took over a second"
    if isinstance(value, SamplingParams):
        field = "stop" if value.stop else "max_tokens"
    if field not in message or not message.startswith(begins):
        return f"does not name the field {field}: {message}"
    if not re.search(r"must|needs|known|exceed|outside|lacks|pass |reads|has|holds", message):
        return f"does not say what would be right: {message}"
    if not any(mark in message for mark in marks_of(value)):
        return f"does not show the value: {message}"
    return None


def marks_of(value: object) -> list[str]:
    """Any of these in a message shows which value it is about: its short form, its type, or that of a part."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        parts: list[object] = [*value, *value.values()]
    else:
        parts = list(value) if isinstance(value, list | tuple | set) else []
    if isinstance(value, ModelInput | SamplingParams | TensorData | AdamParams):
        return [str(number) for number in (10**6, -1, 100_000, "True", "is empty", "TensorData", "both are given")]
    own = [repr(value)[:12], type(value).__name__, "_empty" if value == "" else "\0"]
    return [*own, *(mark for part in parts for mark in marks_of(part))]


def complaints(cases: Iterator[tuple[str, object, Callable[[], object], str]]) -> list[str]:
    found = []
    for path, value, call, begins in cases:
        complaint = complaint_about(call, path.split(".")[-1], value, begins)
        if complaint is not None:
            found.append(f"{path} = {str(value)[:60]!r}: {complaint[:300]}")
    return found


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", INPUTS, ids=lambda value: value.__name__)
def test_a_value_refuses_what_its_fields_cannot_hold(value: type[Any]) -> None:
    cases = (
        (f"{value.__name__}.{name}", wrong, lambda name=name, wrong=wrong: make(value, name, wrong), "")
        for name in parameters_of(value)
        for wrong in wrong_values_of(value, name)
    )
    assert "\n".join(complaints(cases)) == ""


def make(value: type[Any], field: str, wrong: object) -> object:
    return value(**{**VALID.get(value.__name__, {}), field: wrong})


@pytest.mark.parametrize("result", RESULTS, ids=lambda value: value.__name__)
def test_a_result_refuses_what_its_fields_cannot_hold(result: type[Any]) -> None:
    valid = {field.name: valid_of(field.type) for field in fields(result) if field.default is MISSING}
    result(**valid)
    for field in fields(result):
        for wrong in BY_ANNOTATION[kind_of(field.type)]:
            if not (wrong is None and "None" in str(field.type)):
                with pytest.raises(InvalidRequest, match=rf"{result.__name__}\.{field.name}.* must be"):
                    result(**{**valid, field.name: wrong})


def kind_of(annotation: object) -> str:
    text = re.sub(r"typing\.Annotated\[(.*?), .*", r"\1", str(annotation)).removeprefix("<class '").split(" | ")[0]
    text = re.sub(r"typing\.(Optional|Union)\[", "", text)
    return next((kind for kind in ("str", "int", "bool", "list", "dict") if text.startswith(kind)), "other")


def valid_of(annotation: object) -> object:
    if isinstance(annotation, type) and is_dataclass(annotation):
        return annotation(**{f.name: valid_of(f.type) for f in fields(annotation) if f.default is MISSING})
    plain: dict[str, object] = {"str": "a", "int": 1, "bool": True, "list": [], "dict": {}}
    if kind_of(annotation) in plain:
        return plain[kind_of(annotation)]
    return datetime.now(UTC) if "datetime" in str(annotation) else annotation.__args__[0]  # type: ignore[attr-defined]  a Literal


@pytest.mark.parametrize("integer", [3, np.int64(3), np.int32(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_integers_of_numpy_and_torch_are_integers(integer: Any) -> None:
    params = SamplingParams(max_tokens=integer, seed=integer, top_k=integer, stop=[integer])
    assert params == SamplingParams(max_tokens=3, seed=3, top_k=3, stop=[3])
    assert {type(params.max_tokens), type(params.seed), type(params.top_k), type(params.stop[0])} == {int}
    assert type(types.LoraConfig(rank=integer).rank) is int
    assert type(AdamParams(learning_rate=np.float32(0.5)).learning_rate) is float
    assert type(AdamParams(learning_rate=1).learning_rate) is float
    assert AdamParams(learning_rate=torch.tensor(0.5)) == AdamParams(learning_rate=np.array(0.5)) == AdamParams(0.5)
    assert losses.parse_loss("ppo", {"clip_high_threshold": np.float64(1.5)}) == losses.PPO(clip_high_threshold=1.5)


def test_a_list_of_stops_is_a_copy() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ["a"]
    assert SamplingParams(stop=np.array([1, 2])).stop == SamplingParams(stop=(1, 2)).stop == [1, 2]


# ---- calls -----------------------------------------------------------------------------------------------------------


class Clients:
    """One of each, and arguments with which each verb would do."""

    def __init__(self, provider: Provider, service: ServiceClient) -> None:
        self.service = service
        self.training: Any = service.create_lora_training_client(provider.base_model, rank=4, seed=1).result()
        self.sampling = service.create_sampling_client(base_model=provider.base_model).result()
        path = self.training.save_state(f"wrong-input-{id(self)}").result().path
        trained: dict[str, Any] = {"data": [datum()], "loss_fn": "cross_entropy"}
        self.arguments: dict[str, dict[str, Any]] = {
            "sample": {"prompt": PROMPT, "num_samples": 1, "sampling_params": SamplingParams(max_tokens=1)},
            "compute_logprobs": {"prompt": PROMPT},
            "forward": trained,
            "forward_backward": trained,
            "forward_backward_custom": {"data": [datum()], "loss_fn": lambda data, logprobs: (logprobs[0].sum(), {})},
            "optim_step": {"optim_params": AdamParams()},
            "save_state": {"name": "name"},
            "save_weights_for_sampler": {"name": "name"},
            "load_state": {"path": path},
            "load_state_with_optimizer": {"path": path},
            "training.create_sampling_client": {"model_path": path},
            "create_lora_training_client": {"base_model": provider.base_model},
            "create_training_client_from_state": {"path": path},
            "create_training_client_from_state_with_optimizer": {"path": path},
            "create_sampling_client": {"base_model": provider.base_model},
        }

    def wrong_calls(self) -> Iterator[tuple[str, object, Callable[[], object], str]]:
        for path, wrongs in VERBS.items():
            verb, argument = path.rsplit(".", 1)
            name = verb.removeprefix("training.")
            owners = (self.sampling, self.training, self.service)
            owner = self.training if verb.startswith("training.") else next(o for o in reversed(owners) if has(o, name))
            for wrong in wrongs:
                arguments = {**self.arguments.get(verb, {}), argument: wrong}
                yield path, wrong, lambda o=owner, n=name, a=arguments: getattr(o, n)(**a), f"{name}: "


def has(owner: object, verb: str) -> bool:
    return verb in vars(type(owner))


def state_of(training: Any) -> str:
    """A digest of weights, moments and gradients, to the bit."""
    adapters = training._base.thread.engine.adapters
    adapter = getattr(adapters, "by_id", adapters)[training._adapter]
    digest = hashlib.sha256()
    for part in (
        (adapter.delta_VV, adapter.moments, adapter.gradient_VV)
        if hasattr(adapter, "delta_VV")
        else (
            adapter.weights.tensors,
            adapter.moments,
            adapter.gradients,
        )
    ):
        for array in arrays_of(part):
            digest.update(array.tobytes())
    return digest.hexdigest()


def arrays_of(part: Any) -> Iterator[np.ndarray]:
    if part is None:
        yield np.zeros(1)
    elif isinstance(part, dict):
        for key in sorted(part):
            yield from arrays_of(part[key])
    elif is_dataclass(part):
        for field in fields(part):
            yield from arrays_of(getattr(part, field.name))
    else:
        yield np.asarray(part)


def test_wrong_arguments_are_refused_by_the_call_and_leave_everything_as_it_was(
    provider: Provider, backend: ServiceClient
) -> None:
    clients = Clients(provider, backend)
    clients.training.forward_backward([datum()], "cross_entropy").result()
    before = state_of(clients.training)
    assert "\n".join(complaints(clients.wrong_calls())) == ""
    assert state_of(clients.training) == before
    assert clients.training.optim_step(AdamParams()).result().metrics["grad_norm"] > 0
    assert state_of(clients.training) != before
    assert len(clients.sampling.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result().sequences) == 1


def test_an_argument_too_few_too_many_or_misspelt_is_refused_with_the_names(
    provider: Provider, backend: ServiceClient
) -> None:
    clients = Clients(provider, backend)
    with pytest.raises(InvalidRequest, match=r"sample: missing .* 'num_samples'.*arguments are: prompt, num_samples"):
        clients.sampling.sample(PROMPT)
    with pytest.raises(InvalidRequest, match="optim_step: too many positional arguments"):
        clients.training.optim_step(AdamParams(), AdamParams())
    with pytest.raises(InvalidRequest, match="sample: unknown argument 'num_sample'; did you mean 'num_samples'"):
        clients.sampling.sample(PROMPT, num_sample=2, sampling_params=SamplingParams())


def test_wrong_arguments_of_a_rest_client_are_refused(backend: ServiceClient) -> None:
    rest: Any = backend.create_rest_client()

    def cases() -> Iterator[tuple[str, object, Callable[[], object], str]]:
        for path, wrongs in REST.items():
            verb, argument = path.split(".")
            valid = {"training_run_id": "run", "checkpoint_id": "weights/a", "tinker_path": "/run/weights/a"}
            taken = parameters_of(getattr(client.RestClient, verb))
            for wrong in wrongs:
                arguments = {**{k: v for k, v in valid.items() if k in taken}, argument: wrong}
                yield path, wrong, lambda v=verb, a=arguments: getattr(rest, v)(**a), f"{verb}: "

    assert "\n".join(complaints(cases())) == ""


def test_wrong_options_of_a_service_are_refused(tmp_path: Path) -> None:
    def cases() -> Iterator[tuple[str, object, Callable[[], object], str]]:
        for path, wrongs in OPTIONS.items():
            provider, _, option = path.rpartition(".")
            for name in [provider] if provider else ["local", "recording"]:
                for wrong in wrongs:
                    arguments = {"base_url": name, "storage": tmp_path, option: wrong}
                    yield path, wrong, lambda a=arguments: stovetop.ServiceClient(**a), "ServiceClient: "

    assert "\n".join(complaints(cases())) == ""


@pytest.mark.parametrize("timeout", ["5", -1, True, NAN, [5], 1e300])
def test_a_future_refuses_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"result: timeout must be a finite number at least 0 and at most .*, or None"
    ):
        resolved(5).result(timeout)
    assert APIFuture(resolved(5).future()).result(np.float32(1)) == 5


INPUTS_SET_LATER = [[1.0] * 9, np.ones(9, np.float32), None]


@pytest.mark.parametrize("verb", ["forward_backward", "forward_backward_custom"])
@pytest.mark.parametrize("name", ["weights", "target_tokens"])
@pytest.mark.parametrize("value", INPUTS_SET_LATER, ids=lambda value: type(value).__name__)
def test_an_input_of_a_loss_that_was_set_later_and_is_no_tensor_is_refused(
    provider: Provider, backend: ServiceClient, verb: str, name: str, value: Any
) -> None:
    changed, training = datum(), backend.create_lora_training_client(provider.base_model, rank=1, seed=1).result()
    changed.loss_fn_inputs[name] = value
    loss_fn: Any = "cross_entropy" if verb == "forward_backward" else lambda data, logprobs: (logprobs[0].sum(), {})
    with pytest.raises(InvalidRequest, match=rf"{verb}: datum 1: loss_fn_inputs\['{name}'\] must be a TensorData"):
        getattr(training, verb)([datum(), changed], loss_fn)


def test_targets_without_a_target_are_refused(provider: Provider, backend: ServiceClient) -> None:
    training = backend.create_lora_training_client(provider.base_model, rank=1, seed=1).result()
    none = {"target_tokens": np.zeros((4, 0), np.int64), "weights": np.zeros((4, 0), np.float32)}
    with pytest.raises(InvalidRequest, match=r"target_tokens has shape \(4, 0\).* needs a K of at least 1"):
        training.forward_backward([types.Datum(PROMPT, none)], "cross_entropy")


# ---- custom losses ---------------------------------------------------------------------------------------------------


def in_place(data: Any, logprobs: Any) -> Any:
    total = (logprobs[0] ** 2).sum()
    logprobs[0].data = logprobs[0].data[:1]
    return total, {}


RETURNS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a float as loss": (lambda data, p: (0.5, {}), r"must be a torch tensor with one number: 0.5 \(float\)"),
    "only the loss": (lambda data, p: p[0].sum(), r"two values, \(loss, metrics\): tensor"),
    "nothing": (lambda data, p: None, r"two values, \(loss, metrics\): None"),
    "three values": (lambda data, p: (p[0].sum(), {}, 1), "two values"),
    "a vector": (lambda data, p: (p[0], {}), r"one number: a tensor of shape \(9,\)"),
    "an integer tensor": (lambda data, p: (p[0].sum().long(), {}), "one number: a tensor of shape .* torch.int64"),
    "a nan": (lambda data, p: (p[0].sum() * NAN, {}), "must be finite: nan"),
    "an infinite loss": (lambda data, p: (p[0].sum() * INF, {}), "must be finite: -?inf"),
    "no way back": (lambda data, p: (p[0].sum().detach(), {}), "depends on the logprobs"),
    "another way back": (lambda data, p: (p[0].detach().requires_grad_().sum(), {}), "depends on the logprobs"),
    "a gradient of nan": (lambda data, p: ((p[0] * 0).abs().sqrt().sum(), {}), r"logprobs of data\[0\] it is: .*nan"),
    "metrics None": (
        lambda data, p: (p[0].sum(), None),
        "custom loss returns must be a dictionary.*None",
    ),
    "a list of metrics": (lambda data, p: (p[0].sum(), [1]), "custom loss returns must be a dictionary"),
    "a string as metric": (lambda data, p: (p[0].sum(), {"m": "x"}), r"returns\['m'\] must be a number: 'x' \(str\)"),
    "a vector as metric": (lambda data, p: (p[0].sum(), {"m": p[0]}), r"returns\['m'\] must be a number: tensor"),
    "a number as key": (lambda data, p: (p[0].sum(), {5: 1.0}), r"returns\[5\] must be a string as key: 5"),
    "a coroutine": (lambda data, p: asynchronous(data, p), "plain function, not an async one"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_a_custom_loss_that_returns_something_else_fails_its_call_and_adds_no_gradient(
    provider: Provider, backend: ServiceClient, what: str
) -> None:
    loss_fn, words = RETURNS[what]
    training: Any = backend.create_lora_training_client(provider.base_model, rank=1, seed=1).result()
    training.forward_backward([datum()], "cross_entropy").result()
    before = state_of(training)
    with pytest.raises(StovetopError, match=rf"(?s)forward_backward_custom \(call 2 of .*{words}"):
        training.forward_backward_custom([datum()], loss_fn).result()
    assert state_of(training) == before


def test_metrics_of_a_custom_loss_are_floats(provider: Provider, backend: ServiceClient) -> None:
    def loss_fn(data: Any, p: Any) -> Any:
        return p[0].sum(), {"int": 2, "numpy": np.float32(0.5), "tensor": p[0].mean().detach(), "nan": NAN}

    training: Any = backend.create_lora_training_client(provider.base_model, rank=1, seed=1).result()
    metrics = training.forward_backward_custom([datum()], loss_fn).result().metrics
    assert {name: type(value) for name, value in metrics.items()} == dict.fromkeys([*metrics], float)
    assert (metrics["int"], metrics["numpy"]) == (2.0, 0.5)


# ---- what only one kind of model refuses -----------------------------------------------------------------------------


def test_a_stop_string_is_refused_where_the_model_has_no_tokenizer(tmp_path: Path) -> None:
    from engine import tiny

    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder)
    with local.open_service(storage=tmp_path, threads=1, download=None) as service:
        sampler = service.create_sampling_client(base_model=str(folder)).result()
        with pytest.raises(InvalidRequest, match=r"sample: SamplingParams.stop has strings, but .*no tokenizer"):
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, stop=["x"]))
        assert sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, stop=[5])).result().sequences

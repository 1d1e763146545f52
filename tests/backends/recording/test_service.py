"""The fake that is shipped, and what a test of yours may ask of it: calls, latencies, faults."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from examples import datum, logprobs, train

from stovetop.backends import recording
from stovetop.durable import read_manifest
from stovetop.errors import InvalidRequest, RequestFailedError, ServiceClosed, UnknownName
from stovetop.types import AdamParams, Datum, ModelInput, SamplingParams


def test_every_call_is_recorded_in_order_with_its_arguments(tmp_path: Path) -> None:
    with recording.open_service(tmp_path) as service:
        client = service.create_lora_training_client("any/model", rank=2, seed=0).result()
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.5))
        sampler = client.save_weights_and_get_sampling_client().result()
        sampler.sample(ModelInput.from_ints([1]), 2, SamplingParams(max_tokens=3)).result()
        client.save_state("s").result()
    assert [call.verb for call in service.calls] == [
        "create_lora_training_client",
        "forward_backward",
        "optim_step",
        "save_weights_and_get_sampling_client",
        "sample",
        "save_state",
    ]
    created, trained, stepped, _, sampled, _ = service.calls
    assert created.arguments["config"].rank == 2
    assert trained.client == client.model_id
    assert trained.arguments == {"data": [datum()], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    assert stepped.arguments["optim_params"].learning_rate == 0.5
    assert sampled.arguments["num_samples"] == 2
    assert sampled.arguments["sampling_params"] == SamplingParams(max_tokens=3)


def test_a_refused_call_is_not_recorded() -> None:
    with recording.open_service() as service:
        with pytest.raises(InvalidRequest):
            service.create_lora_training_client("any/model").result().forward_backward([], "cross_entropy")
        assert [call.verb for call in service.calls] == ["create_lora_training_client"]


def test_two_services_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    def outcome(seed: int) -> list[float]:
        with recording.open_service(seed=seed) as service:
            client = service.create_lora_training_client("any/model").result()
            train(client, 2, 0.1)
            return logprobs(client).tolist()

    assert outcome(0) == outcome(0) != outcome(1)


def test_every_name_is_a_model_unless_a_list_is_given() -> None:
    with recording.open_service(models=["one"]) as service:
        assert [model.model_name for model in service.get_server_capabilities().supported_models] == ["one"]
        with pytest.raises(UnknownName, match="known: one"):
            service.create_lora_training_client("two")


def test_without_a_storage_a_folder_is_made_when_something_is_saved() -> None:
    with recording.open_service() as service:
        path = Path(service.create_lora_training_client("any/model").result().save_state("s").result().path)
        assert (path / "manifest.json").is_file()


def test_metadata_of_service_client_and_call_reach_the_manifest(tmp_path: Path) -> None:
    with recording.open_service(tmp_path, user_metadata={"who": "me", "run": "0"}) as service:
        client = service.create_lora_training_client("any/model", user_metadata={"run": "1"}).result()
        path = client.save_state("s", ttl_seconds=60, user_metadata={"step": "5"}).result().path
    manifest = read_manifest(Path(path))
    assert manifest["user_metadata"] == {"who": "me", "run": "1", "step": "5"}
    assert (manifest["ttl_seconds"], manifest["base_model"], manifest["lora"]["rank"]) == (60, "any/model", 32)


def test_a_closed_service_has_finished_what_it_accepted_and_takes_no_more() -> None:
    service = recording.open_service(latency_s=0.002)
    client = service.create_lora_training_client("any/model").result()
    futures = [client.forward_backward([datum()], "cross_entropy") for _ in range(5)]
    service.close()
    assert all(future.done() for future in futures)
    with pytest.raises(InvalidRequest, match="closed; make a new ServiceClient"):
        client.optim_step(AdamParams())
    service.close()


# ---- slowness and failure --------------------------------------------------------------------------------------------


def test_latencies_of_samples_overlap_and_those_of_one_client_add_up() -> None:
    with recording.open_service(latency_s=0.03) as service:
        sampler = service.create_sampling_client(base_model="any/model").result()
        client = service.create_lora_training_client("any/model").result()
        start = time.perf_counter()
        samples = [sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=2)) for _ in range(100)]
        assert all(len(future.result().sequences) == 1 for future in samples)
        assert time.perf_counter() - start < 50 * 0.03
        start = time.perf_counter()
        assert client.forward([datum()], "cross_entropy").done() is False
        client.forward([datum()], "cross_entropy")
        client.forward([datum()], "cross_entropy").result()
        assert time.perf_counter() - start >= 3 * 0.03


def test_a_latency_may_depend_on_the_verb() -> None:
    with recording.open_service(latency_s=lambda verb: 0.3 if verb == "sample" else 0.0) as service:
        client = service.create_lora_training_client("any/model").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        slow = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams(max_tokens=1))
        client.forward([datum()], "cross_entropy").result()
        assert not slow.done()


def test_the_nth_call_of_a_verb_fails_once_as_asked() -> None:
    faults = [recording.Raises("forward_backward", 2, ConnectionError("cable cut"))]
    with recording.open_service(faults=faults) as service:
        client = service.create_lora_training_client("any/model").result()
        outcomes = [client.forward_backward([datum()], "cross_entropy") for _ in range(3)]
        outcomes[0].result()
        outcomes[2].result()
        with pytest.raises(RequestFailedError, match=r"forward_backward \(call 2 of model-.*cable cut") as caught:
            outcomes[1].result()
        assert isinstance(caught.value.__cause__, ConnectionError)
        with pytest.raises(RequestFailedError, match="cable cut"):
            client.optim_step(AdamParams()).result()
        train(client, 1, 0.1)


@pytest.mark.parametrize("verb", [verb for verb in get_args(recording.Verb) if not verb.startswith("create_")])
def test_any_verb_can_fail(verb: recording.Verb, tmp_path: Path) -> None:
    with recording.open_service(tmp_path, faults=[recording.Raises(verb, 1, ConnectionError("cable cut"))]) as service:
        client = service.create_lora_training_client("any/model").result()
        sampler = service.create_sampling_client(base_model="any/model").result()
        with recording.open_service(tmp_path) as healthy:
            path = healthy.create_lora_training_client("any/model").result().save_state("s").result().path
        prompt = ModelInput.from_ints([1])
        call: dict[str, Callable[[], object]] = {
            "forward": lambda: client.forward([datum()], "cross_entropy"),
            "forward_backward": lambda: client.forward_backward([datum()], "cross_entropy"),
            "forward_backward_custom": lambda: client.forward_backward_custom([datum()], _sum_of_squares),
            "optim_step": lambda: client.optim_step(AdamParams()),
            "save_state": lambda: client.save_state("a"),
            "save_weights_for_sampler": lambda: client.save_weights_for_sampler("a"),
            "save_weights_and_get_sampling_client": client.save_weights_and_get_sampling_client,
            "load_state": lambda: client.load_state(path),
            "load_state_with_optimizer": lambda: client.load_state_with_optimizer(path),
            "sample": lambda: sampler.sample(prompt, 1, SamplingParams(max_tokens=1)),
            "compute_logprobs": lambda: sampler.compute_logprobs(prompt),
            "save": lambda: client.save_weights_and_get_sampling_client().save(tmp_path / "frozen"),
        }
        with pytest.raises(RequestFailedError, match=f"{verb}.*cable cut"):
            call[verb]().result()


def _sum_of_squares(data: Sequence[Datum], scored: list) -> tuple:
    return (scored[0] ** 2).sum(), {}


def test_a_fault_of_an_unknown_verb_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'forward_backward'"):
        recording.Raises("forward_backwards", 1, ConnectionError())


def test_a_gradient_of_nan_on_demand_is_skipped_by_the_step() -> None:
    with recording.open_service(faults=[recording.NonFiniteGradient(2)]) as service:
        client = service.create_lora_training_client("any/model").result()
        skipped = []
        for _ in range(3):
            client.forward_backward([datum()], "cross_entropy")
            skipped.append(client.optim_step(AdamParams()).result().metrics["skipped_nonfinite"])
    assert skipped == [0.0, 1.0, 0.0]


def test_an_engine_that_breaks_answers_all_who_wait_and_its_model_can_be_opened_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with recording.open_service(latency_s=0.05) as service:
        client: Any = service.create_lora_training_client("any/model").result()
        client._base.thread.engine.step = lambda: {}["a bug of ours"]
        for future in [client.forward_backward([datum()], "cross_entropy"), client.optim_step(AdamParams())]:
            with pytest.raises(RequestFailedError, match="a bug of ours"):
                future.result(timeout=5)
        with pytest.raises(ServiceClosed, match=r"forward: .*'any/model' has failed .*a bug of ours"):
            client.forward([datum()], "cross_entropy")
        client = service.create_lora_training_client("any/model").result()
        client.forward_backward([datum()], "cross_entropy")
        assert client.optim_step(AdamParams()).result(timeout=5).metrics["grad_norm"] > 0
    assert "the engine of 'any/model' failed" in caplog.text

"""What `import stovetop as tinker` gives, and what it does not cost."""

from pathlib import Path

import pytest

import stovetop as tinker
from processes import run_python
from stovetop.backends import local
from stovetop.durable import read_manifest
from stovetop.errors import InvalidRequest, UnknownName


def _in_fresh_process(code: str) -> str:
    return run_python("-c", code, check=True).stdout.strip()


def test_importing_stovetop_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "pydantic", "rich", "tyro", "matplotlib", "safetensors", "datasets"]
    loaded = _in_fresh_process(f"import stovetop, sys; print([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


def test_the_recording_backend_trains_and_samples_without_torch() -> None:
    code = """
import sys, stovetop as tinker
client = tinker.ServiceClient("recording").create_lora_training_client("any/model").result()
datum = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
client.forward_backward([datum], "cross_entropy")
client.optim_step(tinker.AdamParams()).result()
sampler = client.save_weights_and_get_sampling_client()
sampler.sample(tinker.ModelInput.from_ints([1]), 1, tinker.SamplingParams(max_tokens=4)).result()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    assert _in_fresh_process(code) == "[]"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(tinker, name) for name in tinker.__all__)
    assert set(tinker.__all__) <= set(dir(tinker))


def test_what_a_training_program_is_made_of_is_there_and_documented() -> None:
    from stovetop import checkpoints, client, kitchen, lr_schedules, runs
    from stovetop.kitchen.workflows import list_workflows
    from stovetop.rl.types import EnvGroupBuilder, RLDataset
    from stovetop.supervised.data import SupervisedDataset

    named = [client.TrainingClient, client.SamplingClient, SupervisedDataset, RLDataset, EnvGroupBuilder]
    named += [checkpoints.submit_checkpoint, checkpoints.resume_or_create, checkpoints.save_final_checkpoint]
    named += [lr_schedules.compute_schedule_lr_multiplier, runs.open_run, runs.load]
    named += [kitchen.Workflow, kitchen.stage, kitchen.RunConfig]
    assert all(each.__doc__ for each in named)
    assert {"supervised", "preference", "reinforcement", "distillation"} <= set(list_workflows())


def test_every_error_is_a_name_of_the_package() -> None:
    values = vars(tinker.errors).items()
    defined = {name for name, value in values if isinstance(value, type) and issubclass(value, BaseException)}
    assert defined <= set(tinker.__all__)


def test_modules_are_imported_when_they_are_first_named() -> None:
    code = """
import stovetop, sys
assert "stovetop.concurrency" in dir(stovetop) or "concurrency" in dir(stovetop)
before = "stovetop.durable" in sys.modules
print(before, stovetop.durable.MANIFEST, "stovetop.durable" in sys.modules)
"""
    assert _in_fresh_process(code) == "False manifest.json True"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Datun'"):
        _ = tinker.Datun
    assert not hasattr(tinker, "nothing")


def test_scripts_catch_errors_under_the_names_of_the_sdk() -> None:
    assert issubclass(tinker.RequestFailedError, tinker.TinkerError)
    assert issubclass(InvalidRequest, tinker.TinkerError)
    assert issubclass(InvalidRequest, ValueError)


def test_service_client_opens_the_recording_backend(tmp_path: Path) -> None:
    with tinker.ServiceClient(
        base_url="recording", api_key="unused", user_metadata={"who": "me"}, storage=tmp_path, seed=3
    ) as service:
        assert isinstance(service, tinker.client.ServiceClient)
        client = service.create_lora_training_client("any/model", rank=8)
        assert isinstance(client.result(), tinker.TrainingClient)
        assert client.result().save_state("s").result().path.startswith(str(tmp_path))


@pytest.mark.parametrize("address", ["tinker", "http://localhost:8000", "https://example.com"])
def test_a_remote_address_opens_a_client_that_has_asked_nothing_yet(address: str) -> None:
    service = tinker.ServiceClient(address, api_key="tml-unused")
    assert isinstance(service, tinker.client.ServiceClient)
    with pytest.raises(UnknownName, match="unknown keyword of ServiceClient 'device'"):
        tinker.ServiceClient(address, device="cpu")


@pytest.mark.parametrize("address", ["http://", "https://:80", "http://host:port", "http://host:0x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="must be an address such as"):
        tinker.ServiceClient(address)


def test_a_misspelt_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'recording'"):
        tinker.ServiceClient("recroding")


def test_metadata_by_position_is_refused_and_told_how() -> None:
    with pytest.raises(InvalidRequest, match="user_metadata="):
        tinker.ServiceClient({"who": "me"})


@pytest.mark.parametrize("base_url", [None, "recording"])
def test_a_keyword_that_no_service_has_is_refused_with_the_nearest(base_url: str | None) -> None:
    with pytest.raises(UnknownName, match="keyword of ServiceClient 'dispaly_name'; did you mean 'display_name'"):
        tinker.ServiceClient(base_url, dispaly_name="mine")
    with pytest.raises(UnknownName, match="latency_s" if base_url else "did you mean 'device'"):
        tinker.ServiceClient(base_url, devise="cpu")


def test_service_client_is_one_class_that_every_service_is_an_instance_of(tmp_path: Path) -> None:
    assert tinker.ServiceClient is tinker.client.ServiceClient
    service: tinker.ServiceClient = tinker.ServiceClient("recording", storage=tmp_path)
    nothing: tinker.ServiceClient | None = None
    assert isinstance(service, tinker.ServiceClient)
    assert isinstance(local.open_service(storage=tmp_path), tinker.ServiceClient)
    assert not isinstance(nothing, tinker.ServiceClient)
    assert isinstance(service.create_rest_client(), tinker.RestClient)
    assert isinstance(tinker.RestClient(storage=tmp_path), tinker.RestClient)


def test_values_are_dumped_as_the_sdks_are() -> None:
    prompt = tinker.ModelInput.from_ints([1, 2])
    assert prompt.model_dump() == {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    assert tinker.AdamParams(learning_rate=0.1).model_dump()["learning_rate"] == 0.1
    capabilities = tinker.GetServerCapabilitiesResponse([tinker.SupportedModel("m", 8)])
    assert capabilities.model_dump()["supported_models"][0]["max_context_length"] == 8


def test_a_datum_says_where_its_tokens_were_sampled() -> None:
    prompt = tinker.PromptProvenanceSpan(sequence_id="a", length=2)
    answer = tinker.SampledProvenanceSpan(sequence_id="a", length=1)
    datum = tinker.Datum(tinker.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    told = datum.with_provenance(model_input=[prompt, answer], loss_fn_inputs=[prompt, answer])
    assert told.model_input_spans == (prompt, answer)
    assert (told.model_input, told.loss_fn_inputs) == (datum.model_input, datum.loss_fn_inputs)
    with pytest.raises(InvalidRequest, match=r"model_input must cover its 3 positions.*: 2"):
        datum.with_provenance(model_input=[prompt], loss_fn_inputs=[prompt, answer])
    with pytest.raises(InvalidRequest, match="sequence_id must be a string that is not empty"):
        tinker.SampledProvenanceSpan(sequence_id="", length=1)


def test_a_loop_for_the_sdk_catches_what_we_raise(tmp_path: Path) -> None:
    client = tinker.ServiceClient("recording", storage=tmp_path).create_lora_training_client("any/model").result()
    with pytest.raises(tinker.BadRequestError) as refused:
        client.forward_backward([], "cross_entropy")
    assert refused.value.status_code == 400
    assert refused.value.message == str(refused.value)
    client.save_state("s").result()
    with pytest.raises(tinker.ConflictError):
        client.save_state("s")
    with pytest.raises(tinker.NotFoundError):
        client.load_state(str(tmp_path / "nothing"))


def test_user_metadata_is_seen_on_the_client_and_in_what_it_saves(tmp_path: Path) -> None:
    service = tinker.ServiceClient("recording", storage=tmp_path, user_metadata={"who": "me"}, display_name="mine")
    client = service.create_lora_training_client("any/model", user_metadata={"run": "1"}).result()
    assert client.get_info().user_metadata == {"who": "me", "run": "1"}
    saved = client.save_state("s", user_metadata={"step": "5"}).result().path
    assert read_manifest(Path(saved))["run"]["display_name"] == "mine"
    for again in (
        service.create_training_client_from_state(saved, user_metadata={"run": "2"}),
        service.create_training_client_from_state_with_optimizer(saved, user_metadata={"run": "2"}),
    ):
        assert again.result().get_info().user_metadata == {"who": "me", "run": "2"}
    checkpoint = service.create_rest_client().list_checkpoints(client.model_id).result().checkpoints[0]
    assert checkpoint.user_metadata == {"who": "me", "run": "1", "step": "5"}


def test_what_older_programs_pass_is_accepted(tmp_path: Path) -> None:
    service = tinker.ServiceClient("recording", storage=tmp_path)
    client = service.create_lora_training_client("any/model", optimizer=None).result()
    datum = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    client.forward_backward([datum], "cross_entropy")
    client.optim_step(adam_params=tinker.AdamParams(learning_rate=0.1)).result()
    for nothing in ({}, {"optim_params": tinker.AdamParams(), "adam_params": tinker.AdamParams()}):
        with pytest.raises(InvalidRequest, match=r"pass optim_params, .*, or adam_params, its older name"):
            client.optim_step(**nothing)
    sampler = client.save_weights_and_get_sampling_client(retry_config=None, record_stability_info=False).result()
    with pytest.raises(InvalidRequest, match=r"record_stability_info must be False; .*stable_reinforce.*: True"):
        client.save_weights_and_get_sampling_client(record_stability_info=True)
    assert len(sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2]), prompt_logprobs_last_n=None).result()) == 2
    with pytest.raises(InvalidRequest, match=r"close: status must be 'success' or .*: 'succes'"):
        service.close("succes")  # pyright: ignore
    assert service.close("success").result() is None

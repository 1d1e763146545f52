"""What `import stovetop as tinker` gives, and what it does not cost."""

import subprocess
import sys
from pathlib import Path

import pytest

import stovetop as tinker
from stovetop.errors import InvalidRequest, UnknownName


def _in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


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
def test_a_remote_address_is_refused_with_the_next_step(address: str) -> None:
    with pytest.raises(InvalidRequest, match=f"import tinker.*'{address}'"):
        tinker.ServiceClient(address)


def test_a_misspelt_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'recording'"):
        tinker.ServiceClient("recroding")


def test_metadata_by_position_is_refused_and_told_how() -> None:
    with pytest.raises(InvalidRequest, match="user_metadata="):
        tinker.ServiceClient({"who": "me"})


def test_an_engine_option_that_no_backend_has_is_refused() -> None:
    with pytest.raises(TypeError, match="devise"):
        tinker.ServiceClient("recording", devise="cpu")

"""What was frozen in one process samples in another, with the same bits."""

from pathlib import Path
from typing import Any

import pytest

from engine import tiny
from processes import run_python
from stovetop.backends import local
from stovetop.types import AdamParams, ModelInput, SamplingParams

PROMPT = ModelInput.from_ints(tiny.tokens(20, 3))
SAMPLE = """
def seen_by(sampler):
    params = SamplingParams(max_tokens=8, seed=5, temperature=0.8, stop=[])
    response = sampler.sample(PROMPT, 2, params, include_prompt_logprobs=True).result()
    logprobs = [response.prompt_logprobs[1:], *(sequence.logprobs for sequence in response.sequences)]
    return repr(([sequence.tokens for sequence in response.sequences], [[v.hex() for v in each] for each in logprobs]))
"""
PROGRAM = f"""
import sys
from stovetop.backends import local
from stovetop.types import ModelInput, SamplingParams

PROMPT = ModelInput.from_ints({PROMPT.to_ints()})
{SAMPLE}
_, storage, model, folder = sys.argv
with local.open_service(storage=storage, threads=2, deterministic=True, models={{"model": model}}) as service:
    print(seen_by(service.create_sampling_client(folder, base_model="model").result()))
"""


@pytest.mark.slow
def test_a_sampler_that_was_saved_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    """With another number of threads, under another storage."""
    model, folder = tiny.save_model(tmp_path / "model"), tmp_path / "frozen"
    found: dict[str, Any] = {"PROMPT": PROMPT, "SamplingParams": SamplingParams}
    exec(SAMPLE, found)
    with local.open_service(
        storage=tmp_path / "one", threads=1, deterministic=True, models={"model": model}
    ) as service:
        client = service.create_lora_training_client("model", rank=4, seed=1)
        for seed in range(3):
            client.forward_backward([tiny.datum(tiny.tokens(15, seed))], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.05))
        frozen = client.save_weights_and_get_sampling_client().result()
        client.forward_backward([tiny.datum(tiny.tokens(15, 9))], "cross_entropy")
        client.optim_step(AdamParams(learning_rate=0.05)).result()
        frozen.save(folder).result()
        expected = found["seen_by"](frozen)
        assert expected != found["seen_by"](service.create_sampling_client(base_model="model").result())
    done = run_python("-c", PROGRAM, str(tmp_path / "two"), str(model), str(folder), check=True)
    assert done.stdout.strip() == expected

"""A server that is killed at any moment goes on, when it is started again, as if nothing had happened: to the bit."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from running import KEY, datum, running
from server_faults.servers import killable
from tinker import types

from engine import tiny
from stovetop.backends import recording


def trained(url: str, between: Callable[[int], None]) -> list[Any]:
    """All that a client sees of a program that trains, saves and samples."""
    seen: list[Any] = []
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=7).result()
        early = client.save_weights_and_get_sampling_client().result()
        for step in range(8):
            learnt = client.forward_backward([datum(), datum([70, 42, 8, 8, 33, step])], "cross_entropy")
            stepped = client.optim_step(types.AdamParams(learning_rate=0.02))
            if step == 5:
                seen.append(client.save_state("five").result().path.rpartition("/")[2])
            between(step)
            seen += [learnt.result().metrics, stepped.result().metrics]
            seen += [output["logprobs"].tolist() for output in learnt.result().loss_fn_outputs]
        late = client.save_weights_and_get_sampling_client().result()
        for sampler in (early, late):
            params = types.SamplingParams(max_tokens=6, seed=3)
            drawn = sampler.sample(types.ModelInput.from_ints([5, 17]), 2, params).result()
            seen += [[sequence.tokens, sequence.logprobs] for sequence in drawn.sequences]
        final = client.forward([datum()], "cross_entropy").result()
        return [*seen, final.loss_fn_outputs[0]["logprobs"].tolist()]


@pytest.fixture(params=["recording", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The fake, or the folder of a tiny transformer."""
    return "recording" if request.param == "recording" else str(tiny.save_model(tmp_path / "model", tiny.llama(0)))


def test_a_server_that_is_killed_with_requests_under_way_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The quick one of these: the fake, and one kill."""
    with running(tmp_path / "undisturbed", partial(recording.open_service, models=["tiny"])) as undisturbed:
        expected = trained(undisturbed.url, lambda step: None)
    with killable(tmp_path / "killed", "recording") as server:

        def kill(step: int) -> None:
            if step == 4:
                server.end(signal.SIGKILL)
                server.start()

        assert trained(server.url, kill) == expected


@pytest.mark.slow
def test_a_server_that_is_killed_while_requests_wait_goes_on_to_the_bit(tmp_path: Path, backend: str) -> None:
    with killable(tmp_path / "undisturbed", backend) as server:
        expected = trained(server.url, lambda step: None)
    with killable(tmp_path / "killed", backend) as server:

        def kill(step: int) -> None:
            if step in (1, 4, 6):
                server.end(signal.SIGKILL)
                server.start()

        assert trained(server.url, kill) == expected
        assert server.end(signal.SIGTERM) == 0

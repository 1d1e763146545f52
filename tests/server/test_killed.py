"""A server that is killed at any moment goes on, when it is started again, as if nothing had happened: to the bit."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from running import KEY, datum, running
from tinker import types

from engine import tiny
from stovetop.backends import recording

SERVE = Path(__file__).with_name("serve_for_tests.py")


class Killable:
    """A server in a process of its own, always on the same port."""

    def __init__(self, storage: Path, backend: str) -> None:
        self.arguments = [str(storage), backend, "0"]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), *self.arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.arguments[2] = self.process.stdout.readline().strip()

    def end(self, by: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(by)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.arguments[2]}"


@contextmanager
def killable(storage: Path, backend: str) -> Iterator[Killable]:
    server = Killable(storage, backend)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)


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

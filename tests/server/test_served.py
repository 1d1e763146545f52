"""`stovetop serve` as a program: two processes, of which either may be killed."""

import signal
from pathlib import Path

import pytest
import tinker
from running import KEY, datum
from tinker import types

from engine import tiny
from serving import served

pytestmark = pytest.mark.slow  # each start loads torch and a model


def model_in(folder: Path) -> str:
    """NAME=FOLDER."""
    model = folder / "model"
    if not model.exists():
        tiny.save_model(model, tiny.llama(0))
    return f"tiny={model}"


def test_a_server_that_is_killed_comes_back_by_itself_and_its_client_goes_on(tmp_path: Path) -> None:
    with (
        served([model_in(tmp_path)], tmp_path / "storage") as server,
        tinker.ServiceClient(base_url=server.url, api_key=KEY) as sdk,
    ):
        client = sdk.create_lora_training_client("tiny", rank=2, seed=1).result()
        losses = [client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"]]
        killed = server.child
        killed.send_signal(signal.SIGKILL)
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        losses.append(client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"])
        assert losses[1] < losses[0]
        assert server.child.pid != killed.pid


def test_when_the_parent_is_killed_the_server_ends_too_and_the_next_one_takes_the_folder(tmp_path: Path) -> None:
    with served([model_in(tmp_path)], tmp_path / "storage") as server:
        server.wait_until_it_serves()
        child = server.child
        server.parent.send_signal(signal.SIGKILL)
        child.wait(10)
    with served([model_in(tmp_path)], tmp_path / "storage") as server:
        server.wait_until_it_serves()


def test_sigterm_stops_both_and_one_process_is_enough_without_a_restart(tmp_path: Path) -> None:
    with served([model_in(tmp_path)], tmp_path / "storage") as server:
        server.wait_until_it_serves()
        child = server.child
        server.parent.terminate()
        assert server.parent.wait(60) in (0, None)  # subprocess may have collected it
        assert not child.is_running()
    with served([model_in(tmp_path)], tmp_path / "storage", "--no-restart") as alone:
        alone.wait_until_it_serves()
        assert alone.parent.children() == []

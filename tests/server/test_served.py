"""`stovetop serve` as a program: two processes, of which either may be killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from running import KEY, datum
from tinker import types

from engine import tiny

pytestmark = pytest.mark.slow  # each start loads torch and a model


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[psutil.Process, str]]:
    """The parent, and where it serves."""
    model = folder / "model"
    if not model.exists():
        tiny.save_model(model, tiny.llama(0))
    words = ["serve", f"tiny={model}", "--port", "0", "--storage", str(folder / "storage"), "--threads", "1", *options]
    process = subprocess.Popen([sys.executable, "-m", "stovetop", *words], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("export TINKER_BASE_URL=")
        assert process.stdout.readline().startswith("export TINKER_API_KEY=tml-")
        try:
            yield psutil.Process(process.pid), url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def child_of(parent: psutil.Process) -> psutil.Process:
    (child,) = parent.children()
    return child


def wait_until_it_serves(url: str) -> None:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        try:
            if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


def test_a_server_that_is_killed_comes_back_by_itself_and_its_client_goes_on(tmp_path: Path) -> None:
    with served(tmp_path) as (parent, url), tinker.ServiceClient(base_url=url, api_key=KEY) as sdk:
        client = sdk.create_lora_training_client("tiny", rank=2, seed=1).result()
        losses = [client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"]]
        killed = child_of(parent)
        killed.send_signal(signal.SIGKILL)
        client.optim_step(types.AdamParams(learning_rate=0.1)).result()
        losses.append(client.forward_backward([datum()], "cross_entropy").result().metrics["loss:sum"])
        assert losses[1] < losses[0]
        assert child_of(parent).pid != killed.pid


def test_when_the_parent_is_killed_the_server_ends_too_and_the_next_one_takes_the_folder(tmp_path: Path) -> None:
    with served(tmp_path) as (parent, url):
        wait_until_it_serves(url)
        child = child_of(parent)
        parent.send_signal(signal.SIGKILL)
        child.wait(10)
    with served(tmp_path) as (_, url):
        wait_until_it_serves(url)


def test_sigterm_stops_both_and_one_process_is_enough_without_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as (parent, url):
        wait_until_it_serves(url)
        child = child_of(parent)
        parent.terminate()
        assert parent.wait(60) in (0, None)  # subprocess may have collected it
        assert not child.is_running()
    with served(tmp_path, "--no-restart") as (alone, url):
        wait_until_it_serves(url)
        assert alone.children() == []

"""Processes that are killed while they save: what was acknowledged is there, and what is there is whole."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

from examples import OTHER_TOKENS, datum

from stovetop.backends import recording
from stovetop.durable import read_folder, read_manifest
from stovetop.types import AdamParams, Datum

SAVING = """
import sys
import stovetop as st
from stovetop.backends import recording

def datum(number):
    return st.Datum(st.ModelInput.from_ints([70, 42, 8]), {"target_tokens": [42, 8, 33], "weights": [1.0 + number] * 3})

def acknowledge(future, number):
    future.future().add_done_callback(lambda done: print(f"{number} {done.result().path}\\n", end="", flush=True))

service = recording.open_service(sys.argv[1])
clients = [service.create_lora_training_client("any/model", seed=seed).result() for seed in range(2)]
print("under way", flush=True)
for number in range(10**6):
    for client in clients:
        client.forward_backward([datum(number)], "cross_entropy")
        step = client.optim_step(st.AdamParams(learning_rate=0.1))
        acknowledge(client.save_state(f"s{number}"), number)
        acknowledge(client.save_state("last", overwrite=True), number)
        frozen = client.save_weights_and_get_sampling_client()
        acknowledge(frozen.save(f"{sys.argv[1]}/frozen/{client.model_id}-{number}"), number)
    step.result()
"""


def weights_after(num_steps: int) -> list[bytes]:
    """The tensors that the program above saves after each of so many steps."""
    saved: list[bytes] = []
    with recording.open_service() as service:
        client = service.create_lora_training_client("any/model", seed=0).result()
        for number in range(num_steps):
            client.forward_backward([_datum(number)], "cross_entropy")
            client.optim_step(AdamParams(learning_rate=0.1))
            path = Path(client.save_weights_for_sampler(f"s{number}").result().path)
            saved.append((path / "adapter.safetensors").read_bytes())
    return saved


def _datum(number: int) -> Datum:
    return datum([70, *OTHER_TOKENS[1:3], 33], weight=1.0 + number)


def test_killed_at_random_moments_all_that_was_acknowledged_is_there_and_all_that_is_there_is_whole(
    tmp_path: Path, kill_after: Callable[..., str]
) -> None:
    """Two seconds: three processes are started."""
    script, generator = tmp_path / "save.py", random.Random()  # other moments every time
    script.write_text(SAVING)
    acknowledged: dict[str, int] = {}
    storage = tmp_path / "storage"
    for _ in range(3):
        printed = kill_after(script, [str(storage)], generator.uniform(0.0, 0.3), signal.SIGKILL)
        for line in printed.splitlines()[1:]:
            number, _, path = line.partition(" ")
            acknowledged[path] = int(number)
        with recording.open_service(storage):
            assert not any(path.name.startswith(".") for path in storage.glob("checkpoints/**/*"))
    expected = weights_after(2 + max(acknowledged.values()))
    whole = [*storage.glob("checkpoints/*/*/*"), *storage.glob("frozen/[!.]*")]
    for path in whole:
        assert read_folder(path).keys() == read_manifest(path)["files"].keys()
    assert acknowledged.keys() <= {str(path) for path in whole}
    for name, number in acknowledged.items():
        tensors = read_folder(Path(name))["adapter.safetensors"]
        assert tensors in (expected[number:] if Path(name).name == "last" else [expected[number]])

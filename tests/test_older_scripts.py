"""Loops as they are written for the SDK: its `_async` names, pipelined submits, checkpoints, and a kill in the middle.

The bodies follow published scripts line by line; only the names of the data differ.
"""

import asyncio
import itertools
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stovetop as tinker
from processes import run_python
from stovetop.backends import recording
from stovetop.durable import append_row, read_rows

MODEL = "meta-llama/Llama-3.1-8B"


def datum_for(batch: int, index: int) -> tinker.Datum:
    tokens = [65 + (batch + index + position) % 26 for position in range(8)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tinker.TensorData(tokens[1:], "int64"), "weights": [1.0] * 7},
    )


def rl_datum_for(index: int) -> tinker.Datum:
    tokens = [65 + (index * position) % 26 for position in range(6)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(tokens[1:], "int64"),
            "logprobs": tinker.TensorData([-4.0] * 5, "float32"),
            "advantages": tinker.TensorData([1.0 - index % 3] * 5, "float32"),
        },
    )


# ---- supervised: the next batch is submitted before this one is awaited ----------------------------------------------


@dataclass
class Config:
    log_path: str
    model_name: str = MODEL
    lora_rank: int = 32
    learning_rate: float = 0.3
    num_epochs: int = 2
    save_every: int = 3


@dataclass
class SubmittedBatch:
    fwd_bwd_future: tinker.APIFuture[tinker.ForwardBackwardOutput]
    optim_step_future: tinker.APIFuture[tinker.OptimStepResponse]


def get_last_checkpoint(log_path: str) -> dict[str, Any] | None:
    checkpoints = [row for row in read_rows(Path(log_path) / "checkpoints.jsonl") if "state_path" in row]
    return checkpoints[-1] if checkpoints else None


async def save_checkpoint_async(training_client: Any, name: str, log_path: str, loop_state: dict[str, Any]) -> None:
    futures = {
        "state": await training_client.save_state_async(name),
        "sampler": await training_client.save_weights_for_sampler_async(name),
    }
    results = {k: await v.result_async() for k, v in futures.items()}
    paths = {k + "_path": v.path for k, v in results.items()}
    append_row(Path(log_path) / "checkpoints.jsonl", {"name": name, **loop_state, **paths})


async def supervised_main(config: Config, service_client: Any, n_batches: int = 5) -> list[float]:
    resume_info = get_last_checkpoint(config.log_path)
    if resume_info:
        training_client = await service_client.create_training_client_from_state_with_optimizer_async(
            resume_info["state_path"]
        )
        start_epoch, start_batch = resume_info["epoch"], resume_info["batch"]
    else:
        training_client = await service_client.create_lora_training_client_async(
            base_model=config.model_name, rank=config.lora_rank
        )
        start_epoch, start_batch = 0, 0
    losses: list[float] = []

    async def submit_batch(epoch_idx: int, batch_idx: int) -> SubmittedBatch:
        step = epoch_idx * n_batches + batch_idx
        learning_rate = config.learning_rate * (1 - step / (config.num_epochs * n_batches))
        adam_params = tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
        data = [datum_for(batch_idx, index) for index in range(4)]
        if step % config.save_every == 0 and step > 0:
            loop_state = {"epoch": epoch_idx, "batch": batch_idx}
            await save_checkpoint_async(training_client, f"{step:06d}", config.log_path, loop_state)
        fwd_bwd_future = await training_client.forward_backward_async(data, loss_fn="cross_entropy")
        optim_step_future = await training_client.optim_step_async(adam_params)
        return SubmittedBatch(fwd_bwd_future, optim_step_future)

    async def finish_batch(submitted: SubmittedBatch) -> None:
        fwd_bwd_result = await submitted.fwd_bwd_future.result_async()
        await submitted.optim_step_future.result_async()
        losses.append(fwd_bwd_result.metrics["loss:sum"])

    pending_batch = None
    for epoch_idx in range(start_epoch, config.num_epochs):
        for batch_idx in range(start_batch if epoch_idx == start_epoch else 0, n_batches):
            submitted_batch = await submit_batch(epoch_idx, batch_idx)
            if pending_batch is not None:
                await finish_batch(pending_batch)
            pending_batch = submitted_batch
    if pending_batch is not None:
        await finish_batch(pending_batch)
    return losses


def test_the_supervised_loop_learns_and_pipelines(tmp_path: Path) -> None:
    with recording.open_service(tmp_path, latency_s=0.001) as service:
        losses = asyncio.run(supervised_main(Config(str(tmp_path)), service))
        verbs = [call.verb for call in service.calls if call.verb in ("forward_backward", "optim_step")]
    assert len(losses) == 10
    assert losses[-1] < 0.75 * losses[0]
    assert verbs == ["forward_backward", "optim_step"] * 10


def test_the_supervised_loop_resumes_from_its_checkpoints_file(tmp_path: Path) -> None:
    with recording.open_service(tmp_path) as service:
        whole = asyncio.run(supervised_main(Config(str(tmp_path)), service))
        assert [row["name"] for row in read_rows(tmp_path / "checkpoints.jsonl")] == ["000003", "000006", "000009"]
    last = json.loads((tmp_path / "checkpoints.jsonl").read_text().splitlines()[1])
    (tmp_path / "resumed").mkdir()
    append_row(tmp_path / "resumed" / "checkpoints.jsonl", last)
    with recording.open_service(tmp_path) as service:
        resumed = asyncio.run(supervised_main(Config(str(tmp_path / "resumed")), service))
    assert resumed == whole[6:]


# ---- reinforcement learning: substeps, enqueued one ahead ------------------------------------------------------------


def split_list(items: list[Any], parts: int) -> list[list[Any]]:
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(edges)]


async def train_step(
    data_D: list[tinker.Datum], training_client: Any, learning_rate: float, num_substeps: int, loss_fn: str
) -> list[list[float]]:
    batches = split_list(data_D, min(num_substeps, len(data_D)))
    adam_params = tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    training_logprobs_D: list[list[float]] = []

    fwd_bwd_future = await training_client.forward_backward_async(batches[0], loss_fn=loss_fn)
    optim_future = await training_client.optim_step_async(adam_params)

    for i in range(len(batches)):
        next_fwd_bwd_future = next_optim_future = None
        if i + 1 < len(batches):
            next_fwd_bwd_future = await training_client.forward_backward_async(batches[i + 1], loss_fn=loss_fn)
            next_optim_future = await training_client.optim_step_async(adam_params)

        fwd_bwd_result = await fwd_bwd_future.result_async()
        await optim_future.result_async()
        training_logprobs_D.extend(output["logprobs"].tolist() for output in fwd_bwd_result.loss_fn_outputs)
        fwd_bwd_future, optim_future = next_fwd_bwd_future, next_optim_future
    return training_logprobs_D


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_the_rl_train_step_pipelines_its_substeps(loss_fn: str) -> None:
    async def run(service_client: Any) -> list[list[float]]:
        training_client = await service_client.create_lora_training_client_async(base_model=MODEL, rank=32)
        sampling_client = await training_client.save_weights_and_get_sampling_client_async(name="000000")
        response = await sampling_client.sample_async(
            prompt=tinker.ModelInput.from_ints([65]),
            num_samples=4,
            sampling_params=tinker.SamplingParams(max_tokens=5, temperature=1.0, stop=["\n"]),
        )
        assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in response.sequences)
        return await train_step([rl_datum_for(index) for index in range(8)], training_client, 0.1, 4, loss_fn)

    with recording.open_service(latency_s=0.001) as service:
        assert [len(logprobs) for logprobs in asyncio.run(run(service))] == [5] * 8
        verbs = [call.verb for call in service.calls]
    assert verbs[-8:] == ["forward_backward", "optim_step"] * 4


def test_minibatches_that_stream_in_add_up_to_one_step() -> None:
    async def run(service_client: Any) -> float:
        training_client = await service_client.create_lora_training_client_async(base_model=MODEL, rank=32)
        trajectory_groups_queue: asyncio.Queue[list[tinker.Datum]] = asyncio.Queue()
        for index in range(4):
            trajectory_groups_queue.put_nowait([rl_datum_for(2 * index), rl_datum_for(2 * index + 1)])
        forward_backward_futures = []
        i_minibatch = 0
        while i_minibatch < 4:
            data_D = await trajectory_groups_queue.get()
            forward_backward_futures.append(
                await training_client.forward_backward_async(data_D, loss_fn="importance_sampling")
            )
            i_minibatch += 1
        optim_future = await training_client.optim_step_async(tinker.AdamParams(learning_rate=0.1))
        for fwd_bwd_future in forward_backward_futures:
            await fwd_bwd_future.result_async()
        return (await optim_future.result_async()).metrics["grad_norm"]

    async def at_once(service_client: Any) -> float:
        training_client = await service_client.create_lora_training_client_async(base_model=MODEL, rank=32)
        await training_client.forward_backward_async([rl_datum_for(index) for index in range(8)], "importance_sampling")
        optim_future = await training_client.optim_step_async(tinker.AdamParams(learning_rate=0.1))
        return (await optim_future.result_async()).metrics["grad_norm"]

    with recording.open_service() as service:
        assert asyncio.run(run(service)) == pytest.approx(asyncio.run(at_once(service)), rel=1e-9)


# ---- real kills ------------------------------------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
import stovetop as tinker
from stovetop.durable import append_row, read_rows

folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
rows = read_rows(folder / "checkpoints.jsonl")
service = tinker.ServiceClient("recording", storage=folder)
if rows:
    client = service.create_training_client_from_state_with_optimizer(rows[-1]["state_path"]).result()
else:
    client = service.create_lora_training_client("any/model", seed=0).result()
for step in range(rows[-1]["batch"] if rows else 0, num_steps):
    tokens = [65 + (step * position) % 26 for position in range(8)]
    datum = tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 7})
    forward_backward = client.forward_backward([datum], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.1))
    state = client.save_state(f"{step + 1:06d}", overwrite=True)
    rolling = client.save_state("rolling", overwrite=True)
    append_row(folder / "checkpoints.jsonl", {"batch": step + 1, "state_path": state.result().path})
    append_row(folder / "rolling.jsonl", {"path": rolling.result().path})
    print(step, forward_backward.result().metrics["loss:sum"], flush=True)
assert "torch" not in sys.modules
print("final", client.forward([datum], "cross_entropy").result().metrics["loss:sum"], flush=True)
"""


@pytest.mark.slow  # tests/kitchen has its like
def test_a_run_killed_at_random_points_is_the_run_that_would_have_been(
    tmp_path: Path, kill_after: Callable[..., str]
) -> None:
    script, killed, whole = tmp_path / "train.py", tmp_path / "killed", tmp_path / "whole"
    script.write_text(KILLED)
    killed.mkdir()
    whole.mkdir()
    generator = random.Random()  # other points every time
    printed: dict[str, str] = {}
    for by in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        printed |= _by_step(kill_after(script, [str(killed), "100000"], generator.uniform(0, 0.2), by))
        last, rolling = (read_rows(killed / name)[-1] for name in ("checkpoints.jsonl", "rolling.jsonl"))
        with recording.open_service() as service:
            for path in (last["state_path"], rolling["path"]):
                service.create_training_client_from_state_with_optimizer(path).result()
    num_steps = str(last["batch"] + 3)
    printed |= _by_step(_run(script, killed, num_steps))
    expected = _by_step(_run(script, whole, num_steps))
    assert printed.items() <= expected.items()
    assert "final" in printed


def _run(script: Path, folder: Path, num_steps: str) -> str:
    return run_python(str(script), str(folder), num_steps, check=True).stdout


def _by_step(output: str) -> dict[str, str]:
    return dict(line.split() for line in output.splitlines())

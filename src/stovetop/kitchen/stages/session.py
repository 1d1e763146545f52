"""Stages that begin and end a run: its training client, its renderer, the steps before it, its final weights."""

from typing import NamedTuple

from stovetop.checkpoints import FINAL, CheckpointRecord, Start, resume_or_create, submit_final_checkpoint
from stovetop.client import ServiceClient, TrainingClient
from stovetop.durable import append_row, read_rows
from stovetop.kitchen.nodes import Positions
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.policies import Policy, saved_paths
from stovetop.model_families import recommended_renderer_name
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer
from stovetop.rl.rollout_pool import RolloutPool
from stovetop.runs import Run, load

MODELS_FILE = "models.jsonl"  # the models that a run has made, the last one last
REGISTERED = "model.registered"


class Adapter(NamedTuple):
    """What a new run trains, and what it begins from."""

    model_name: str
    lora_rank: int
    seed: int
    train_unembed: bool  # the output head too
    load_checkpoint_path: str | None  # weights to start from, with a fresh optimizer


@stage(writes="adapter")
def choose_adapter(
    model_name: str,
    lora_rank: int = 32,
    seed: int = 0,
    train_unembed: bool = True,
    load_checkpoint_path: str | None = None,
) -> Adapter:
    """What the config says of the adapter, as one value."""
    return Adapter(model_name, lora_rank, seed, train_unembed, load_checkpoint_path)


class Session(NamedTuple):
    """What a run works with."""

    start: Start
    training_client: TrainingClient


@stage(writes=("start", "training_client"))
async def init_session(service: ServiceClient, run: Run, adapter: Adapter) -> Session:
    """The training client, new or as its last checkpoint left it, and where the run begins. Where a tracker shows the
    run is in the client's metadata."""
    start = await resume_or_create(service, run.path, **adapter._asdict(), user_metadata=await run.user_metadata())
    return Session(start, start.training_client)


@stage(writes="renderer")
def init_renderer(training_client: TrainingClient, renderer_name: str | None = None) -> Renderer:
    """The one of this name, or the one recommended for the model."""
    tokenizer = training_client.get_tokenizer()
    return get_renderer(renderer_name or recommended_renderer_name(tokenizer), tokenizer)


class Plan(NamedTuple):
    """The steps that a run has before it."""

    positions: Positions
    is_complete: bool  # nothing is left to do, not even the final checkpoint


@stage(writes=("positions", "is_complete"))
def plan_steps(num_per_epoch: int, start: Start, run: Run, num_epochs: int = 1, max_steps: int | None = None) -> Plan:
    """From where the run begins up to the last step of the epochs, or to max_steps."""
    num_steps = num_per_epoch * num_epochs
    num_steps = num_steps if max_steps is None else min(num_steps, max_steps)
    is_complete = start.is_complete(num_steps)
    if not is_complete:
        run.start_at(start.batch, num_steps)
    return Plan(Positions(num_per_epoch, num_steps, start.batch), is_complete)


def is_unfinished(is_complete: bool) -> bool:
    """Whether the run was not complete when it began."""
    return not is_complete


@stage(writes="final_checkpoint")
async def save_final_weights(
    training_client: TrainingClient,
    run: Run,
    positions: Positions,
    policies: list[Policy] | None = None,
    reference_path: str | None = None,
    pool: RolloutPool | None = None,
) -> CheckpointRecord:
    """Saves state and weights as "final", with what a run that is made longer needs to go on."""
    run.emit("training.checkpoint", step=positions.num_steps, name=FINAL)
    run.stream.sync()
    return await submit_final_checkpoint(training_client, positions.num_steps).record(
        run.path,
        policy_paths=await saved_paths(policies or []),
        trained_ahead=() if pool is None else pool.trained_ahead,
        reference_path=reference_path,
    )


@stage
def register_model(run: Run, adapter: Adapter, start: Start, final_checkpoint: CheckpointRecord | None = None) -> None:
    """Adds the final weights to the run's models.jsonl, once, wherever the run is moved to; those of a run that is
    complete, if it was killed before."""
    record = final_checkpoint or start.record
    if record is None or record.final is not True or record.sampler_path is None:
        return
    row = {"name": run.path.name, "base_model": adapter.model_name, "path": record.sampler_path}
    within = record.sampler_path.removeprefix(str(run.path))
    if not any(str(each.get("path")).endswith(within) for each in read_rows(run.path / MODELS_FILE)):
        append_row(run.path / MODELS_FILE, row)
    events = () if final_checkpoint else ((event.name, event.step) for event in load(run.path).events)
    if (REGISTERED, record.batch) not in events:
        run.emit(REGISTERED, step=record.batch, base_model=adapter.model_name, path=record.sampler_path)

"""checkpoints.jsonl: what was saved, when to save, and from which save a run goes on.

A row names the **next** batch: a state saved after batches 0..k has `batch` k + 1, counted over the whole run, so a
resumed run repeats nothing and skips nothing. What a saved state consists of is the backend's business.

There is no synchronous twin of the coroutines here: a script without an event loop calls `asyncio.run(...)` on them.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, overload

from stovetop.arguments import UserMetadata
from stovetop.client import ServiceClient, TrainingClient
from stovetop.concurrency import in_thread
from stovetop.durable import MANIFEST, append_row, make_folders, parse_rows, read_folder, writing
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, TornCheckpoint
from stovetop.futures import APIFuture
from stovetop.run_folder import CHECKPOINTS_FILE, STATES_FOLDER, is_run, saved_folders
from stovetop.saved_states import describe
from stovetop.types import LoraConfig, SaveWeightsForSamplerResponse, SaveWeightsResponse

log = logging.getLogger(__name__)

COPY_FILE = ".checkpoints.jsonl.copy"  # every row once more, for a run whose checkpoints.jsonl is lost
FINAL = "final"

CheckpointKind = Literal["state", "sampler", "both"]  # to go on from; to sample from; both
Scalar = int | float | str | bool
RowValue = Scalar | list[str] | list[int]
LoopState = Mapping[str, Scalar]  # batch (the next one), epoch, and any further numbers and words of the loop's own

_OWN_KEYS = {
    "name": str, "batch": int, "epoch": int, "final": bool, "state_path": str, "sampler_path": str,
    "policy_paths": list, "trained_ahead": list, "reference_path": str,
}  # fmt: skip
_ITEMS = {"policy_paths": str, "trained_ahead": int}
_SAVED = {"name", "state_path", "sampler_path", "policy_paths", "trained_ahead", "reference_path"}  # no loop_state's


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One row. What is None is not written; `extras` lie flat beside the rest."""

    name: str
    batch: int | None = None  # the next one to run
    epoch: int | None = None  # that it belongs to
    final: bool | None = None  # the run was complete
    state_path: str | None = None  # weights and optimizer
    sampler_path: str | None = None  # weights
    extras: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    policy_paths: tuple[str, ...] = ()  # of the weights that the next batches are sampled with, where sampling is ahead
    trained_ahead: tuple[int, ...] = ()  # groups from `batch` on that were trained, where batches are what is ready
    reference_path: str | None = None  # of the weights that preferences are measured against

    def to_dict(self) -> dict[str, RowValue]:
        """As a row of checkpoints.jsonl: what is None or empty is left out, `extras` lie beside the rest."""
        own: dict[str, RowValue | None] = {
            "name": self.name,
            "batch": self.batch,
            "epoch": self.epoch,
            "final": self.final,
            "state_path": self.state_path,
            "sampler_path": self.sampler_path,
            "policy_paths": list(self.policy_paths) or None,
            "trained_ahead": list(self.trained_ahead) or None,
            "reference_path": self.reference_path,
        }
        return {key: value for key, value in own.items() if value is not None} | dict(self.extras)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """From a row. Keys that are not of a checkpoint are `extras`; a value of the wrong kind is refused."""
        for key, kind in _OWN_KEYS.items():
            if key in row and type(row[key]) is not kind:
                raise InvalidRequest(f"{key!r} of a checkpoint must be {kind.__name__}: {row[key]!r}")
        for key, kind in _ITEMS.items():
            if not all(type(item) is kind for item in row.get(key, ())):
                raise InvalidRequest(f"each of {key!r} of a checkpoint must be {kind.__name__}: {row[key]!r}")
        if "name" not in row:
            raise InvalidRequest(f"a checkpoint needs a name: {dict(row)}")
        own: dict[str, Any] = {
            key: tuple(value) if key in _ITEMS else value for key, value in row.items() if key in _OWN_KEYS
        }
        return cls(**own, extras={key: value for key, value in row.items() if key not in _OWN_KEYS})

    def has(self, key: str) -> bool:
        """Whether the row has this key, one of `extras` too."""
        return key in self.to_dict()

    def get(self, key: str) -> RowValue | None:
        """The row's value of this key, None without it."""
        return self.to_dict().get(key)


def load_checkpoints_file(log_dir: str | Path) -> list[CheckpointRecord]:
    """All rows, none when there is no file. Paths are where the folders lie now: the directory may have been moved."""
    log_dir = Path(log_dir).expanduser().resolve()
    return [located_record(record, log_dir) for record in _rows(log_dir)]


def get_last_checkpoint(log_dir: str | Path, required_key: str = "state_path") -> CheckpointRecord | None:
    """The last row that has this key. Its folder has not been opened: see `resume_or_create`."""
    log_dir = Path(log_dir).expanduser().resolve()
    last = next((record for record in reversed(_rows(log_dir)) if record.has(required_key)), None)
    return None if last is None else located_record(last, log_dir)


def _rows(log_dir: Path) -> list[CheckpointRecord]:
    return parse_rows(log_dir / CHECKPOINTS_FILE, CheckpointRecord.from_dict)


def located_record(record: CheckpointRecord, log_dir: Path) -> CheckpointRecord:
    """With its paths where the folders lie now."""
    return replace(
        record,
        state_path=located(record.state_path, log_dir),
        sampler_path=located(record.sampler_path, log_dir),
        policy_paths=tuple(located(path, log_dir) for path in record.policy_paths),
        reference_path=located(record.reference_path, log_dir),
    )


@overload
def located(path: str, log_dir: Path) -> str: ...
@overload
def located(path: None, log_dir: Path) -> None: ...
def located(path: str | None, log_dir: Path) -> str | None:
    """Where the run directory has it now, which may have been moved or copied: the longest tail of `path` that is a
    saved folder in there, or in the run that this one is part of; else `path`."""
    if path is None or not Path(path).is_absolute():
        return path
    parts = Path(path).parts
    tails = (
        folder.joinpath(*parts[start:])
        for folder in (log_dir, *log_dir.parents)
        if folder == log_dir or is_run(folder)
        for start in range(1, len(parts))
    )
    return next((str(moved) for moved in tails if (moved / MANIFEST).is_file()), path)


# ---- saving ----------------------------------------------------------------------------------------------------------


def is_due(num_done: int, every: int) -> bool:
    """Whether something that happens `every` so many batches happens after `num_done`; 0 turns it off."""
    return every > 0 and num_done % every == 0


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A save that was submitted. It holds the weights as of its submission, whatever is trained since."""

    name: str
    loop_state: LoopState
    state: APIFuture[SaveWeightsResponse] | None
    sampler: APIFuture[SaveWeightsForSamplerResponse] | None

    async def record(
        self,
        log_dir: str | Path,
        *,
        policy_paths: Sequence[str] = (),
        trained_ahead: Sequence[int] = (),
        reference_path: str | None = None,
    ) -> CheckpointRecord:
        """Waits for the save and writes its row. Log the metrics of the steps before it first: a run that goes on from
        here will not run those steps again. What else it needs to go on is known only now: see `CheckpointRecord`."""
        row: dict[str, RowValue] = {"name": self.name, **self.loop_state}
        if self.state is not None:
            row["state_path"] = (await self.state).path
        if self.sampler is not None:
            row["sampler_path"] = (await self.sampler).path
        row |= {"policy_paths": list(policy_paths), "trained_ahead": list(trained_ahead)}
        if reference_path is not None:
            row["reference_path"] = reference_path
        record = CheckpointRecord.from_dict(row)
        log_dir = Path(log_dir).expanduser()
        for name in (CHECKPOINTS_FILE, COPY_FILE):
            with writing(log_dir / name):
                make_folders(log_dir)
                append_row(log_dir / name, record.to_dict())
        return record


def submit_checkpoint(
    training_client: TrainingClient, name: str, loop_state: LoopState, kind: CheckpointKind = "state"
) -> PendingCheckpoint:
    """Submits a save and waits for nothing: call it right after the `optim_step` that it is to contain, before the next
    step is submitted. `loop_state["batch"]` is the next batch.

        saved = submit_checkpoint(client, f"{step + 1:06d}", {"batch": step + 1})
        ...                                # await the step, log its metrics
        await saved.record(run.path)
    """
    if reserved := _SAVED & set(loop_state):
        raise InvalidRequest(f"a loop_state says where the loop is, not {', '.join(sorted(reserved))}: {loop_state}")
    CheckpointRecord.from_dict({"name": name, **loop_state})  # refused now rather than after the save
    return PendingCheckpoint(
        name,
        dict(loop_state),
        training_client.save_state(name) if kind in ("state", "both") else None,
        training_client.save_weights_for_sampler(name) if kind in ("sampler", "both") else None,
    )


async def save_checkpoint(
    training_client: TrainingClient,
    name: str,
    log_dir: str | Path,
    loop_state: LoopState,
    kind: CheckpointKind = "state",
) -> CheckpointRecord:
    """Saves and records at once, where nothing is to be submitted in between."""
    return await submit_checkpoint(training_client, name, loop_state, kind).record(log_dir)


async def save_final_checkpoint(
    training_client: TrainingClient,
    log_dir: str | Path,
    *,
    start: "Start",
    num_batches: int,
    policy_paths: Sequence[str] = (),
    trained_ahead: Sequence[int] = (),
    reference_path: str | None = None,
    **loop_state: Scalar,
) -> CheckpointRecord | None:
    """The last act of a loop: saves "final", state and sampler weights; or, where the run was complete already, saves
    nothing and says so. What a run that is made longer needs to go on is in its row: see `CheckpointRecord`."""
    if start.is_complete(num_batches):
        return None
    return await submit_final_checkpoint(training_client, num_batches, **loop_state).record(
        log_dir, policy_paths=policy_paths, trained_ahead=trained_ahead, reference_path=reference_path
    )


def submit_final_checkpoint(
    training_client: TrainingClient, num_batches: int, **loop_state: Scalar
) -> PendingCheckpoint:
    """Submits "final", state and sampler weights, of a run that is not complete yet."""
    state = {"batch": num_batches, "final": True, **loop_state}
    return submit_checkpoint(training_client, FINAL, state, kind="both")


# ---- resuming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """A client, and where its loop begins."""

    training_client: TrainingClient
    batch: int = 0
    record: CheckpointRecord | None = None  # the row that it goes on from, with whatever else the loop noted

    def is_complete(self, num_batches: int) -> bool:
        """Whether a run of so many batches has nothing left to do, which is said; ask before `Run.start_at`, so that a
        run that is complete keeps every row it has. One that was stopped just before its final checkpoint is not, and
        one that was stopped behind the batch that it is to end with now cannot be: it has no weights of that."""
        finished = self.record is not None and self.record.final is True
        if not finished:
            refuse_to_end_before(self.batch, num_batches)
        if self.batch < num_batches or not finished:
            return False
        log.info("already complete: %d of %d batches are trained", self.batch, num_batches)
        return True


def refuse_to_end_before(batch: int, num_batches: int) -> None:
    """Refuses to end a run after fewer batches than it has trained: there are no weights of that."""
    if batch > num_batches:
        raise InvalidRequest(
            f"this run has trained {batch} batches, and cannot end after {num_batches}; ask for {batch} or more "
            f"(max_steps, num_epochs), or begin another run with another log_path"
        )


async def resume_or_create(
    service: ServiceClient,
    log_dir: str | Path,
    *,
    model_name: str,
    lora_rank: int = 32,
    seed: int | None = None,
    train_unembed: bool = True,
    load_checkpoint_path: str | None = None,
    user_metadata: UserMetadata | None = None,
) -> Start:
    """The training client of a run, by the first of these that applies:

    1. The last row of checkpoints.jsonl with a state and a batch: weights and optimizer, and that batch. A row whose
       state, or one of the policies that it names, is torn or gone is skipped, and said; if none can be used, that is
       an error, never a silent fresh start.
    2. `load_checkpoint_path`: its weights with a fresh optimizer, batch 0.
    3. A new adapter, batch 0.

    A run that has lost its checkpoints.jsonl but not its states is refused, with the way to go on.
    """
    positions = [
        _Position(record.state_path, record.batch, record)
        for record in load_checkpoints_file(log_dir)
        if record.state_path is not None and record.batch is not None
    ]
    if not positions:
        _refuse_lost_rows(Path(log_dir).expanduser().resolve())
    if positions:
        start = await _resume(service, log_dir, positions, model_name, user_metadata)
    elif load_checkpoint_path is not None:
        if Path(load_checkpoint_path).is_dir():  # what is on a server says its rank alone, below
            refuse_another_adapter(describe(Path(load_checkpoint_path)).lora, lora_rank, train_unembed)
        log.info("starting from the weights of %s, with a fresh optimizer", load_checkpoint_path)
        start = Start(await service.create_training_client_from_state(load_checkpoint_path, model_name, user_metadata))
    else:
        start = Start(
            await service.create_lora_training_client(
                model_name, lora_rank, seed, train_unembed=train_unembed, user_metadata=user_metadata
            )
        )
    _refuse_another_rank(start.training_client.get_info().lora_rank, lora_rank)
    return start


def refuse_another_adapter(saved: LoraConfig, lora_rank: int, train_unembed: bool) -> None:
    """Refuses to start from an adapter of another rank, or with another say on the output head: it stays as it was
    saved."""
    _refuse_another_rank(saved.rank, lora_rank)
    if saved.train_unembed != train_unembed:
        head = "has the output head too" if saved.train_unembed else "leaves the output head as it is"
        raise InvalidRequest(f"the saved adapter {head}; set train_unembed to {saved.train_unembed}: {train_unembed}")


def _refuse_another_rank(saved_rank: int | None, lora_rank: int) -> None:
    if saved_rank not in (None, lora_rank):
        raise InvalidRequest(f"the saved adapter has rank {saved_rank}; set lora_rank to it: {lora_rank}")


def _refuse_lost_rows(log_dir: Path) -> None:
    """Without rows: an error if there were some; a word if states were saved and the run was stopped before a row was
    written, so that beginning again repeats what they hold."""
    saved = saved_folders(log_dir)
    recorded = parse_rows(log_dir / COPY_FILE, CheckpointRecord.from_dict)
    last = next((record for record in reversed(recorded) if record.state_path and record.batch is not None), None)
    if last is not None:
        raise CheckpointError(
            f"{CHECKPOINTS_FILE} names no checkpoint to go on from, but {len(recorded)} were made, and "
            f"{STATES_FOLDER}/ holds {len(saved)} folders. To go on from {last.name!r} (batch {last.batch}, "
            f"{last.state_path}), copy {COPY_FILE} to {CHECKPOINTS_FILE}; to begin anew, use behavior_if_exists=delete "
            f"or another log_path: {log_dir}"
        )
    if saved:
        log.warning("the run begins anew: no row of %s names what was saved in %s", CHECKPOINTS_FILE, saved[-1])


class _Position(NamedTuple):
    state_path: str
    batch: int
    record: CheckpointRecord


async def _resume(
    service: ServiceClient,
    log_dir: str | Path,
    positions: list[_Position],
    model_name: str,
    user_metadata: UserMetadata | None,
) -> Start:
    for path, batch, record in reversed(positions):
        try:
            for policy_path in record.policy_paths:
                await _check_there(service, policy_path)
            client = await service.create_training_client_from_state_with_optimizer(path, model_name, user_metadata)
        except (TornCheckpoint, CheckpointNotFound) as error:
            log.warning("checkpoint %r cannot be used, trying the one before: %s", record.name, error)
            continue
        log.info("resuming from checkpoint %r at batch %d", record.name, batch)
        return Start(client, batch, record)
    raise CheckpointError(
        f"none of the {len(positions)} checkpoints of this run can be used; restore one of their folders, or begin "
        f"again with behavior_if_exists=delete: {log_dir}"
    )


async def _check_there(service: ServiceClient, path: str) -> None:
    """Refuses weights that are torn or gone: a folder of this machine is read, a server is asked to sample from it."""
    if Path(path).is_absolute():
        await in_thread(partial(read_folder, Path(path)))
    else:
        await service.create_sampling_client(path)

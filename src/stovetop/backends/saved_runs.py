"""The `RestClient` of providers that run in this process: what their training clients saved, read from the folders.
What saves that were accepted before will change is read when they are done."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from stovetop.arguments import AccessScope, AtLeastNone, FolderName, StatePath, UserMetadata, is_path
from stovetop.backends.older_names import with_older_names
from stovetop.backends.pending_saves import PendingSaves
from stovetop.checks import checked
from stovetop.client import RestClient
from stovetop.durable import MANIFEST, clear_leftovers, delete_folder, read_manifest
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, RunNotFound, TornCheckpoint
from stovetop.futures import APIFuture, resolved
from stovetop.rest_types import KIND_OF_FOLDER
from stovetop.saved_states import describe
from stovetop.sdk_differences import require_neutral
from stovetop.types import (
    Checkpoint,
    CheckpointsListResponse,
    CheckpointType,
    Cursor,
    GetServerCapabilitiesResponse,
    LoraConfig,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)

log = logging.getLogger(__name__)

OWNER = "local"  # there are no accounts
_FOREIGN = "this adapter was not saved by a training client of this package, so no run is known"


@dataclass(frozen=True, slots=True)
class RunLabels:
    """What its user says of a service, and so of each of its runs."""

    user_metadata: UserMetadata = field(default_factory=dict[str, str])
    display_name: str | None = None
    project_id: str | None = None

    def with_metadata(self, more: UserMetadata | None) -> "RunLabels":
        """The same labels with further metadata, which wins over the metadata of the same key."""
        return RunLabels({**self.user_metadata, **(more or {})}, self.display_name, self.project_id)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A training client of this process, from its creation on."""

    model_id: str
    base_model: str
    lora: LoraConfig
    labels: RunLabels
    created: datetime = field(default_factory=lambda: datetime.now(UTC))

    def described(self) -> dict[str, Any]:
        """What goes into the manifest of everything that it saves."""
        labels = self.labels
        return {
            "model_id": self.model_id,
            "user_metadata": labels.user_metadata,
            "display_name": labels.display_name,
            "project_id": labels.project_id,
        }


class _Saved(NamedTuple):
    """One checkpoint and its manifest."""

    checkpoint: Checkpoint
    manifest: Mapping[str, Any]


@with_older_names("rest")
class SavedRuns(RestClient):
    """See `client.RestClient`. Made by `over`, since calling a RestClient opens the provider that is named."""

    _storage: Path
    _live: Mapping[str, LiveRun]
    _saves: PendingSaves
    _capabilities: Callable[[], GetServerCapabilitiesResponse]
    _require_open: Callable[[], None]

    @classmethod
    def over(
        cls,
        storage: Path,
        live: Mapping[str, LiveRun],
        saves: PendingSaves,
        capabilities: Callable[[], GetServerCapabilitiesResponse],
        require_open: Callable[[], None],
    ) -> Self:
        """Of what lies under `storage`, and of the training clients in `live`; `saves` are on their way there.
        `require_open` refuses calls once the service is closed."""
        runs = object.__new__(cls)
        runs._storage = storage / "checkpoints"
        runs._live = live
        runs._saves = saves
        runs._capabilities = capabilities
        runs._require_open = require_open
        return runs

    @checked
    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        self._require_open()
        require_neutral(access_scope=access_scope)
        return self._saves.then(
            self._storage / training_run_id, lambda: self._run(training_run_id, self._saved_by(training_run_id))
        )

    @checked
    def get_training_run_by_tinker_path(
        self, tinker_path: StatePath, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        self._require_open()
        require_neutral(access_scope=access_scope)
        path = Path(tinker_path)
        return self._saves.then(path.parent.parent, lambda: self._run_that_saved(path))

    @checked
    def get_weights_info_by_tinker_path(self, tinker_path: StatePath) -> APIFuture[WeightsInfoResponse]:
        self._require_open()
        return self._saves.then(Path(tinker_path), lambda: _weights_info(Path(tinker_path)))

    @checked
    def list_training_runs(
        self,
        limit: AtLeastNone = 20,
        offset: AtLeastNone = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        self._require_open()
        require_neutral(access_scope=access_scope)
        return self._saves.then(self._storage, lambda: self._runs(limit, offset, project_id))

    @checked
    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        self._require_open()
        return self._saves.then(
            self._storage / training_run_id,
            lambda: CheckpointsListResponse([checkpoint for checkpoint, _ in self._saved_by(training_run_id)]),
        )

    @checked
    def list_user_checkpoints(
        self, limit: AtLeastNone = 100, offset: AtLeastNone = 0
    ) -> APIFuture[CheckpointsListResponse]:
        self._require_open()
        return self._saves.then(self._storage, lambda: self._checkpoints(limit, offset))

    @checked
    def delete_checkpoint(self, training_run_id: FolderName, checkpoint_id: FolderName) -> APIFuture[None]:
        return self._delete(self._storage / training_run_id / checkpoint_id)

    @checked
    def delete_checkpoint_from_tinker_path(self, tinker_path: StatePath) -> APIFuture[None]:
        return self._delete(Path(tinker_path))

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return resolved(self._capabilities())

    def _delete(self, path: Path) -> APIFuture[None]:
        self._require_open()
        return self._saves.then(path, lambda: self._delete_now(path.resolve()), after_loads=True)

    def _delete_now(self, path: Path) -> None:
        kinds = {self._storage / run.name / kind for run in self._storage.glob("*") for kind in KIND_OF_FOLDER}
        if path.parent not in kinds:
            raise InvalidRequest(
                f"only checkpoints of this service are deleted, {self._storage}/<run>/weights/<name> and "
                f".../sampler_weights/<name>: {path}"
            )
        if not (path / MANIFEST).is_file():
            raise CheckpointNotFound(
                f"there is no checkpoint at this path: {path}; pass the path that the save returned"
            )
        delete_folder(path)

    def _runs(self, limit: int, offset: int, project_id: str | None) -> TrainingRunsResponse:
        saved = {folder.name: found for folder in self._storage.glob("*") if (found := _saved_in(folder))}
        saved |= {model_id: saved.get(model_id, []) for model_id in self._live}
        runs = [
            self._run(model_id, found)
            for model_id, found in saved.items()
            if project_id is None or project_id == self._project(model_id, found)
        ]
        runs.sort(key=lambda run: run.last_request_time, reverse=True)
        return TrainingRunsResponse(runs[offset:][:limit], Cursor(offset, limit, len(runs)))

    def _checkpoints(self, limit: int, offset: int) -> CheckpointsListResponse:
        found = [checkpoint for folder in self._storage.glob("*") for checkpoint, _ in _saved_in(folder)]
        found.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        return CheckpointsListResponse(found[offset:][:limit], Cursor(offset, limit, len(found)))

    def _run_that_saved(self, path: Path) -> TrainingRun:
        manifest, run_folder = _manifest(path), path.parent.parent
        saved, model_id = _saved_in(run_folder), run_folder.name
        if not saved:  # a copy, which does not lie where runs save
            kind = "weights" if manifest["with_optimizer"] else "sampler_weights"
            saved = [_Saved(_checkpoint(path, manifest, kind), manifest)]
            model_id = _described(manifest).get("model_id", path.name)
        return self._run(model_id, saved, manifest)

    def _saved_by(self, model_id: str) -> list[_Saved]:
        """What a run has saved, the latest first. A live one may have saved nothing yet; any other must have."""
        folder = self._storage / model_id
        is_name = is_path(model_id) and model_id != ".." and folder.parent == self._storage
        saved = _saved_in(folder) if is_name else []
        if not saved and model_id not in self._live:
            raise RunNotFound(f"no run of this name has saved anything under {self._storage}: {model_id!r}")
        return saved

    def _project(self, model_id: str, saved: Sequence[_Saved]) -> str | None:
        live = self._live.get(model_id)
        return _described(saved[0].manifest).get("project_id") if live is None else live.labels.project_id

    def _run(self, model_id: str, saved: Sequence[_Saved], manifest: Mapping[str, Any] | None = None) -> TrainingRun:
        """The run that has saved all this. Of a run of an earlier process the manifest tells the rest: that of the
        latest checkpoint, if none is given."""
        live, checkpoints = self._live.get(model_id), [checkpoint for checkpoint, _ in saved]
        times = [checkpoint.time for checkpoint in checkpoints] + ([] if live is None else [live.created])
        if live is not None:
            base_model, rank, metadata = live.base_model, live.lora.rank, live.labels.user_metadata
        else:
            manifest = saved[0].manifest if manifest is None else manifest
            described = _described(manifest)
            base_model, rank = manifest["base_model"], manifest["lora"]["rank"]
            metadata = described.get("user_metadata", manifest.get("user_metadata"))
        return TrainingRun(
            training_run_id=model_id,
            base_model=base_model,
            model_owner=OWNER,
            is_lora=True,
            last_request_time=max(times),
            lora_rank=rank,
            last_checkpoint=_first_of("training", checkpoints),
            last_sampler_checkpoint=_first_of("sampler", checkpoints),
            user_metadata=metadata,
        )


def clear_killed_saves(storage: Path) -> None:
    """What services on this storage were writing when they were killed. What a living one writes stays."""
    for kind in KIND_OF_FOLDER:
        for folder in (storage / "checkpoints").glob(f"*/{kind}"):
            clear_leftovers(folder)


def _first_of(kind: CheckpointType, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    return next((checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_type == kind), None)


def _weights_info(path: Path) -> WeightsInfoResponse:
    state = describe(path)
    lora = state.lora
    return WeightsInfoResponse(
        state.base_model,
        is_lora=True,
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


def _manifest(path: Path) -> dict[str, Any]:
    """Of a checkpoint of ours; an adapter that others wrote has no run."""
    if path.is_dir() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{_FOREIGN}: {path}")
    return read_manifest(path)


def _described(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return manifest.get("run", {})


def _saved_in(run_folder: Path) -> list[_Saved]:
    """What one run has saved, the latest first. What is being written begins with a dot; what is torn is reported and
    left out."""
    found: list[_Saved] = []
    for kind in KIND_OF_FOLDER:
        for folder in (run_folder / kind).glob("[!.]*"):
            try:
                manifest = read_manifest(folder)
                found.append(_Saved(_checkpoint(folder, manifest, kind), manifest))
            except TornCheckpoint as error:
                log.warning("%s", error)
    return sorted(found, key=lambda saved: saved.checkpoint.time, reverse=True)


def _checkpoint(folder: Path, manifest: Mapping[str, Any], kind: str) -> Checkpoint:
    time = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime, UTC)
    ttl_seconds = manifest.get("ttl_seconds")
    return Checkpoint(
        checkpoint_id=f"{kind}/{folder.name}",
        checkpoint_type=KIND_OF_FOLDER[kind],
        time=time,
        tinker_path=str(folder),
        size_bytes=sum(file["bytes"] for file in manifest["files"].values()),
        user_metadata=manifest.get("user_metadata"),
        expires_at=None if ttl_seconds is None else time + timedelta(seconds=ttl_seconds),
    )

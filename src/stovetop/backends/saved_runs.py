"""The `RestClient` of providers that run in this process: what their training clients saved, read from the folders."""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from stovetop.backends.older_names import with_older_names
from stovetop.checks import checked
from stovetop.client import AccessScope, AtLeastNone, FolderName, RestClient, StatePath, UserMetadata, is_path
from stovetop.durable import MANIFEST, read_manifest
from stovetop.engine.saved_states import describe
from stovetop.errors import CheckpointError, CheckpointNotFound, InvalidRequest, NotFoundError, TornCheckpoint
from stovetop.futures import APIFuture, resolved
from stovetop.rest_types import KIND_OF_FOLDER
from stovetop.sdk_differences import require_neutral
from stovetop.types import (
    Checkpoint,
    CheckpointsListResponse,
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


class RunNotFound(InvalidRequest, NotFoundError):
    """No training client of this name."""


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


@with_older_names(
    "get_training_run",
    "get_training_run_by_tinker_path",
    "list_training_runs",
    "list_checkpoints",
    "list_user_checkpoints",
    "delete_checkpoint",
    "delete_checkpoint_from_tinker_path",
    value=True,
)
class SavedRuns(RestClient):
    """See `client.RestClient`. Made by `over`, since calling a RestClient opens the provider that is named."""

    _storage: Path
    _live: Mapping[str, LiveRun]
    _capabilities: Callable[[], GetServerCapabilitiesResponse]

    @classmethod
    def over(
        cls, storage: Path, live: Mapping[str, LiveRun], capabilities: Callable[[], GetServerCapabilitiesResponse]
    ) -> Self:
        """Of what lies under `storage`, and of the training clients in `live`."""
        runs = object.__new__(cls)
        runs._storage = storage / "checkpoints"
        runs._live = live
        runs._capabilities = capabilities
        return runs

    @checked
    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        require_neutral("get_training_run", access_scope=access_scope)
        folder = self._storage / training_run_id
        is_name = is_path(training_run_id) and training_run_id != ".." and folder.parent == self._storage
        if training_run_id in self._live or (is_name and _checkpoints(folder)):
            return resolved(self._run(folder))
        raise RunNotFound(f"no run of this name has saved anything under {self._storage}: {training_run_id!r}")

    @checked
    def get_training_run_by_tinker_path(
        self, tinker_path: StatePath, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        require_neutral("get_training_run_by_tinker_path", access_scope=access_scope)
        path = Path(tinker_path)
        manifest = _manifest(path)
        return resolved(self._run(path.parent.parent, manifest))

    @checked
    def get_weights_info_by_tinker_path(self, tinker_path: StatePath) -> APIFuture[WeightsInfoResponse]:
        state = describe(Path(tinker_path))
        lora = state.lora
        return resolved(
            WeightsInfoResponse(
                state.base_model,
                is_lora=True,
                lora_rank=lora.rank,
                train_unembed=lora.train_unembed,
                train_mlp=lora.train_mlp,
                train_attn=lora.train_attn,
            )
        )

    @checked
    def list_training_runs(
        self,
        limit: AtLeastNone = 20,
        offset: AtLeastNone = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        require_neutral("list_training_runs", access_scope=access_scope)
        saved = {folder.name: folder for folder in self._storage.glob("*") if _checkpoints(folder)}
        saved |= {model_id: self._storage / model_id for model_id in self._live}
        folders = [folder for folder in saved.values() if project_id in (None, self._project(folder))]
        runs = sorted(map(self._run, folders), key=lambda run: run.last_request_time, reverse=True)
        return resolved(TrainingRunsResponse(runs[offset:][:limit], _cursor(limit, offset, len(runs))))

    @checked
    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        self.get_training_run(training_run_id)
        return resolved(CheckpointsListResponse(_checkpoints(self._storage / training_run_id)))

    @checked
    def list_user_checkpoints(
        self, limit: AtLeastNone = 100, offset: AtLeastNone = 0
    ) -> APIFuture[CheckpointsListResponse]:
        found = [checkpoint for folder in self._storage.glob("*") for checkpoint in _checkpoints(folder)]
        found.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        return resolved(CheckpointsListResponse(found[offset:][:limit], _cursor(limit, offset, len(found))))

    @checked
    def delete_checkpoint(self, training_run_id: FolderName, checkpoint_id: FolderName) -> APIFuture[None]:
        return self._delete(self._storage / training_run_id / checkpoint_id)

    @checked
    def delete_checkpoint_from_tinker_path(self, tinker_path: StatePath) -> APIFuture[None]:
        return self._delete(Path(tinker_path))

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return resolved(self._capabilities())

    def _delete(self, path: Path) -> APIFuture[None]:
        path = path.resolve()
        kinds = {self._storage / run.name / kind for run in self._storage.glob("*") for kind in KIND_OF_FOLDER}
        if path.parent not in kinds:
            raise InvalidRequest(
                f"only checkpoints of this service are deleted, {self._storage}/<run>/weights/<name> and "
                f".../sampler_weights/<name>: {path}"
            )
        if not (path / MANIFEST).is_file():
            raise CheckpointNotFound(f"there is no checkpoint at this path: {path}")
        shutil.rmtree(path)
        return resolved(None)

    def _project(self, folder: Path) -> str | None:
        live = self._live.get(folder.name)
        return _described(_latest_manifest(folder)).get("project_id") if live is None else live.labels.project_id

    def _run(self, folder: Path, manifest: Mapping[str, Any] | None = None) -> TrainingRun:
        """The run that saves in `folder`; `manifest` is that of one of its checkpoints."""
        live, saved = self._live.get(folder.name), _checkpoints(folder)
        times = [checkpoint.time for checkpoint in saved] + ([] if live is None else [live.created])
        last = {kind: next((each for each in saved if each.checkpoint_type == kind), None) for kind in KINDS}
        if live is not None:
            base_model, rank, metadata = live.base_model, live.lora.rank, live.labels.user_metadata
        else:
            manifest = _latest_manifest(folder) if manifest is None else manifest
            described = _described(manifest)
            base_model, rank = manifest["base_model"], manifest["lora"]["rank"]
            metadata = described.get("user_metadata", manifest.get("user_metadata"))
        return TrainingRun(
            training_run_id=folder.name,
            base_model=base_model,
            model_owner=OWNER,
            is_lora=True,
            last_request_time=max(times),
            lora_rank=rank,
            last_checkpoint=last["training"],
            last_sampler_checkpoint=last["sampler"],
            user_metadata=metadata,
        )


KINDS = tuple(KIND_OF_FOLDER.values())


def _manifest(path: Path) -> dict[str, Any]:
    """Of a checkpoint of ours; an adapter that others wrote has no run."""
    if path.is_dir() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{_FOREIGN}: {path}")
    return read_manifest(path)


def _described(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return manifest.get("run", {})


def _latest_manifest(run_folder: Path) -> dict[str, Any]:
    return read_manifest(Path(_checkpoints(run_folder)[0].tinker_path))


def _checkpoints(run_folder: Path) -> list[Checkpoint]:
    """Of one run, the latest first. What is being written begins with a dot; what is torn is reported and left out."""
    found: list[Checkpoint] = []
    for kind in KIND_OF_FOLDER:
        for folder in (run_folder / kind).glob("[!.]*"):
            try:
                found.append(_checkpoint(folder, read_manifest(folder)))
            except TornCheckpoint as error:
                log.warning("%s", error)
    return sorted(found, key=lambda checkpoint: checkpoint.time, reverse=True)


def _checkpoint(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    time = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime, UTC)
    ttl_seconds = manifest.get("ttl_seconds")
    return Checkpoint(
        checkpoint_id=f"{folder.parent.name}/{folder.name}",
        checkpoint_type=KIND_OF_FOLDER[folder.parent.name],
        time=time,
        tinker_path=str(folder),
        size_bytes=sum(file["bytes"] for file in manifest["files"].values()),
        user_metadata=manifest.get("user_metadata"),
        expires_at=None if ttl_seconds is None else time + timedelta(seconds=ttl_seconds),
    )


def _cursor(limit: int, offset: int, total: int) -> Cursor:
    return Cursor(offset, limit, total)

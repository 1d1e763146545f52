"""What a model's name stands for: a base model, by its name or its alias; a checkpoint, by its tinker:// path; or, by
the id of a training client, the weights of it that were frozen last: a checkpoint, or those of a sampling session. Only
what is the caller's is found, and only what is committed.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stovetop.client import SamplingClient
from stovetop.errors import NotFoundError
from stovetop.model_families import context_length_of
from stovetop.model_store import canonical_name
from stovetop.server.keys import queue_of
from stovetop.server.recovery import Parts
from stovetop.server.rows import CheckpointRow, SamplerRow

MAX_OPEN = 8  # checkpoints whose weights are kept at hand; a bound, not a tuned number


class ModelNotFound(NotFoundError):
    """No model of this name, or none of the caller's."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What answers."""

    name: str  # as it was asked for
    base_model: str
    weights: str | None  # a tinker:// path or the id of a sampling session; None: the base model's own
    client: SamplingClient


class Models:
    """By name. The weights of the checkpoints that were asked for last stay at hand; a folder is never written twice,
    so what was read of it stays true."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, SamplingClient] = OrderedDict()  # by folder, the last one last
        self._lock = threading.Lock()  # protects the table

    def find(self, parts: Parts, name: str, owner: str) -> Target:
        """Waits for weights that are still read: not for an event loop."""
        base_model = _base_model(parts, name)
        if base_model is not None:
            service = parts.service.in_queue(queue_of(owner))
            return Target(name, base_model, None, service.create_sampling_client(base_model=base_model).result())
        frozen = _weights_of(parts, name, owner)
        match frozen:
            case CheckpointRow():
                base_model = _base_model_of(parts, frozen)
                return Target(name, base_model, frozen.path, self._opened(parts, frozen.folder, owner))
            case SamplerRow():
                return Target(name, frozen.base_model, frozen.id, parts.samplers.client_of(frozen.id, owner))

    def _opened(self, parts: Parts, folder: str, owner: str) -> SamplingClient:
        with self._lock:
            client = self._open.get(folder)
            if client is not None:
                self._open.move_to_end(folder)
                return client
        client = parts.samplers.open_folder(folder, owner).result()
        with self._lock:
            self._open[folder] = client
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return client


def _weights_of(parts: Parts, name: str, owner: str) -> CheckpointRow | SamplerRow:
    checkpoints = [row for row in _checkpoints(parts, owner) if name in (row.path, row.model_id)]
    frozen = [row for row in (parts.samplers.newest_frozen(name, owner),) if row is not None]
    newest = max([*checkpoints, *frozen], key=lambda row: row.n or 0, default=None)
    if newest is not None:
        return newest
    if any(program.model.id == name for program in parts.programs.owned(owner)):
        raise ModelNotFound(
            "this training client has no frozen weights yet; call save_weights_and_get_sampling_client or "
            f"save_weights_for_sampler, then ask again: {name!r}"
        )
    known = ", ".join(_base_models(parts))
    raise ModelNotFound(
        f"there is no model of this name; pass a base model ({known}), the tinker:// path of a checkpoint or the id "
        f"of a training client: {name[:200]!r}"
    )


def _checkpoints(parts: Parts, owner: str) -> list[CheckpointRow]:
    """Those of this owner that can be sampled from, the oldest first."""
    rows = [row for row in parts.checkpoints.owned(owner) if row.kind != "external_weights"]
    return sorted(rows, key=lambda row: row.n)


def _base_model_of(parts: Parts, row: CheckpointRow) -> str:
    return parts.programs.find(row.model_id, row.owner).model.base_model


def _base_model(parts: Parts, name: str) -> str | None:
    """The base model of this name, or of this alias; None where it is another kind of name."""
    return next((each for each in (name, canonical_name(name)) if each in _base_models(parts)), None)


def _base_models(parts: Parts) -> list[str]:
    return [str(model.model_name) for model in parts.service.get_server_capabilities().supported_models]


def listed(parts: Parts, owner: str) -> list[dict[str, Any]]:
    """All that `find` finds for this owner, as the protocol lists models."""
    base_models = [_described(parts, name, name, 0.0) for name in _base_models(parts)]
    checkpoints = [
        _described(parts, row.path, _base_model_of(parts, row), row.created_s) for row in _checkpoints(parts, owner)
    ]
    saved = {row.model_id for row in _checkpoints(parts, owner)}
    live = [
        _described(parts, model.id, model.base_model, model.created_s)
        for model in (program.model for program in parts.programs.owned(owner))
        if model.id in saved or parts.samplers.newest_frozen(model.id, owner) is not None
    ]
    return [*base_models, *checkpoints, *live]


def _described(parts: Parts, name: str, base_model: str, created_s: float) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "stovetop",
        "root": base_model,
        "parent": None if name == base_model else base_model,
        "max_model_len": context_length_of(parts.service, base_model),
    }


def described(parts: Parts, name: str, owner: str) -> Mapping[str, Any]:
    """One of those."""
    asked = _base_model(parts, name) or name
    for each in listed(parts, owner):
        if each["id"] == asked:
            return each
    raise ModelNotFound(f"there is no model of this name; GET /v1/models lists them: {name[:200]!r}")

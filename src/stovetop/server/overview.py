"""What a server is and does at this moment, as values: what its page (`page.py`) and its metrics (`metrics.py`) show.
Reads only. It looks at the disk, so it is not for an event loop."""

import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stovetop.server.activity import Done
from stovetop.server.limits import Load
from stovetop.server.program import Program
from stovetop.server.recovery import Parts
from stovetop.server.samplers import InMemory

SILENT_S = 30.0  # without a heartbeat, of which a client sends one in 10 s: it may be dead
SHOWN_S = 86_400.0  # a tenant that was silent for longer, and has nothing here, is not shown

State = Literal["at work", "idle", "silent", "gone"]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One that clients train on and sample from."""

    name: str
    context_length: int | None


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model of a tenant's."""

    id: str
    owner: str
    base_model: str
    rank: int
    is_in_memory: bool
    idle_s: float  # since its last request


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner and what is theirs."""

    name: str
    num_sessions: int  # that are alive
    heard_s: float | None  # since one of them was last heard of; None: all have finished, or none is known
    adapters: InMemory
    load: Load
    done: Done
    tokens_per_s: int
    checkpoint_bytes: int

    @property
    def state(self) -> State:
        if self.heard_s is None:
            return "gone"
        if self.heard_s > SILENT_S:
            return "silent"
        return "at work" if self.load.num_requests > 0 or self.tokens_per_s > 0 else "idle"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Of the storage folder."""

    free_bytes: int
    total_bytes: int  # of the whole disk
    journal_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """See above."""

    at_s: float  # since the epoch
    models: list[BaseModel]
    tenants: list[Tenant]  # those at work first
    adapters: list[Adapter]  # in memory first, then those that were used last
    samplers: InMemory
    disk: DiskUse

    @property
    def in_memory(self) -> InMemory:
        """Adapters of all tenants."""
        num_in = sum(adapter.is_in_memory for adapter in self.adapters)
        return InMemory(num_in, len(self.adapters) - num_in)


def look_at(parts: Parts) -> Overview:
    """Now."""
    now_s = time.time()
    adapters = [_adapter(program, now_s) for program in parts.programs.all() if not program.is_empty]
    return Overview(
        at_s=now_s,
        models=[
            BaseModel(model.model_name or "", model.max_context_length)
            for model in parts.service.get_server_capabilities().supported_models
        ],
        tenants=_tenants(parts, adapters),
        adapters=sorted(adapters, key=lambda adapter: (not adapter.is_in_memory, adapter.idle_s)),
        samplers=parts.samplers.counts(),
        disk=_disk(parts),
    )


def _adapter(program: Program, now_s: float) -> Adapter:
    model = program.model
    idle_s = max(0.0, now_s - program.last_request_s)
    return Adapter(model.id, model.owner, model.base_model, model.lora_rank, program.is_in_memory, idle_s)


def _tenants(parts: Parts, adapters: list[Adapter]) -> list[Tenant]:
    alive, heard_s = Counter[str](), dict[str, float]()
    for row in parts.sessions.all():
        if row.finished is None:
            silence_s = parts.sessions.silence_s(row.id)
            alive[row.owner] += parts.sessions.is_alive(row.id)
            heard_s[row.owner] = min(silence_s, heard_s.get(row.owner, silence_s))
    loads, done = parts.limits.by_owner(), parts.activity.by_owner()
    speeds, kept = parts.activity.tokens_per_s(), parts.checkpoints.bytes_by_owner()
    owned = Counter((adapter.owner, adapter.is_in_memory) for adapter in adapters)
    silent = {owner for owner, silence_s in heard_s.items() if silence_s > SHOWN_S}
    names = {*heard_s, *loads, *done, *kept, *(adapter.owner for adapter in adapters)}
    names -= silent - {*loads, *done, *kept, *(owner for owner, is_in in owned if is_in)}
    tenants = [
        Tenant(
            name=name,
            num_sessions=alive[name],
            heard_s=heard_s.get(name),
            adapters=InMemory(owned[name, True], owned[name, False]),
            load=loads.get(name, Load()),
            done=done.get(name, Done()),
            tokens_per_s=speeds[name],
            checkpoint_bytes=kept.get(name, 0),
        )
        for name in names
    ]
    order = ("at work", "idle", "silent", "gone")
    return sorted(tenants, key=lambda tenant: (order.index(tenant.state), tenant.name))


def _disk(parts: Parts) -> DiskUse:
    usage = shutil.disk_usage(parts.storage)
    journal_bytes = sum(map(_size, parts.storage.glob("journal.sqlite*")))
    return DiskUse(usage.free, usage.total, journal_bytes, sum(parts.checkpoints.bytes_by_owner().values()))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it went since it was listed
        return 0

"""From the journal to all that a server works with: before the first request is served, everything that was
acknowledged is there again.

Folders that no row speaks of are removed first: a save or a snapshot that was cut off, or one whose replacement was
committed. Then each model is made as of its snapshot and its later requests are replayed. What is computed again is
compared with what is stored: a difference means that this machine, or another version of a library, rounds otherwise.
"""

import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.server.checkpoints import Checkpoints
from stovetop.server.folders import Folders
from stovetop.server.journal import Journal
from stovetop.server.limits import Limits
from stovetop.server.program import Program
from stovetop.server.programs import Programs
from stovetop.server.requests import Requests, Result
from stovetop.server.rows import (
    Change,
    CheckpointRow,
    DrawnRow,
    ModelRow,
    RequestRow,
    ResultRow,
    SamplerRow,
    SessionRow,
    SnapshotRow,
)
from stovetop.server.samplers import Samplers
from stovetop.server.sessions import Sessions
from stovetop.server.shared import Shared
from stovetop.server.verbs import Load, MakeFrom, read_verb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What the routes work with."""

    service: InProcessServiceClient
    journal: Journal
    sessions: Sessions
    requests: Requests
    checkpoints: Checkpoints
    samplers: Samplers
    programs: Programs
    limits: Limits


def recover(
    service: InProcessServiceClient,
    journal: Journal,
    storage: Path,
    limits: Limits,
    end: Callable[[], object],
    *,
    was_killed: bool = False,
) -> Parts:
    """All parts, as the journal has them. Takes as long as the replay; raises where that cannot be done. `end` ends the
    process when an engine has died. `was_killed`: the server before this one was ended from outside, so the request
    that it was replaying is not to blame."""
    for model in service.get_server_capabilities().supported_models:
        service.create_sampling_client(base_model=model.model_name).result()  # it is loaded, or it says why not
    folders = Folders(storage)
    checkpoints = Checkpoints(journal.rows(CheckpointRow), folders)
    requests = Requests(journal, limits, lambda: service.failed is not None, end)
    if was_killed:
        journal.put(Change("UPDATE request SET attempts = attempts - 1 WHERE attempts > 0", ())).result()
    rows = journal.rows(RequestRow, order="n")
    samplers = Samplers(
        service, journal, requests, checkpoints, journal.rows(SamplerRow), journal.rows(DrawnRow), folders
    )
    snapshots = {row.model_id: row for row in journal.rows(SnapshotRow)}
    needed = checkpoints.needed() | samplers.needed() | {row.folder for row in snapshots.values()} | _read_by(rows)
    folders.remove_others(needed)
    last_n = rows[-1].n if rows else 0
    shared = Shared(service, journal, requests, samplers, checkpoints, folders, limits, count(last_n + 1))
    programs: list[Program] = []
    results = {row.n: Result.stored(row) for row in journal.rows(ResultRow)}
    for model in journal.rows(ModelRow, order="created_s"):
        program = Program(model, shared)
        _replay(program, [row for row in rows if row.model_id == model.id], results, snapshots.get(model.id))
        programs.append(program)
    sessions = Sessions(journal, {row.id: row for row in journal.rows(SessionRow)})
    return Parts(service, journal, sessions, requests, checkpoints, samplers, Programs(shared, programs), limits)


def _replay(
    program: Program, rows: Iterable[RequestRow], results: dict[int, Result], snapshot: SnapshotRow | None
) -> None:
    if snapshot is not None:
        program.restore(snapshot)
    num_replayed, differs = 0, None
    for row in rows:
        if snapshot is not None and row.n <= snapshot.n:
            program.know(row, results.get(row.n))
            continue
        is_same = program.replay(row, results.get(row.n))
        num_replayed += 1
        differs = differs if is_same or differs is not None else row
    log.info("%s: %d requests replayed", program.model.id, num_replayed)
    if differs is not None:
        log.warning(
            "request %d of %s came out otherwise than before: its bits may depend on the processor, the number of "
            "threads or the version of a library, one of which has changed",
            differs.seq,
            program.model.id,
        )


def _read_by(rows: Iterable[RequestRow]) -> set[str]:
    """Folders that a replay would read, of checkpoints that may have been deleted."""
    loads = [
        read_verb(row.kind, zlib.decompress(row.body))
        for row in rows
        if row.body is not None and row.kind in ("make_from", "load")
    ]
    return {verb.folder for verb in loads if isinstance(verb, MakeFrom | Load)}

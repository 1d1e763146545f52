"""From the journal to all that a server works with: before the first request is served, everything that was
acknowledged is there again.

Folders that no row speaks of are removed first: a save or a snapshot that was cut off, or one whose replacement was
committed. Then each model that has requests behind its snapshot is made as of the snapshot, and these are replayed. A
model whose snapshot covers all is made when its next request comes.
"""

import logging
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from stovetop.backends.in_process import InProcessServiceClient
from stovetop.server.activity import Activity
from stovetop.server.checkpoints import Checkpoints
from stovetop.server.downloads import Links
from stovetop.server.folders import Folders
from stovetop.server.journal import Journal
from stovetop.server.limits import Limits
from stovetop.server.program import NotBroughtBack, Program
from stovetop.server.programs import Programs
from stovetop.server.requests import Requests
from stovetop.server.rows import (
    Change,
    CheckpointRow,
    DrawnRow,
    ModelRow,
    RequestRow,
    SamplerRow,
    ServedRow,
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
    links: Links
    activity: Activity
    storage: Path


def recover(
    service: InProcessServiceClient,
    journal: Journal,
    storage: Path,
    limits: Limits,
    end: Callable[[], object],
    *,
    activity: Activity | None = None,
    was_killed: bool = False,
) -> Parts:
    """All parts, as the journal has them. Takes as long as the replay; raises where that cannot be done. `end` ends the
    process when an engine has died. `was_killed`: the server before this one was ended from outside, so the request
    that it was replaying is not to blame."""
    for model in service.get_server_capabilities().supported_models:
        service.create_sampling_client(base_model=model.model_name).result()  # it is loaded, or it says why not
    activity = activity or Activity()
    folders = Folders(storage)
    checkpoints = Checkpoints(journal.rows(CheckpointRow), folders, journal)
    requests = Requests(journal, limits, activity, lambda: service.failed is not None, end)
    if was_killed:
        journal.put(Change("UPDATE request SET attempts = attempts - 1 WHERE attempts > 0", ())).result()
    drawn = journal.rows(DrawnRow)
    samplers = Samplers(service, journal, requests, checkpoints, journal.rows(SamplerRow), drawn, folders)
    snapshots = {row.folder for row in journal.rows(SnapshotRow)}
    read = _read_by(journal.rows(RequestRow, "body IS NOT NULL AND kind IN ('make_from', 'load')"))
    folders.remove_others(checkpoints.needed() | samplers.needed() | snapshots | read)
    known = journal.read(_known_requests).result()
    last_n = max((each.last_n for each in known.values()), default=0)
    shared = Shared(service, journal, requests, samplers, checkpoints, folders, limits, count(last_n + 1))
    programs = [_program(model, shared, known.get(model.id)) for model in journal.rows(ModelRow, order="created_s")]
    tails = [program for program in programs if program.model.id in known and known[program.model.id].has_tail]
    if all([_is_brought_back(program) for program in tails]):
        for folder in read - checkpoints.needed():  # of checkpoints that were deleted: it goes when no replay reads it
            checkpoints.remove_folder(folder)
    served_until_s = max((row.until_s for row in journal.rows(ServedRow)), default=None)
    sessions = Sessions(journal, {row.id: row for row in journal.rows(SessionRow)}, served_until_s)
    of_models = Programs(shared, programs)
    return Parts(
        service, journal, sessions, requests, checkpoints, samplers, of_models, limits, Links(), activity, storage
    )


def _is_brought_back(program: Program) -> bool:
    """One that is not keeps no other from working: it sleeps, and its next request tries it again."""
    try:
        program.wake()
    except NotBroughtBack as error:
        log.error("%s", error)
        return False
    return True


class _Known(NamedTuple):
    """What the journal knows of the requests of one model."""

    last_n: int
    last_seq: int
    last_request_s: float
    has_tail: bool  # some are not covered by a snapshot


def _known_requests(connection: sqlite3.Connection) -> dict[str, _Known]:
    query = "SELECT model_id, max(n), max(seq), max(accepted_s), max(body IS NOT NULL) FROM request GROUP BY model_id"
    return {model_id: _Known(*known) for model_id, *known in connection.execute(query)}


def _program(model: ModelRow, shared: Shared, known: _Known | None) -> Program:
    """It sleeps until its first request, or until the replay."""
    if known is None:  # a run of copies, or one whose session has finished long ago
        return Program(model, shared, is_asleep=True)
    return Program(model, shared, is_asleep=True, last_seq=known.last_seq, last_request_s=known.last_request_s)


def _read_by(rows: Iterable[RequestRow]) -> set[str]:
    """Folders that a replay would read, of checkpoints that may have been deleted."""
    loads = [
        read_verb(row.kind, zlib.decompress(row.body))
        for row in rows
        if row.body is not None and row.kind in ("make_from", "load")
    ]
    return {verb.folder for verb in loads if isinstance(verb, MakeFrom | Load)}

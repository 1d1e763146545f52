"""What a server lets go of as time goes by, so that its memory and its disk stay bounded: results that were kept for
long enough, checkpoints whose time is over, and what belongs to clients that are silent or have finished.

A request whose result is forgotten is still known: sent again, it is not done again.

    a session                   its models                            its frozen samplers
    silent for QUIET_S          out of memory, back at a request      the same; samples not fetched are gone
    silent for KEPT_S           on the disk                           deleted
    finished                    out of memory                         deleted
    finished, and silent        deleted, but for what they saved      deleted
      for KEPT_S

Frozen samplers are those whose weights no path has; the longest unused go also when an owner has too many bytes of
them. A sampler that was not used for QUIET_S goes out of memory too,
whatever its session does.
"""

import time

from stovetop.server.openai.kept import sweep_answers
from stovetop.server.recovery import Parts
from stovetop.server.rows import Change

KEPT_IN_JOURNAL_S = 86_400.0  # a training result, whether or not a client has come for it
QUIET_S = 900.0  # without a heartbeat, of which a client sends six a minute; a sampler, without a sample
KEPT_S = 86_400.0  # what only its client could ask for, after it was last heard of


def sweep(parts: Parts, now_s: float) -> None:
    """`now_s` since the epoch. Waits for the disk, and for no model."""
    over = parts.requests.sweep(time.monotonic())
    parts.programs.forget(over)
    parts.samplers.forget(over)
    # what is still to be replayed is compared with its result
    old = "DELETE FROM result WHERE done_s < ? AND n IN (SELECT n FROM request WHERE body IS NULL)"
    parts.journal.put_soon(Change(old, (now_s - KEPT_IN_JOURNAL_S,)))
    parts.journal.put_soon(Change("DELETE FROM deletion WHERE done_s < ?", (now_s - KEPT_IN_JOURNAL_S,)))
    parts.journal.put_soon(sweep_answers(now_s))
    parts.sessions.keep(now_s)
    parts.checkpoints.delete_expired(now_s)
    parts.samplers.delete_beyond(parts.limits.sampler_bytes_of)
    _reap(parts)


def _reap(parts: Parts) -> None:
    quiet = parts.sessions.quiet(QUIET_S)
    silent = {row.id for row, silence_s in quiet if silence_s > KEPT_S}
    finished = {row.id for row, _ in quiet if row.finished is not None}
    parts.samplers.delete_frozen(silent | finished)
    parts.samplers.rest(QUIET_S, {row.id for row, _ in quiet})
    parts.programs.sleep({row.id for row, _ in quiet})
    parts.programs.end(silent & finished)

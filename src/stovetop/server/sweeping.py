"""What a server forgets as time goes by: results that were kept for long enough, in memory and in the journal. What
sessions, checkpoints and limits will forget belongs here too.

A request whose result is forgotten is still known: sent again, it is not done again.
"""

import time

from stovetop.server.recovery import Parts
from stovetop.server.rows import Change

KEPT_IN_JOURNAL_S = 86_400.0  # a training result, whether or not a client has come for it


def sweep(parts: Parts, now_s: float) -> None:
    """`now_s` since the epoch."""
    over = parts.requests.sweep(time.monotonic())
    parts.programs.forget(over)
    parts.samplers.forget(over)
    # what is still to be replayed is compared with its result
    old = "DELETE FROM result WHERE done_s < ? AND n IN (SELECT n FROM request WHERE body IS NULL)"
    parts.journal.put_soon(Change(old, (now_s - KEPT_IN_JOURNAL_S,)))

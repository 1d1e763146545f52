"""The exact tokens of every answer, kept in the journal under the answer's id, so that a model can later be trained on
what it said without a text being encoded a second time.

    GET /v1/answers/ID     to the key that asked, for KEPT_S seconds

    {"id", "object": "answer", "created", "expires_at", "model", "base_model", "weights", "temperature",
     "prompts": [[token, ..]],
     "choices": [{"index", "prompt": index of its prompt, "tokens", "logprobs", "stop_reason"}]}

`weights` says exactly which: a tinker:// path or a sampling session of the protocol; null for a base model. `tokens`
are all that were drawn, the one that ended the answer included, with one logprob each: under the distribution at
`temperature` (at 1 for a temperature of 0), before top-k and top-p.
"""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from stovetop.errors import NotFoundError
from stovetop.server.journal import Journal
from stovetop.server.rows import AnswerRow, Change, put

KEPT_S = 86_400.0  # a day


def keep(journal: Journal, answer_id: str, owner: str, created_s: float, what: Mapping[str, Any]) -> "Future[None]":
    """Done when it is committed. An answer is sent after that."""
    record = {
        "id": answer_id,
        "object": "answer",
        "created": int(created_s),
        "expires_at": int(created_s + KEPT_S),
        **what,
    }
    body = zlib.compress(json.dumps(record, allow_nan=False).encode(), 1)
    return journal.put(put(AnswerRow(answer_id, owner, created_s, body)))


def kept(journal: Journal, answer_id: str, owner: str, now_s: float) -> bytes:
    """The record of an answer to this owner, as JSON. Waits for the journal."""
    rows = journal.rows(AnswerRow, "id = ? AND owner = ? AND created_s > ?", answer_id, owner, now_s - KEPT_S)
    if not rows:
        raise NotFoundError(f"there is no answer of this id; they are kept for {KEPT_S / 3600:g} hours: {answer_id!r}")
    return zlib.decompress(rows[0].body)


def sweep_answers(now_s: float) -> Change:
    """Forgets those that have been kept for long enough. `now_s` since the epoch."""
    return Change("DELETE FROM answer WHERE created_s < ?", (now_s - KEPT_S,))

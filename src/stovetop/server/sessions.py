"""Client processes: each introduces itself as a session, says that it lives, and says when it ends. What is made
belongs to a session, and a session to an owner."""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from stovetop.errors import NotFoundError
from stovetop.server.bodies import CreateSession, FinishSession
from stovetop.server.journal import Journal
from stovetop.server.requests import Gone
from stovetop.server.rows import ServedRow, SessionRow, amend, put

ALIVE_S = 900.0  # since a client was heard of: its heart beats every 10 s


class Sessions:
    """All of them, with when each was last heard of (monotonic seconds). That is kept as of the last sweep; the time in
    which there was no server does not count as a client's silence."""

    def __init__(self, journal: Journal, rows: Mapping[str, SessionRow], served_until_s: float | None = None) -> None:
        """`served_until_s`: when the server before this one was last there; None: there was none."""
        self._journal = journal
        self._rows = dict(rows)
        now_s = time.monotonic()
        self.last_seen_s = {row.id: now_s - _silence_s(row, served_until_s) for row in rows.values()}
        self._kept_s = dict(self.last_seen_s)  # the same, as it is kept
        self._lock = threading.Lock()  # protects the rows: a session finishes once

    def create(self, body: CreateSession, owner: str) -> tuple[SessionRow, "Future[None]"]:
        """A new session, and when it is committed."""
        row = SessionRow(f"sess-{secrets.token_hex(8)}", owner, time.time(), body.model_dump_json())
        self.last_seen_s[row.id] = time.monotonic()
        self._rows[row.id] = row
        return row, self._journal.put(put(row))

    def all(self) -> list[SessionRow]:
        """Of all owners."""
        return list(self._rows.values())

    def owned(self, owner: str) -> list[SessionRow]:
        """Those of an owner, the newest first."""
        rows = [row for row in list(self._rows.values()) if row.owner == owner]
        return sorted(rows, key=lambda row: (row.created_s, row.id), reverse=True)

    def project_of(self, session_id: str) -> str | None:
        """The project that a session was made in."""
        row = self._rows.get(session_id)
        return None if row is None else json.loads(row.body).get("project_id")

    def quiet(self, since_s: float) -> list[tuple[SessionRow, float]]:
        """Those that have finished, or of which nothing was heard for so many seconds: each with its silence so far."""
        now_s = time.monotonic()
        silences = [(row, now_s - self.last_seen_s[row.id]) for row in list(self._rows.values())]
        return [(row, silence_s) for row, silence_s in silences if row.finished is not None or silence_s > since_s]

    def find(self, session_id: str, owner: str) -> SessionRow:
        """A session of this owner. One of another is as good as none."""
        row = self._rows.get(session_id)
        if row is None or row.owner != owner:
            raise NotFoundError(f"there is no session of this id: {session_id!r}")
        return row

    def at_work(self, session_id: str, owner: str) -> SessionRow:
        """The same, of one that has not finished; it is heard of."""
        row = self.find(session_id, owner)
        if row.finished is not None:
            raise Gone(f"this session has finished; make a new ServiceClient: {session_id!r}")
        self.last_seen_s[session_id] = time.monotonic()
        return row

    def is_alive(self, session_id: str) -> bool:
        """It has not finished, and was heard of lately."""
        row = self._rows.get(session_id)
        if row is None or row.finished is not None:
            return False
        return time.monotonic() - self.last_seen_s[session_id] < ALIVE_S

    def silence_s(self, session_id: str) -> float:
        """Since it was heard of, or the server started."""
        return time.monotonic() - self.last_seen_s[session_id]

    def num_alive(self) -> int:
        return sum(map(self.is_alive, list(self._rows)))

    def finish(self, session_id: str, body: FinishSession, owner: str) -> "Future[None]":
        """The first reason stays."""
        with self._lock:
            row = self.find(session_id, owner)
            if row.finished is None:
                row = self._rows[session_id] = replace(row, finished=body.model_dump_json())
            return self._journal.put(amend(SessionRow, "finished", row.finished, "id = ?2", row.id))

    def keep(self, now_s: float) -> None:
        """Writes down of whom was heard since this was last done, as of now, in seconds since the epoch."""
        epoch_s = now_s - time.monotonic()
        heard = {
            session_id: seen_s
            for session_id, seen_s in list(self.last_seen_s.items())
            if self._kept_s.get(session_id) != seen_s
        }
        changes = [
            amend(SessionRow, "seen_s", epoch_s + seen_s, "id = ?2", session_id) for session_id, seen_s in heard.items()
        ]
        self._journal.put_soon(*changes, put(ServedRow(1, now_s)))
        self._kept_s |= heard

    def assign(self, session_id: str, project_id: str, owner: str) -> "Future[None]":
        """It belongs to this project from now on."""
        with self._lock:
            row = self.find(session_id, owner)
            body = json.dumps({**json.loads(row.body), "project_id": project_id})
            self._rows[session_id] = replace(row, body=body)
            return self._journal.put(amend(SessionRow, "body", body, "id = ?2", session_id))

    def metadata_of(self, row: SessionRow) -> dict[str, Any]:
        """What the user said of the whole session."""
        return json.loads(row.body).get("user_metadata") or {}


def _silence_s(row: SessionRow, served_until_s: float | None) -> float:
    """How long nothing was heard of a client while the server before this one was there."""
    seen_s = row.created_s if row.seen_s is None else row.seen_s
    return 0.0 if served_until_s is None else max(0.0, served_until_s - seen_s)

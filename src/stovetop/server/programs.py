"""The programs of all models, by id: makes them, finds them for their owner, and finds their requests."""

import logging
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import wait

from stovetop.errors import InvalidRequest, NotFoundError
from stovetop.server.program import Program
from stovetop.server.requests import Request
from stovetop.server.rows import ModelRow, put
from stovetop.server.shared import Shared
from stovetop.server.verbs import Call

log = logging.getLogger(__name__)


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a model, which the SDK computes too."""
    return f"{session_id}:train:{model_seq_id}"


class Programs:
    def __init__(self, shared: Shared, programs: Iterable[Program] = ()) -> None:
        self._shared = shared
        self._by_id = {program.model.id: program for program in programs}
        self._lock = threading.Lock()  # protects the table
        self._to_forget: dict[str, set[str]] = {}  # ids of requests, by model; of the thread that sweeps

    async def make(self, model: ModelRow, call: Call) -> Request:
        """The request that makes a model, which its row is committed with."""
        with self._lock:
            program = self._by_id.setdefault(model.id, Program(model, self._shared))
        try:
            return await program.accept(call, put(program.model))
        except BaseException:
            with self._lock:
                if not program.is_made and self._by_id.get(model.id) is program:
                    del self._by_id[model.id]
            raise

    def find(self, model_id: str, owner: str) -> Program:
        """A model of this owner. One of another is as good as none."""
        program = self._by_id.get(model_id)
        if program is None or program.model.owner != owner:
            raise NotFoundError(f"there is no model of this id: {model_id!r}")
        return program

    def is_there(self, model_id: str) -> bool:
        return model_id in self._by_id

    def all(self) -> list[Program]:
        """Of all owners, the oldest first."""
        return list(self._by_id.values())

    def owned(self, owner: str) -> list[Program]:
        """Those of an owner, the oldest first."""
        return [program for program in list(self._by_id.values()) if program.model.owner == owner]

    def of_session(self, session_id: str) -> list[Program]:
        return [program for program in list(self._by_id.values()) if program.model.session_id == session_id]

    def sleep(self, session_ids: Collection[str]) -> None:
        """The models of these sessions go out of memory: see `Program.sleep`."""
        for program in list(self._by_id.values()):
            if program.is_in_memory and program.model.session_id in session_ids:
                program.sleep()

    def end(self, session_ids: Collection[str]) -> None:
        """Nothing is asked of the models of these sessions any more: see `Program.end`."""
        for program in list(self._by_id.values()):
            if program.has_requests and program.model.session_id in session_ids:
                program.end()

    def add_run(self, model: ModelRow) -> None:
        """A run that a copied checkpoint belongs to, and nothing else. The same one may be added again."""
        with self._lock:
            known = self._by_id.setdefault(model.id, Program(model, self._shared, is_asleep=True))
        if not known.is_empty:
            raise InvalidRequest(f"model_seq_id was used by another request; take the next one: {model.id!r}")

    def request(self, request_id: str, owner: str) -> Request:
        """A training request of this owner, from the journal where it is not in memory any more."""
        model_id, _, seq = request_id.rpartition(":")
        program = self._by_id.get(model_id)
        if program is not None and program.model.owner == owner and seq.isdecimal() and len(seq) < 19:
            request = program.find(int(seq))
            if request is not None:
                return request
        raise NotFoundError(f"there is no request of this id: {request_id!r}")

    def forget(self, requests: Iterable[Request]) -> None:
        """The results of these are not kept in memory any more. Those of a model that is at work go at a later call."""
        for request in requests:
            model_id = request.id.rpartition(":")[0]
            self._to_forget.setdefault(model_id, set()).add(request.id)
        for model_id, over in list(self._to_forget.items()):
            program = self._by_id.get(model_id)
            if program is None or program.forget(over):
                del self._to_forget[model_id]

    def rest(self, give_up_s: float) -> None:
        """Makes a snapshot of each that has done anything since its last one. Waits for them, so long at most."""
        written = [program.rest() for program in list(self._by_id.values())]
        late = wait(written, timeout=give_up_s).not_done
        if late:
            log.warning("snapshots that were not written in %g s, so that more is replayed: %d", give_up_s, len(late))

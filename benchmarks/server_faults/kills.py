"""kill -9 at a random moment, again and again, while tenants work: of the server, and of its parent."""

import json
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from server_faults.servers import Process, is_serving, killable, supervised, wait_until_serving
from server_faults.tenants import Tenant, differences, left_behind
from server_faults.wire import Wire, program

NUM_TENANTS = 3
NUM_STEPS = 20  # of each
NUM_ROUNDS = 4  # of each client of its own
SHORT_S = 0.1  # of work after a start, of clients of our own
STARTING_S = 0.2
LIMIT_S = 600.0  # for a run
LONGEST_S = 0.4  # of work after a start
NUM_SUPERVISED = (
    8  # kills of a run of `stovetop serve`, which takes its time to start: a run without a limit takes hours
)


def undisturbed(folder: Path, backend: str, seed: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """What tenants of this seed see and leave behind on a server that is left alone. It is kept in the folder."""
    kept = folder / f"undisturbed-{Path(backend).name}-{seed}-{num_steps}.json"
    if not kept.exists():
        storage = folder / f"undisturbed-{seed}" / "storage"
        with killable(storage, backend) as server:
            tenants = tenants_of(server.url, seed, num_steps)
            wait_for(tenants)
            server.end(signal.SIGTERM)
        kept.write_text(json.dumps(_outcome(tenants, storage)))
        shutil.rmtree(storage.parent)
    return json.loads(kept.read_text())


def fresh(folder: Path, name: str, seed: int) -> Path:
    """Where the server of a disturbed run stores. What an earlier one left there goes."""
    storage = folder / f"{name}-{seed}" / "storage"
    shutil.rmtree(storage.parent, ignore_errors=True)
    return storage


def run(folder: Path, backend: str, seed: int, num_steps: int = NUM_STEPS, most: int = 1000) -> dict[str, Any]:
    """Kills the server until the tenants are done, or so often at most."""
    expected, storage = undisturbed(folder, backend, seed, num_steps), fresh(folder, "killed", seed)
    rng = random.Random(seed)
    kills: list[str] = []
    with killable(storage, backend) as server:
        tenants = tenants_of(server.url, seed, num_steps)
        while not _are_done(tenants):
            if len(kills) < most and _works(server, tenants, rng):
                server.end(signal.SIGKILL)
                kills.append(under_way(storage))
                server.start()
            elif len(kills) >= most:
                wait_for(tenants)
        server.end(signal.SIGTERM)
    return {**_of(kills), **counted(storage, expected, tenants)}


def run_supervised(
    folder: Path, model: str, seed: int, num_steps: int = NUM_STEPS, most: int = NUM_SUPERVISED
) -> dict[str, Any]:
    """The same of `stovetop serve`: of four kills three are of the server and one is of its parent."""
    expected, storage = undisturbed(folder, model, seed, num_steps), fresh(folder, "supervised", seed)
    rng = random.Random(seed)
    kills: list[str] = []
    parents = 0
    with supervised(storage, Path(model)) as server:
        wait_until_serving(server.url)
        tenants = tenants_of(server.url, seed, num_steps)
        while not _are_done(tenants):
            if len(kills) < most and _works(server, tenants, rng):
                if len(kills) % 4 == 1:
                    server.end_parent(signal.SIGKILL)
                    kills.append(under_way(storage))
                    parents += 1
                    server.start()
                else:
                    server.end(signal.SIGKILL)
                    kills.append(under_way(storage))  # its parent pauses for a second at least
            elif len(kills) >= most:
                wait_for(tenants)
        assert server.end_parent(signal.SIGTERM) == 0
    return {**_of(kills), "of parents": parents, **counted(storage, expected, tenants)}


def run_wire(folder: Path, backend: str, seed: int, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """The same with clients that ask again at once, so that kills come thick and fast: while one starts, too."""
    rng = random.Random(seed)
    place = folder / f"wire-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    with killable(place / "undisturbed", backend) as server:
        expected = [program(client, num_rounds, lora_seed) for lora_seed, client in _wires(server.url)]
        server.end(signal.SIGTERM)
    kills: list[str] = []
    with killable(place / "killed", backend) as server, ThreadPoolExecutor(NUM_TENANTS) as asking:
        asked = [asking.submit(program, client, num_rounds, lora_seed) for lora_seed, client in _wires(server.url)]
        while not all(future.done() for future in asked):
            wait_until_serving(server.url)  # a commit of its replay is none
            time.sleep(rng.uniform(0, SHORT_S))
            if _is_under_way(server.storage, rng, lambda: all(future.done() for future in asked)):
                server.end(signal.SIGKILL)
                kills.append(under_way(server.storage))
                server.start()
                if rng.random() < 0.1:
                    time.sleep(rng.uniform(0, STARTING_S))
                    server.end(signal.SIGKILL)
                    kills.append(under_way(server.storage))
                    server.start()
        server.end(signal.SIGTERM)
    faults = [fault for index, future in enumerate(asked) for fault in differences(expected[index], future.result())]
    left = [json.loads(json.dumps(left_behind(place / name))) for name in ("undisturbed", "killed")]
    faults += differences(*left)
    if not faults:
        shutil.rmtree(place)
    return {**_of(kills), "compared": sum(map(len, expected)), "faults": faults}


def _wires(url: str) -> list[tuple[int, Wire]]:
    """Tenants, each with the seed of its model."""
    return [(seed, Wire(url, name=f"wire-{seed}")) for seed in range(NUM_TENANTS)]


def tenants_of(url: str, seed: int, num_steps: int) -> list[Tenant]:
    tenants = [Tenant(url, 100 * seed + index, num_steps) for index in range(NUM_TENANTS)]
    for tenant in tenants:
        tenant.start()
    return tenants


def _are_done(tenants: Sequence[Tenant]) -> bool:
    return all(tenant.is_done for tenant in tenants)


def wait_for(tenants: Sequence[Tenant], limit_s: float = LIMIT_S) -> None:
    for tenant in tenants:
        tenant.thread.join(limit_s)
        assert tenant.is_done, "a tenant does not end"


def _works(server: Process, tenants: Sequence[Tenant], rng: random.Random) -> bool:
    """Waits for a moment at which the server is to be killed: once in ten it is starting, else see below. False
    where the tenants are done before."""
    if rng.random() < 0.1:
        time.sleep(rng.uniform(0, 0.5))
        return True
    while not is_serving(server.url):
        if _are_done(tenants):
            return False
        time.sleep(0.02)
    time.sleep(rng.uniform(0, LONGEST_S))
    return _is_under_way(server.storage, rng, lambda: _are_done(tenants))


def _is_under_way(storage: Path, rng: random.Random, is_done: Callable[[], bool]) -> bool:
    """Waits for a commit, and, nine times of ten, until the journal has a request that is not answered. False where all
    is done before."""
    wal = storage / "journal.sqlite-wal"
    anything = rng.random() < 0.1
    before = _size(wal)
    while not is_done():
        now = _size(wal)
        if now != before and (anything or under_way(storage) != "nothing"):
            return True
        before = now
        time.sleep(0.001)
    return False


def _size(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def under_way(storage: Path) -> str:
    """What the journal and the folder of a server that was killed say of that moment: `requests` were committed whose
    results were not, or a `write` was not whole; else `nothing`."""
    with tempfile.TemporaryDirectory() as folder:
        for file in storage.glob("journal.sqlite*"):
            shutil.copy(file, folder)
        journal = sqlite3.connect(Path(folder) / "journal.sqlite")
        try:
            (unanswered,) = journal.execute(
                "SELECT count(*) FROM request LEFT JOIN result USING (n) WHERE result.n IS NULL AND body IS NOT NULL"
            ).fetchone()
        except sqlite3.DatabaseError:  # it was killed before it had made its tables, or is copied while it writes
            unanswered = 0
        finally:
            journal.close()
    if unanswered:
        return "requests"
    return "write" if any(storage.rglob(".*.writing-*")) else "nothing"


def _outcome(tenants: Sequence[Tenant], storage: Path) -> dict[str, Any]:
    """As JSON has it."""
    for tenant in tenants:
        if tenant.error is not None:
            raise tenant.error
    seen = {f"seen {tenant.seed}": tenant.seen for tenant in tenants}
    return json.loads(json.dumps({**seen, **left_behind(storage)}))


def counted(storage: Path, expected: dict[str, Any], tenants: Sequence[Tenant]) -> dict[str, Any]:
    """How much was compared with the undisturbed run, and where it differs."""
    errors = [f"tenant {tenant.seed}: {tenant.error!r}" for tenant in tenants if tenant.error is not None]
    faults = errors or differences(expected, _outcome(tenants, storage))
    if not faults:
        shutil.rmtree(storage.parent)
    return {"compared": sum(len(tenant.seen) for tenant in tenants), "faults": faults}


def _of(kills: Sequence[str]) -> dict[str, int]:
    return {"kills": len(kills), "under way": len(kills) - kills.count("nothing")}

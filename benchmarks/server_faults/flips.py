"""One bit of a server's folder is another than was written: in the journal, its log or its mark, in checkpoints,
snapshots and frozen weights. The server refuses to start, by name, or answers as before, or refuses what is damaged.
"""

import json
import random
import shutil
import signal
from pathlib import Path

from server_faults.servers import Forked, is_serving
from server_faults.wire import Json, Refused, Wire, program, still_known, wire

NUM_FLIPS = 25  # in a part
NAMES = ("damaged", "use an earlier one", "cannot be brought back", "are gone")  # one is in every refusal of a request


def run(folder: Path, seed: int, num_flips: int = NUM_FLIPS) -> Json:
    """The folder is that of a server that was killed (even seeds) or stopped (odd ones)."""
    rng = random.Random(seed)
    whole = folder / f"whole-{seed}" / "storage"
    shutil.rmtree(whole.parent, ignore_errors=True)
    server = Forked(whole, "recording")
    server.start()
    with wire(server.url) as client:
        seen = program(client, num_rounds=2)
        session, futures = client.session, dict(client.futures)
    server.end(signal.SIGTERM if seed % 2 else signal.SIGKILL)
    faults: list[str] = []
    refused, harmless = 0, 0
    for number in range(num_flips):
        place = folder / f"flipped-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place / "storage")
        what = _flip(place / "storage", rng)
        found = _found(place / "storage", session, futures, seen)
        refused += found == "refused"
        harmless += found == "harmless"
        if found not in ("refused", "harmless"):
            faults.append(f"flip {number} ({what}): {found}")
    shutil.rmtree(whole.parent, ignore_errors=True)
    return {"flips": num_flips, "refused": refused, "harmless": harmless, "faults": faults}


def _flip(storage: Path, rng: random.Random) -> str:
    """Half of them in the journal, whatever its size."""
    files = [file for file in sorted(storage.rglob("*")) if file.is_file() and file.stat().st_size]
    of_journal = [file for file in files if file.name.startswith("journal.") and not file.name.endswith("-shm")]
    file = rng.choice(of_journal if rng.random() < 0.5 else [file for file in files if file not in of_journal])
    data = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"{file.relative_to(storage)}, byte {place}, bit {bit}"


def _found(storage: Path, session: str, futures: dict[str, Json], seen: Json) -> str:
    server = Forked(storage, "recording")
    server.start()
    try:
        while not is_serving(server.url):
            if not server.is_alive:
                return _told(storage)
        with wire(server.url, give_up=lambda: not server.is_alive) as client:
            client.session = session
            if unknown := still_known(client, futures):
                return unknown[0]
            return _used(client, seen, storage)
    finally:
        if server.is_alive:
            server.end(signal.SIGKILL)


def _told(storage: Path) -> str:
    told = storage.with_suffix(".log").read_text()
    last = told.strip().rpartition("\n")[2]
    return "refused" if last.startswith("stovetop.") else f"it does not start: {last[:300]}"


def _used(client: Wire, seen: Json, place: Path) -> str:
    """What was sampled and saved before is used: the same comes of it, or a refusal by name."""
    refusals: list[str] = []
    for number in range(2):
        for sampler, key in ((2 * number + 1, "frozen"), (2 * number + 2, "opened")):
            answer = _sampled(client, f"{client.session}:sample:{sampler}")
            expected = seen[f"round-{number} {key}"]
            if answer.get("sequences") != expected["sequences"]:
                refusals.append(json.dumps(answer))
    body = {"session_id": client.session, "model_seq_id": 20, "base_model": "tiny", "optimizer": True}
    for number, name in enumerate(("weights/round-0", "weights/round-1", "weights/last")):
        path = f"tinker://{client.session}:train:0/{name}"
        answer = client.ask("POST", "load_weights", json={**body, "model_seq_id": 20 + number, "path": path})
        made = answer.json()
        if answer.status_code == 200:
            made = client.result(made)
        if "error" in made or answer.status_code != 200:
            refusals.append(json.dumps(made))
    for model in range(3):
        try:
            learnt = client.result(client.learn(f"{client.session}:train:{model}", 500, [1, 2, 3]))
        except Refused as error:
            refusals.append(str(error))
        else:
            refusals += [json.dumps(learnt)] if "error" in learnt else []
    unnamed = [told for told in refusals if not any(name in told for name in NAMES) or str(place) in told]
    return unnamed[0][:300] if unnamed else "refused" if refusals else "harmless"


def _sampled(client: Wire, sampler_id: str) -> Json:
    body = {
        "sampling_session_id": sampler_id, "seq_id": 1, "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 17, 42]}]},
        "sampling_params": {"max_tokens": 5, "seed": 1},
    }  # fmt: skip
    submitted = client.ask("POST", "asample", json=body)
    if submitted.status_code != 200:
        return submitted.json()
    return client.ask("POST", "retrieve_future", json={"request_id": submitted.json()["request_id"]}).json()

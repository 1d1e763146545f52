"""The power goes. From all that a server has written and synced, in order, the folders are built that a disk may have
afterwards: what was synced, and of the rest any part. A server that starts on one has all that was acknowledged before.

A write may be on the disk in part, sector by sector, as soon as it was made, and is whole when its file is synced. That
a file was made, renamed or removed may be on the disk as soon as it was done, in order for each folder, and is when the
folder is synced.
"""

import os
import random
import shutil
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from server_faults.disk_calls import WritesDown, preloaded
from server_faults.servers import Forked
from server_faults.tenants import differences
from server_faults.wire import Json, Refused, Unanswered, Wire, program, still_known, wire

NUM_POINTS = 15  # in a part
SECTOR = 512


class Note(NamedTuple):
    """One call, as `disk_calls.c` writes it down."""

    what: str  # c: a file is made; m: a folder; w: written; t: truncated; s: synced; r: renamed; u: removed
    path: str
    other: str
    at: int
    data: bytes


def read_notes(file: Path, up_to: int) -> Iterator[Note]:
    """Those that were whole at this place of it."""
    data, place = file.read_bytes()[:up_to], 0
    while place + 40 <= len(data):
        what, *sizes, at, size = struct.unpack_from("=qqqqq", data, place)
        place += 40
        if place + sum(sizes) + size > len(data):
            return
        parts: list[bytes] = []
        for length in (*sizes, size):
            parts.append(data[place : place + length])
            place += length
        yield Note(chr(what), os.fsdecode(parts[0]), os.fsdecode(parts[1]), at, parts[2])


class File:
    """What was written to it: synced, and since."""

    def __init__(self) -> None:
        self.synced = bytearray()
        self.since: list[tuple[int, bytes | None]] = []  # where and what; None: it was cut off there
        self.size = 0  # as the running system has it

    def write(self, at: int, data: bytes | None) -> None:
        at = self.size if at < 0 else at
        self.since.append((at, data))
        self.size = at if data is None else max(self.size, at + len(data))

    def sync(self) -> None:
        self.synced = self._with(self.since)
        self.since = []

    def image(self, some: random.Random | None, *, whole: bool) -> bytes:
        """With what came since, where it is `whole`, or some of it."""
        if whole:
            return bytes(self._with(self.since))
        if some is None:
            return bytes(self.synced)
        parts: list[tuple[int, bytes | None]] = []
        for at, data in self.since:
            pieces = (
                [(at + start, data[start : start + SECTOR]) for start in range(0, len(data), SECTOR)] if data else []
            )
            parts += [piece for piece in pieces or [(at, data)] if some.random() < 0.5]
        return bytes(self._with(parts))

    def _with(self, changes: Sequence[tuple[int, bytes | None]]) -> bytearray:
        found = bytearray(self.synced)
        for at, data in changes:
            if data is None:
                del found[at:]
            end = at + len(data or b"")
            found.extend(bytes(max(0, end - len(found))))
            found[at:end] = data or b""
        return found


class Folder:
    """The names in it: synced, and since."""

    def __init__(self) -> None:
        self.now: dict[str, File | Folder] = {}  # as the running system has it
        self.synced: dict[str, File | Folder] = {}
        self.since: list[tuple[str, str | None, File | Folder | None]] = []  # what is gone, what is there, and which

    def change(self, gone: str, there: str | None, which: "File | Folder | None") -> None:
        self.since.append((gone, there, which))
        self.now = self._with(self.now, self.since[-1:])

    def sync(self) -> None:
        self.synced = self._with(self.synced, self.since)
        self.since = []

    def image(self, place: Path, some: random.Random | None, *, whole: bool) -> None:
        """Makes it there."""
        place.mkdir()
        num = len(self.since) if whole else 0 if some is None else some.randint(0, len(self.since))
        for name, entry in self._with(self.synced, self.since[:num]).items():
            if isinstance(entry, Folder):
                entry.image(place / name, some, whole=whole)
            else:
                (place / name).write_bytes(entry.image(some, whole=whole))

    @staticmethod
    def _with(
        names: "dict[str, File | Folder]", changes: "Sequence[tuple[str, str | None, File | Folder | None]]"
    ) -> "dict[str, File | Folder]":
        found = dict(names)
        for gone, there, which in changes:
            found.pop(gone, None)
            if there is not None and which is not None:
                found[there] = which
        return found


class Disk:
    """A folder that is there for sure, and what is done below it."""

    def __init__(self, root: Path) -> None:
        self.root = Folder()
        self._place = root

    def do(self, note: Note) -> None:
        if Path(note.path) == self._place:
            assert note.what == "s", "it was there before"
            self.root.sync()
            return
        parent, name = self._at(Path(note.path).parent), Path(note.path).name
        entry = None if parent is None else parent.now.get(name)
        if parent is None or (entry is None and note.what not in "cm"):
            return  # it is none of the server's: it was there before
        match note.what:
            case "c" | "m":
                parent.change(name, name, File() if note.what == "c" else Folder())
            case "r":
                assert Path(note.other).parent == Path(note.path).parent, "no server moves anything elsewhere"
                parent.change(name, Path(note.other).name, entry)
            case "u":
                parent.change(name, None, None)
            case "s":
                assert entry is not None
                entry.sync()
            case _:
                assert isinstance(entry, File)
                entry.write(note.at, note.data if note.what == "w" else None)

    def _at(self, place: Path) -> Folder | None:
        found: File | Folder | None = self.root
        for name in place.relative_to(self._place).parts:
            found = found.now.get(name) if isinstance(found, Folder) else None
        return found if isinstance(found, Folder) else None


def run(folder: Path, seed: int, num_points: int = NUM_POINTS) -> Json:
    """Three images of each of some moments: without anything that was not synced, with all of it, and with some."""
    preloaded(folder)
    rng = random.Random(seed)
    before, notes = (folder / f"power-{seed}").resolve(), folder / f"notes-{seed}"
    shutil.rmtree(before, ignore_errors=True)
    notes.unlink(missing_ok=True)
    server = Forked(before / "storage", "recording")
    server.start(WritesDown(notes))
    with wire(server.url, moment=lambda: notes.stat().st_size if notes.exists() else 0) as client:
        seen = program(client, num_rounds=2)
    server.end(signal.SIGKILL)
    shutil.rmtree(before)
    faults: list[str] = []
    num_images = 0
    for point in sorted(_points(client, notes, rng, num_points)):
        for how in ("synced", "whole", "some"):
            image = folder / f"image-{seed}"
            shutil.rmtree(image, ignore_errors=True)
            _image(notes, point, before, image, rng if how == "some" else None, whole=how == "whole")
            num_images += 1
            faults += [f"at {point}, {how}: {fault}" for fault in _faults(image / "storage", client, point, seen)]
    return {"images": num_images, "points": num_points, "faults": faults}


def _points(client: Wire, notes: Path, rng: random.Random, num_points: int) -> set[int]:
    """Half of them right behind an answer."""
    answers = [*client.submitted.values(), *client.told.values()]
    size = notes.stat().st_size
    return {rng.choice(answers) if rng.random() < 0.5 else rng.randrange(size) for _ in range(num_points)}


def _image(notes: Path, point: int, root: Path, image: Path, some: random.Random | None, *, whole: bool) -> None:
    disk = Disk(root)
    for note in read_notes(notes, point):
        disk.do(note)
    disk.root.image(image, some, whole=whole)


def _faults(storage: Path, before: Wire, point: int, seen: Json) -> list[str]:
    """What a server on this image does not know, though it was answered before; and what comes of the same program."""
    server = Forked(storage, "recording")
    server.start()
    try:
        with wire(server.url, give_up=lambda: not server.is_alive) as client:
            told = {name: before.futures[name] for name, moment in before.told.items() if moment <= point}
            submitted = [name for name, moment in before.submitted.items() if moment <= point]
            if submitted:
                client.session = before.session
            faults = still_known(client, told)
            for name in submitted:
                answer = client.ask("POST", "retrieve_future", json={"request_id": name})
                if answer.status_code != 200:
                    faults.append(f"{name} was accepted: {answer.status_code} {answer.text[:200]}")
            return faults or differences(seen, program(client, num_rounds=2))
    except (Unanswered, Refused, AssertionError) as error:
        return [f"{error!r}; {storage.with_suffix('.log').read_text()[-300:]}"]
    finally:
        if server.is_alive:
            server.end(signal.SIGKILL)

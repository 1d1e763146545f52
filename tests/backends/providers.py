"""The backends that must pass the conformance suite. A new one is added to this table, and to nothing else."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine import tiny
from server.running import KEY, running
from stovetop.backends import local, recording, remote
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import ServiceClient
from stovetop.durable import Disk


def folder_itself(_storage: Path, path: str) -> Path:
    return Path(path)


def local_path(storage: Path, model_id: str, kind: str, name: str) -> str:
    return str(storage / "checkpoints" / model_id / kind / name)


@dataclass(frozen=True, slots=True)
class Provider:
    """How to open a backend, and what the suite must know of its models."""

    open: Callable[..., AbstractContextManager[ServiceClient]]  # saving under a path, through a disk
    base_model: str
    other_model: str  # of the same shape, with other weights
    learning_rate: float  # at which some dozens of steps teach it a short sequence
    tolerance: float  # of a logprob that two ways of computing give; 0 where they are exact
    in_process: bool = True  # or a server's: it has what was sent to it, and the causes of errors stay there
    path_of: Callable[[Path, str, str, str], str] = (
        local_path  # of a storage, client, kind and name, before it is saved
    )
    folder_of: Callable[[Path, str], Path] = folder_itself  # where in a storage the files of a path are


def open_recording(storage: Path, disk: Disk, **options: Any) -> ServiceClient:
    return recording.open_service(storage, disk=disk, models=["tiny", "other"], **options)


def recording_provider(folder: Path) -> Provider:
    return Provider(open_recording, "tiny", "other", learning_rate=0.5, tolerance=0.0)


def local_provider(folder: Path) -> Provider:
    """Two seeded random Llamas of vocabulary 512, loaded from disk."""
    models = [str(tiny.save_model(folder / name, tiny.llama(seed))) for seed, name in enumerate(("tiny", "other"))]

    def open_local(storage: Path, disk: Disk, **options: Any) -> ServiceClient:
        return local.open_service(storage=storage, disk=disk, threads=1, download=None, **options)

    return Provider(open_local, *models, learning_rate=0.02, tolerance=1e-4)


@contextmanager
def open_remote(storage: Path, disk: Disk, **options: Any) -> Iterator[ServiceClient]:
    """The recording backend behind a server in this process, and a client of it over HTTP."""
    serve = partial(recording.open_service, disk=disk, models=["tiny", "other"], preload=True, **options)
    with (
        running(storage, serve) as server,
        remote.open_service(server.url, api_key=KEY, tokenizer=lambda _: ByteTokenizer()) as service,
    ):
        yield service


def remote_path(_storage: Path, model_id: str, kind: str, name: str) -> str:
    return f"tinker://{model_id}/{kind}/{name}"


def newest_folder(storage: Path, path: str) -> Path:
    """A server has a folder for each save, which ends in the number of its request."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    folders = (storage / "checkpoints" / model_id / kind).glob(f"{name}.*")
    return max(folders, key=lambda folder: int(folder.name.rpartition(".")[2]))


def remote_provider(folder: Path) -> Provider:
    return Provider(
        open_remote,
        "tiny",
        "other",
        learning_rate=0.5,
        tolerance=0.0,
        in_process=False,
        path_of=remote_path,
        folder_of=newest_folder,
    )


PROVIDERS: dict[str, Callable[[Path], Provider]] = {  # each gets a folder of its own, for models it has to make
    "recording": recording_provider,
    "local": local_provider,
    "remote": remote_provider,
}
IN_PROCESS = ["recording", "local"]

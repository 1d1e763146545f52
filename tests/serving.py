"""`stovetop serve` in processes of its own."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass(frozen=True, slots=True)
class Served:
    parent: psutil.Process
    exports: dict[str, str]  # what it tells its clients to export

    @property
    def url(self) -> str:
        return self.exports["TINKER_BASE_URL"]

    @property
    def child(self) -> psutil.Process:
        """The server."""
        (child,) = self.parent.children()
        return child

    def wait_until_it_serves(self) -> None:
        give_up_s = time.monotonic() + 90
        while time.monotonic() < give_up_s:
            try:
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(self.url)


@contextmanager
def served(models: Sequence[str], storage: Path, *options: str, port: int = 0) -> Iterator[Served]:
    """The words are NAME=FOLDER, of models whose tokenizers no cache has."""
    words = ["serve", *models, f"--port={port}", "--storage", str(storage), "--threads", "1", *options]
    process = subprocess.Popen([sys.executable, "-m", "stovetop", *words], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline().removeprefix("export ").partition("#")[0].strip() for _ in range(3)]
        exports = dict(line.split("=", 1) for line in lines if line)
        assert exports, f"it ended with {process.wait(10)}"
        try:
            yield Served(psutil.Process(process.pid), exports)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

"""A server in a process of its own, that is killed and started again."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVE = Path(__file__).with_name("serve_for_tests.py")


class Killable:
    """A server in a process of its own, always on the same port."""

    def __init__(self, storage: Path, backend: str) -> None:
        self.arguments = [str(storage), backend, "0"]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), *self.arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.arguments[2] = self.process.stdout.readline().strip()

    def end(self, by: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(by)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.arguments[2]}"


@contextmanager
def killable(storage: Path, backend: str) -> Iterator[Killable]:
    server = Killable(storage, backend)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)

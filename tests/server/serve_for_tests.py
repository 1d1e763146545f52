"""A server for tests that kill it: STORAGE BACKEND PORT. Prints its port when it is open, 0 is a free one."""

import signal
import sys
from pathlib import Path

from stovetop.backends import local, recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.server.ports import listen
from stovetop.server.serve import Server, ServerOptions


def open_service(storage: Path) -> InProcessServiceClient:
    if sys.argv[2] == "recording":
        return recording.open_service(storage, models=["tiny", "other"], preload=True)
    return local.open_service(
        storage=storage, models={"tiny": sys.argv[2]}, preload=True, threads=1, deterministic=True, download=None
    )


if __name__ == "__main__":
    listening = listen("127.0.0.1", int(sys.argv[3]))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    server = Server(open_service, listening, ServerOptions(storage=Path(sys.argv[1])))
    signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    server.run()

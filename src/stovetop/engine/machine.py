# pyright: basic
"""What this machine has, as far as this process may use it: memory and processors, and whether others want these too;
what becomes of memory that the process frees, and which settings of torch all of it shares. No other file asks the
system.

On Linux: the kernel's own estimate of what can be had without swapping (MemAvailable, which counts the page cache that
it would drop), or less where a control group allows less. Elsewhere: psutil.

Everything is a function of the texts of files, which a test can hand in.
"""

import ctypes
import math
import os
import platform
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from stovetop.errors import StovetopError

ReadFile = Callable[[str], str | None]  # the text of a file, None where there is none

MEMORY_INFO, OWN_GROUPS, GROUPS = "/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup"


def available_bytes(device: torch.device) -> int:
    """Memory of the device that can still be had."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # that torch keeps for itself
        return torch.cuda.mem_get_info(device)[0] + unused
    return available_host_bytes()


def text_of(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def by_psutil() -> int:
    try:
        import psutil
    except ImportError as error:
        raise StovetopError(
            "this system has no /proc/meminfo, and psutil, which would say how much memory is available, is not "
            "installed; install it with: pip install psutil"
        ) from error
    return psutil.virtual_memory().available


def available_host_bytes(read: ReadFile = text_of, elsewhere: Callable[[], int] = by_psutil) -> int:
    """Memory of the host that can still be had. `elsewhere` is asked on systems without /proc/meminfo."""
    in_all = _field(read(MEMORY_INFO), "MemAvailable:")
    return min([elsewhere() if in_all is None else in_all * 1024, *_available_in_groups(read)])


def available_cores(read: ReadFile = text_of) -> int:
    """Processors that this process may run on, or, where a control group allows less time than they have, what that
    comes to, rounded up."""
    return max(1, min([len(_allowed()), *_cores_of_groups(read)]))


# ---- control groups --------------------------------------------------------------------------------------------------


class _MemoryFiles(NamedTuple):
    """Where one version of control groups says what a group may have, has, and has only to read files faster."""

    limit: str
    usage: str
    file_cache: str  # a line of memory.stat


_V2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _available_in_groups(read: ReadFile) -> Iterator[int]:
    """For the group of this process and each one above it, if it has a limit."""
    for folder, files in _folders(read, "memory"):
        limit, usage = (_number(read(f"{folder}/{name}")) for name in (files.limit, files.usage))
        if limit is not None and usage is not None:
            reclaimable = _field(read(f"{folder}/memory.stat"), files.file_cache) or 0
            yield max(0, limit - usage + min(usage, reclaimable))


def _cores_of_groups(read: ReadFile) -> Iterator[int]:
    for folder, files in _folders(read, "cpu"):
        if files is _V2:
            quota, _, period = (read(f"{folder}/cpu.max") or "").strip().partition(" ")
        else:
            quota, period = (read(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        time, of = _number(quota), _number(period)
        if time and of:
            yield math.ceil(time / of)


def _folders(read: ReadFile, controller: str) -> Iterator[tuple[str, _MemoryFiles]]:
    """The folders of this process's groups, up to the root: in a container the path that the kernel tells may be that
    of the host, of which only the root is there."""
    for line in (read(OWN_GROUPS) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, files = GROUPS, _V2
        elif controller in controllers.split(","):
            root, files = f"{GROUPS}/{controller}", _V1
        else:
            continue
        own = PurePosixPath("/") / path
        for folder in (own, *own.parents):
            yield f"{root}{'' if folder == PurePosixPath('/') else folder}", files


def _number(text: str | None) -> int | None:
    """None for a file that is not there, and for "max" and -1, which are no limits."""
    text = "" if text is None else text.strip()
    return int(text) if text.isdigit() else None


def _field(text: str | None, name: str) -> int | None:
    """The number behind `name` at the start of a line."""
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return _number(words[1])
    return None


# ---- settings of torch -----------------------------------------------------------------------------------------------


class SharedSettings:
    """What torch has once for the whole process. Loading a model changes some of it for a while: the default dtype, the
    functions that fill new tensors, and, if only for a moment, the number of threads (`set_threads_here`). Of two
    threads that did so at once, one would put back what the other had set.

    Whatever computes meanwhile must not depend on them: every new tensor of the engine is given its dtype."""

    def __init__(self) -> None:
        self._changed = threading.Lock()  # protects the settings: held by the one thread that changes them
        self._state = threading.Lock()  # protects the next one, together with the default dtype
        self._default_dtype: torch.dtype | None = None  # apart from that change; None while there is none

    @contextmanager
    def changed(self) -> Generator[None]:
        """Within, this thread alone may change them, as those do which make models of transformers. The default dtype
        is float32 at the beginning; at the end it is what it was before."""
        with self._changed:
            with self._state:
                self._default_dtype = default = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            try:
                yield
            finally:
                with self._state:
                    torch.set_default_dtype(default)
                    self._default_dtype = None

    @property
    def default_dtype(self) -> torch.dtype:
        """That of the process, whatever another thread has changed it to for a while."""
        with self._state:
            return self._default_dtype or torch.get_default_dtype()

    def restore_default_dtype(self, dtype: torch.dtype) -> None:
        """Where it is another one, it waits for those who change the settings."""
        if self.default_dtype != dtype:
            with self._changed:
                torch.set_default_dtype(dtype)


SHARED = SharedSettings()


def set_threads_here(number: int) -> None:
    """Torch's number of threads in this thread, and in no other. Torch takes the number that any thread has set last
    for that of all which begin later, so it is set back, in one that has begun before. RuntimeError where no thread may
    begin."""
    torch.get_num_threads()  # a thread that has not asked yet takes that number when it does
    with ThreadPoolExecutor(1) as other:
        default = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(number)
        other.submit(torch.set_num_threads, default).result()


# ---- processors that others want -------------------------------------------------------------------------------------


class Processors(NamedTuple):
    """Counters, in seconds since some moment."""

    waited_s: dict[str, float]  # for each thread of this process: ready to run, while others had the processors
    idle_s: float  # that processors which this process may run on had nothing to do, all together


def processors(read: ReadFile = text_of) -> Processors | None:
    """None on a system that does not tell: all but Linux."""
    own = {f"cpu{number}" for number in _allowed()}
    lines = [line.split() for line in (read("/proc/stat") or "").splitlines()]
    idle = [int(words[4]) for words in lines if words and words[0] in own]
    if not idle:
        return None
    waited_s: dict[str, float] = {}
    for task in _tasks():
        times = (read(f"/proc/self/task/{task}/schedstat") or "").split()  # on a processor, waiting for one: ns
        if len(times) > 1:
            waited_s[task] = int(times[1]) / 1e9
    return Processors(waited_s, sum(idle) / os.sysconf("SC_CLK_TCK")) if waited_s else None


def _tasks() -> list[str]:
    """The threads of this process; none where the system does not tell, or has no file left to tell it by."""
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


# ---- freed memory ----------------------------------------------------------------------------------------------------

# mallopt(3) of the GNU C library
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
UNUSED_HEAP_BYTES = 2**30  # that stay at the end of the heap
OWN_BYTES = 32 * 2**20  # larger blocks, the most that the library allows here, go back to the system at once


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory: a pass frees what the next one needs again, and every page that went
    back to the system in between costs a fault, and is filled with zeros, when it returns. False where the library is
    another than GNU's, which is left alone."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, UNUSED_HEAP_BYTES) and mallopt(M_MMAP_THRESHOLD, OWN_BYTES))

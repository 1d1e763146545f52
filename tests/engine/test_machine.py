"""What the machine says it has, from the files of several kinds of machines."""

import re
import sys
from pathlib import Path

import pytest
import torch

from stovetop.engine import machine
from stovetop.engine.machine import available_cores, available_host_bytes
from stovetop.errors import StovetopError

GIB = 2**30
MEMINFO = (
    "MemTotal: 25165824 kB\nMemFree: 1048576 kB\nMemAvailable: 20971520 kB\nCached: 19000000 kB\n"  # 1 GiB, 20 GiB
)


def files(**more: str) -> machine.ReadFile:
    """A machine with /proc/meminfo and these, by their paths with `__` for `/`."""
    texts = {"/proc/meminfo": MEMINFO} | {path.replace("__", "/"): text for path, text in more.items()}
    return texts.get


def refuse() -> int:
    raise AssertionError("psutil is not asked where the kernel says it")


def test_the_page_cache_counts_as_available() -> None:
    assert available_host_bytes(files(), refuse) == 20 * GIB


@pytest.mark.parametrize(
    ("own", "folder"),
    [
        ("0::/", "__sys__fs__cgroup"),  # a container with a namespace of its own
        ("0::/user.slice/job", "__sys__fs__cgroup__user.slice__job"),
        ("0::/user.slice/job", "__sys__fs__cgroup__user.slice"),  # the limit of a group above it
        ("12:cpu:/x\n0::/a/b", "__sys__fs__cgroup"),  # of a path of the host only the root is there
    ],
)
def test_a_control_group_allows_what_it_has_left_and_the_file_cache_it_would_drop(own: str, folder: str) -> None:
    group = {
        f"{folder}__memory.max": f"{8 * GIB}\n",
        f"{folder}__memory.current": f"{7 * GIB}\n",
        f"{folder}__memory.stat": f"anon 1\nfile {6 * GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}\n",
    }
    assert available_host_bytes(files(__proc__self__cgroup=own, **group), refuse) == 6 * GIB


def test_control_groups_of_the_first_version_say_the_same() -> None:
    folder = "__sys__fs__cgroup__memory__docker__abc"
    group = {
        f"{folder}__memory.limit_in_bytes": str(8 * GIB),
        f"{folder}__memory.usage_in_bytes": str(7 * GIB),
        f"{folder}__memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n",
        "__sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712",  # no limit
        "__sys__fs__cgroup__memory__memory.usage_in_bytes": str(30 * GIB),
    }
    own = "11:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n"
    assert available_host_bytes(files(__proc__self__cgroup=own, **group), refuse) == 3 * GIB


def test_a_group_without_a_limit_or_over_it_is_no_error() -> None:
    folder = "__sys__fs__cgroup"
    free = {f"{folder}__memory.max": "max\n", f"{folder}__memory.current": "5\n"}
    assert available_host_bytes(files(__proc__self__cgroup="0::/", **free), refuse) == 20 * GIB
    over = {f"{folder}__memory.max": "5\n", f"{folder}__memory.current": "7\n"}
    assert available_host_bytes(files(__proc__self__cgroup="0::/", **over), refuse) == 0


def test_a_machine_without_proc_asks_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS has none."""
    import psutil

    class Memory:
        available = 11 * GIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert available_host_bytes(lambda path: None) == 11 * GIB
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(StovetopError, match="pip install psutil"):
        available_host_bytes(lambda path: None)


def test_this_machine_has_memory_and_processors_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.text_of(machine.MEMORY_INFO) is not None:
        monkeypatch.setitem(sys.modules, "psutil", None)
    assert machine.available_bytes(torch.device("cpu")) > 2**20
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("own", "group", "cores"),
    [
        ("0::/", {"__sys__fs__cgroup__cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"__sys__fs__cgroup__cpu.max": "max 100000\n"}, 8),
        (
            "3:cpu,cpuacct:/a",
            {
                "__sys__fs__cgroup__cpu__a__cpu.cfs_quota_us": "300000",
                "__sys__fs__cgroup__cpu__a__cpu.cfs_period_us": "100000",
            },
            3,
        ),
        ("3:cpu,cpuacct:/a", {"__sys__fs__cgroup__cpu__a__cpu.cfs_quota_us": "-1"}, 8),
    ],
)
def test_a_control_group_may_allow_less_than_all_processors(
    own: str, group: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert available_cores(files(__proc__self__cgroup=own, **group)) == cores


def test_no_other_file_asks_the_system_what_the_machine_has() -> None:
    source = Path(machine.__file__).parents[1]
    # The kernel's settings (/proc/sys), a process's own limits and how often the kernel has killed for memory
    # (/proc/vmstat) are not what the machine has.
    proc, limits = r"/proc/(?!self/task/|self/fd/|sys/|vmstat)", r"sysconf\b(?!\(\"SC_OPEN_MAX)"
    asking = re.compile(rf"{proc}|{limits}|psutil\.(?!Process|Error)|mem_get_info|sched_getaffinity|cpu_count|/sys/fs")
    assert {path.name for path in source.rglob("*.py") if asking.search(path.read_text())} == {"machine.py"}

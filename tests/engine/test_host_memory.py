"""What is freed is there for the next pass, without faults."""

import platform
import subprocess
import sys

import pytest

from stovetop.engine.host_memory import keep_freed_memory

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets what only the GNU C library has")

COUNT_FAULTS = """
import resource, sys
import torch
from stovetop.engine.host_memory import keep_freed_memory
assert sys.argv[1] == "no" or keep_freed_memory()
work = lambda: [torch.ones(2**22) for _ in range(6)]  # of 16 MiB
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work(), work()
before = faults()
work()
print(faults() - before)
"""


@needs_glibc
def test_the_next_pass_finds_the_memory_of_the_last() -> None:
    """In a process of its own, for the setting is the process's and cannot be taken back."""
    pages = 6 * 16 * 2**20 // 4096
    faults = {
        told: int(subprocess.run([sys.executable, "-c", COUNT_FAULTS, told], capture_output=True, check=True).stdout)
        for told in ("no", "yes")
    }
    assert faults["no"] > pages / 2
    assert faults["yes"] < pages / 20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()

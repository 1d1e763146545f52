"""What is freed stays with the process."""

import json
import platform

import pytest

from processes import run_python
from stovetop.engine.machine import keep_freed_memory

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets what only the GNU C library has")

HEAP_AFTER_A_BLOCK_WAS_FREED = """
import ctypes, json, sys
import torch
from stovetop.engine.machine import keep_freed_memory

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks", *"ABCDEF")]

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo
assert sys.argv[1] == "no" or keep_freed_memory()
before = mallinfo()
block = torch.ones(6 * 2**20)  # 24 MiB
mapped = mallinfo().hblks - before.hblks
del block
print(json.dumps({"mapped": mapped, "kept": mallinfo().arena - before.arena}))
"""


@pytest.mark.slow
@needs_glibc
def test_a_large_block_comes_from_the_heap_and_stays_there() -> None:
    """In a process of its own, for the setting is the process's and cannot be taken back."""
    found = {
        told: json.loads(run_python("-c", HEAP_AFTER_A_BLOCK_WAS_FREED, told, check=True).stdout)
        for told in ("no", "yes")
    }
    assert found["no"]["mapped"] == 1
    assert found["yes"]["mapped"] == 0
    assert found["no"]["kept"] < 2**20
    assert found["yes"]["kept"] > 20 * 2**20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()

"""Freed memory of the host stays with the process. A pass frees what the next one needs again, and every page that went
back to the system in between costs a fault, and is filled with zeros, when it returns.
"""

import ctypes
import platform

# mallopt(3) of the GNU C library
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30  # at the end of the heap
OWN_BYTES = 32 * 2**20  # larger blocks, the most that the library allows here, go back to the system at once


def keep_freed_memory() -> bool:
    """Whether the C library was told to; another than GNU's is left alone."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, OWN_BYTES))

"""The system calls that a program in a sandbox is refused, as a filter for the kernel: a BPF program, in bytes.

Namespaces take away what a program could see. The filter takes away parts of the kernel that few programs use and in
which many faults have been found, and what namespaces do not cover: sockets (those to the host of a virtual machine are
in none), memory that no limit counts, the memory of other processes. A call that is refused fails with EPERM.

The filter reads struct seccomp_data: the number of the call at 0, the architecture at 4, arguments from 16 on.
"""

import errno
import struct
from typing import NamedTuple

from stovetop.errors import SandboxUnavailable


class Numbers(NamedTuple):
    """Of a system call, on each architecture; None where it has none."""

    x86_64: int | None
    aarch64: int | None


REFUSED: dict[str, Numbers] = {
    # other processes
    "ptrace": Numbers(101, 117),
    "process_vm_readv": Numbers(310, 270),
    "process_vm_writev": Numbers(311, 271),
    "process_madvise": Numbers(440, 440),
    "process_mrelease": Numbers(448, 448),
    "pidfd_getfd": Numbers(438, 438),
    "kcmp": Numbers(312, 272),
    # file systems
    "mount": Numbers(165, 40),
    "umount2": Numbers(166, 39),
    "pivot_root": Numbers(155, 41),
    "chroot": Numbers(161, 51),
    "move_mount": Numbers(429, 429),
    "open_tree": Numbers(428, 428),
    "fsopen": Numbers(430, 430),
    "fsconfig": Numbers(431, 431),
    "fsmount": Numbers(432, 432),
    "fspick": Numbers(433, 433),
    "mount_setattr": Numbers(442, 442),
    "name_to_handle_at": Numbers(303, 264),
    "open_by_handle_at": Numbers(304, 265),
    "fanotify_init": Numbers(300, 262),
    "quotactl": Numbers(179, 60),
    "quotactl_fd": Numbers(443, 443),
    "mknod": Numbers(133, None),
    "mknodat": Numbers(259, 33),
    # namespaces, keys
    "unshare": Numbers(272, 97),
    "setns": Numbers(308, 268),
    "add_key": Numbers(248, 217),
    "request_key": Numbers(249, 218),
    "keyctl": Numbers(250, 219),
    # sockets; a pair of connected ones, which asyncio needs, is another call
    "socket": Numbers(41, 198),
    # memory that no limit of a process counts
    "memfd_create": Numbers(319, 279),
    "memfd_secret": Numbers(447, 447),
    "shmget": Numbers(29, 194),
    "shmat": Numbers(30, 196),
    "msgget": Numbers(68, 186),
    "semget": Numbers(64, 190),
    "mq_open": Numbers(240, 180),
    "vmsplice": Numbers(278, 75),
    "move_pages": Numbers(279, 239),
    "migrate_pages": Numbers(256, 238),
    "mbind": Numbers(237, 235),
    "set_mempolicy": Numbers(238, 237),
    # parts of the kernel with a history
    "bpf": Numbers(321, 280),
    "io_uring_setup": Numbers(425, 425),
    "io_uring_enter": Numbers(426, 426),
    "io_uring_register": Numbers(427, 427),
    "perf_event_open": Numbers(298, 241),
    "userfaultfd": Numbers(323, 282),
    "personality": Numbers(135, 92),
    "modify_ldt": Numbers(154, None),
    "lookup_dcookie": Numbers(212, 18),
    # the machine
    "kexec_load": Numbers(246, 104),
    "kexec_file_load": Numbers(320, 294),
    "init_module": Numbers(175, 105),
    "finit_module": Numbers(313, 273),
    "delete_module": Numbers(176, 106),
    "reboot": Numbers(169, 142),
    "swapon": Numbers(167, 224),
    "swapoff": Numbers(168, 225),
    "acct": Numbers(163, 89),
    "syslog": Numbers(103, 116),
    "iopl": Numbers(172, None),
    "ioperm": Numbers(173, None),
    "vhangup": Numbers(153, 58),
    "clock_settime": Numbers(227, 112),
    "clock_adjtime": Numbers(305, 266),
    "settimeofday": Numbers(164, 170),
    "adjtimex": Numbers(159, 171),
    "sethostname": Numbers(170, 161),
    "setdomainname": Numbers(171, 162),
}  # from the kernel's unistd.h

# Calls that are for oneself alone: the argument that names a process must be 0. Another's limits and its share of the
# processors are what the first process of the sandbox, which watches the program, could be ended or held up by.
FOR_ONESELF: dict[str, tuple[Numbers, int]] = {
    "prlimit64": (Numbers(302, 261), 0),
    "sched_setparam": (Numbers(142, 118), 0),
    "sched_setscheduler": (Numbers(144, 119), 0),
    "sched_setattr": (Numbers(314, 274), 0),
    "sched_setaffinity": (Numbers(203, 122), 0),
    "setpriority": (Numbers(141, 140), 1),
    "ioprio_set": (Numbers(251, 30), 1),
}

_CLONE3 = Numbers(435, 435)  # its flags are in memory, where no filter sees them; the C library then uses clone
_CLONE = Numbers(56, 220)
_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_IOCTL = Numbers(16, 29)
_TYPES_INTO_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_...
_X32 = 0x40000000  # numbers from here on are calls of x86_64 by another name

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # where in seccomp_data; the low half of an argument
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def filter_for(machine: str) -> bytes:
    """For a machine as `platform.machine()` names it."""
    if machine not in _ARCHITECTURE:
        known = " and ".join(_ARCHITECTURE)
        raise SandboxUnavailable(f"its filter of system calls is written for {known}: this machine is {machine!r}")

    def number(of: Numbers) -> int | None:
        return of.x86_64 if machine == "x86_64" else of.aarch64

    clone, clone3, ioctl = (number(of) or 0 for of in (_CLONE, _CLONE3, _IOCTL))  # both architectures have them
    steps = [
        *(_step(_LOAD, _ARCH), *_unless(_EQUAL, _ARCHITECTURE[machine], _KILL)),
        _step(_LOAD, _NUMBER),
        *(_where(_AT_LEAST, _X32, _KILL) if machine == "x86_64" else ()),
        *_where(_EQUAL, clone3, _ENOSYS),
        *(step for call in REFUSED.values() if (refused := number(call)) is not None
          for step in _where(_EQUAL, refused, _EPERM)),
        *(step for call, place in FOR_ONESELF.values() if (own := number(call)) is not None
          for step in (_step(_EQUAL, own, 0, 4), _step(_LOAD, (_FIRST, _SECOND)[place]), *_unless(_EQUAL, 0, _EPERM),
                       _step(_LOAD, _NUMBER))),
        *(_step(_EQUAL, clone, 0, 3), _step(_LOAD, _FIRST), *_where(_ANY_BIT, _NEW_NAMESPACE, _EPERM)),
        *(_step(_LOAD, _NUMBER), _step(_EQUAL, ioctl, 0, 5), _step(_LOAD, _SECOND)),
        *(step for request in _TYPES_INTO_TERMINAL for step in _where(_EQUAL, request, _EPERM)),
        _step(_RETURN, _ALLOW),
    ]  # fmt: skip
    return b"".join(steps)


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction, struct sock_filter: how many of the next to skip where it holds, and where not."""
    return struct.pack("HBBI", code, if_so, if_not, value)


def _where(test: int, value: int, verdict: int) -> tuple[bytes, bytes]:
    return _step(test, value, 0, 1), _step(_RETURN, verdict)


def _unless(test: int, value: int, verdict: int) -> tuple[bytes, bytes]:
    return _step(test, value, 1, 0), _step(_RETURN, verdict)

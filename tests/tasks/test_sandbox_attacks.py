"""What programs try in a sandbox, as a list: each attack, and what it meets. An attack that comes to its end has
succeeded; one that meets anything but what is expected fails its test too, so that none passes by a mistake in it.
"""

import os
import platform
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from stovetop.tasks.sandbox import Completed, Ending, Limits
from stovetop.tasks.sandbox.seccomp import FOR_ONESELF, REFUSED
from tasks.sandboxes import processes_with, the_sandbox

LIMITS = Limits(time_s=5.0, num_processes=4, memory_bytes=256 << 20, disk_bytes=4 << 20, num_files=200)

AROUND = """
import os, sys
try:
    exec(compile(program, name, "exec"), dict(globals()))
except BaseException as error:
    print("met", type(error).__name__, getattr(error, "errno", None), flush=True)
else:
    print("SUCCEEDED", flush=True)
"""
ONE_AFTER_ANOTHER = """
import os
for name, program in attacks:
    if os.fork() == 0:
        print(f"{name}:", end=" ", flush=True)
        exec(around)
        os._exit(0)
    os.wait()
"""


class Attack(NamedTuple):
    name: str
    program: str
    meets: str  # what is raised, or the line that the program prints


def attacked(program: str, limits: Limits = LIMITS, **known: object) -> Completed:
    """`known` are names that the program knows."""
    return run(AROUND, limits, name="attack", program=textwrap.dedent(program).strip(), **known)


def run(source: str, limits: Limits, **known: object) -> Completed:
    names = "".join(f"{name} = {value!r}\n" for name, value in known.items())
    return the_sandbox().run({"attack.py": (names + source).encode()}, ["python", "attack.py"], limits)


def said(completed: Completed) -> str:
    return completed.stdout.decode().strip()


def syscall(name: str, *arguments: object) -> str:
    """A system call that Python has no function for, by its number on this machine."""
    number = REFUSED[name]._asdict()[platform.machine()]
    return f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall({number}, {", ".join(map(str, arguments)) or 0}) < 0:
            raise OSError(ctypes.get_errno(), "refused")
    """


SEES = [
    Attack("reads a file of the person's", "open(secret).read()", "FileNotFoundError"),
    Attack("reads it by a way up", "open('../../../../../..' + secret).read()", "FileNotFoundError"),
    Attack("reads it through a link", "os.symlink(secret, 'link'); open('link').read()", "FileNotFoundError"),
    Attack("lists the home folder", "os.listdir(home + '/.ssh')", "FileNotFoundError"),
    Attack("reads the users", "open('/etc/passwd').read()", "FileNotFoundError"),
    Attack("reads the passwords", "open('/etc/shadow').read()", "FileNotFoundError"),
    Attack("reads the machine's id", "open('/etc/machine-id').read()", "FileNotFoundError"),
    Attack("lists the processes", "os.listdir('/proc')", "FileNotFoundError"),
    Attack("reads another environment", "open('/proc/1/environ').read()", "FileNotFoundError"),
    Attack("reads its own command line", "open('/proc/self/cmdline').read()", "FileNotFoundError"),
    Attack("writes another's memory", "open('/proc/1/mem', 'r+b')", "FileNotFoundError"),
    Attack("reads the kernel's settings", "open('/proc/sys/kernel/core_pattern').read()", "FileNotFoundError"),
    Attack("looks at the hardware", "os.listdir('/sys')", "FileNotFoundError"),
    Attack("leaves by a control group", "open('/sys/fs/cgroup/release_agent', 'w')", "FileNotFoundError"),
    Attack("reads the environment", "print('knows', dict(os.environ).get('STOVETOP_SECRET'))", "knows None"),
    Attack("imports this package, for its samples", "import stovetop", "ModuleNotFoundError"),
    Attack("imports a package of the person's", "import numpy", "ModuleNotFoundError"),
    Attack("looks where packages are", "assert os.listdir(packages) != []", "AssertionError"),
    Attack("reads the disk", "open('/dev/vda', 'rb').read(1)", "FileNotFoundError"),
    Attack("reads memory", "open('/dev/mem', 'rb').read(1)", "FileNotFoundError"),
    Attack("reads the kernel's log", "open('/dev/kmsg').read(1)", "FileNotFoundError"),
    Attack("opens the terminal", "open('/dev/tty').read(1)", "FileNotFoundError"),
    Attack("opens a new terminal", "os.openpty()", "FileNotFoundError"),
    Attack("reads what the launcher was told", "[os.read(n, 1) for n in range(3, 64)]", "OSError 9"),
    Attack(
        "reads any other open file",
        """
        for number in range(4, 64):
            try: os.fstat(number); print('there is', number)
            except OSError: pass
        raise KeyError
        """,
        "KeyError",
    ),
    Attack("learns the machine's name", "print('named', os.uname().nodename)", "named sandbox"),
]

IS_OURS = os.access(os.__file__, os.W_OK) and os.geteuid() != 0
READ_ONLY = "OSError 30" if IS_OURS else "PermissionError"  # a file of another user's is refused for that

CHANGES = [
    Attack("writes into a module", "open(os.__file__, 'a')", READ_ONLY),
    Attack("writes over the interpreter", "open(sys.executable, 'r+b')", READ_ONLY),
    Attack("puts a sitecustomize in place", "open(packages + '/sitecustomize.py', 'w')", "OSError 30"),
    Attack("renames a module", "os.rename(os.__file__, os.__file__ + 'x')", "OSError 30"),
    Attack("changes a module's rights", "os.chmod(os.__file__, 0o777)", "OSError 30"),
    Attack("links to a module", "os.link(os.__file__, 'mine')", "OSError 18"),
    Attack("writes beside its folder", "open('/file', 'w')", "OSError 30"),
    Attack("makes a folder in /dev", "os.mkdir('/dev/shm')", "OSError 30"),
    Attack("makes a device", "os.mknod('disk', 0o60600, os.makedev(254, 0))", "PermissionError"),
    Attack("mounts", syscall("mount", 0, 0, 0, 4096, 0), "PermissionError"),
    Attack("mounts in the new way", syscall("fsopen", 0, 0), "PermissionError"),
    Attack("unmounts", syscall("umount2", "b'/usr/lib'", 2), "PermissionError"),
    Attack("changes the root", "os.chroot('/tmp')", "PermissionError"),
    Attack("becomes root", "os.setuid(0)", "OSError 22"),
    Attack("joins a group", "os.setgroups([0])", "PermissionError"),
    Attack("sets the clock", "import time; time.clock_settime(0, 0)", "PermissionError"),
    Attack("renames the machine", "import socket; socket.sethostname('mine')", "PermissionError"),
]

REACHES = [
    Attack("opens a socket", "import socket; socket.socket()", "PermissionError"),
    Attack("asks the internet", "import urllib.request as r; r.urlopen('http://1.1.1.1', timeout=1)", "URLError"),
    Attack("asks this machine", "import socket; socket.create_connection(('127.0.0.1', 22))", "PermissionError"),
    Attack("asks for a name", "import socket; socket.getaddrinfo('example.com', 80)", "gaierror"),
    Attack("sends a packet", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "PermissionError"),
    Attack("opens a local socket", "import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
    Attack("asks the machine below", "import socket; socket.socket(socket.AF_VSOCK)", "PermissionError"),
    Attack("asks the kernel", "import socket; socket.socket(socket.AF_NETLINK)", "PermissionError"),
    Attack("serves", "import http.server as h; h.HTTPServer(('', 8000), None)", "PermissionError"),
    Attack("goes around by io_uring", syscall("io_uring_setup", 1, 0), "PermissionError"),
]

ATTACKS_PROCESSES = [
    Attack("signals the tests", "os.kill(tests_process, 9)", "ProcessLookupError"),
    Attack("kills the launcher", "os.kill(1, 9); print('still here')", "still here"),
    Attack("stops the launcher", "os.kill(1, 19); print('still here')", "still here"),
    Attack("interrupts the launcher", "os.kill(1, 2); os.kill(1, 15); print('still here')", "still here"),
    Attack("floods the launcher", "[os.kill(1, 17) for _ in range(100_000)]; print('still here')", "still here"),
    Attack("traces the launcher", syscall("ptrace", 16, 1, 0, 0), "PermissionError"),
    Attack("reads the launcher's memory", syscall("process_vm_readv", 1, 0, 0, 0, 0, 0), "PermissionError"),
    Attack("writes the launcher's memory", syscall("process_vm_writev", 1, 0, 0, 0, 0, 0), "PermissionError"),
    Attack("takes the launcher's files", syscall("pidfd_getfd", 3, 4, 0), "PermissionError"),
    Attack("makes a user namespace", syscall("unshare", 0x10000000), "PermissionError"),
    Attack("joins a namespace", syscall("setns", 3, 0), "PermissionError"),
    Attack("asks for keys", syscall("keyctl", 0, 0, 0), "PermissionError"),
    Attack("loads a program into the kernel", syscall("bpf", 0, 0, 0), "PermissionError"),
    Attack("watches the machine", syscall("perf_event_open", 0, 0, -1, -1, 0), "PermissionError"),
    Attack("handles page faults", syscall("userfaultfd", 0), "PermissionError"),
    Attack("takes precedence", "os.nice(-5)", "PermissionError"),
    Attack(
        "takes precedence by the clock",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "PermissionError",
    ),
    Attack(
        "takes the launcher's time",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
        "PermissionError",
    ),
    Attack("slows the launcher down", "os.setpriority(os.PRIO_PROCESS, 1, 19)", "PermissionError"),
    Attack("types into the terminal", "import fcntl; fcntl.ioctl(0, 0x5412, b'x')", "PermissionError"),
]

ALONE = [
    Attack("kills everything", "os.kill(-1, 9)", "ProcessLookupError"),
    Attack(
        "raises its limits",
        "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))",
        "ValueError",
    ),
    Attack("takes memory", "bytearray(1 << 30)", "MemoryError"),
    Attack("maps memory", "import mmap; mmap.mmap(-1, 1 << 30)", "OSError 12"),
    Attack("takes memory that is not counted", "os.memfd_create('mine')", "PermissionError"),
    Attack("takes memory between processes", syscall("shmget", 0, 1 << 30, 0o1600), "PermissionError"),
    Attack("locks memory", "import ctypes; assert ctypes.CDLL(None).mlockall(2) == 0", "AssertionError"),
    Attack("fills the disk", "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(9)]", "OSError 28"),
    Attack("fills the disk with one file", "open('big', 'wb').truncate(1 << 40)", "OSError 27"),
    Attack("forks without end", "while True:\n    if os.fork() == 0: __import__('time').sleep(9)", "BlockingIOError"),
    Attack(
        "starts threads without end",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "RuntimeError",
    ),
    Attack("opens files without end", "held = []\nwhile True: held.append(open(os.__file__))", "OSError 24"),
    Attack("opens pipes without end", "while True: os.pipe()", "OSError 24"),
]

TOGETHER = [*SEES, *CHANGES, *REACHES, *ATTACKS_PROCESSES]  # in one sandbox, to save the time to make seventy


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The line that each attack of TOGETHER ended with, each in a process of its own."""
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("of the person's")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STOVETOP_SECRET", "of the person's")
        completed = run(
            ONE_AFTER_ANOTHER,
            replace(LIMITS, time_s=60.0),
            around=AROUND,
            attacks=[(attack.name, textwrap.dedent(attack.program).strip()) for attack in TOGETHER],
            secret=str(secret),
            home=str(Path.home()),
            packages=str(the_sandbox().interpreter.emptied[0]),
            tests_process=os.getpid(),
        )
    assert completed.ended_by is None, completed
    lines = [line.partition(": ") for line in said(completed).splitlines() if ": " in line]
    return {name: rest for name, _, rest in lines}


@pytest.mark.parametrize("attack", TOGETHER, ids=lambda attack: attack.name)
def test_a_program_that(attack: Attack, outcomes: dict[str, str]):
    assert met(outcomes[attack.name], attack), outcomes[attack.name]


@pytest.mark.parametrize("attack", ALONE, ids=lambda attack: attack.name)
def test_a_program_in_a_sandbox_of_its_own_that(attack: Attack):
    completed = attacked(attack.program)
    assert completed.ended_by is None
    assert met(said(completed).splitlines()[0], attack), completed


def met(line: str, attack: Attack) -> bool:
    """Whether an attack came to what it was to come to."""
    kind, _, number = attack.meets.partition(" ")
    return line == attack.meets or line.startswith(f"met {kind} {number}")


class Endless(NamedTuple):
    name: str
    program: str
    ended_by: Ending


ENDLESS = [
    Endless("loops", "while True: pass", "time"),
    Endless("sleeps", "import time; time.sleep(60)", "time"),
    Endless(
        "is deaf",
        "import signal\nfor n in (1, 2, 3, 10, 13, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "time",
    ),
    Endless("closes its files and goes on", "import time; os.closerange(0, 64); time.sleep(60)", "time"),
    Endless("blocks its alarm", "import signal, time; signal.alarm = signal.setitimer = None; time.sleep(60)", "time"),
    Endless("waits for input", "import threading; threading.Event().wait()", "time"),
    Endless("writes without end", "while True: os.write(1, bytes(65536))", "output"),
    Endless("complains without end", "while True: os.write(2, bytes(65536))", "output"),
    Endless("answers without end", "while True: os.write(3, bytes(65536))", "output"),
    Endless("makes files without end", "n = 0\nwhile True: n += 1; open(str(n), 'w').close()", "files"),
    Endless("makes folders without end", "while True: os.mkdir('in'); os.chdir('in')", "files"),
    Endless("makes links without end", "n = 0\nwhile True: n += 1; os.symlink('x', str(n))", "files"),
]


@pytest.mark.parametrize("attack", ENDLESS, ids=lambda attack: attack.name)
def test_a_program_is_ended_that(attack: Endless):
    limits = Limits(time_s=0.15 if attack.ended_by == "time" else 5.0, num_files=200, output_bytes=1 << 20)
    start_s = time.monotonic()
    completed = attacked(attack.program, limits)
    assert completed.ended_by == attack.ended_by, completed
    assert completed.exit_code is None
    assert time.monotonic() - start_s < 4.0
    assert max(map(len, (completed.stdout, completed.stderr, completed.answer))) <= limits.output_bytes


LEAVES_PROCESSES = [
    "if os.fork() == 0: time.sleep(60)",
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)",
    "import signal\nif os.fork() == 0: [signal.signal(n, signal.SIG_IGN) for n in (1, 15)]; time.sleep(60)",
    "import threading; threading.Thread(target=time.sleep, args=(60,)).start(); os._exit(0)",
    "import subprocess; subprocess.Popen([sys.executable, 'attack.py', 'again'], start_new_session=True)",
]


@pytest.mark.parametrize("program", LEAVES_PROCESSES)
def test_no_process_is_left_behind(program: str, tmp_path: Path):
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    source = f"import os, sys, time\n# {mark}\nif 'again' in sys.argv: time.sleep(60)\n{program}\n"
    start_s = time.monotonic()
    completed = the_sandbox().run({"attack.py": source.encode()}, ["python", "attack.py", mark], LIMITS)
    assert completed.exit_code == 0, completed
    assert time.monotonic() - start_s < 4.0
    assert processes_with(mark) == []


def test_a_program_that_is_killed_in_its_time_leaves_nothing_either(tmp_path: Path):
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    source = b"import os, time\nos.fork()\nos.setsid() if os.getpid() != 2 else 0\ntime.sleep(60)"
    completed = the_sandbox().run({"attack.py": source}, ["python", "attack.py", mark], Limits(time_s=0.2))
    assert completed.ended_by == "time"
    assert processes_with(mark) == []


def test_a_program_finds_nothing_of_the_one_before():
    first = "open('left', 'w').write('x'); os.mkdir('folder'); os.symlink('/', 'link'); print(sorted(os.listdir()))"
    second = "print(sorted(os.listdir()), os.listdir('/program'))"
    assert "left" in said(attacked(first))
    assert said(attacked(second)).startswith("['attack.py'] ['attack.py']")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
@pytest.mark.parametrize(
    "code",
    [
        b"\xb8\x14\x00\x00\x00\xcd\x80\xc3",  # mov eax, 20; int 0x80: getpid by the 32-bit door
        b"\xb8\x27\x00\x00\x40\x0f\x05\xc3",  # mov eax, 0x40000027; syscall: getpid of the x32 ABI
    ],
)
def test_a_program_is_killed_that_calls_the_kernel_by_another_door(code: bytes):
    completed = attacked(
        """
        import ctypes, mmap
        memory = mmap.mmap(-1, 4096, prot=7)
        memory.write(code)
        ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
        """,
        code=code,
    )
    assert completed.exit_code == -31, completed  # SIGSYS
    assert completed.stdout == b""


def test_every_call_that_the_filter_names_is_refused():
    numbers = [number for call in REFUSED.values() if (number := call._asdict()[platform.machine()]) is not None]
    completed = attacked(
        """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for number in numbers:
            assert libc.syscall(number, -1, -1, -1, -1, -1, -1) == -1 and ctypes.get_errno() == errno.EPERM, number
        print(len(numbers), "refused")
        """,
        numbers=numbers,
    )
    assert said(completed).startswith(f"{len(numbers)} refused"), completed


def test_calls_on_oneself_are_allowed_and_the_same_ones_on_another_process_refused():
    numbers = [(getattr(call, platform.machine()), place) for call, place in FOR_ONESELF.values()]
    completed = attacked(
        """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for number, place in numbers:
            for process, is_refused in ((1, True), (-1, True), (0, False)):
                arguments = [process, 99, 0, 0] if place == 0 else [99, process, 0, 0]
                ctypes.set_errno(0)
                libc.syscall(number, *arguments)
                assert (ctypes.get_errno() == errno.EPERM) == is_refused, (number, process)
        print(len(numbers), "refused")
        """,
        numbers=numbers,
    )
    assert said(completed).startswith(f"{len(numbers)} refused"), completed


def test_memory_is_bounded_for_all_processes_together():
    hog = """
        children = 0
        while True:
            try: pid = os.fork()
            except BlockingIOError: break
            if pid == 0:
                try: bytearray(100 << 20); held = bytearray(100 << 20)
                except MemoryError: os._exit(1)
                os._exit(0)
            children += 1
        print(children, "children")
    """
    limits = Limits(num_processes=3, memory_bytes=64 << 20, disk_bytes=1 << 20)
    assert limits.total_memory_bytes == 3 * (64 << 20) + (1 << 20)
    assert said(attacked(hog, limits)).startswith("2 children")


def test_there_are_at_least_sixty_attacks():
    assert len(TOGETHER) + len(ALONE) + len(ENDLESS) + len(LEAVES_PROCESSES) >= 60

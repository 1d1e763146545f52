"""A sandbox's own words: what it takes and gives back, what it refuses, and what it says where none can be made. What
programs try in it is in `test_sandbox_attacks.py`.
"""

import errno
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from processes import started
from stovetop.errors import InvalidRequest, SandboxError, SandboxUnavailable
from stovetop.tasks.sandbox import BubblewrapSandbox, Limits, find_sandbox
from stovetop.tasks.sandbox import bubblewrap as module
from stovetop.tasks.sandbox.bubblewrap import Bwrap, try_out
from stovetop.tasks.sandbox.causes import known_cause
from stovetop.tasks.sandbox.channels import Channels
from stovetop.tasks.sandbox.interpreter import Interpreter, this_interpreter
from stovetop.tasks.sandbox.seccomp import REFUSED, filter_for
from tasks.sandboxes import processes_with, the_sandbox


def test_a_program_reads_its_input_and_its_files_and_writes_to_three_places():
    program = b"import os, sys; print(sys.stdin.read(), open('data/a').read()); os.write(2, b'e'); os.write(3, b'a')"
    completed = the_sandbox().run(
        {"code/main.py": program, "data/a": "naïve".encode()}, ["python", "code/main.py"], stdin=b"in"
    )
    assert (completed.stdout, completed.stderr, completed.answer) == ("in naïve\n".encode(), b"e", b"a")
    assert (completed.exit_code, completed.ended_by) == (0, None)
    assert 0 < completed.seconds < 5


@pytest.mark.parametrize(
    ("program", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.abort()", -signal.SIGABRT), ("1 / 0", 1)]
)
def test_how_a_program_ended_is_told(program: str, exit_code: int):
    assert the_sandbox().run({"main.py": program.encode()}, ["python", "main.py"]).exit_code == exit_code


def test_a_program_may_use_threads_and_processes_and_deep_recursion():
    program = b"""
import subprocess, sys, threading
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
sys.setrecursionlimit(10**6)
threading.stack_size(128 << 20)
thread = threading.Thread(target=lambda: print(deep(20_000)))
thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout)
exit()
"""
    assert the_sandbox().run({"main.py": program}, ["python", "main.py"]).stdout.split() == [b"20000", b"7"]


def test_sixteen_programs_run_at_once():
    def run(number: int) -> bytes:
        program = f"import time; time.sleep(0.1); print({number})"
        return the_sandbox().run({"main.py": program.encode()}, ["python", "main.py"]).stdout

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(run, range(16))) == [f"{number}\n".encode() for number in range(16)]


def test_a_program_that_is_not_there_is_no_failure_of_the_sandbox():
    completed = the_sandbox().run({}, ["/usr/bin/no-such-program"])
    assert completed.exit_code == 127
    assert b"No such file" in completed.stderr


@pytest.mark.parametrize("name", ["/etc/passwd", "../above", "a/../../b", "", ".", "a\0b"])
def test_a_file_outside_of_the_folder_is_refused(name: str):
    with pytest.raises(InvalidRequest, match="below its folder"):
        the_sandbox().run({name: b""}, ["python", "main.py"])


@pytest.mark.parametrize("command", [[], ["sh", "-c", "1"]])
def test_a_command_that_would_have_to_be_looked_for_is_refused(command: list[str]):
    with pytest.raises(InvalidRequest, match="absolute path"):
        the_sandbox().run({}, command)


def test_limits_that_are_none_are_refused():
    with pytest.raises(InvalidRequest, match="time_s"):
        Limits(time_s=0)
    with pytest.raises(InvalidRequest, match="num_processes"):
        Limits(num_processes=0)


def test_further_folders_can_be_read_with_the_packages_in_them(tmp_path: Path):
    package = tmp_path / "python3.11" / "site-packages"
    package.mkdir(parents=True)
    (package / "mine.py").write_text("value = 5")
    sandbox = BubblewrapSandbox(the_sandbox().bwrap, this_interpreter((package,)))
    program = f"import sys; sys.path.append({str(package)!r}); import mine; print(mine.value)"
    assert sandbox.run({"main.py": program.encode()}, ["python", "main.py"]).stdout == b"5\n"


# ---- where it fails --------------------------------------------------------------------------------------------------


def test_a_sandbox_that_does_not_start_says_why_and_gives_no_result():
    broken = BubblewrapSandbox(the_sandbox().bwrap, Interpreter(Path("/no/python"), (), (), ()))
    with pytest.raises(SandboxError, match=r"did not start: .*bwrap"):
        broken.run({}, ["python"])


@pytest.mark.parametrize("call", ["pipe", "memfd_create", "Popen"])
def test_a_system_that_gives_no_more_files_or_processes_is_a_failure_of_the_sandbox(
    call: str, monkeypatch: pytest.MonkeyPatch
):
    sandbox = the_sandbox()

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(subprocess if call == "Popen" else os, call, refuses)
    with pytest.raises(SandboxError, match=r"could not be started: .*too many open files"):
        sandbox.run({"main.py": b""}, ["python", "main.py"])


def test_a_bubblewrap_that_is_gone_is_a_failure_of_the_sandbox():
    gone = BubblewrapSandbox(Bwrap(Path("/no/bwrap"), (0, 12, 0)), the_sandbox().interpreter)
    with pytest.raises(SandboxError, match=r"could not be started: .*/no/bwrap"):
        gone.run({}, ["python"])


def test_no_file_stays_open_where_not_all_pipes_can_be_made(monkeypatch: pytest.MonkeyPatch):
    made = iter([os.pipe(), os.pipe()])

    def pipe() -> tuple[int, int]:
        if (ends := next(made, None)) is None:
            raise OSError(errno.EMFILE, "too many open files")
        return ends

    num_files = len(os.listdir("/dev/fd")) - 4
    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="too many open files"):
        Channels(Limits())
    assert len(os.listdir("/dev/fd")) == num_files


def test_a_sandbox_that_is_ended_from_outside_gives_no_result(tmp_path: Path):
    mark = f"m.py\0{tmp_path}"
    with ThreadPoolExecutor(1) as threads:
        program = {"m.py": b"import time; time.sleep(20)"}
        running = threads.submit(the_sandbox().run, program, ["python", "m.py", str(tmp_path)], Limits(time_s=20))
        _wait_until(lambda: len(processes_with(mark)) == 1)
        (folder,) = processes_with(mark)
        launcher = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(launcher, signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended before its program"):
            running.result()


def test_a_program_does_not_outlive_the_process_that_ran_it(tmp_path: Path):
    script = tmp_path / "run.py"
    script.write_text(
        "from stovetop.tasks.sandbox import find_sandbox, Limits\n"
        "sandbox = find_sandbox()\nprint('ready', flush=True)\n"
        "program = {'m.py': b'import time; time.sleep(60)'}\n"
        f"sandbox.run(program, ['python', 'm.py', {str(tmp_path)!r}], Limits(time_s=60))"
    )
    the_sandbox()  # or the test is skipped
    with started(str(script)) as (process, first):
        assert first == "ready\n"
        _wait_until(lambda: len(processes_with(f"m.py\0{tmp_path}")) == 1)
        process.kill()
        _wait_until(lambda: processes_with(f"m.py\0{tmp_path}") == [])


def _wait_until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    latest_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < latest_s
        time.sleep(0.02)


# ---- where none can be made ------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_two_ways_to_get_it_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "installed", list)
    with pytest.raises(SandboxUnavailable, match=r"apt install bubblewrap.*pip install 'stovetop\[sandbox\]'"):
        find_sandbox()


def test_another_system_is_told_what_it_can_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match=r"this is darwin.*virtual machine, or pass a sandbox of your own"):
        find_sandbox()


@pytest.mark.parametrize(
    ("file", "content", "message", "says"),
    [
        ("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n", "Permission denied", "AppArmor"),
        ("proc/sys/kernel/unprivileged_userns_clone", "0\n", "No permissions", "unprivileged_userns_clone=1"),
        ("proc/sys/user/max_user_namespaces", "0\n", "No space left on device", "max_user_namespaces="),
        ("none", "", "Operation not permitted", "--security-opt seccomp=unconfined"),
        ("none", "", "RuntimeError: can't start new thread", "Linux 5.14"),
        ("none", "", "cannot open max_user_namespaces: Read-only file system", "If this is a container"),
        ("none", "", "something else", "docs/graders.md"),
    ],
)  # fmt: skip
def test_a_known_cause_is_named_with_what_to_do(tmp_path: Path, file: str, content: str, message: str, says: str):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert says in known_cause(message, tmp_path)


def test_a_sandbox_in_which_a_limit_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TRIAL", module.TRIAL.replace("range(8)", "range(2)"))  # as if no more were refused
    with pytest.raises(SandboxUnavailable, match="not a program within its limits"):
        try_out(the_sandbox())


def test_a_folder_is_kept_only_where_bubblewrap_does_not_follow_the_links_in_it(tmp_path: Path):
    with pytest.raises(SandboxUnavailable, match=r"0\.12\.0 or later.*CVE-2026-87766.*0\.11\.0"):
        BubblewrapSandbox(Bwrap(Path("/usr/bin/bwrap"), (0, 11, 0)), this_interpreter(), kept=tmp_path)
    kept = BubblewrapSandbox(Bwrap(Path("/usr/bin/bwrap"), (0, 12, 0)), this_interpreter(), kept=tmp_path)
    arguments = kept.arguments(Limits(), 3)
    assert arguments[arguments.index("/kept") - 2 : arguments.index("/kept")] == ["--bind", str(tmp_path)]


# ---- the filter of system calls --------------------------------------------------------------------------------------

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel's little machine makes of a call."""
    data = struct.pack(
        "IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments))
    )
    steps = list(struct.iter_unpack("HBBI", filter_for(machine)))
    accumulator, at = 0, 0
    while True:
        code, if_so, if_not, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
            continue
        holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
        at += if_so if holds else if_not


def refusal(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_its_calls_and_allows_others(machine: str):
    numbers = {name: call._asdict()[machine] for name, call in REFUSED.items()}
    refused = {number for number in numbers.values() if number is not None}
    assert len(refused) > 50
    assert {verdict(machine, number) for number in refused} == {refusal(errno.EPERM)}
    special = {435, *((56, 16) if machine == "x86_64" else (220, 29))}
    assert {verdict(machine, number) for number in set(range(500)) - refused - special} == {ALLOWED}


@pytest.mark.parametrize(("machine", "clone", "ioctl"), [("x86_64", 56, 16), ("aarch64", 220, 29)])
def test_the_filter_looks_at_what_some_calls_are_given(machine: str, clone: int, ioctl: int):
    assert verdict(machine, clone, 0x3D0F00) == ALLOWED  # a thread
    assert verdict(machine, clone, signal.SIGCHLD) == ALLOWED  # a process
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, flag | signal.SIGCHLD) == refusal(errno.EPERM)
    assert verdict(machine, ioctl, 0, 0x5401) == ALLOWED  # whether it is a terminal
    assert verdict(machine, ioctl, 0, 0x5412) == refusal(errno.EPERM)
    assert verdict(machine, 435) == refusal(errno.ENOSYS)  # clone3: the C library then uses clone
    assert verdict(machine, 0, architecture=0x40000003) == KILLED  # the 32-bit door


def test_the_filter_kills_what_uses_the_other_numbers_of_x86_64():
    assert verdict("x86_64", 0x40000000 | 41) == KILLED


def test_another_machine_is_refused():
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        filter_for("riscv64")

"""What grading programs costs on this machine: the time to start a sandbox, and gradings a second, one alone and
several at once, with the CPU time of each.

    python benchmarks/grading.py

A grading here is one test of a program that prints the sum of two numbers.
"""

import argparse
import os
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from stovetop.tasks.code import CodeTest
from stovetop.tasks.code_grading import CodeGrader
from stovetop.tasks.sandbox import BubblewrapSandbox, find_sandbox

PROGRAM = "print(sum(map(int, input().split())))"
TESTS = (CodeTest("3 4\n", "7\n"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 4, 16])
    arguments = parser.parse_args()
    sandbox = find_sandbox()
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    print(f"{os.cpu_count()} processors, as {who}, bubblewrap {'.'.join(map(str, sandbox.bwrap.version))}")
    print(f"a sandbox and a program that does nothing: {1000 * start_s(sandbox):.0f} ms (median of 20)")
    for at_once in arguments.at_once:
        before_s = cpu_s()
        number, seconds = gradings(sandbox, at_once, arguments.seconds)
        each_ms = 1000 * (cpu_s() - before_s) / number
        print(f"{at_once:3} at once: {number / seconds:.1f} gradings/s, {each_ms:.0f} ms of CPU time each")


def start_s(sandbox: BubblewrapSandbox) -> float:
    """One alone."""
    times_s: list[float] = []
    for _ in range(20):
        begin_s = time.perf_counter()
        sandbox.run({"program.py": b""}, ["python", "-I", "program.py"])
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s)


def gradings(sandbox: BubblewrapSandbox, at_once: int, seconds: float) -> tuple[int, float]:
    """How many there were, and in how many seconds."""
    grader = CodeGrader(sandbox, max_at_once=at_once)
    latest_s = time.perf_counter() + seconds

    def grades(_: int) -> int:
        number = 0
        while time.perf_counter() < latest_s:
            assert grader.grade(PROGRAM, TESTS).is_correct
            number += 1
        return number

    begin_s = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        number = sum(threads.map(grades, range(at_once)))
    return number, time.perf_counter() - begin_s


def cpu_s() -> float:
    """Of this process and of all that it has waited for: it does not depend on what else the machine does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()

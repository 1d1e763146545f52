"""Is what a server promises true? Each count is done in parts, by seed, one process a part, and then the table.

    python benchmarks/promise.py kills-recording          # until the number of KILLS that the table asks for
    python benchmarks/promise.py all --jobs 2             # every count; some hours
    python benchmarks/promise.py kills-local --seed 17    # one part again: its schedule is that of its seed
    python benchmarks/promise.py --table                  # what was counted so far

What a part has counted is appended to a JSONL as it is done, and the script goes on where it stopped. Exit code 1 where
anything was lost, doubled or changed. What is done to the server is in `server_faults/`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from stovetop.durable import append_row, read_rows

TESTS = Path(__file__).parent.parent / "tests"  # which have a tiny model
MODEL = "MODEL"  # its folder, in the arguments of a count

Row = Mapping[str, Any]


class Count(NamedTuple):
    """What is counted, by one part after the other."""

    says: str
    part: str  # "file:function" of (folder, *arguments, seed)
    arguments: tuple[str, ...]
    unit: str  # what of a part's row is summed
    wanted: int  # of it; a part that says that it was the last one ends the count too


COUNTS: dict[str, Count] = {
    "kills-recording": Count("kill -9, the fake", "kills:run", ("slow recording",), "kills", 50),
    "kills-local": Count("kill -9, a transformer", "kills:run", (MODEL,), "kills", 50),
    "kills-served": Count(
        "kill -9 of `stovetop serve`: of four one of the parent", "kills:run_supervised", (MODEL,), "kills", 20
    ),
    "kills-fast": Count(
        "kill -9, the fake, clients that ask at once", "kills:run_wire", ("slow recording",), "kills", 300
    ),
    "kills-fast-local": Count("the same, a transformer", "kills:run_wire", (MODEL,), "kills", 200),
    "proxy": Count("requests through a proxy, one in ten wrong", "proxy:run", ("recording",), "requests", 10_000),
    "journal-calls": Count(
        "the k-th call for the journal's files fails, for all k", "failing:journal_calls", (), "calls", 10**6
    ),
    "checkpoint-calls": Count(
        "the k-th write, append, sync or rename of checkpoints fails", "failing:checkpoint_calls", (), "calls", 10**6
    ),
    "full-disks": Count("the disk is full, for some starts", "failing:full_disks", (), "full", 100),
    "flips": Count("bits of journal and checkpoints are flipped", "flips:run", (), "flips", 1000),
    "power": Count("what the disk may have when the power goes", "power:run", (), "points", 300),
    "outages": Count("the server is away for 1, 10 and 60 s", "outages:outages", ("slow recording",), "outages", 6),
    "suspended": Count("SIGSTOP of the server", "outages:suspended", ("slow recording",), "stops", 50),
    "files": Count("no file descriptor is left", "outages:without_files", ("slow recording",), "times", 30),
    "clocks": Count("clocks jump", "outages:clock_jumps", ("slow recording",), "jumps", 40),
}


def main() -> int:
    options = _options()
    if options.one:
        return _do(options.count[0], options.seed, options)
    if not options.table:
        names = list(COUNTS) if options.count == ["all"] else options.count
        for name in names:
            _count(name, options)
    return _show(read_rows(options.results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="*", choices=[*COUNTS, "all", []], help="which (default: none)")
    parser.add_argument("--seed", type=int, help="this part alone, whether or not it was done before")
    parser.add_argument("--until", type=int, help="how many of its unit (default: as the table says)")
    parser.add_argument("--jobs", type=int, default=1, help="parts at once")
    parser.add_argument("--table", action="store_true", help="what was counted so far, and no more")
    parser.add_argument("--results", type=Path, default=Path("promise.jsonl"))
    parser.add_argument("--folder", type=Path, default=Path("promise"), help="where servers keep their things")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _count(name: str, options: argparse.Namespace) -> None:
    """Parts, until there are enough."""
    if options.seed is not None:
        _start(name, options.seed, options)
        return
    count, taken = COUNTS[name], threading.Lock()
    wanted = options.until or count.wanted
    begun = {row["seed"] for row in _rows_of(name, options)}

    def parts() -> None:
        while True:
            rows = _rows_of(name, options)
            if _sum(rows, count) >= wanted or any(row.get("last") for row in rows):
                return
            with taken:
                seed = next(seed for seed in range(len(begun) + 1) if seed not in begun)
                begun.add(seed)
            _start(name, seed, options)

    with ThreadPoolExecutor(options.jobs) as jobs:
        for job in [jobs.submit(parts) for _ in range(options.jobs)]:
            job.result()


def _start(name: str, seed: int, options: argparse.Namespace) -> None:
    """One part, in a process of its own."""
    command = [sys.executable, __file__, name, "--one", "--seed", str(seed)]
    command += ["--results", str(options.results), "--folder", str(options.folder)]
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=False)
    if not any(row["seed"] == seed for row in _rows_of(name, options)):
        raise RuntimeError(f"this part has counted nothing: {name} --seed {seed}")


def _do(name: str, seed: int, options: argparse.Namespace) -> int:
    from server_faults import servers

    count = COUNTS[name]
    folder = options.folder.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    file, _, function = count.part.partition(":")
    local = ("stovetop.backends.local",) if MODEL in count.arguments else ()
    servers.preload(f"server_faults.{file}", *local)
    arguments = [str(_model(options.folder)) if argument == MODEL else argument for argument in count.arguments]
    part: Callable[..., dict[str, Any]] = vars(import_module(f"server_faults.{file}"))[function]
    began_s = time.monotonic()
    try:
        counted = part(folder, *arguments, seed)
    except Exception:
        counted = {"faults": [traceback.format_exc()]}
    append_row(options.results, {"count": name, "seed": seed, **counted, "seconds": time.monotonic() - began_s})
    print(json.dumps({"count": name, "seed": seed, **counted})[:500], flush=True)
    return 1 if counted["faults"] else 0


def _model(folder: Path) -> Path:
    """A tiny transformer with random weights."""
    made = folder.resolve() / "model"
    if not made.exists():
        sys.path.append(str(TESTS))
        tiny = import_module("engine.tiny")
        tiny.save_model(made.with_suffix(f".{os.getpid()}")).rename(made)
    return made


def _rows_of(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for row in read_rows(options.results) if row["count"] == name]


def _sum(rows: Sequence[Row], count: Count) -> int:
    return sum(row.get(count.unit, 0) for row in rows)


def _show(rows: Sequence[Row]) -> int:
    table = Table("count", "parts", "number", "more", "faults", "minutes")
    for name, count in COUNTS.items():
        mine = [row for row in rows if row["count"] == name]
        if not mine:
            continue
        more = {
            key: sum(row.get(key, 0) for row in mine)
            for key in mine[0]
            if isinstance(mine[0][key], int) and key not in ("seed", "last", count.unit)
        }
        number = f"{_sum(mine, count):,} of {count.wanted:,} {count.unit}"
        faults = sum(len(row["faults"]) for row in mine)
        told = ", ".join(f"{value:,} {key}" for key, value in more.items())
        minutes = sum(row["seconds"] for row in mine) / 60
        table.add_row(f"{name}: {count.says}", str(len(mine)), number, told, str(faults), f"{minutes:.0f}")
    Console(width=150).print(table)
    for row in rows:
        for fault in row["faults"]:
            print(f"{row['count']} --seed {row['seed']}: {fault}")
    return 1 if any(row["faults"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

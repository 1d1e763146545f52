"""The demo on several seeds, each in a process of its own, one after the other: is what it shows an accident?

    python benchmarks/demo_seeds.py --seeds 11 12 13

Asks of every seed what the README says: supervised learning at least halves the held-out loss, and reinforcement
learning ends, at temperature 1, at least 0.3 above the better of the base model and the supervised one.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stovetop.durable import read_rows
from stovetop.runs import load

STAGES = ("base model", "after examples", "after reward")


def run_demo(seed: int, folder: Path) -> float:
    """Seconds it took. A run that was begun goes on."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "stovetop", "run", "sort_digits_demo", f"seed={seed}", f"log_path={folder}"]
    subprocess.run(command, check=True)
    return time.monotonic() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo_seeds"))
    arguments = parser.parse_args()
    table = Table("seed", "held-out loss", *(f"{s}, T=1 / greedy" for s in STAGES), "rise at T=1", "seconds", "holds")
    all_hold = True
    for seed in arguments.seeds:
        folder = arguments.folder / str(seed)
        seconds = run_demo(seed, folder)
        losses = load(folder / "supervised").series("test/nll").values
        results = {row["stage"]: row for row in read_rows(folder / "results.jsonl")}
        accuracy = [results[stage]["at temperature 1"] for stage in STAGES]
        rise = accuracy[2] - max(accuracy[:2])
        holds = losses[-1] <= losses[0] / 2 and rise >= 0.3
        all_hold &= holds
        shown = [f"{results[s]['at temperature 1']:.3f} / {results[s]['greedy']:.3f}" for s in STAGES]
        table.add_row(
            str(seed), f"{losses[0]:.2f} -> {losses[-1]:.2f}", *shown, f"{rise:+.3f}", f"{seconds:.0f}", str(holds)
        )
    Console(width=160).print(table)
    return 0 if all_hold else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Another checkout of this project against this one, on this machine: what a change cost or gained.

    git worktree add /tmp/before COMMIT
    python benchmarks/old_and_new.py /tmp/before                     # about 8 minutes on two cores
    python benchmarks/old_and_new.py /tmp/before --only train --rounds 3

Measures our side of `compare.py`, each checkout with its own files, in processes of their own that take turns. The
medians of the rounds count; a ratio above 1 says that this checkout is faster. A measure that the other checkout does
not know is had by copying `benchmarks/` into it.
"""

import argparse
import os
import statistics
from pathlib import Path

from compare import HERE, run_apart
from compare_work import SIZES
from rich.console import Console
from rich.table import Table

MEASURES = {  # of `compare.py`, with the side that is ours, and those of its numbers that are speeds
    "train": ("ours", ["tokens_per_s"]),
    "sample_equal": ("ours", ["tokens_per_s"]),
    "sample_ragged": ("ours", ["tokens_per_s"]),
    "grpo": ("ours", ["tokens_per_s"]),
    "adapters": ("ours", ["train 1", "train 8", "sample 1", "sample 8"]),
    "mode": ("exact", ["train", "sample"]),
    "decode": ("ours", ["rows 1", "rows 8", "rows 32"]),
    "load": ("ours", ["loads", "first steps"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    usual = ["train", "sample_equal", "sample_ragged", "mode"]
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=usual)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=SIZES, default="quick")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    console = Console(width=120)
    speeds: dict[tuple[str, str], dict[Path, list[float]]] = {}
    for turn in range(options.rounds):
        for measure in options.only:
            for checkout in (options.old.resolve(), HERE)[:: 1 if turn % 2 == 0 else -1]:
                side, names = MEASURES[measure]
                numbers = run_apart(side, measure, options, checkout)
                for name in names:
                    speeds.setdefault((measure, name), {}).setdefault(checkout, []).append(numbers[name])
                console.print(f"round {turn + 1}, {measure}, {checkout.name}: {numbers}", highlight=False)
    table = Table("", "old", "new", "new / old")
    for (measure, name), by_checkout in speeds.items():
        old, new = (statistics.median(by_checkout[checkout]) for checkout in (options.old.resolve(), HERE))
        table.add_row(f"{measure}, {name}", f"{old:.4g}", f"{new:.4g}", f"{new / old:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()

"""How much time runs save that train side by side on one copy of the base model.

    python benchmarks/sweeps.py [--preset sl_basic:small] [--runs 8] [--rounds 2] [--threads 2] [--steps 4]

The same runs, seeds of one preset, one after the other (at_once=1, each loads the model) and all at once, alternated.
Printed are the seconds of each round, and the ratio of their medians: how many times faster it is side by side.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="sl_basic:small")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], options.runs: []}
    for round_number in range(options.rounds):
        for at_once in seconds:
            seconds[at_once].append(sweep_s(options, at_once))
            print(f"round {round_number + 1}, {at_once} at once: {seconds[at_once][-1]:.1f} s", flush=True)
    alone, together = (statistics.median(of_one) for of_one in seconds.values())
    print(f"{options.preset}, {options.runs} runs: side by side {alone / together:.2f} times as fast as one by one")


def sweep_s(options: argparse.Namespace, at_once: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        seeds = ",".join(map(str, range(options.runs)))
        command = [sys.executable, "-m", "stovetop", "sweep", options.preset, f"seed={seeds}", f"at_once={at_once}"]
        command += [f"max_steps={options.steps}", f"folder={Path(folder) / 'sweep'}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        began_s = time.monotonic()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began_s


if __name__ == "__main__":
    main()

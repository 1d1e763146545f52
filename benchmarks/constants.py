"""What half and double of each number that was chosen for speed do, on this machine.

    python benchmarks/constants.py                          # about 25 minutes on two cores
    python benchmarks/constants.py --only SOFTMAX_BYTES --rounds 5
    python benchmarks/constants.py --dtype float32          # in the deterministic mode, which some of them do not touch

Each constant is tried with the part of `compare.py` that it matters to, in processes of their own that take turns. What
counts is the median; a ratio above 1 says that this value is faster than the one that the engine has.
"""

import argparse
import json
import os
import statistics
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from compare import printed_numbers, run_here
from compare_work import SIZES, Setting
from rich.console import Console
from rich.table import Table

from stovetop.model_store import require_model


class Constant(NamedTuple):
    module: str  # of the engine
    measure: str  # of compare.py
    numbers: tuple[str, ...]  # of what it returns, speeds


CONSTANTS = {
    "CHUNK_BYTES": Constant("model.head", "train", ("tokens_per_s",)),
    "SOFTMAX_BYTES": Constant("model.head", "train", ("tokens_per_s",)),
    "SCORE_BYTES": Constant("kernels.block_attention", "train", ("tokens_per_s",)),
    "LAYOUT_ROWS": Constant("kernels.arithmetic", "decode", ("rows 8", "rows 32")),
    "CACHE_BYTES": Constant("sampling.drawing", "decode", ("rows 32",)),
    "PRECISE_ROWS": Constant("lora.routing", "decode", ("rows 8", "rows 32")),
    "CHUNK_TOKENS": Constant("sampling.prompts", "sample_ragged", ("tokens_per_s",)),
    "MIN_BATCHED": Constant("lora.routing", "adapters", ("train 8", "sample 8")),
}
SCALES = (0.5, 1.0, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONSTANTS, default=list(CONSTANTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("CONSTANT", "SCALE"), help="measure this, in this process")
    options = parser.parse_args()
    if options.one:
        name, scale = options.one
        print(json.dumps(measured_with(name, float(scale), options)))
        return
    console = Console(width=120)
    table = Table("constant", "value", "measure", "half", "double")
    for name in options.only:
        found: dict[float, list[dict[str, float]]] = {scale: [] for scale in SCALES}
        for turn in range(options.rounds):
            for scale in SCALES[:: 1 if turn % 2 == 0 else -1]:
                words = ["--one", name, str(scale), f"--model={options.model}", f"--dtype={options.dtype}"]
                words.append(f"--threads={options.threads}")
                found[scale].append(printed_numbers(Path(__file__), words, options.threads))
        for number in CONSTANTS[name].numbers:
            half, same, double = (statistics.median(run[number] for run in found[scale]) for scale in SCALES)
            told = (f"{CONSTANTS[name].measure} {number}", f"{half / same:.2f}", f"{double / same:.2f}")
            table.add_row(name, str(value_of(name)), *told)
            console.print(f"{name}: {told}", highlight=False)
    console.print(table)


def value_of(name: str) -> Any:
    """On a CPU, where it depends on the device."""
    value = vars(import_module(f"stovetop.engine.{CONSTANTS[name].module}"))[name]
    return value["cpu"] if isinstance(value, dict) else value


def measured_with(name: str, scale: float, options: argparse.Namespace) -> dict[str, float]:
    module = import_module(f"stovetop.engine.{CONSTANTS[name].module}")
    value = vars(module)[name]
    changed = max(1, round(value_of(name) * scale))
    setattr(module, name, {**value, "cpu": changed} if isinstance(value, dict) else changed)
    setting = Setting(require_model(options.model), options.dtype, options.threads, SIZES["quick"])
    return run_here("ours", CONSTANTS[name].measure, setting)


if __name__ == "__main__":
    main()

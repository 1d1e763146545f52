"""Stovetop beside what one would use instead, on this machine: the same model, data, dtype and threads.

    python benchmarks/compare.py                       # about half an hour on two cores
    python benchmarks/compare.py --quick --json out.json
    python benchmarks/compare.py --side ours --measure train      # one measurement, in this process

Each measurement is a process of its own. The sides take turns, so that a machine that grows slower slows all of them,
and the median of the rounds counts. Needs the extra `bench`; llama.cpp is a side where its file is given (`--gguf`).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from compare_work import SIZES, Numbers, Setting
from rich.console import Console
from rich.table import Table

from stovetop.model_store import require_model

HERE = Path(__file__).resolve().parents[1]

# measure -> side -> module and function that does it
MEASURES: dict[str, dict[str, str]] = {
    "train": {
        "ours": "compare_ours:train",
        "padded": "compare_peers:train_padded",
        "sorted": "compare_peers:train_sorted",
        "trl": "compare_peers:sft",
    },
    "sample_equal": {"ours": "compare_ours:sample_equal", "generate": "compare_peers:generate_equal"},
    "sample_ragged": {"ours": "compare_ours:sample_ragged", "generate": "compare_peers:generate_ragged"},
    "grpo": {"ours": "compare_ours:grpo", "trl": "compare_peers:grpo"},
    "adapters": {"ours": "compare_ours:adapters"},
    "mode": {"exact": "compare_ours:exact_mode", "fast": "compare_ours:fast_mode"},
    "mode_bfloat16": {"exact": "compare_ours:exact_bfloat16", "fast": "compare_ours:fast_bfloat16"},
    "flat": {"ours": "compare_ours:flat"},
    "prompts": {"together": "compare_ours:prompts_together", "apart": "compare_ours:prompts_apart"},
    "decode": {"ours": "compare_ours:decode", "llama": "compare_llama:decode"},
    "load": {"ours": "compare_ours:load"},
}
ONCE = {"flat", "prompts"}  # compared with itself only, at several sizes


class Row(NamedTuple):
    """One line of the table."""

    key: str
    meaning: str
    value: float
    target: str
    holds: bool | None  # None where there is no target


# ---- one measurement -------------------------------------------------------------------------------------------------


def run_here(side: str, measure: str, setting: Setting) -> Numbers:
    import torch

    torch.set_num_threads(setting.threads)
    module, _, function = MEASURES[measure][side].partition(":")
    measurement: Callable[[Setting], Numbers] = vars(import_module(module))[function]
    return measurement(setting)


def run_apart(side: str, measure: str, options: argparse.Namespace, checkout: Path = HERE) -> Numbers:
    """The same in a fresh process, with the files of this checkout or of another one."""
    words = ["--side", side, "--measure", measure, "--size", options.size]
    words += [f"--model={options.model}", f"--dtype={options.dtype}", f"--threads={options.threads}"]
    words += [f"--gguf={options.gguf}"] if side == "llama" else []
    return printed_numbers(checkout / "benchmarks" / "compare.py", words, options.threads)


def printed_numbers(program: Path, words: list[str], threads: int) -> Numbers:
    """The last line of what the program prints, in a process of its own. The rest is shown if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(program.parents[1] / "src")
    command = [sys.executable, str(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- all of them -----------------------------------------------------------------------------------------------------

Medians = dict[tuple[str, str], Numbers]  # by measure and side


def run_all(options: argparse.Namespace, console: Console) -> Medians:
    found: dict[tuple[str, str], list[Numbers]] = {}
    for turn in range(SIZES[options.size].rounds):
        for measure, sides in MEASURES.items():
            if measure in options.only and (turn == 0 or measure not in ONCE):
                for side in sides:
                    if side == "llama" and options.gguf is None:
                        continue
                    numbers = run_apart(side, measure, options)
                    found.setdefault((measure, side), []).append(numbers)
                    console.print(f"round {turn + 1}, {measure}, {side}: {shown(numbers)}", highlight=False)
    return {
        key: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for key, runs in found.items()
    }


def shown(numbers: Numbers) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def rows_of(medians: Medians) -> list[Row]:
    rows: list[Row] = []

    def at_least(key: str, meaning: str, value: float, target: float) -> None:
        rows.append(Row(key, meaning, value, f"at least {target:g}", value >= target))

    def at_most(key: str, meaning: str, value: float, target: float) -> None:
        rows.append(Row(key, meaning, value, f"at most {target:g}", value <= target))

    def speed(measure: str, side: str) -> float:
        return medians[measure, side]["tokens_per_s"]

    if ("train", "ours") in medians:
        ours = speed("train", "ours")
        at_least(
            "train_vs_padded", "training, against transformers + PEFT, padded", ours / speed("train", "padded"), 2.8
        )
        at_least("train_vs_sorted", "the same, sorted, in fours", ours / speed("train", "sorted"), 1.2)
        rows.append(Row("train_vs_trl", "the same, TRL's SFTTrainer", ours / speed("train", "trl"), "", None))
        peaks = [medians["train", side]["peak_bytes"] for side in ("ours", "padded")]
        at_most("memory", "its peak memory, against padded", peaks[0] / peaks[1], 0.25)
    if ("sample_equal", "ours") in medians:
        ours = speed("sample_equal", "ours")
        at_least(
            "sample_equal", "sampling equal lengths, against generate", ours / speed("sample_equal", "generate"), 1.5
        )
    if ("sample_ragged", "ours") in medians:
        ratio = speed("sample_ragged", "ours") / speed("sample_ragged", "generate")
        at_least("sample_ragged", "sampling ragged groups, against generate", ratio, 4.0)
    if ("grpo", "ours") in medians:
        at_least("grpo_vs_trl", "a whole GRPO step, against TRL", speed("grpo", "ours") / speed("grpo", "trl"), 4.5)
    if ("adapters", "ours") in medians:
        numbers = medians["adapters", "ours"]
        for count, target in ((8, 0.9), (32, 0.8)):
            ratio = min(numbers[f"{verb} {count}"] / numbers[f"{verb} 1"] for verb in ("train", "sample"))
            at_least(f"adapters_{count}", f"{count} adapters, against one (the slower of the verbs)", ratio, target)
    if ("mode", "exact") in medians:
        exact, fast = medians["mode", "exact"], medians["mode", "fast"]
        for verb in ("train", "sample"):
            meaning = f"{verb} in float32: the deterministic mode, against the fast one"
            at_least(f"{verb}_exact", meaning, exact[verb] / fast[verb], 0.95)
        rows.append(
            Row("gap_exact", "largest gap in the deterministic mode, nats", exact["gap"], "0", exact["gap"] == 0)
        )
    if ("mode_bfloat16", "exact") in medians:
        exact, fast = medians["mode_bfloat16", "exact"], medians["mode_bfloat16", "fast"]
        for verb in ("train", "sample"):
            at_least(f"{verb}_exact_bfloat16", f"{verb} in bfloat16: the same", exact[verb] / fast[verb], 0.91)
        gaps = exact["gap"], fast["gap"]
        rows.append(Row("gap_exact_bfloat16", "its largest gap", gaps[0], "0", gaps[0] == 0))
        rows.append(Row("gap_fast_bfloat16", "the largest gap of the fast mode", gaps[1], "", None))
    if ("prompts", "apart") in medians:
        together, apart = medians["prompts", "together"], medians["prompts", "apart"]
        for name in together:
            what, length = name.split()
            means = f"four answers to a prompt of {length} tokens, shared against apart: "
            shown_as = "speed" if what == "tokens_per_s" else "memory"
            rows.append(Row(f"prompts_{shown_as}_{length}", means + shown_as, together[name] / apart[name], "", None))
    if ("decode", "llama") in medians:
        for name, value in medians["decode", "ours"].items():
            ratio = value / medians["decode", "llama"][name]
            if name == "rows 1":
                rows.append(Row("decode_vs_llama_1", "decoding, 1 row, against llama.cpp", ratio, "", None))
            else:
                at_least(f"decode_vs_llama_{name[5:]}", f"decoding, {name}, against llama.cpp", ratio, 1.0)
    for measure in ("decode", "load"):
        for name, value in medians.get((measure, "ours"), {}).items():
            rows.append(Row(f"{measure}_{name}", f"{measure}, {name}, a second", value, "", None))
    if ("flat", "ours") in medians:
        numbers = medians["flat", "ours"]
        times = [value for name, value in numbers.items() if name.startswith("time")]
        gaps = [value for name, value in numbers.items() if name.startswith("gap")]
        rows.append(Row("gap", "largest gap of sampled and trained logprobs, nats", max(gaps), "", None))
        at_most(
            "gap_flat", "gap in the largest batch, against the smallest", gaps[-1] / gaps[0] if gaps[0] else 1.0, 1.1
        )
        at_most("time_per_token", "largest batch, against the smallest", times[-1] / times[0], 1.1)
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table("", "ratio", "target", "")
    for row in rows:
        holds = "" if row.holds is None else "yes" if row.holds else "no"
        table.add_row(row.meaning, f"{row.value:.3g}", row.target, holds)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="one small round, 3 minutes")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, a further side: see compare_llama.py")
    parser.add_argument("--side", help="with --measure: do only this, here, and print its numbers")
    parser.add_argument("--measure", choices=MEASURES)
    options = parser.parse_args()
    if options.gguf is not None and not options.gguf.is_file():
        parser.error(f"--gguf is to be a file that llama.cpp reads, and there is none: {options.gguf}")
    model = require_model(options.model)
    if options.side:
        setting = Setting(model, options.dtype, options.threads, SIZES[options.size], options.gguf)
        print(json.dumps(run_here(options.side, options.measure, setting)))
        return
    console = Console(width=120)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "trl"))
    console.print(f"{model.name}, {options.dtype}, {options.threads} threads, {platform.machine()}; {versions}")
    medians = run_all(options, console)
    rows = rows_of(medians)
    console.print(table_of(rows))
    if options.json:
        details = {f"{measure} {side}": numbers for (measure, side), numbers in medians.items()}
        options.json.write_text(json.dumps({**{row.key: row.value for row in rows}, "details": details}, indent=1))


if __name__ == "__main__":
    main()

"""Does every preset learn? Each on three seeds, in a process of its own, one after the other, and then the table.

    python benchmarks/recipes.py                               # all that is not measured yet; about two hours
    python benchmarks/recipes.py --only dpo:small --seeds 100  # one preset on a seed of its own
    python benchmarks/recipes.py --table                       # what was measured so far
    python benchmarks/recipes.py --table --markdown            # the same for a page

The seeds 0, 1 and 2 are for this alone: presets are tuned on others. What is measured is appended to a JSONL as it is
done, with the preset's config, and the script goes on where it stopped; a preset that was changed since is measured
again. Exit code 1 where a threshold is missed or a run failed. Thresholds are in `recipe_proofs/__init__.py`.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipe_proofs import PROOFS, Proof
from rich.console import Console
from rich.table import Table

from stovetop.cli.loading import load_chosen
from stovetop.durable import append_row, read_rows
from stovetop.errors import UnknownName
from stovetop.runs import load
from stovetop.tracking.configs import config_to_dict

SEEDS = (0, 1, 2)


class Measured(NamedTuple):
    """One preset with one seed: a row of the JSONL."""

    preset: str
    seed: int
    numbers: dict[str, float]
    run_s: float  # the run alone, as `stovetop run` does it
    whole_s: float  # with what is measured before and after
    cpu_s: float  # of the whole, all threads
    threads: int
    config: dict[str, object]  # of the preset


# ---- one measurement -------------------------------------------------------------------------------------------------


def measure_here(preset: str, seed: int, folder: Path, threads: int) -> Measured:
    began_s = time.monotonic()
    numbers = asyncio.run(PROOFS[preset].function()(folder, seed))
    whole_s = time.monotonic() - began_s
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    return Measured(preset, seed, numbers, run_seconds(folder), whole_s, cpu_s, threads, config_of_preset(preset))


def run_seconds(folder: Path) -> float:
    """From opening the run to closing it; of phases the whole."""
    return sum(event.values["seconds"] for event in load(folder).events if event.name == "run.stop")


def config_of_preset(preset: str) -> dict[str, Any]:
    config = load_chosen(preset).config
    assert config is not None
    return json.loads(json.dumps(config_to_dict(config)))


def measure_apart(preset: str, seed: int, options: argparse.Namespace) -> None:
    """In a fresh process, which appends its row. One that was interrupted begins again: its time counts."""
    folder = options.folder / preset.replace(":", "_") / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, __file__, "--one", preset, str(seed), str(folder)]
    command += ["--results", str(options.results), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{seed}.log").open("wb") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        tail = Path(log.name).read_text(errors="replace")[-2000:]
        print(f"{preset}, seed {seed} failed with exit code {done.returncode}; {log.name} ends with:\n{tail}")


# ---- all of them -----------------------------------------------------------------------------------------------------


def measured(results: Path, presets: Iterable[str], seeds: Sequence[int]) -> dict[tuple[str, int], Measured]:
    """The last row of each preset as it is now, with one of these seeds."""
    configs = {preset: config_of_preset(preset) for preset in presets}
    rows = [Measured(**row) for row in read_rows(results)] if results.exists() else []
    return {
        (row.preset, row.seed): row
        for row in rows
        if row.preset in configs and row.seed in seeds and row.config == configs[row.preset]
    }


def run_all(options: argparse.Namespace, measure: Callable[[str, int, argparse.Namespace], None]) -> None:
    there = measured(options.results, options.only, options.seeds)
    for seed in options.seeds:  # every preset once before any of them twice
        for preset in options.only:
            if (preset, seed) not in there:
                print(f"{preset}, seed {seed} ...", flush=True)
                measure(preset, seed, options)


class Line(NamedTuple):
    """One preset in the table; what has a value for each seed has them in the order of seeds."""

    preset: str
    quantity: str
    before: str
    after: str
    more: str
    minutes: str  # of the run, and how many it may take
    holds: str


def lines_of(there: Mapping[tuple[str, int], Measured], presets: Iterable[str]) -> list[Line]:
    lines: list[Line] = []
    for preset in presets:
        rows = [there[key] for key in sorted(there) if key[0] == preset]
        if rows:
            lines.append(_line(preset, PROOFS[preset], rows))
    return lines


def _line(preset: str, proof: Proof, rows: Sequence[Measured]) -> Line:
    def each(name: str) -> str:
        return ", ".join(f"{row.numbers[name]:.3g}" for row in rows if name in row.numbers)

    names = [name for name in rows[0].numbers if name not in ("before", "after")]
    missed = [f"seed {row.seed}: {says}" for row in rows for says in proof.misses(row.numbers)]
    minutes = ", ".join(f"{row.run_s / 60:.1f}" for row in rows)
    return Line(
        preset,
        proof.quantity,
        each("before"),
        each("after"),
        "; ".join(f"{name} {each(name)}" for name in names),
        f"{minutes} of {proof.minutes}",
        "yes" if not missed else f"no. {'; '.join(missed)}",
    )


def show(lines: Sequence[Line], *, as_markdown: bool) -> None:
    if as_markdown:
        for cells in (Line._fields, ["---"] * len(Line._fields), *lines):
            print(f"| {' | '.join(cells)} |")
        return
    table = Table(*Line._fields)
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(PROOFS), metavar="RECIPE:PRESET")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe_proofs"), help="of the runs")
    parser.add_argument("--results", type=Path, help="the JSONL (default: results.jsonl in the folder)")
    parser.add_argument("--table", action="store_true", help="measure nothing, and print what is there")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--one", nargs=3, metavar=("PRESET", "SEED", "FOLDER"), help="measure this, in this process")
    options = parser.parse_args(words)
    options.results = options.results or options.folder / "results.jsonl"
    for preset in options.only:
        if preset not in PROOFS:
            raise UnknownName("preset with a proof", preset, PROOFS)
    if options.one:
        preset, seed, folder = options.one
        row = measure_here(preset, int(seed), Path(folder), options.threads)
        append_row(options.results, row._asdict())
        return 0
    if not options.table:
        run_all(options, measure_apart)
    there = measured(options.results, options.only, options.seeds)
    show(lines_of(there, options.only), as_markdown=options.markdown)
    is_whole = len(there) == len(options.only) * len(options.seeds)
    return 0 if is_whole and not any(PROOFS[row.preset].misses(row.numbers) for row in there.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

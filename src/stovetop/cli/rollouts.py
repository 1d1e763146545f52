"""The command rollouts: finds among all that a run has played, and shows what it found as a table, as JSON lines or as
a page."""

import argparse
import json
import shlex
import tempfile
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from stovetop.cli.runs import run_in
from stovetop.cli.tables import print_table
from stovetop.cli.words import Action, count
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest
from stovetop.tracking.rollout_rows import (
    FACTS,
    Facts,
    Order,
    check_condition,
    find_rollouts,
    read_rollouts,
    rollout_files,
)

if TYPE_CHECKING:
    from stovetop.tracking.rollout_rows import Found

IN_A_TABLE, ON_A_PAGE = 20, 64  # rollouts, unless --limit says otherwise
ANSWER_CHARACTERS = 60
NOT_IN_JSON = ("pieces", "kinds", "token_ids", "logprobs", "trained_logprobs", "advantages")  # they are in the files
HELP = """\
All rollouts of a run of reinforcement learning: every answer of every step and of every evaluation, with its reward.
Those that fit all conditions are shown as a table, as JSON lines (--json) or as a page to read (--html, --open).
"""
EXAMPLES = """\
columns for --where, a condition of SQL (single quotes around texts):
  {columns}

examples:
  stovetop rollouts runs/rl_loop --order worst
  stovetop rollouts runs/rl_loop --where "reward < 0 AND num_tokens > 100" --open
  stovetop rollouts runs/rl_loop --where "metrics['correct'] = 1 AND split = 'eval_test'"
  stovetop rollouts runs/rl_loop --step 12 --html step12.html
  stovetop rollouts runs/rl_loop --grep "I cannot" --json > refusals.jsonl
  stovetop rollouts runs/rl_loop --prompt 3fa2 --open       the same prompt in every step that had it

Their tokens, with logprobs of sampler and trainer, are columns of the files in runs/rl_loop/rollouts/ too.
"""


def rollouts(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop rollouts",
        description=HELP,
        epilog=EXAMPLES.format(columns=_columns()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="the folder of a run, or of one of several phases")
    parser.add_argument("--where", metavar="SQL", default="", help="such as: reward < 0")
    parser.add_argument(
        "--grep", metavar="TEXT", default="", help="that the prompt or the answer has, as it is written"
    )
    parser.add_argument("--step", metavar="N", type=partial(count, least=0), help="those of one step")
    parser.add_argument("--split", metavar="NAME", default="", help="train, or eval_NAME for those of an evaluator")
    parser.add_argument(
        "--prompt", metavar="DIGEST", default="", help="those of one prompt: the beginning of its digest"
    )
    parser.add_argument("--order", choices=get_args(Order), default="first", help="which come first (default: first)")
    parser.add_argument(
        "--limit", metavar="N", type=count, help=f"default: {IN_A_TABLE}, {ON_A_PAGE} on a page, all as JSON"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="a line for each, with chat, turns and logs")
    shown.add_argument("--html", metavar="FILE", help="a page with them, and with their tokens in colour")
    shown.add_argument("--open", action="store_true", help="such a page, opened in a browser")
    options = parser.parse_args(words)
    run = run_in(options.run)
    if options.html is not None and Path(options.html).is_dir():
        raise InvalidRequest(f"--html takes the name of a file, and this is a folder: {options.html!r}")
    if options.where:
        check_condition(options.where)
    return lambda: _show(run, options)


def _columns() -> str:
    lines = [", ".join(FACTS[start : start + 8]) for start in range(0, len(FACTS), 8)]
    return ",\n  ".join(lines)


def _show(run: Path, options: argparse.Namespace) -> None:
    if not rollout_files(run):
        raise InvalidRequest(
            f"this run has no rollouts: they are kept by recipes that play, such as rl_loop, from their first step on: "
            f"{run}"
        )
    is_page = options.open or options.html is not None
    limit = options.limit or (None if options.json else ON_A_PAGE if is_page else IN_A_TABLE)
    found = find_rollouts(
        run,
        where=options.where,
        grep=options.grep,
        split=options.split,
        step=options.step,
        prompt=options.prompt,
        order=options.order,
        limit=limit,
    )
    if options.json:
        _print_json(found)
    elif not found.rollouts:
        print(_nothing_fits(run, options))
    elif is_page:
        _write_page(run, found, options)
    else:
        _print_table(run, found)


def _nothing_fits(run: Path, options: argparse.Namespace) -> str:
    """With what there is to choose from."""
    splits = sorted({file.stem.partition("_")[2] for file in rollout_files(run)})
    if options.split and options.split not in splits:
        return f"no rollout is of the split {options.split!r}; there are: {', '.join(splits)}"
    case = "; --grep tells upper and lower case apart" if options.grep else ""
    return f"no rollout fits all of this{case}"


def _print_json(found: "Found") -> None:
    for row in read_rollouts(found.rollouts):
        values = {name: getattr(row, name) for name in type(row).__dataclass_fields__ if name not in NOT_IN_JSON}
        print(json.dumps(values))


def _print_table(run: Path, found: "Found") -> None:
    print_table([_cells(each) for each in found.rollouts])
    print(f"{len(found.rollouts)} of {found.num_found} rollouts", end="")
    print(f"; to read them: stovetop rollouts {shlex.quote(str(run))} ... --open, or --html FILE")


def _cells(rollout: Facts) -> dict[str, str]:
    values = rollout.values
    answer = " ".join(str(values["answer"]).split())
    return {
        "step": f"{values['step']}",
        "split": str(values["split"]),
        "group": f"{values['group_idx']}.{values['traj_idx']}",
        "reward": f"{values['reward']:.4g}",
        "tokens": f"{values['num_tokens']}",
        "stop": str(values["stop_reason"]),
        "prompt": str(values["prompt"]),
        "answer": answer if len(answer) <= ANSWER_CHARACTERS else f"{answer[:ANSWER_CHARACTERS]}...",
    }


def _write_page(run: Path, found: "Found", options: argparse.Namespace) -> None:
    from stovetop.tracking.rollout_pages import Shown, rollouts_page

    rows = read_rollouts(found.rollouts)
    told: list[Any] = [options.where, options.grep, options.split, options.prompt]
    what = ", ".join([*([f"step {options.step}"] if options.step is not None else []), *filter(None, told)])
    shown = Shown(None, found.num_found, f"{run.name}/rollouts")
    page = rollouts_page(f"rollouts of {run.name}{': ' if what else ''}{what}", rows, shown).encode()
    if options.html is not None:
        file = Path(options.html).expanduser().resolve()
    else:
        file = Path(tempfile.mkdtemp(prefix="stovetop-")) / "rollouts.html"
    write_file(file, page)
    print(f"{len(rows)} of {found.num_found} rollouts: {file}")
    if options.open and not webbrowser.open(file.as_uri()):
        print("no browser could be started here; open the file where there is one")

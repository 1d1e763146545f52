"""The command eval: its words become a `Plan`, which is checked; then the plan is carried out, and its report shown."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stovetop.checkpoint_users import being_read
from stovetop.checks import collecting
from stovetop.cli.evaluation_report import Report, SetReport, reports_against, show_report
from stovetop.cli.interrupts import run_interruptibly, same_command
from stovetop.cli.weights import Weights, renderer_of, weights_of
from stovetop.cli.words import Action, count, temperature
from stovetop.durable import make_folders, write_file, writing
from stovetop.errors import InvalidRequest
from stovetop.evaluation.example_set import Evaluation, ExampleSet, evaluate
from stovetop.evaluation.rows import RowKey, Settings, open_rows, read_rows, refuse_other_settings
from stovetop.recipes.settings import check_renderer_name
from stovetop.run_folder import locked
from stovetop.tasks.evaluation_kinds import Asking, LoadedSet
from stovetop.tasks.evaluation_sets import EXAMPLES, KINDS, check_tools, load_sets, open_tools

if TYPE_CHECKING:
    from stovetop.client import SamplingClient, ServiceClient
    from stovetop.preference.judge import JudgeCompleter
    from stovetop.renderers.base import Renderer

RESULTS = "results.json"
JUDGE_TOKENS = 256  # of a judge's answer

EPILOG = """\
sets:
{kinds}
  CHATS.jsonl  held-out chats: nats per token, bits per byte; a sample too, sample:NAME
  NAME:SOURCE takes rows of the same form from elsewhere: FILE.jsonl, FILE.parquet, the folder of a download.
  Behind a set [:100] takes its first 100 examples.

{examples}

Each example's answers and scores are a row in --out, at once: the same command goes on where it was interrupted. What
the numbers are worth, and how many examples one needs, is in docs/evaluation.md.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command asks for."""

    weights: Weights
    sets: tuple[LoadedSet, ...]
    asking: Asking
    seeds: tuple[int, ...]
    out: Path
    renderer_name: str | None
    judge: Weights | None
    base_url: str
    against: Path | None
    as_json: bool

    def settings(self, loaded: LoadedSet, renderer_name: str | None = None) -> Settings:
        """What the rows of a set depend on. The renderer may be known only with the model."""
        judge = {"judge": self.judge.shown} if loaded.needs == "judge" and self.judge is not None else {}
        return {"weights": self.weights.shown, **loaded.settings(self.asking, renderer_name), **judge}

    def seeds_of(self, loaded: LoadedSet) -> tuple[int, ...]:
        """What is only read is the same with every seed."""
        return self.seeds if loaded.is_sampled else self.seeds[:1]


# ---- understanding ---------------------------------------------------------------------------------------------------


def evaluation(words: Sequence[str]) -> Action:
    kinds = "\n".join(f"  {name:<11}{kind.summary}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        "stovetop eval",
        description="Measures a model or a checkpoint on sets of examples, with standard errors.",
        epilog=EPILOG.format(kinds=kinds, examples=EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="a run (its last checkpoint), a checkpoint's path, or a model")
    parser.add_argument("--on", nargs="+", required=True, metavar="SET", help="what to evaluate on, see below")
    parser.add_argument("--limit", type=count, metavar="N", help="the first N examples of each set")
    parser.add_argument("--samples", type=count, metavar="N", default=1, help="answers to each example (default: 1)")
    parser.add_argument("--k", type=count, nargs="+", default=[1], help="of pass@k, up to --samples (default: 1)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED", help="default: 0")
    parser.add_argument(
        "--temperature", type=temperature, metavar="T", help="default: 0 for one answer and one seed, 1 for several"
    )
    parser.add_argument("--max-tokens", type=count, metavar="N", help="of an answer; default: as the set says")
    parser.add_argument(
        "--renderer", metavar="NAME", help="how chats are written; default: as in the run, or else the model's own way"
    )
    parser.add_argument("--judge", metavar="MODEL", help="a model or a checkpoint that compares answers, for pairwise")
    parser.add_argument("--out", metavar="FOLDER", help="for rows and results; default: evaluations/<checkpoint>")
    parser.add_argument("--against", metavar="FOLDER", help="--out of another evaluation, to compare with by example")
    parser.add_argument("--base-url", metavar="URL", default="local", help="where models run, as in ServiceClient")
    parser.add_argument("--json", action="store_true", help="for programs: one object in place of the table")
    parser.add_argument("--dry-run", action="store_true", help="check all but the model, say what would be done, stop")
    options = parser.parse_args(words)
    plan = _understood(options)
    if options.dry_run:
        return lambda: _show_plan(plan)
    return lambda: run_interruptibly(_evaluate(plan), lambda: same_command(["eval", *words]))


def _understood(options: argparse.Namespace) -> Plan:
    """All that is wrong with the words, at once."""
    several = options.samples > 1 or len(options.seeds) > 1
    sampling_temperature = (1.0 if several else 0.0) if options.temperature is None else options.temperature
    weights, sets, asking, judge = None, list[LoadedSet](), None, None
    with collecting() as problem:
        with problem:
            weights = weights_of(options.checkpoint, options.base_url)
        with problem:
            sets = load_sets(options.on, options.limit)
            check_tools(sets)
        with problem:
            asking = Asking(
                num_samples=options.samples,
                temperature=sampling_temperature,
                max_tokens=options.max_tokens,
                ks=tuple(options.k),
            )
        with problem:
            _check_seeds(options.seeds, sampling_temperature)
        with problem:
            check_renderer_name(options.renderer)
        with problem:
            judge = None if options.judge is None else weights_of(options.judge, options.base_url)
            if judge is None and any(each.needs == "judge" for each in sets):
                raise InvalidRequest("pairwise needs --judge, a model or a checkpoint that compares two answers")
    assert weights is not None, "it would have been refused"
    assert asking is not None, "likewise"
    out = Path("evaluations", weights.label) if options.out is None else Path(options.out)
    against = None if options.against is None else Path(options.against)
    renderer_name = options.renderer or (renderer_of(weights.model_path) if weights.model_path else None)
    plan = Plan(
        weights, tuple(sets), asking, tuple(options.seeds), out, renderer_name, judge, options.base_url, against,
        options.json,
    )  # fmt: skip
    _check_folders(plan)
    return plan


def _check_seeds(seeds: Sequence[int], temperature: float) -> None:
    if len(set(seeds)) < len(seeds):
        raise InvalidRequest(f"--seeds must be different from each other: {' '.join(map(str, seeds))}")
    if len(seeds) > 1 and temperature == 0:
        raise InvalidRequest("at temperature 0 every seed gives the same answers; pass a temperature above 0")


def _check_folders(plan: Plan) -> None:
    if plan.out.exists() and not plan.out.is_dir():
        raise InvalidRequest(f"--out must be a folder, and there is a file: {str(plan.out)!r}")
    for loaded in plan.sets:
        refuse_other_settings(plan.out, loaded.name, plan.settings(loaded, plan.renderer_name))
        if plan.against is not None and not read_rows(plan.against, loaded.name):
            raise InvalidRequest(f"--against has no rows of {loaded.name}, {loaded.name}.jsonl: {str(plan.against)!r}")


def _show_plan(plan: Plan) -> None:
    print(f"Would evaluate {plan.weights.shown}. Nothing was asked, and nothing was written.")
    for loaded in plan.sets:
        seeds, num_samples = plan.seeds_of(loaded), plan.asking.num_samples if loaded.is_sampled else 1
        wanted = [RowKey(id, seed) for id in loaded.ids for seed in seeds]
        there = {row.key for row in read_rows(plan.out, loaded.name)}
        print(
            f"  {loaded.name}: {len(loaded.ids)} examples, {num_samples} samples, {len(seeds)} seeds; "
            f"{len(there.intersection(wanted))} of {len(wanted)} rows are in {plan.out / loaded.name}.jsonl"
        )
        for reason, number in loaded.left_out.items():
            print(f"    {number} rows are left out: {reason}")


# ---- doing -----------------------------------------------------------------------------------------------------------


async def _evaluate(plan: Plan) -> None:
    from stovetop import ServiceClient
    from stovetop.model_families import context_length_of

    with ExitStack() as stack:
        for weights in (plan.weights, plan.judge):
            if weights is not None and weights.model_path is not None:
                stack.enter_context(being_read(weights.model_path))
        service = stack.enter_context(ServiceClient(plan.base_url))
        client = await service.create_sampling_client(plan.weights.model_path, plan.weights.base_model)
        renderer_name, renderer = _renderer(client, plan.renderer_name)
        judge = None if plan.judge is None else await _open_judge(service, plan.judge)
        tools = stack.enter_context(open_tools(plan.sets, judge=judge))
        asking = replace(plan.asking, context_tokens=context_length_of(service, client.get_base_model()))
        made = [(loaded, loaded.make(renderer, asking, tools)) for loaded in plan.sets]
        with writing(plan.out):
            make_folders(plan.out)
        stack.enter_context(locked(plan.out, "evaluation", "--out"))
        reports: list[SetReport] = []
        for loaded, example_set in made:
            settings = plan.settings(loaded, renderer_name)
            evaluated = await _evaluate_set(plan, loaded, example_set, settings, client)
            reports.append(SetReport.of(evaluated, example_set, loaded, settings))
        if judge is not None:
            reports = [each.with_judge(judge) if each.needs_judge else each for each in reports]
        report = Report(plan.weights.shown, str(plan.out), reports, reports_against(plan.against, reports))
        write_file(plan.out / RESULTS, json.dumps(report.to_json(), indent=1).encode())
        show_report(report, as_json=plan.as_json)


async def _evaluate_set(
    plan: Plan, loaded: LoadedSet, example_set: ExampleSet, settings: Settings, client: "SamplingClient"
) -> Evaluation:
    from rich.console import Console

    from stovetop.tracking.console import ConsoleSink

    file, seeds = open_rows(plan.out, loaded.name, settings), plan.seeds_of(loaded)
    wanted = [RowKey(id, seed) for seed in seeds for id in loaded.ids]
    num_there = sum(file.get(key) is not None for key in wanted)
    sink = ConsoleSink(Console(stderr=True))
    with sink.progress(loaded.name, total=len(wanted), completed=num_there) as bar:
        return await evaluate(example_set, client, seeds, file=file, on_row=lambda _: bar.advance())


def _renderer(client: "SamplingClient", name: str | None) -> "tuple[str, Renderer]":
    from stovetop.model_families import recommended_renderer_name
    from stovetop.renderers import get_renderer

    tokenizer = client.get_tokenizer()
    name = name or recommended_renderer_name(tokenizer, client.get_base_model())
    return name, get_renderer(name, tokenizer)


async def _open_judge(service: "ServiceClient", weights: Weights) -> "JudgeCompleter":
    from stovetop.completers import SamplingMessageCompleter
    from stovetop.preference.judge import JudgeCompleter

    client = await service.create_sampling_client(weights.model_path, weights.base_model)
    _, renderer = _renderer(client, None)
    return JudgeCompleter(SamplingMessageCompleter(client, renderer, JUDGE_TOKENS, temperature=0.0))

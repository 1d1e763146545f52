"""The command sweep: several runs of one recipe, over values of its fields."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stovetop.checks import collecting
from stovetop.cli.configs import as_flags, config_of
from stovetop.cli.interrupts import run_interruptibly, same_command
from stovetop.cli.loading import Chosen, RecipeModule, check_run, load_chosen, split_name
from stovetop.cli.sweep_table import show_sweep
from stovetop.cli.tables import print_table
from stovetop.cli.words import Action
from stovetop.client import ServiceClient
from stovetop.durable import make_folders, writing
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.kitchen.run_config import RunConfig
from stovetop.reports.standing import standing_of
from stovetop.run_folder import locked
from stovetop.stored_configs import read_config
from stovetop.sweeps.points import Point, Values, draw_points, grid, name_of, parse_values
from stovetop.sweeps.running import Asked, SweptRun, check_at_once, continued, run_all, store_sweep
from stovetop.tracking.configs import changed_fields, config_to_dict
from stovetop.tracking.console import ConsoleSink, open_console, quiet
from stovetop.tracking.log_file import at_info

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OPTIONS = ("folder", "at_once", "draw", "draw_seed", "metric", "goal")

HELP = """\
usage: stovetop sweep <recipe>[:<preset>] <field>=<a>,<b> ... [field=value ...] [options] [--dry-run] [--debug]

Several runs of one recipe below one folder, and a table of what they came to, the best first, with mean and standard
error over the seeds. The same command again goes on where it stopped; with further values it adds their runs.

fields:
  learning_rate=1e-4,3e-4  each of these values, with each of those of other fields: a grid
  learning_rate=1e-5..1e-3 any value between, to draw from (draw=20); by its logarithm where that is tenfold or more
  seed=0,1,2               every point with each of these seeds
  field=value              the same for all runs

options (name=value, or --name value):
  at_once=N     N runs side by side in this process, on one copy of the base model: small steps share passes (1)
  draw=N        draw N points at random instead of taking all combinations
  draw_seed=S   of what is drawn (0)
  metric=NAME   to compare the runs by: its last value (test/nll, test/accuracy ...: the first there is)
  goal=min|max  whether less or more of it is better (by its name: less of a loss, more of all else)
  folder=PATH   of the sweep (runs/sweep_RECIPE)
  --dry-run     check all of it, say which runs there would be, and stop

examples:
  stovetop sweep sl_basic:small learning_rate=1e-4,3e-4,1e-3 seed=0,1,2 at_once=3
  stovetop sweep rl_basic:small learning_rate=1e-5..1e-3 group_size=4,8 draw=10 metric=env/all/reward/total
  stovetop report runs/sweep_sl_basic_small
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command asks for."""

    chosen: Chosen
    folder: Path
    asked: Asked
    runs: list[SweptRun]
    at_once: int


# ---- from words ------------------------------------------------------------------------------------------------------


def sweep(words: Sequence[str]) -> Action:
    if not words or {"-h", "--help"} & set(words):
        return lambda: print(HELP, end="")
    plan = _plan(words[0], [word for word in words[1:] if word != "--dry-run"])
    if "--dry-run" in words:
        return lambda: _show_plan(plan)
    return lambda: _carry_out(plan, ["sweep", *words])


def _plan(name: str, words: Sequence[str]) -> Plan:
    chosen = load_chosen(name)
    options, fields, fixed = _sorted_words(words)
    recipe, preset = split_name(name)
    name = recipe if preset is None else f"{recipe}:{preset}"
    folder = Path(options.get("folder") or f"runs/sweep_{Path(recipe).stem}{'' if preset is None else f'_{preset}'}")
    num, draw_seed = _whole(options, "draw", 1), _whole(options, "draw_seed", 0) or 0
    if (goal := options.get("goal")) not in (None, "min", "max"):
        raise InvalidRequest(f"goal must be min or max: {goal!r}")
    if not fields:
        raise InvalidRequest("a sweep needs a field with several values: learning_rate=1e-4,3e-4 or seed=0,1,2, say")
    points = grid(fields) if num is None else draw_points(fields, num, draw_seed)
    runs = _runs(chosen, f"stovetop sweep {name}", folder, points, fixed)
    at_once = _whole(options, "at_once", 1) or 1
    if at_once > 1:
        check_at_once(runs)
        _train_of(chosen.recipe)
    return Plan(chosen, folder, Asked(name, fixed, points, options.get("metric"), goal), runs, at_once)


def _sorted_words(words: Sequence[str]) -> tuple[dict[str, str], dict[str, Values], list[str]]:
    """The options of the sweep, the fields with several values, and the words that all runs share."""
    options: dict[str, str] = {}
    fields: dict[str, Values] = {}
    fixed: list[str] = []
    for flag in _joined(as_flags(words, {})):
        name, equals, value = flag.removeprefix("--").partition("=")
        if not equals:
            fixed.append(flag)
        elif name in OPTIONS:
            options[name] = value
        elif name == "log_path":
            raise InvalidRequest(f"each run of a sweep has a folder of its own below that of the sweep; folder={value}")
        elif (values := parse_values(name, value)) is None:
            fixed.append(f"{name}={value}")
        else:
            fields[name] = values
    return options, fields, fixed


def _joined(flags: Sequence[str]) -> list[str]:
    """`--field value` becomes `--field=value`; further words of a field that takes several stay as they are."""
    joined: list[str] = []
    for flag in flags:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and not flag.startswith("--"):
            joined[-1] += f"={flag}"
        else:
            joined.append(flag)
    return joined


def _whole(options: dict[str, str], name: str, least: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"{name} must be a whole number, {least} or more: {text!r}")
    return int(text)


def _runs(chosen: Chosen, prog: str, folder: Path, points: Sequence[Point], fixed: Sequence[str]) -> list[SweptRun]:
    """Each with its config, which is checked as `stovetop run` checks it."""
    runs: list[SweptRun] = []
    with collecting() as problem:
        for point in points:
            place = folder / name_of(point)
            words = [*fixed, *(f"{field}={value}" for field, value in point.items()), f"log_path={place}"]
            with problem:
                config = config_of(chosen.recipe, words, prog, chosen.config, lambda own: check_run(chosen.recipe, own))
                runs.append(SweptRun(point, place, config))
    return runs


def _train_of(recipe: RecipeModule) -> Callable[[Any, ServiceClient], Awaitable[None]]:
    """What trains with a service that is open; refused where the recipe has none."""
    train = vars(recipe).get("train")
    if train is None:
        raise InvalidRequest(
            f"runs at once share a service: {vars(recipe)['__name__']} needs `async def train(config, service)`, which "
            "its main calls; or leave at_once out"
        )
    return train


# ---- carrying it out -------------------------------------------------------------------------------------------------


def _show_plan(plan: Plan) -> None:
    print(f"{len(plan.runs)} runs in {plan.folder}, {plan.at_once} at once. Nothing was run or written.")
    print_table([{**run.point, "folder": run.folder.name} for run in plan.runs])


def _carry_out(plan: Plan, words: Sequence[str]) -> None:
    continued(plan.folder, plan.asked)  # refused before anything is written
    with writing(plan.folder):
        make_folders(plan.folder)
    failed: dict[Path, Exception] = {}
    with locked(plan.folder, "sweep", "folder"):
        asked = store_sweep(plan.folder, plan.asked)
        run_interruptibly(_run(plan, failed), lambda: same_command(words))
    try:
        show_sweep(plan.folder, asked)
    except StovetopError as error:
        if not failed:
            raise
        print(f"there is no table: {error}")
    if failed:
        listed = "".join(f"\n  {folder}: {error}" for folder, error in failed.items())
        raise StovetopError(
            f"{len(failed)} of {len(plan.runs)} runs have failed; the same command tries them again:{listed}"
        )


async def _run(plan: Plan, failed: dict[Path, Exception]) -> None:
    """All runs; those that have failed are put into `failed`. One after the other they show themselves as they do
    alone; side by side there is a bar for all of them."""
    if plan.at_once == 1:
        for number, run in enumerate(plan.runs, 1):
            if _is_done(run):
                print(f"run {number} of {len(plan.runs)}: {run.folder.name} is complete")
                continue
            print(f"run {number} of {len(plan.runs)}: {run.folder.name}")
            failed |= await run_all([run], lambda run: plan.chosen.recipe.main(run.config))
        return
    console = open_console(shown=True)
    train = _train_of(plan.chosen.recipe)
    with (
        at_info(),
        quiet(),
        ConsoleSink(console).progress("sweep", total=len(plan.runs)) as bar,
        _service_of(plan.folder, plan.runs[0].config) as service,
    ):

        async def start(run: SweptRun) -> None:
            if _is_done(run):
                return
            with service.at(run.folder) as own:
                await train(run.config, own)

        def ended(run: SweptRun, error: Exception | None) -> None:
            words = f"{run.folder.name}: {'done' if error is None else f'failed: {error}'}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            bar.advance()

        failed |= await run_all(plan.runs, start, at_once=plan.at_once, ended=ended)


def _is_done(run: SweptRun) -> bool:
    """Complete, with this very config: there is nothing to load a model for."""
    config = config_to_dict(run.config)
    if config.get("behavior_if_exists", "resume") != "resume" or standing_of(run.folder).state != "complete":
        return False
    return changed_fields(read_config(run.folder).config, config).keys() <= {"log_path"}


def _service_of(folder: Path, config: "DataclassInstance") -> ServiceClient:
    if isinstance(config, RunConfig):
        return config.open_service(folder)
    base_url: str | None = vars(config).get("base_url")  # of a flat loop
    return ServiceClient(base_url, storage=folder)

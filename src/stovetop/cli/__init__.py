"""The command line. The only package that reads the arguments and the environment of the program, and that prints; what
it starts lives elsewhere.

A command is first understood, then carried out. What goes wrong in the first half is a mistake in the command (exit
code 2); in the second, a failure (1). An interrupt exits with 130, SIGTERM takes the same path and exits with 143.
Nothing here imports torch or transformers.

`recipes`, `reports`, `rollouts`, `models`, `serve`, `views`, `disk`, `sync` and `evaluation` have the commands;
`configs`, `describe`, `runs` and `interrupts` what they rest on.
"""

import sys
import traceback
from collections.abc import Sequence

from stovetop.cli import disk, models, recipes, reports, rollouts, serve, sync, views
from stovetop.cli.interrupts import as_interrupted, interrupted_by_sigterm, output_is_closed
from stovetop.cli.words import Action, entry
from stovetop.errors import StovetopError

HELP = """\
usage: stovetop <command> ...

Stovetop trains language models that you own, on this machine.

commands:
  run <recipe> [field=value ...]  run a recipe, or FILE.py; the same command again goes on where it stopped
  resume <run> [field=value ...]  go on with a run, with its own config
  sweep <recipe> field=a,b ...    several runs of a recipe, over values of its fields, and which is best
  runs [folder]                   the runs in a folder
  report <run>                    what a run has come to
  rollouts <run>                  what the model said in it: find, read, with rewards and tokens
  prune <run>                     delete checkpoints that a run does not need, after saying which
  sync <run> --to <tracker>       send a run to wandb, trackio, mlflow or tensorboard
  list                            the recipes, with their presets
  describe <recipe>               what a recipe or a workflow does: its stages, and the fields of its config
  eval <checkpoint> --on <set>    measure a model on sets of examples, with standard errors
  fetch <model>                   bring a model to this machine, once
  serve <model> ...               serve models to programs that use the Tinker SDK
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


def _eval(words: Sequence[str]) -> Action:
    from stovetop.cli import evaluation  # which imports what no other command needs

    return evaluation.evaluation(words)


def _sweep(words: Sequence[str]) -> Action:
    from stovetop.cli import sweeps  # likewise

    return sweeps.sweep(words)


COMMANDS = {
    "run": recipes.run,
    "resume": recipes.resume,
    "sweep": _sweep,
    "runs": reports.runs,
    "report": reports.report,
    "rollouts": rollouts.rollouts,
    "prune": disk.prune,
    "sync": sync.sync,
    "list": recipes.list_recipes,
    "describe": recipes.describe,
    "eval": _eval,
    "fetch": models.fetch,
    "serve": serve.serve,
    "chat": models.chat,
    "export": models.export,
    "show": views.show,
    "play": views.play,
}


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
        print(f"error: {error}", *vars(error).get("__notes__", ()), sep="\n", file=sys.stderr)
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
    return entry("command", words[0], COMMANDS)(words[1:])

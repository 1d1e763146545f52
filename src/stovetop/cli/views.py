"""The commands that show what a model sees: show (chats), play (an environment)."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stovetop.cli.interrupts import run_interruptibly
from stovetop.cli.words import Action, count, entry
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.recipes.settings import check_renderer_name
from stovetop.tasks import TASKS

if TYPE_CHECKING:
    from stovetop.renderers.base import TrainOnWhat


def show(words: Sequence[str]) -> Action:
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
    parser.add_argument("--limit", metavar="N", type=count, default=3, help="show the first N chats (default: 3)")
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


def play(words: Sequence[str]) -> Action:
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
    entry("task", options.task, TASKS)
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

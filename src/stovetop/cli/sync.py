"""`stovetop sync`: sends a run to a tracker that was down, or that it was begun without."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from stovetop.cli.runs import run_in
from stovetop.cli.words import Action
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.run_folder import EVENTS_FILE, METRICS_FILE, locked
from stovetop.runs import sender_of
from stovetop.tracking.trackers import TRACKERS, TrackerChoice, check_trackers


def sync(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop sync",
        description="Sends to a tracker what it has not got of a run: metrics, config, texts, plots and pages.",
        epilog=f"trackers: {', '.join(TRACKERS)}. It goes on where what was sent before has ended.",
    )
    parser.add_argument("run", help="its folder, such as runs/sl_basic")
    parser.add_argument("--to", required=True, metavar="TRACKER", help="NAME or NAME:PROJECT, such as wandb:mine")
    options = parser.parse_args(words)
    folder = run_in(options.run)
    choices = check_trackers(options.to)
    if len(choices) != 1:
        raise InvalidRequest(f"--to takes one tracker, such as wandb or wandb:mine: {options.to!r}")
    if not any((folder / name).is_file() for name in (METRICS_FILE, EVENTS_FILE)):
        raise InvalidRequest(f"there is nothing to send: the run has neither metrics nor events: {options.run!r}")
    return lambda: _sync(folder, choices[0])


def _sync(folder: Path, choice: TrackerChoice) -> None:
    with locked(folder):
        sender = sender_of(folder, choice)
        before = sender.sent
        try:
            sender.send()
            sender.close()
        except StovetopError:
            raise
        except (Exception, SystemExit) as error:  # of the tracker's library: anything
            raise StovetopError(
                f"{choice.name} did not take all of it ({type(error).__name__}: {error}); it has the steps up to "
                f"{sender.sent.step}, and the same command goes on behind them"
            ) from error
    sent = sender.sent
    print(f"{choice.name} has the run up to step {sent.step}, with {sent.num_others} texts and files.", end=" ")
    is_new = (sent.step, sent.num_others) != (before.step, before.num_others)
    print(f"New from step {before.step + 1} on." if is_new else "It had all of it before.")
    if sent.url is not None:
        print(sent.url)

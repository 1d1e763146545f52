"""How a command is interrupted, and what is said then."""

import shlex
import signal

import pytest

from processes import signal_after
from stovetop.cli_interrupts import how_to_go_on

NEVER_AWAITS = """
import threading, time
from stovetop import cli, cli_interrupts

cli_interrupts.SECONDS_TO_AWAIT = 0.1

def compute():
    while True:
        sum(range(1000))

async def main():
    try:
        print("under way", flush=True)
        {work}
    finally:
        print("left", flush=True)

terminations = []
try:
    with cli_interrupts.interrupted_by_sigterm(terminations):
        cli_interrupts.run_interruptibly(main())
except KeyboardInterrupt:
    raise SystemExit(143 if terminations else 130)
"""


@pytest.mark.parametrize("work", ["compute()", "threading.Event().wait(50)"])
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_awaits_nothing_is_interrupted_soon_too(work: str, by: signal.Signals, code: int) -> None:
    ended = signal_after(["-c", NEVER_AWAITS.format(work=work)], 0.1, by)
    assert (ended.code, ended.printed, ended.errors) == (code, "under way\nleft\n", "")
    assert ended.seconds < 5


AWAITS_AND_CLEANS_UP = """
import asyncio, time
from stovetop import cli_interrupts

cli_interrupts.SECONDS_TO_AWAIT = 0.1

async def main():
    try:
        print("under way", flush=True)
        await asyncio.sleep(50)
    finally:
        time.sleep(0.4)
        print("all saved", flush=True)

try:
    cli_interrupts.run_interruptibly(main())
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_what_awaits_is_cancelled_and_has_its_time_to_clean_up() -> None:
    ended = signal_after(["-c", AWAITS_AND_CLEANS_UP], 0.1, signal.SIGINT)
    assert (ended.code, ended.printed, ended.errors) == (130, "under way\nall saved\n", "")


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("run sl_loop epochs=2", "run sl_loop epochs=2"),
        ("run sl_loop behavior_if_exists=delete", "run sl_loop behavior_if_exists=delete behavior_if_exists=resume"),
        ("run sl_loop --behavior-if-exists raise", "run sl_loop --behavior-if-exists raise behavior_if_exists=resume"),
    ],
)
def test_the_command_to_go_on_with_deletes_nothing(command: str, again: str) -> None:
    assert how_to_go_on(shlex.split(command)).endswith(f": stovetop {again}")


@pytest.mark.parametrize("command", ["chat smollm2", "play math", ""])
def test_what_has_no_place_to_go_on_from_is_only_said_to_be_interrupted(command: str) -> None:
    assert how_to_go_on(shlex.split(command)) == "Interrupted."

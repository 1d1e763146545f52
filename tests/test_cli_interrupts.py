"""How a command is interrupted, and what is said then."""

import shlex
import signal
from collections.abc import Callable

import pytest

from costly import slow_but
from processes import ctrl_c_is_heard, signal_after
from stovetop.cli.interrupts import Interrupted, as_interrupted, interrupted_by_sigterm, same_command

NEVER_AWAITS = """
import threading, time
from stovetop import cli
from stovetop.cli import interrupts

interrupts.SECONDS_TO_AWAIT = 0.1

def compute():
    while True:
        sum(range(1000))

async def main():
    try:
        print("under way", flush=True)
        {work}
    finally:
        print("left", flush=True)

try:
    with interrupts.interrupted_by_sigterm():
        interrupts.run_interruptibly(main())
except KeyboardInterrupt as interrupt:
    raise SystemExit(interrupts.as_interrupted(interrupt).exit_code)
"""


@pytest.mark.parametrize("work", ["compute()", pytest.param("threading.Event().wait(50)", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("by", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_what_awaits_nothing_is_interrupted_soon_too(work: str, by: signal.Signals, code: int) -> None:
    ended = signal_after(["-c", NEVER_AWAITS.format(work=work)], 0.1, by)
    assert (ended.code, ended.printed, ended.errors) == (code, "under way\nleft\n", "")
    assert ended.seconds < 5


COMPUTES_AMONG_OTHERS = """
import asyncio
from stovetop.cli import interrupts
from stovetop.concurrency import together

interrupts.SECONDS_TO_AWAIT = 0.1

async def compute():
    print("under way", flush=True)
    while True:
        sum(range(1000))

async def cleans_up(name, *awaitables):
    try:
        await together([*awaitables, asyncio.sleep(50)])
    finally:
        await asyncio.sleep(0.01)
        print(name, "cleaned up", flush=True)

try:
    interrupts.run_interruptibly(cleans_up("outer", cleans_up("inner", compute())))
except KeyboardInterrupt as interrupt:
    raise SystemExit(interrupts.as_interrupted(interrupt).exit_code)
"""


def test_a_task_that_computes_is_interrupted_and_all_around_it_clean_up_without_a_word_of_asyncio() -> None:
    ended = signal_after(["-c", COMPUTES_AMONG_OTHERS], 0.1, signal.SIGINT)
    assert (ended.code, ended.errors) == (130, "")
    assert ended.printed == "under way\ninner cleaned up\nouter cleaned up\n"


AWAITS_AND_CLEANS_UP = """
import asyncio, time
from stovetop.cli import interrupts

interrupts.SECONDS_TO_AWAIT = 0.1

async def main():
    try:
        print("under way", flush=True)
        await asyncio.sleep(50)
    finally:
        time.sleep(0.4)
        print("all saved", flush=True)

try:
    interrupts.run_interruptibly(main())
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_what_awaits_is_cancelled_and_has_its_time_to_clean_up() -> None:
    ended = signal_after(["-c", AWAITS_AND_CLEANS_UP], 0.1, signal.SIGINT)
    assert (ended.code, ended.printed, ended.errors) == (130, "under way\nall saved\n", "")


# ---- what does not end by itself -------------------------------------------------------------------------------------

DOES_NOT_END = """
import asyncio, time
from stovetop.cli import interrupts

interrupts.SECONDS_TO_CLEAN_UP = {seconds}
interrupts.SECONDS_TO_LEAVE = 0.2

async def main():
    print("under way", flush=True)
    while True:
        try:
            {work}
        except asyncio.CancelledError:
            {then}

try:
    interrupts.run_interruptibly(main(), lambda: "To go on: run it again")
except interrupts.Interrupted as interrupt:
    print("came to its end", interrupt)
    raise SystemExit(interrupt.exit_code)
"""
BLOCKS = "await asyncio.to_thread(time.sleep, 50)"
AT_ONCE_S = 2.0


def test_a_thread_that_blocks_does_not_hold_up_the_end() -> None:
    program = DOES_NOT_END.format(seconds=20, work=BLOCKS, then="raise")
    ended = signal_after(["-c", program], 0.1, signal.SIGTERM)
    assert (ended.code, ended.printed) == (143, "under way\n")
    assert ended.errors.endswith("\nNot all of it has ended in time. To go on: run it again\n")
    assert ended.seconds < AT_ONCE_S


def test_what_does_not_let_itself_be_cancelled_has_its_time_and_not_more() -> None:
    program = DOES_NOT_END.format(seconds=0.3, work="await asyncio.sleep(50)", then="pass")
    ended = signal_after(["-c", program], 0.1, signal.SIGINT)
    assert (ended.code, ended.printed) == (130, "under way\n")
    assert ended.seconds < AT_ONCE_S


@pytest.mark.parametrize("then", slow_but(1, ["time.sleep(50)", "pass", "await asyncio.sleep(50)"]))
def test_a_second_signal_ends_it_at_once_whatever_it_does(then: str) -> None:
    program = DOES_NOT_END.format(seconds=20, work="await asyncio.sleep(50)", then=then)
    ended = signal_after(["-c", program], 0.1, signal.SIGINT, again_after=0.3)
    assert (ended.code, ended.printed) == (130, "under way\n")
    assert ended.errors.endswith("\nEnded at once. To go on: run it again\n")
    assert ended.seconds < AT_ONCE_S


def test_what_fails_while_it_ends_is_said() -> None:
    program = DOES_NOT_END.format(seconds=20, work="await asyncio.sleep(50)", then="raise ValueError('not closed')")
    ended = signal_after(["-c", program], 0.1, signal.SIGINT)
    assert (ended.code, ended.printed.splitlines()[1]) == (
        130,
        "came to its end Interrupted. While it ended: not closed. To go on: run it again",
    )


@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("run sl_loop epochs=2", "run sl_loop epochs=2"),
        ("run sl_loop behavior_if_exists=delete", "run sl_loop behavior_if_exists=delete behavior_if_exists=resume"),
        ("run sl_loop --behavior-if-exists raise", "run sl_loop --behavior-if-exists raise behavior_if_exists=resume"),
    ],
)
def test_the_command_to_go_on_with_deletes_nothing(command: str, again: str) -> None:
    assert same_command(shlex.split(command)).endswith(f": stovetop {again}")


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_what_is_no_run_is_only_said_to_be_interrupted(of_sigint: Callable[..., object] | signal.Handlers) -> None:
    with ctrl_c_is_heard():
        signal.signal(signal.SIGINT, of_sigint)
        with pytest.raises(Interrupted, match=r"^Interrupted\.$") as raised, interrupted_by_sigterm():
            signal.raise_signal(signal.SIGTERM)
    assert raised.value.exit_code == 143
    assert str(as_interrupted(KeyboardInterrupt())) == "Interrupted."
    assert as_interrupted(KeyboardInterrupt()).exit_code == 130

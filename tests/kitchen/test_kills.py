"""A run that is killed anywhere is, once it goes on, the run that would have been.

A kill is simulated by a copy of the run's folder, with all that was saved in it, at a boundary of a stage: while the
engine's thread goes on writing. Each copy goes on where it lies, after the original is gone. Besides, runs are stopped
by what a stage or a call raises, and cancelled at boundaries and at any other moment, some of them again and again.
How long calls take differs from run to run. `make test` tries a sixtieth of some modes, .ci/run all of all.
"""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from costly import slow_but
from kitchen.copies import number_of
from kitchen.modes import (
    MODES,
    Config,
    Killed,
    Mode,
    Outcome,
    cancel_the_run,
    kill_at_boundaries,
    outcome,
)
from stovetop.backends.recording import Raises, Verb
from stovetop.errors import InvalidRequest, StageFailed
from stovetop.kitchen import stage
from stovetop.kitchen.workflow import Workflow

NUM_PARTS = 60  # of the boundaries of a mode
QUICK_PARTS = (7,)
QUICK_MODES = {"supervised", "two steps ahead"}
NUM_STOPS = 20  # runs of a mode that are stopped in another way
QUICK_STOPS = {("supervised", 0)}


# ---- kills at the boundaries of stages -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=slow_but(QUICK_MODES, MODES))
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    is_quick = "not slow" in request.config.getoption("markexpr", "")

    def wanted(number: int) -> bool:
        return not is_quick or number % NUM_PARTS in QUICK_PARTS

    return kill_at_boundaries(MODES[request.param], tmp_path_factory.mktemp("killed"), wanted=wanted)


@pytest.mark.parametrize("part", slow_but(QUICK_PARTS, range(NUM_PARTS)))
def test_a_run_that_is_killed_at_the_boundary_of_a_stage_is_the_run_that_would_have_been(
    killed: Killed, part: int
) -> None:
    for copy in (copy for copy in killed.copies if number_of(copy) % NUM_PARTS == part):
        killed.assert_same_after(copy, seed=part)


# ---- runs that are stopped in other ways -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A run that nothing stopped."""

    mode: Mode
    outcome: Outcome
    seconds: float


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    mode = MODES[request.param]
    config = mode.config(tmp_path_factory.mktemp("whole"))
    began_s = time.monotonic()
    mode.train(config)
    return Whole(mode, outcome(config.log_path), time.monotonic() - began_s)


@pytest.mark.parametrize(
    ("whole", "number"),
    slow_but(QUICK_STOPS, [(mode, number) for mode in MODES for number in range(NUM_STOPS)]),
    indirect=["whole"],
)
def test_a_run_that_is_stopped_again_and_again_is_the_run_that_would_have_been(
    whole: Whole, number: int, tmp_path: Path
) -> None:
    generator = random.Random(number)
    config = whole.mode.config(tmp_path)
    for _ in range(generator.choice([1, 1, 2, 3])):
        stop(whole, config, generator)
    whole.mode.train(config, seed=number)
    assert outcome(config.log_path) == whole.outcome


def stop(whole: Whole, config: Config, generator: random.Random) -> None:
    """Begins a run, or goes on with it, and stops it somewhere; where it has passed that place it goes to its end."""
    mode, seed = whole.mode, generator.randrange(1000)
    match generator.choice(["raised", "cancelled at a boundary", "cancelled", "fault"]):
        case "fault":
            verb: Verb = generator.choice(["forward_backward", "optim_step", "save_state", "compute_logprobs"])
            fault = Raises(verb, generator.randint(1, 6), InvalidRequest("a fault"))
            with contextlib.suppress(StageFailed):
                mode.train(config, faults=[fault], seed=seed)
        case "cancelled":
            with contextlib.suppress(TimeoutError):
                mode.train(config, after_s=generator.uniform(0, whole.seconds), seed=seed)
        case how:
            workflow = stopping(mode.workflow, generator, cancels=how != "raised")
            with contextlib.suppress(StageFailed, asyncio.CancelledError):
                mode.train(config, workflow=workflow, seed=seed)


def stopping(workflow: Workflow, generator: random.Random, *, cancels: bool) -> Workflow:
    """With a stage more, beside one of the others, that stops the run at one of its steps."""
    at = generator.randint(0, 7)

    @stage
    async def stops(step: int = at) -> None:
        if step != at:
            return
        if not cancels:
            raise ValueError("stopped")
        cancel_the_run()

    beside = generator.choice(workflow.stages).stage.name
    insert = generator.choice([workflow.insert_before, workflow.insert_after])
    return insert(beside, stops)

"""Whatever is raised, and wherever in the engine's threads: each call is answered once, and what is not concerned has
the bits of a run without faults; or the engine is dead, says so to all, and its base model can be opened again."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import injected
import pytest
from injected import PACKAGE, Outcome, Place, run

from stovetop.engine import ops
from stovetop.errors import Cancelled

ERRORS = [Exception, SystemExit, MemoryError, KeyboardInterrupt, RuntimeError, GeneratorExit]
NUM_SHARES = 4  # of all places, for as many processes
CONTAINMENT = "/engine/containment.py"
OURS = (
    "/engine/engine.py",
    "/engine/scheduler.py",
    "/engine/ops.py",
    "/engine/residency.py",
    CONTAINMENT,
    "/backends/engine_thread.py",
    "/backends/accepted.py",
    "/backends/queues.py",
    "/backends/interruption.py",
    "/backends/expected.py",
    "/futures.py",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return injected.saved_state(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def without_faults(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(saved, tmp_path_factory.mktemp("without"))


def test_without_faults_all_succeeds_but_what_was_spoiled_or_taken_back(without_faults: Outcome) -> None:
    errors = {index: error for index, (_, error) in enumerate(without_faults.answers) if error is not None}
    taken_back = {injected.TO_CANCEL, len(without_faults.asked) + injected.TO_STOP}
    assert {index for index, error in errors.items() if isinstance(error, Cancelled)} == taken_back
    (spoiled,) = errors.keys() - taken_back
    assert "so its gradients are dropped" in str(errors[spoiled])
    assert {type(asked.op) for asked in without_faults.asked} == set(ops.Op.__args__)


def check(found: Outcome, expected: Outcome, error: type[BaseException]) -> None:
    assert found.watch.has_raised
    assert max(found.num_answers) == 1  # and all are answered, for `run` has their answers
    if found.failed is not None:
        assert isinstance(found.failed, error)
        return
    assert len(found.changed(expected)) <= 1, found.changed(expected)
    for owner, num_steps in found.num_steps.items():
        check_steps(found, expected, owner, num_steps)


def check_steps(found: Outcome, expected: Outcome, owner: str, num_steps: int | None) -> None:
    """Of one adapter: no step without the gradients of all forward_backwards before it, and none in secret."""
    spoiled, succeeded, moved = False, 0, False
    for asked, (_, error), (_, usual) in zip(found.asked, found.answers, expected.answers, strict=True):
        if asked.owner != owner:
            continue
        match asked.op:
            case ops.ForwardBackward() | ops.Score():
                spoiled |= error is not None and not isinstance(usual, Cancelled)
            case ops.OptimStep():
                assert error is not None or not spoiled, "half of the gradients were missing"
                spoiled = False
                succeeded += error is None
            case ops.RestoreAdapter():
                moved = True
            case _:
                pass
    assert moved or num_steps in (None, succeeded)


def is_of_the_whole(place: Place) -> bool:
    """Whether what raises there may end the engine: the files that are not about one op, the beginning of what cancels,
    and what ends a failure, which cannot end its own."""
    return (
        place.caller.co_filename.removeprefix(PACKAGE) in OURS
        or place.called.co_filename.removeprefix(PACKAGE) == CONTAINMENT
        or place.called.co_name == "cancel"
        or place.caller.co_name in ("idle", "weights_in_use", "tickets")  # asked between the work on two tickets
    )


def inject(places: Sequence[Place], expected: Outcome, saved: Path, folder: Path, first: int) -> Counter[str]:
    counts = Counter[str]()
    for number, place in enumerate(places):
        error = ERRORS[(first + number) % len(ERRORS)]
        try:
            found = run(saved, folder / str(number), place, error)
            check(found, expected, error)
        except BaseException as failure:
            raise AssertionError(f"{error.__name__} at {place}: {failure!r}") from failure
        counts["contained" if found.failed is None else "ended the engine"] += 1
        if found.failed is not None and error is not KeyboardInterrupt:
            assert is_of_the_whole(place), f"{error.__name__} at {place} ended the engine"
    assert not run(saved, folder / "again").changed(expected), "the base model is as it was"
    return counts


def test_an_exception_at_some_of_the_calls_that_a_step_makes(
    without_faults: Outcome, saved: Path, tmp_path: Path
) -> None:
    places = random.Random(0).sample(list(without_faults.watch.places), 2)
    inject(places, without_faults, saved, tmp_path, 0)


def test_an_exception_while_a_running_sample_is_stopped_ends_nothing_else(
    without_faults: Outcome, saved: Path, tmp_path: Path
) -> None:
    (place,) = (
        place
        for place in without_faults.watch.places
        if place.caller.co_qualname == "Sampler.cancel" and place.called.co_name == "_take_out"
    )
    found = run(saved, tmp_path, place, RuntimeError)
    assert found.failed is None
    check(found, without_faults, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_an_exception_at_every_call_that_a_step_makes(
    share: int, without_faults: Outcome, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = list(without_faults.watch.places)
    counts = inject(places[share::NUM_SHARES], without_faults, saved, tmp_path, share)
    with capsys.disabled():
        print(f"\n{counts.total()} of {len(places)} calls raised: {dict(counts)}")  # noqa: T201  it is to be seen

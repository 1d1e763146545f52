"""Where a failure ends, and what an error keeps."""

import weakref

import pytest

from stovetop.backends.interruption import Interrupted
from stovetop.engine.containment import Contained, forget_frames


class Large:
    """What a frame refers to."""


def raised_from_each_other(kept: "list[weakref.ref[Large]]") -> None:
    """As a step that has used up its moments raises: the second error is from the first, which is raised again."""
    large = Large()
    kept.append(weakref.ref(large))
    try:
        try:
            raise ValueError("first")
        except ValueError as first:
            raise KeyError("second") from first
    except KeyError as second:
        raise (second.__cause__ or second) from None


def test_what_is_raised_ends_there_and_keeps_no_frame_even_of_errors_that_are_before_each_other() -> None:
    kept: list[weakref.ref[Large]] = []
    with Contained() as outcome:
        raised_from_each_other(kept)
    assert isinstance(outcome.error, ValueError)
    assert isinstance(outcome.error.__context__, KeyError)
    assert outcome.error.__context__.__cause__ is outcome.error
    assert kept[0]() is None
    forget_frames(outcome.error)  # again


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, MemoryError])
def test_whatever_is_raised_is_contained(error: type[BaseException]) -> None:
    with Contained() as outcome:
        raise error
    assert isinstance(outcome.error, error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
def test_what_ends_the_work_from_outside_is_not(error: type[BaseException]) -> None:
    with pytest.raises(error), Contained():
        raise error

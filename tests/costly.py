"""Tests that cost much: with less of them in `make test` than in .ci/run."""

from collections.abc import Container, Iterable
from typing import Any

import hypothesis
import pytest


def costly(quick: int) -> hypothesis.settings:
    """Of a property of which one example takes a tenth of a second or more: so many examples in `make test`; where more
    are asked for (--examples), more by the same factor."""
    return hypothesis.settings(max_examples=max(1, quick * hypothesis.settings().max_examples // 25))


def slow_but(quick: Container[Any] | int, params: Iterable[Any]) -> list[Any]:
    """For `parametrize`: all these, of which `make test` tries the quick ones alone, or so many of the first. A tuple
    has a value for each of several names."""
    params = list(params)
    assert not any(isinstance(param, type(pytest.param())) for param in params), "values, not pytest.param(...)"
    return [
        pytest.param(
            *(param if type(param) is tuple else (param,)),
            marks=[] if (index < quick if isinstance(quick, int) else param in quick) else [pytest.mark.slow],
        )
        for index, param in enumerate(params)
    ]

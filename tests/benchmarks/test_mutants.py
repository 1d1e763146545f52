"""The small changes that tests are tried with."""

import random
import sys
from pathlib import Path

import pytest

SOURCE = "def f(a, b):\n    if a < b and b > 0:\n        return a + 1\n    return [a * b, True, 'x']\n"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])


def test_a_mutant_differs_in_one_place_and_the_seed_says_in_which() -> None:
    from mutants import mutants_of

    found = mutants_of(SOURCE, 100, seed=0)
    assert len(found) == len(set(found)) == 11
    assert mutants_of(SOURCE, 4, seed=1) == mutants_of(SOURCE, 4, seed=1) != mutants_of(SOURCE, 4, seed=2)
    for mutant in found:
        compile(mutant, "mutant", "exec")
    assert "def f(a, b):\n    if a <= b and b > 0:\n        return a + 1\n    return [a * b, True, 'x']" in found


def test_arguments_nearby_have_the_same_form() -> None:
    from mutants import nearby

    call = ["f", [[1, 2.5, "ab"], {"tuple": [1, {"set": [2]}]}, True, None], {}]
    changed = [nearby(call, random.Random(seed)) for seed in range(20)]
    assert len({str(each) for each in changed}) > 5
    assert {each[0] for each in changed} == {"f"}
    assert {str(each[1][2:]) for each in changed} == {"[True, None]"}

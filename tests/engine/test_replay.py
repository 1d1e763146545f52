"""Ops are values: nothing that lives is in them, and done again, elsewhere and in other company, they give the same."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import recorded
from stovetop.engine import ops
from stovetop.types import ModelInput

PLAIN = (str, bytes, int, float, bool, type(None), Path)


def parts(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, down to the fields of dataclasses."""
    found: set[Any] = set()
    waiting = [annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        origin = typing.get_origin(kind)
        if origin is typing.Literal or kind in found or isinstance(kind, str | typing.ForwardRef):
            continue
        found.add(origin or kind)
        if "numpy" not in str(kind):
            waiting += typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            waiting += [hints[field.name] for field in dataclasses.fields(kind)]
    return found


def test_no_op_holds_anything_but_values() -> None:
    kinds = {kind for op in typing.get_args(ops.Op) for kind in parts(op)}
    assert Any not in kinds
    assert object not in kinds
    assert Callable not in kinds
    for kind in kinds:
        is_container = kind in (typing.Union, types.UnionType, list, tuple, dict) or "collections.abc" in str(kind)
        is_array = "numpy" in str(kind)
        assert kind in PLAIN or kind is ... or is_container or is_array or dataclasses.is_dataclass(kind), kind


def test_every_op_can_be_copied_and_written_down(tmp_path: Path) -> None:
    for op in recorded.one_of_each(tmp_path):
        for again in (pickle.loads(pickle.dumps(op)), copy.deepcopy(op)):
            assert type(again) is type(op)
            assert recorded.digest(again) == recorded.digest(op)


def test_a_value_of_an_op_is_told_from_another() -> None:
    first, second = (ops.ComputeLogprobs(None, ModelInput.from_ints([token])) for token in (1, 2))
    assert recorded.digest(first) != recorded.digest(second)


@pytest.mark.slow
def test_the_ops_of_a_run_done_again_in_a_fresh_process_give_the_same_bits(tmp_path: Path) -> None:
    """All submitted before the first step, and each when nothing is left to do of those before it."""
    run = recorded.record(tmp_path)
    given, found = tmp_path / "ops", tmp_path / "found"
    given.write_bytes(pickle.dumps(run.ops))
    folder = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "engine.recorded", given, found], cwd=folder, check=True, timeout=120)
    at_once, one_by_one = (recorded.Found(**each) for each in json.loads(found.read_text()))
    assert at_once == run.found
    assert one_by_one == run.found
    assert len(run.found.answers) == len(run.ops) > 70

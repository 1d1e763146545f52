"""What a stage is, and what it cannot be made of."""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, Protocol, TypedDict, TypeVar

import pytest

from processes import run_python
from stovetop.client import SamplingClient, TrainingClient
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen import stage
from stovetop.kitchen.annotations import UNKNOWN, fits, shown
from stovetop.types import Datum


class Both(NamedTuple):
    first: int
    second: list[str]


@stage(writes=("first", "second"))
async def both(seed: int, *, scale: float = 1.0) -> Both:
    """One line.

    And more.
    """
    return Both(seed, [str(scale)])


def test_a_stage_is_called_like_the_function_that_it_is_made_of() -> None:
    assert asyncio.run(both(3, scale=0.5)) == Both(3, ["0.5"])
    assert asyncio.run(both(seed=3)).second == ["1.0"]


def test_a_stage_knows_what_it_reads_and_writes() -> None:
    assert both.name == "both"
    assert dict(both.reads) == {"seed": "seed", "scale": "scale"}
    assert both.optional == {"scale"}
    assert dict(both.writes) == {"first": "first", "second": "second"}
    assert both.takes() == {"seed": int, "scale": float}
    assert both.gives() == {"first": int, "second": list[str]}
    assert both.doc == "One line."
    assert inspect.getsource(both.function).startswith("@stage")


def test_a_stage_under_another_name_reads_and_writes_other_names() -> None:
    other = both.using("other", seed="my_seed", second="words")
    assert (other.name, dict(other.reads)) == ("other", {"seed": "my_seed", "scale": "scale"})
    assert dict(other.writes) == {"first": "first", "second": "words"}
    assert other.gives() == {"first": int, "words": list[str]}
    assert both.name == "both"
    again = other.using("third", seed="seed")
    assert (dict(again.reads)["seed"], dict(again.writes)["second"]) == ("seed", "words")


def test_what_is_both_read_and_written_is_renamed_in_both() -> None:
    @stage(writes="data_D")
    async def change(data_D: list[int]) -> list[int]:
        return data_D

    other = change.using("other", data_D="test_D")
    assert (dict(other.reads), dict(other.writes)) == ({"data_D": "test_D"}, {"data_D": "test_D"})


def test_a_stage_that_makes_one_value_of_another_can_change_it_and_read_one_name_twice() -> None:
    @stage(writes="larger")
    def larger_of(one: int, other: int) -> int:
        return max(one, other)

    grow = larger_of.using("grow", one="size", other="size", larger="size")
    assert (dict(grow.reads), dict(grow.writes)) == ({"one": "size", "other": "size"}, {"larger": "size"})
    with pytest.raises(InvalidRequest, match="a stage writes each name once; stage 'other': 'second'"):
        both.using("other", first="second")


def test_a_name_that_a_stage_does_not_have_cannot_be_renamed() -> None:
    with pytest.raises(UnknownName, match="unknown name of stage 'both' 'sede'; did you mean 'seed'"):
        both.using("other", sede="my_seed")


def test_what_a_generator_yields_and_a_plain_function_returns_is_what_they_give() -> None:
    @stage(writes="pool")
    async def open_pool() -> AsyncIterator[list[int]]:
        yield [1]

    @stage
    def note(pool: list[int]) -> None: ...

    assert open_pool.opens
    assert open_pool.gives() == {"pool": list[int]}
    assert not note.opens
    assert note.gives() == {}


async def positional(seed: int, /) -> None: ...
async def several(*seeds: int) -> None: ...
async def anything(**seeds: int) -> None: ...
def generates() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [positional, several, anything, generates, lambda: None, print, Both])
def test_what_cannot_be_a_stage_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"plain parameters|a stage is made of|identifiers"):
        stage(function)


@pytest.mark.parametrize("writes", ["two words", ("a", "a"), ("a", ""), ""])
def test_what_cannot_be_a_name_is_refused(writes: str | tuple[str, ...]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"names of stages and values are identifiers|a stage writes each name once"
    ):
        stage(writes=writes)(several_fine)


def several_fine() -> None: ...


@pytest.mark.slow  # a type checker takes two seconds
def test_a_type_checker_refuses_wrong_names_and_types_of_a_direct_call_and_functions_as_nodes(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("""
from stovetop.kitchen import Workflow, stage

@stage(writes="data_D")
async def get(step: int, scale: float = 1.0) -> list[int]:
    return [step]

async def main() -> None:
    fine: list[int] = await get(1, scale=2.0)
    wrong: list[str] = await get(1)  # line 10
    await get("1")  # line 11
    await get(1, scael=2.0)  # line 12
    print(fine, wrong)

def plain() -> None: ...

Workflow("fine", get, get.using("other"))
Workflow("wrong", plain)  # line 18
""")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "reportMissingTypeStubs": false}')
    checked = run_python("-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable)
    lines = [int(line.split(":")[1]) for line in checked.stdout.splitlines() if " error: " in line]
    assert sorted(set(lines)) == [10, 11, 12, 18], checked.stdout


# ---- annotations -----------------------------------------------------------------------------------------------------


class Sized(Protocol):
    size: int

    @property
    def weight(self) -> int: ...
    def shrink(self) -> None: ...


class Box:
    def __init__(self) -> None:
        self.size = self.weight = 1

    def shrink(self) -> None: ...


class Delegating:
    def __getattr__(self, name: str) -> object: ...


class Colour(Enum):
    RED = 1


class Row(TypedDict):
    name: str


T = TypeVar("T")
Seconds = NewType("Seconds", float)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (int, int), (int, float), (bool, int), (Colour, Enum), (int, object), (int, Any), (Any, int), (T, int),
        (Annotated[int, "positive"], int), (Seconds, float), (int, int | None), (int | None, int | str | None),
        (None, int | None), (Literal["a"], str), (Literal["a"], Literal["a", "b"]), (str, Literal["a", "b"]),
        (list[int], list[int]), (list[int], Sequence[float]), (dict[str, int], Mapping[str, int]), (list, list[int]),
        (tuple[int, ...], Sequence[int]), (tuple[int, str], Sequence[int]), (Box, Sized), (Sized, Box), (Enum, Colour),
        (Both, tuple), (list[Any], list[int]), (Callable[[int], str], Callable[[int], str]), (Row, dict),
        (Delegating, Sized),
    ],
)  # fmt: skip
def test_what_may_be_right_fits(given: object, wanted: object) -> None:
    assert fits(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (int, str), (float, int), (str, int | None), (int | None, int), (None, int), (Literal["c"], Literal["a", "b"]),
        (Literal["a"], int), (int, Literal["a"]), (list[int], list[str]), (list[Datum], Sequence[int]),
        (dict[str, int], dict[str, str]), (tuple[int, ...], Sequence[str]), (list[int], int), (Colour, int),
        (SamplingClient, TrainingClient), (int, Sized), (list[int], dict[str, int]), (Annotated[str, 1], Seconds),
    ],
)  # fmt: skip
def test_what_is_wrong_for_certain_does_not_fit(given: object, wanted: object) -> None:
    assert not fits(given, wanted)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ([1], list[int], True), ([1], Sequence[str], True), (None, list[int], False), (None, int | None, True),
        (1, float, True), ("a", Literal["a"], True), (Box(), Sized, True), (3, Sized, False), (None, UNKNOWN, True),
        (object(), int, False), (True, float, True), ({}, Row, True), (1.0, int, False),
    ],
)  # fmt: skip
def test_a_value_is_compared_by_its_class(value: object, annotation: object, expected: bool) -> None:
    assert fits(type(value), annotation, exactly=True) == expected


def test_types_are_shown_as_one_writes_them() -> None:
    shapes = [list[Datum], dict[str, int | None], tuple[int, ...], Literal["a"], None, TrainingClient, UNKNOWN]
    assert [shown(shape) for shape in shapes] == [
        "list[Datum]", "dict[str, int | None]", "tuple[int, ...]", "Literal['a']", "None", "TrainingClient", "Any",
    ]  # fmt: skip

"""Traces: each task has spans of its own, which nest; what is off does nothing; what is written, others can read."""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stovetop.calls import AnsweredCall, Tokens
from stovetop.concurrency import map_together
from stovetop.tracking.trace import (
    EVENTS_FILE,
    TRACE_FILE,
    convert,
    current_tracer,
    scope,
    scope_span,
    set_scope_attributes,
    tracing,
)
from stovetop.tracking.waiting import waiting_for

Event = Mapping[str, Any]


def events_in(folder: Path) -> list[Event]:
    return [event for event in json.loads((folder / TRACE_FILE).read_text()) if event["ph"] != "M"]


def nested(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """The spans of each lane, as paths, in the order in which they begin; each end is that of the innermost."""
    open_in: dict[int, list[str]] = defaultdict(list)
    paths: list[tuple[str, ...]] = []
    for event in events:
        lane = open_in[event["tid"]]
        if event["ph"] == "B":
            lane.append(event["name"])
            paths.append(tuple(lane))
        elif event["ph"] == "E":
            assert lane.pop() == event["name"]
    assert not any(open_in.values())
    return paths


def test_tasks_that_run_at_the_same_time_have_pairs_of_their_own(tmp_path: Path) -> None:
    order = random.Random(0)

    @scope
    async def inner(number: int) -> int:
        await asyncio.sleep(order.random() / 1000)
        return number

    async def outer(number: int) -> int:
        with scope_span("outer", number=number):
            await asyncio.sleep(order.random() / 1000)
            return await inner(number) + await inner(number)

    with tracing(tmp_path):
        assert asyncio.run(map_together(outer, range(40), limit=7)) == [2 * number for number in range(40)]
    paths = nested(events_in(tmp_path))
    name = inner.__qualname__
    assert paths.count(("outer",)) == 40
    assert paths.count(("outer", name)) == 80
    assert {event["tid"] for event in events_in(tmp_path)} <= set(range(1, 8))  # lanes are used again


def test_off_it_does_nothing(tmp_path: Path) -> None:
    @scope
    def double(number: int) -> int:
        set_scope_attributes(number=number)
        return 2 * number

    with scope_span("a"):
        assert double(2) == 4
    assert current_tracer() is None
    assert convert(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_span_tells_its_attributes_and_what_was_raised_in_it(tmp_path: Path) -> None:
    def fail() -> None:
        with scope_span("outer", step=3), scope_span("inner"):
            set_scope_attributes(reward=1.0)
            raise ValueError

    with tracing(tmp_path), pytest.raises(ValueError):  # noqa: PT011  it has no words
        fail()
    told = [event.get("args") for event in events_in(tmp_path)]
    assert told == [{"step": 3}, None, {"reward": 1.0, "error": "ValueError"}, {"error": "ValueError"}]


def test_what_a_run_waits_for_is_a_span_of_a_short_name(tmp_path: Path) -> None:
    with tracing(tmp_path), waiting_for("group %s of %s, %s", 3, 16, "a builder"), waiting_for("%s: an answer", "env"):
        pass
    assert nested(events_in(tmp_path)) == [("group",), ("group", "an answer")]
    assert events_in(tmp_path)[0]["args"] == {"what": "group 3 of 16, a builder"}


def test_calls_of_a_service_overlap_in_a_lane_of_their_own(tmp_path: Path) -> None:
    with tracing(tmp_path) as tracer:
        tracer.call(AnsweredCall("sample", 10.0, 12.0, Tokens(5, 2, 3)))
        tracer.call(AnsweredCall("sample", 11.0, 13.0, Tokens()))
    begun, ended, other, _ = events_in(tmp_path)
    assert (begun["ph"], ended["ph"], begun["id"]) == ("b", "e", ended["id"])
    assert (begun["ts"], ended["ts"]) == (10_000_000, 12_000_000)
    assert begun["args"] == {"computed": 5, "cached": 2, "drawn": 3}
    assert other["id"] != begun["id"]


def test_what_a_killed_run_has_left_is_converted_with_what_comes_after_it(tmp_path: Path) -> None:
    with tracing(tmp_path), scope_span("before"):
        pass
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"ph": "B", "na')
    with tracing(tmp_path), scope_span("after"):
        pass
    assert nested(events_in(tmp_path)) == [("before",), ("after",)]


@dataclass(frozen=True)
class Config:
    """A config."""


def test_a_run_with_the_flag_has_a_trace_with_its_stages_and_one_without_has_none(tmp_path: Path) -> None:
    from stovetop.runs import open_run

    for enable_trace in (False, True):
        path = tmp_path / str(enable_trace)
        with open_run(path, Config(), console=False, enable_trace=enable_trace), scope_span("mine"):
            pass
        assert (path / TRACE_FILE).exists() == enable_trace
    assert nested(events_in(tmp_path / "True")) == [("mine",)]

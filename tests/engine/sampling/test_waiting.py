"""What waits costs a step nothing, and has its turn."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from engine import tiny
from engine.sampling import traffic
from engine.sampling.traffic import PREFIX, Asked, Traffic, asked
from stovetop.engine.sampling import admission
from stovetop.engine.sampling.prefix_cache import PrefixCache

LONG = tiny.tokens(200, 5)


def lines_of(step: Callable[[], object]) -> int:
    """How many lines of Python a step executes, each turn of a loop counted."""
    count = 0

    def trace(_: FrameType, event: str, __: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


KINDS: dict[str, Callable[[int], Asked]] = {
    "prompts that differ": lambda number: asked([number % 500, *tiny.tokens(99, number)], max_tokens=100),
    "prompts that begin alike": lambda number: asked([*PREFIX, *tiny.tokens(20, number)], max_tokens=100),
    "the same prompt": lambda number: asked(LONG, max_tokens=50, seed=number),
    "logprobs": lambda number: traffic.scored([number % 500, *tiny.tokens(99, number)]),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_step_costs_the_same_however_much_waits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_RUNNING", 3)
    lines: list[int] = []
    for waiting in (20, 400):
        found = Traffic(traffic.sampler(1000))
        found.ask(asked([1, 2, 3], 3, 200))  # takes all places, for long
        if kind == "logprobs":
            found.ask(traffic.scored(LONG))
        found.step()
        for number in range(waiting):
            found.ask(KINDS[kind](number))
        for _ in range(2):
            found.step()
        lines.append(lines_of(found.step))
    assert lines[1] == pytest.approx(lines[0], rel=0.02)


def test_prompts_are_begun_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    original = PrefixCache.longest_match
    monkeypatch.setattr(
        PrefixCache,
        "longest_match",
        lambda self, prompt: (begun.append(prompt.request.ticket.number), original(self, prompt))[1],
    )
    found = Traffic(traffic.sampler(600))
    for number in range(12):
        found.ask(asked(tiny.tokens(30 + 17 * number % 60, number), 2, 20, seed=number))
    found.run()
    firsts = list(dict.fromkeys(begun))
    assert firsts == sorted(firsts)


def test_weights_are_in_use_as_long_as_a_request_needs_them() -> None:
    found = Traffic(traffic.sampler(1000))
    first, second = (found.ask(asked(tiny.tokens(9, n), 1, 3 + n, 0)) for n in range(2))
    other = found.ask(asked(tiny.tokens(9, 2), 1, 9, 1))
    assert set(map(id, found.sampler.weights_in_use())) == {id(traffic.adapter(0)), id(traffic.adapter(1))}
    while not {first, second} <= set(found.answers):
        found.step()
    assert list(found.sampler.weights_in_use()) == [traffic.adapter(1)]
    assert found.sampler.cancel(other)
    assert list(found.sampler.weights_in_use()) == []
    assert not found.sampler.cancel(other)

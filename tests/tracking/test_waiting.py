"""What is said of a run that stands still."""

import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest

from stovetop.concurrency import together
from stovetop.tracking.waiting import STALL_AFTER_S, Watch, waiting_for


@dataclass
class Clock:
    now_s: float = 0.0
    said: list[str] = field(default_factory=list[str])

    def watch(self, after_s: float = 10.0) -> Watch:
        return Watch(after_s, say=self.said.append, clock=lambda: self.now_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_innermost_of_what_has_begun_is_named_with_where_it_is_and_since_when(clock: Clock) -> None:
    watch = clock.watch()
    with watch.on(), waiting_for("stage %s", "roll"):
        clock.now_s = 3.0
        with waiting_for("group %s of %s", 1, 8), waiting_for("step %s", 0):
            clock.now_s = 13.5
            watch.look()
    assert clock.said == [
        "nothing has gone on for 10 s. What is waited for:\n  stage roll > group 1 of 8 > step 0: for 10 s"
    ]


def test_whatever_begins_or_ends_is_progress(clock: Clock) -> None:
    watch = clock.watch()
    with watch.on(), waiting_for("a stage"):
        for _ in range(5):
            clock.now_s += 9.0
            watch.look()
            with waiting_for("a group"):
                pass
    assert clock.said == []


def test_it_is_said_again_when_it_has_lasted_twice_as_long(clock: Clock) -> None:
    watch = clock.watch()
    with watch.on(), waiting_for("a stage"):
        for _ in range(45):
            clock.now_s += 1.0
            watch.look()
        assert [said.partition(".")[0] for said in clock.said] == [
            f"nothing has gone on for {seconds} s" for seconds in (10, 20, 40)
        ]
        with waiting_for("a group"):
            pass
        clock.now_s += 10.0
        watch.look()
    assert len(clock.said) == 4


def test_tasks_are_within_what_made_them_and_only_so_many_are_listed(clock: Clock) -> None:
    watch = clock.watch()

    async def play(index: int) -> None:
        with waiting_for("group %s", index):
            await asyncio.sleep(0.01)
            if index == 0:
                clock.now_s = 11.0
                watch.look()

    async def main() -> None:
        with waiting_for("stage"):
            await together(play(index) for index in range(13))

    with watch.on():
        asyncio.run(main())
    [said] = clock.said
    assert said.count("\n  stage > group ") == 10
    assert said.endswith("\n  and 3 more")


def test_an_object_is_shown_in_short_and_only_when_it_is_said(clock: Clock) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no")

    watch = clock.watch()
    with watch.on(), waiting_for("%s and %s", Broken(), range(10**6)), waiting_for("%s", ["x" * 1000]):
        clock.now_s = 20.0
        watch.look()
    [first, second] = clock.said[0].splitlines()[1].split(" > ")
    assert first == "  a Broken and range(0, 1000000)"
    assert second.startswith("['xxx")
    assert len(second) < 200


def test_a_watch_within_another_speaks_for_both(clock: Clock) -> None:
    """That of a phase, within that of the whole run, to which nothing happens meanwhile."""
    whole, phase = clock.watch(after_s=10.0), clock.watch(after_s=20.0)
    with whole.on():
        with phase.on(), waiting_for("a step"):
            clock.now_s = 15.0
            whole.look()
            phase.look()
            assert clock.said == []
            clock.now_s = 21.0
            whole.look()
            phase.look()
            assert clock.said == ["nothing has gone on for 21 s. What is waited for:\n  a step: for 21 s"]
        clock.now_s = 30.0
        whole.look()
        assert len(clock.said) == 1  # the end of a phase is progress
        clock.now_s = 31.0
        whole.look()
        assert len(clock.said) == 2


def test_where_nothing_watches_nothing_is_kept(clock: Clock) -> None:
    watch = clock.watch()
    with waiting_for("before"):
        with watch.on():
            pass
        with waiting_for("after"):
            clock.now_s = 20.0
            watch.look()
    assert clock.said == ["nothing has gone on for 20 s. What is waited for:"]


def test_a_thread_sees_that_everything_stands_still_and_ends_with_the_watch() -> None:
    said: list[str] = []
    with Watch(0.05, say=said.append).on(), waiting_for("a step that sleeps without await"):
        time.sleep(0.2)
    assert "a step that sleeps without await: for 0 s" in said[0]
    assert not any(thread.name == "watch of progress" for thread in threading.enumerate())


def test_the_stated_time_is_five_minutes() -> None:
    assert STALL_AFTER_S == 300.0

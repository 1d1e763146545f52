"""The number of threads: found by trying, and fewer while other programs want the processors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine import tiny
from stovetop.engine import threads
from stovetop.engine.machine import Processors, processors, set_threads_here
from stovetop.engine.model import exactness
from stovetop.engine.model.adopting import adopt
from stovetop.engine.ops import ForwardBackward, Sample
from stovetop.engine.threads import LONGEST_PAUSE_S, Threads
from stovetop.losses import CrossEntropy
from stovetop.types import ModelInput, SamplingParams


def test_the_fastest_number_is_chosen_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    monkeypatch.setattr(threads, "_rate", lambda number, seconds: {1: 10.0, 2: 17.0, 4: 9.0}[number])
    try:
        assert threads.fastest_threads(seconds=1.0) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_trial_counts_work_per_second_on_so_many_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert threads._rate(1, 0.01) > 0  # pyright: ignore[reportPrivateUsage]  the measuring itself
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


class Machine:
    """Processors on which other programs are busy, and a clock."""

    def __init__(self, number: int) -> None:
        self.number, self.busy = number, 0.0
        self.grants_one = False  # the process gets the time of one processor, however many rest
        self.now_s = self.waited_s = self.idle_s = 0.0
        self.chosen: list[int] = []
        self.threads = Threads(number, self.counters, self.chosen.append, lambda: self.now_s)

    def counters(self) -> Processors:
        return Processors({"1": self.waited_s, "2": 0.0}, self.idle_s)

    def run(self, seconds: float) -> None:
        """Steps of a tenth of a second in which all threads compute."""
        for _ in range(round(10 * seconds)):
            free = self.number - self.busy - self.threads.number
            if self.grants_one:
                self.waited_s += 0.1 * (self.threads.number - 1)
                free = 1
            self.now_s += 0.1
            self.waited_s += 0.1 * max(0.0, -free) / 2
            self.idle_s += 0.1 * max(0.0, free)
            self.threads.look()


def test_a_thread_less_for_each_processor_that_others_keep_busy_and_all_again_afterwards() -> None:
    machine = Machine(4)
    machine.run(10)
    assert machine.chosen == []
    machine.busy = 1.0
    machine.run(1)
    assert machine.threads.number == 3
    machine.busy = 3.0
    machine.run(1)
    assert machine.threads.number == 1
    machine.run(30)
    assert machine.threads.number == 1, "there is always one, and no more while all processors have something to do"
    machine.busy = 0.0
    machine.run(3)
    assert machine.threads.number == 4


def test_more_threads_that_were_too_many_are_tried_more_and_more_seldom() -> None:
    """Of a control group that allows less time than the system's idle processors promise."""
    machine = Machine(2)
    machine.grants_one = True
    machine.run(600)
    rises = machine.chosen.count(2)
    assert 5 < rises < 20
    assert rises < 600 / LONGEST_PAUSE_S + 8


def test_a_system_that_does_not_tell_keeps_the_number() -> None:
    chosen: list[int] = []
    own = Threads(4, lambda: None, chosen.append)
    own.look()
    assert chosen == []
    assert processors(lambda path: None) is None


def test_the_systems_counters_are_read_for_the_processors_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3}, raising=False)
    stat = "cpu  9 9 9 999 9\ncpu0 1 2 3 100 5\ncpu1 1 2 3 200 5\ncpu3 1 2 3 400 5\nintr 7\n"
    found = processors(lambda path: stat if path == "/proc/stat" else "5000000000 2500000000 17\n")
    if found is not None:  # Linux has /proc/self/task
        assert found.idle_s == 6.0
        assert set(found.waited_s.values()) == {2.5}


def test_a_system_that_cannot_open_one_more_file_keeps_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: str) -> list[str]:
        raise OSError(24, "Too many open files", path)

    monkeypatch.setattr("os.listdir", listdir)
    assert processors() is None


def test_counters_that_could_not_be_read_once_are_read_again() -> None:
    machine = Machine(4)
    told = iter([machine.counters(), None])
    machine.threads = Threads(4, lambda: next(told, machine.counters()), machine.chosen.append, lambda: machine.now_s)
    machine.busy = 1.0
    machine.run(2)
    assert machine.chosen == [3]


def test_a_thread_that_begins_under_the_name_of_one_that_ended_hides_no_other() -> None:
    waits = iter([{"1": 100.0, "2": 0.0}, {"1": 0.0, "2": 1.0}])
    chosen: list[int] = []
    times_s = iter([0.0, 0.0, 1.0])
    own = Threads(4, lambda: Processors(next(waits), 0.0), chosen.append, lambda: next(times_s))
    own.look()
    assert chosen == [3]


def test_the_number_is_that_of_the_engines_thread_and_of_none_that_begins_later() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before)
    with ThreadPoolExecutor(1) as engine, ThreadPoolExecutor(1) as later:
        engine.submit(set_threads_here, before + 1).result()
        assert engine.submit(torch.get_num_threads).result() == before + 1
        assert later.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_deterministic_mode_trains_on_all_threads_for_gradients_round_otherwise_on_fewer(
    deterministic: bool,
) -> None:
    chosen: list[int] = []
    own = Threads(4, lambda: None, chosen.append)
    own.number = 2  # others have the rest
    base = tiny.base_model() if deterministic else adopt(tiny.llama(), "", fingerprint="", deterministic=False)
    engine = tiny.Engine(base, threads=own)
    prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=2, seed=0)
    tiny.run(engine, Sample(None, prompt, 1, params, False, 0))
    assert chosen == []
    tiny.run(engine, ForwardBackward(tiny.trained_adapter(engine), [tiny.datum([1, 2, 3])], CrossEntropy()))
    assert chosen == ([4, 2] if deterministic else [])


def test_a_model_that_loads_is_tried_on_several_numbers_in_its_own_thread_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before)
    with ThreadPoolExecutor(1) as loader:
        tried = loader.submit(lambda: list(number_and_that_of_new_threads(4))).result()
        assert loader.submit(torch.get_num_threads).result() == 4
    assert set(tried) == {(1, before), (2, before), (4, before)}


def number_and_that_of_new_threads(number: int) -> Iterator[tuple[int, int]]:
    set_threads_here(number)
    for _ in exactness._on_threads([0]):  # pyright: ignore[reportPrivateUsage]  what a check goes through
        with ThreadPoolExecutor(1) as new:
            yield torch.get_num_threads(), new.submit(torch.get_num_threads).result()


def test_a_process_that_may_begin_no_thread_keeps_the_number_and_tries_again() -> None:
    def choose(number: int) -> None:
        raise RuntimeError("can't start new thread")

    machine = Machine(4)
    machine.threads = Threads(4, machine.counters, choose, lambda: machine.now_s)
    machine.busy = 1.0
    machine.run(1)
    assert machine.threads.number == 4
    machine.threads._choose = machine.chosen.append  # pyright: ignore[reportPrivateUsage]  there is room again
    machine.run(1)
    assert machine.threads.number == 3

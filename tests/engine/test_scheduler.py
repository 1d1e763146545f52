"""What runs next: order within an adapter, turns between queues, the filling of passes. No engine, no tensor."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stovetop.engine import ops
from stovetop.engine.scheduler import MAX_CANDIDATES, Scheduler
from stovetop.losses import CrossEntropy
from stovetop.types import AdamParams, LoraConfig

PASS = 100  # tokens of one at most
LOSS = CrossEntropy()


def forward(adapter: str, queue: str | None = None) -> ops.Op:
    return ops.Forward(ops.AdapterId(adapter), [], LOSS, queue=queue)


def backward(adapter: str, queue: str | None = None) -> ops.Op:
    return ops.ForwardBackward(ops.AdapterId(adapter), [], LOSS, queue=queue)


def step(adapter: str, queue: str | None = None) -> ops.Op:
    return ops.OptimStep(ops.AdapterId(adapter), AdamParams(), queue=queue)


def score(adapter: str, queue: str | None = None) -> ops.Op:
    return ops.Score(ops.AdapterId(adapter), [], ops.ScoreId("s"), queue=queue)


def freeze(adapter: str, queue: str | None = None) -> ops.Op:
    return ops.Freeze(ops.AdapterId(adapter), ops.WeightsId("w"), queue=queue)


def turns(
    passes_of: list[tuple[ops.Op, list[int]]], *, share_passes: bool = True, limit: int = PASS
) -> list[list[int]]:
    """The turns in which ops run that are there from the start, as numbers in the order of submission."""
    scheduler = Scheduler(limit, share_passes=share_passes)
    for number, (op, passes) in enumerate(passes_of):
        scheduler.add(ops.Ticket(number, op), passes)
    found = []
    while turn := scheduler.next_turn():
        found.append([ticket.number for ticket in turn])
    assert scheduler.idle
    return found


def test_what_is_ready_of_other_adapters_runs_along_and_nothing_overtakes_its_own() -> None:
    given = [
        (backward("a"), [10]),
        (step("a"), []),
        (backward("b"), [10]),
        (step("b"), []),
        (backward("a"), [10]),
        (backward("c"), [10]),
        (freeze("c"), []),
        (step("a"), []),
    ]
    assert turns(given) == [[0, 2, 5], [3, 1], [6], [4], [7]]
    assert turns(given, limit=20) == [[0, 2], [5], [3, 1], [6], [4], [7]]
    assert turns(given, share_passes=False) == [[0], [2], [5], [1, 3], [6], [4], [7]]


@pytest.mark.parametrize("share_passes", [False, True])
@pytest.mark.parametrize("queues", [("A", "B"), (None, None)])
def test_with_100_operations_queued_by_one_the_first_of_another_begins_within_two_turns(
    share_passes: bool, queues: tuple[str | None, str | None]
) -> None:
    """Whether these are of one adapter or of many, whose passes are full; a queue is an owner's, or an adapter's."""
    first, second = queues
    for num_adapters in (1, 5) if first else (1,):
        given = [(backward(f"a{number % num_adapters}", first), [PASS, PASS]) for number in range(100)]
        assert [100] in turns([*given, (backward("b", second), [PASS])], share_passes=share_passes)[:2]


def test_an_op_in_several_passes_takes_turns_with_the_others() -> None:
    given = [(backward("a"), [PASS] * 3), (backward("b"), [PASS]), (backward("c"), [PASS])]
    assert turns(given) == [[0], [1], [2], [0], [0]]


def test_the_rest_of_a_pass_is_filled_by_the_same_queue_first_and_then_by_the_next_ones() -> None:
    given = [
        (backward("a1", "A"), [40]),
        (backward("b", "B"), [30]),
        (backward("a2", "A"), [50]),
        (backward("c", "C"), [10]),
    ]
    assert turns(given) == [[0, 2, 3], [1]]


def test_small_passes_that_run_along_with_others_keep_no_op_of_the_same_queue_from_its_turn() -> None:
    """b1 always fits beside a; b2 never does."""
    scheduler, ran = Scheduler(PASS, share_passes=True), []
    large = ops.Ticket(0, backward("b2", "B"))
    scheduler.add(large, [PASS])
    for number in range(1, 40, 2):
        scheduler.add(ops.Ticket(number, backward("a", "A")), [50])
        scheduler.add(ops.Ticket(number + 1, backward("b1", "B")), [10])
        ran += scheduler.next_turn()
        if large in ran:
            return
    raise AssertionError("its turn never came")


@pytest.mark.parametrize("share_passes", [False, True])
def test_queues_whose_ops_differ_tenfold_in_size_get_the_same_tokens(share_passes: bool) -> None:
    """An owner's are in one queue: one of these has ten adapters. Each trains: two passes, then a step."""
    rng = random.Random(0)
    sizes = {f"owner {number}": rng.choice([5, 15, 50]) for number in range(16)}
    scheduler, tokens, numbers = Scheduler(PASS, share_passes=share_passes), Counter[str](), iter(range(10**6))
    sizes_of = dict[int, int]()

    def train(owner: str, adapter: str) -> None:
        for _ in range(20 * 50 // sizes[owner]):
            for op in (backward(adapter, owner), backward(adapter, owner), step(adapter, owner)):
                ticket = ops.Ticket(next(numbers), op)
                sizes_of[ticket.number] = 0 if isinstance(op, ops.OptimStep) else sizes[owner]
                scheduler.add(ticket, [sizes[owner]] if sizes_of[ticket.number] else [])

    for owner in sizes:
        for index in range(10 if owner == "owner 7" else 1):
            train(owner, f"{owner}, {index}")
    while max(tokens.values(), default=0) < 1000:
        for ticket in scheduler.next_turn():
            tokens[ops.queue_of(ticket.op)] += sizes_of[ticket.number]
    jain = tokens.total() ** 2 / (len(sizes) * sum(each**2 for each in tokens.values()))
    assert jain > 0.98


def test_a_queue_with_large_ops_does_not_run_along_for_ever_where_all_fit_into_one_pass() -> None:
    """An adapter has one op at a time, so one with small ops cannot have more tokens in a pass."""
    scheduler, tokens, sizes = Scheduler(PASS, share_passes=True), Counter[str](), {"small": 1, "large": 10}
    for number in range(4000):
        queue = "small" if number % 2 else "large"
        scheduler.add(ops.Ticket(number, backward(queue, queue)), [sizes[queue]])
    for _ in range(1000):
        for ticket in scheduler.next_turn():
            tokens[ops.queue_of(ticket.op)] += sizes[ops.queue_of(ticket.op)]
    assert tokens["small"] > 800
    assert abs(tokens["small"] - tokens["large"]) <= PASS + 10


def test_a_queue_that_was_empty_has_no_more_to_get_than_one_that_comes() -> None:
    scheduler, ran = Scheduler(PASS, share_passes=False), []
    for number in range(10):
        scheduler.add(ops.Ticket(number, backward("busy", "busy")), [PASS])
    for _ in range(5):
        scheduler.next_turn()
    for number in range(10, 20):
        scheduler.add(ops.Ticket(number, backward("idle", "idle")), [PASS])
    while turn := scheduler.next_turn():
        ran += [ticket.number >= 10 for ticket in turn]
    assert ran[:10] == [True, False] * 5


def test_after_a_score_its_adapter_waits_until_it_is_known_what_became_of_the_loss() -> None:
    scheduler, name = Scheduler(PASS, share_passes=True), ops.ScoreId("s")
    scored, later = ops.Ticket(1, score("a")), ops.Ticket(2, step("a"))
    scheduler.add(scored, [10])
    scheduler.add(later)
    assert scheduler.next_turn() == [scored]
    scheduler.hold(ops.AdapterId("a"), name)
    assert scheduler.idle
    assert scheduler.next_turn() == []
    answer = ops.Ticket(3, ops.BackwardFrom(ops.AdapterId("a"), name, []))
    scheduler.add(answer, [10])
    assert scheduler.next_turn() == [answer]
    assert scheduler.next_turn() == [later]


def test_an_answer_that_is_there_before_its_score_is_done_runs_behind_it() -> None:
    scheduler, name = Scheduler(PASS, share_passes=True), ops.ScoreId("s")
    answer = ops.Spoil(ops.AdapterId("a"), "refused", name)
    tickets = [ops.Ticket(number, op) for number, op in enumerate([score("a"), step("a"), answer])]
    for ticket in tickets:
        scheduler.add(ticket, [10] if ticket.number == 0 else [])
    assert scheduler.next_turn() == [tickets[0]]
    scheduler.hold(ops.AdapterId("a"), name)
    assert scheduler.next_turn() == [tickets[2]]
    assert scheduler.next_turn() == [tickets[1]]


# ---- any traffic -----------------------------------------------------------------------------------------------------

KINDS = {"forward": forward, "backward": backward, "step": step, "freeze": freeze, "score": score}


@dataclass(slots=True)
class Followed:
    """A scheduler under random traffic, and what has to hold of it."""

    share_passes: bool
    scheduler: Scheduler = field(init=False)
    tickets: dict[str, list[ops.Ticket]] = field(default_factory=dict)  # that are left, by adapter, in their order
    left: dict[ops.Ticket, list[int]] = field(default_factory=dict)  # passes
    begun: set[ops.Ticket] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    passed_over: Counter[str] = field(default_factory=Counter[str])  # tokens of others while a queue was ready
    num_added: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(PASS, share_passes=self.share_passes)

    def add(self, op: Any, passes: list[int], *, first: bool = False) -> None:
        ticket = ops.Ticket(self.num_added, op)
        self.num_added += 1
        self.tickets.setdefault(op.adapter, []).insert(0 if first else len(self.tickets.get(op.adapter, [])), ticket)
        self.left[ticket] = passes
        self.scheduler.add(ticket, passes)

    def answer(self, adapter: str) -> None:
        """What became of a custom loss."""
        self.held.discard(adapter)
        self.add(ops.Spoil(ops.AdapterId(adapter), "", ops.ScoreId("s")), [], first=True)

    def ready(self) -> dict[str, list[ops.Ticket]]:
        found: dict[str, list[ops.Ticket]] = {}
        for adapter, tickets in self.tickets.items():
            if tickets and adapter not in self.held:
                found.setdefault(ops.queue_of(tickets[0].op), []).append(tickets[0])
        return found

    def forget(self, ticket: ops.Ticket) -> None:
        self.tickets[str(getattr(ticket.op, "adapter"))].remove(ticket)  # noqa: B009
        del self.left[ticket]

    def turn(self, fails: bool) -> None:
        ready = self.ready()
        turn = self.scheduler.next_turn()
        assert bool(turn) == bool(ready)
        if not turn:
            return
        all_ready = [ticket for tickets in ready.values() for ticket in tickets]
        assert all(ticket in all_ready for ticket in turn), "each is the next of its adapter"
        assert len(set(turn)) == len(turn) <= 1 + MAX_CANDIDATES
        assert len({type(ticket.op) for ticket in turn}) == 1
        tokens = sum(self.left[ticket][0] for ticket in turn if self.left[ticket])
        assert tokens <= PASS
        if not self.share_passes:
            assert len(turn) == 1 or isinstance(turn[0].op, ops.OptimStep)
        leader = ops.queue_of(turn[0].op)
        assert turn[0].number == min(ticket.number for ticket in ready[leader]), "the oldest of its queue"
        served = {ops.queue_of(ticket.op) for ticket in turn}
        for queue in ready:
            self.passed_over[queue] = 0 if queue in served else self.passed_over[queue] + tokens
            # it begins where its own last pass ended, and each of the others may begin a pass until then, or run along
            assert self.passed_over[queue] <= 3 * NUM_QUEUES * PASS, "a turn in each round"
        for ticket in turn:
            self.begun.add(ticket)
            del self.left[ticket][:1]
            if fails and ticket is turn[-1]:
                self.scheduler.end(ticket)
                self.forget(ticket)
            elif not self.left[ticket]:
                self.forget(ticket)
                op = ticket.op
                if isinstance(op, ops.Score):
                    self.scheduler.hold(op.adapter, op.scored)
                    self.held.add(op.adapter)

    def cancel(self, ticket: ops.Ticket) -> None:
        assert self.scheduler.cancel(ticket) == (ticket not in self.begun)
        if ticket not in self.begun:
            self.forget(ticket)


NUM_QUEUES = 4
PASSES = st.lists(st.integers(1, PASS), min_size=1, max_size=3)


@given(st.booleans(), st.randoms(use_true_random=False), st.lists(PASSES, min_size=5, max_size=60))
def test_whatever_comes_order_is_kept_passes_are_bounded_every_queue_has_its_turn_and_nothing_is_lost(
    share_passes: bool, chosen: random.Random, passes: list[list[int]]
) -> None:
    """Ops come, are cancelled, fail and hold their adapters at random moments. Queues are owners with several adapters,
    one of which sends its ops in the name of two."""
    followed = Followed(share_passes)
    for own in passes:
        owner, kind = chosen.randrange(NUM_QUEUES - 1), chosen.choice(list(KINDS))
        queue = f"queue {NUM_QUEUES - 1 if owner == 0 and chosen.random() < 0.3 else owner}"
        op = KINDS[kind](f"adapter {owner}.{chosen.randrange(3)}", queue)
        followed.add(op, own if isinstance(op, ops.PassesOp) else [])
        for _ in range(chosen.choice([0, 0, 1, 2])):
            followed.turn(fails=chosen.random() < 0.1)
        if followed.left and chosen.random() < 0.2:
            followed.cancel(chosen.choice(list(followed.left)))
        if followed.held and chosen.random() < 0.5:
            followed.answer(chosen.choice(sorted(followed.held)))
    while followed.left:
        if followed.scheduler.idle:
            followed.answer(min(followed.held))
        followed.turn(fails=False)
    assert followed.scheduler.idle
    assert followed.scheduler.next_turn() == []


def seconds_a_turn(num_queued: int, num_adapters: int) -> float:
    scheduler = Scheduler(PASS, share_passes=True)
    for number in range(num_queued):
        name = ops.AdapterId(f"adapter {number % num_adapters}")
        scheduler.add(ops.Ticket(number, ops.CreateAdapter(name, LoraConfig())))
    times = []
    for _ in range(200):
        begin_s = time.perf_counter()
        scheduler.next_turn()
        assert not scheduler.idle
        times.append(time.perf_counter() - begin_s)
    return sorted(times)[100]


@pytest.mark.parametrize("num_adapters", [1, 10_000])
def test_a_turn_costs_the_same_however_much_is_queued(num_adapters: int) -> None:
    """10,000 ops against 300; medians, and far from the 30 times that going through them would take."""
    few = seconds_a_turn(300, min(num_adapters, 300))
    assert seconds_a_turn(10_000, num_adapters) < 5 * few + 20e-6


def test_ten_thousand_ops_are_cancelled_in_no_time() -> None:
    scheduler = Scheduler(PASS, share_passes=True)
    tickets = [ops.Ticket(number, backward("a")) for number in range(10_000)]
    for ticket in tickets:
        scheduler.add(ticket, [PASS])
    begin_s = time.perf_counter()
    assert all(scheduler.cancel(ticket) for ticket in reversed(tickets))
    assert scheduler.idle
    assert time.perf_counter() - begin_s < 2


def test_saves_of_many_adapters_that_wait_at_the_gate_are_asked_for_once_a_turn() -> None:
    scheduler, asked = Scheduler(PASS, share_passes=True), list[ops.Ticket]()

    def no_room(ticket: ops.Ticket) -> bool:
        asked.append(ticket)
        return False

    scheduler.may_begin = no_room
    saves = [
        ops.Ticket(number, ops.SaveAdapter(ops.AdapterId(f"saving {number}"), Path("s"), {}, True, False))
        for number in range(300)
    ]
    steps = [ops.Ticket(300 + number, step("b")) for number in range(3)]
    for ticket in (*saves, *steps):
        scheduler.add(ticket)
    assert [scheduler.next_turn() for _ in steps] == [[ticket] for ticket in steps]
    assert asked == [saves[0]] * len(steps)
    assert scheduler.idle
    scheduler.may_begin = lambda ticket: True
    assert [scheduler.next_turn() for _ in saves] == [[ticket] for ticket in saves]

"""A failure belongs to the request that caused it: whatever raises where, every ticket is answered once, and those that
did not cause it are answered as if nothing had been, to the bit."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from costly import costly, slow_but
from engine import tiny
from engine.sampling import traffic
from engine.sampling.traffic import PREFIX, Traffic, asked, at_call, fail_at, scored
from stovetop.backends.interruption import Interrupted
from stovetop.checks import unchecked
from stovetop.engine import ops
from stovetop.engine.kernels.attention_plans import CachedAttention, PrefillAttention
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.shared_prefix import SharedPrefixes
from stovetop.engine.lora.routing import Stack
from stovetop.engine.model import base_model
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling import batch, prompts, sampler
from stovetop.engine.sampling.admission import Admission
from stovetop.engine.sampling.batch import Batch
from stovetop.engine.sampling.halves import in_halves
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.kv_memory import KVMemory
from stovetop.engine.sampling.not_finite import Culprits
from stovetop.engine.sampling.prefix_cache import PrefixCache
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.request import Request, Running
from stovetop.engine.sampling.sampler import Sampler
from stovetop.engine.sampling.stops import Stops
from stovetop.errors import InvalidRequest
from stovetop.types import SamplingParams

COUNT = 6


class Panic(BaseException):
    """No Exception, like the panics of a library in Rust."""


PLACES: list[tuple[Any, str]] = [
    (BaseModel, "hidden_states_of"),
    (BaseModel, "head"),
    (PrefillAttention, "attend"),
    (CachedAttention, "attend"),
    (batch, "draw"),
    (prompts, "_found"),
    (sampler, "stops_of"),
    (Stops, "hit"),
    (Running, "next_uniform"),
    (Running, "result"),
    (Request, "answer"),
    (Request, "stream"),
    (Prompts, "_start"),
    (Prompts, "_taken"),
    (Prompts, "_twins"),
    (PrefixCache, "add"),
    (Batch, "fill_slots"),
    (Batch, "remove"),
    (SharedPrefixes, "join"),
    (SharedPrefixes, "leave"),
    (KVCache, "copy_from"),
    (KVMemory, "reserve"),
    (KVMemory, "make"),
    (Sampler, "_settle"),
    (Sampler, "_take_out"),
    (Admission, "remove"),
    (Admission, "_preempt"),
    (Admission, "admit"),
    (Admission, "_begin"),
]
ERRORS = {"an error": RuntimeError("a bug"), "a panic": Panic("a bug"), "memory": traffic.out_of_memory()}


@pytest.fixture(scope="module", autouse=True)
def known_beforehand() -> None:
    """What no fault is raised in: the model, and what requests give alone."""
    for seed in range(3):
        traffic.expected(seed, COUNT)


def is_as_alone(found: Traffic, seed: int) -> bool:
    """All that did not fail."""
    pairs = zip(found.tickets, traffic.expected(seed, COUNT), strict=True)
    kept = [(ticket, result) for ticket, result in pairs if ticket not in found.errors]
    return all(traffic.plain(found.answers[ticket].result) == result for ticket, result in kept)


@costly(8)
@given(st.sampled_from(PLACES), st.sampled_from(sorted(ERRORS)), st.integers(0, 60), st.integers(0, 2))
def test_what_raises_once_anywhere_fails_one_request_at_most(
    place: tuple[Any, str], kind: str, call: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, *place, at_call(call), ERRORS[kind])
        found = traffic.together(traffic.random_requests(seed, COUNT), seed=seed)
    assert set(found.answers) == set(found.tickets)
    assert list(found.errors.values()) in ([], [ERRORS[kind]])
    assert is_as_alone(found, seed)
    assert traffic.nothing_is_left(found.sampler)


@costly(4)
@given(st.sampled_from(PLACES), st.sampled_from(["an error", "a panic"]), st.integers(0, 2))
def test_what_raises_always_fails_all_and_the_next_ones_are_answered(
    place: tuple[Any, str], kind: str, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, *place, lambda *_, **__: True, ERRORS[kind])
        found = traffic.together(traffic.random_requests(seed, 4), seed=seed)
    assert set(found.answers) == set(found.tickets)
    assert set(found.errors.values()) <= {ERRORS[kind]}
    again = found.ask(asked(tiny.tokens(12, 0), 2, seed=4))
    found.run()
    assert traffic.plain(found.answers[again].result) == traffic.alone(asked(tiny.tokens(12, 0), 2, seed=4))


@given(st.sampled_from(["an error", "a panic"]), st.integers(0, 2), st.booleans(), st.integers(1, 3))
@costly(3)
def test_a_request_with_which_every_pass_raises_fails_in_that_step_and_no_other(
    kind: str, seed: int, with_its_prompt: bool, samples: int
) -> None:
    """It is the only one that gets so far in its sequence."""
    first = 190 if with_its_prompt else 201
    requests = traffic.random_requests(seed, COUNT)
    steps: list[list[ops.Ticket]] = []
    raised_in: list[int] = []
    with pytest.MonkeyPatch.context() as patch:

        def is_its_own(_: Any, __: Any, positions_N: torch.Tensor, *___: Any) -> bool:
            raised_in.extend([len(steps)] if (positions_N >= first).any() else [])
            return bool((positions_N >= first).any())

        fail_at(patch, BaseModel, "hidden_states_of", is_its_own, ERRORS[kind])
        found = Traffic(traffic.sampler(1500))
        for wanted in requests[:4]:
            found.ask(wanted)
        bad = found.ask(asked(tiny.tokens(200, 99), samples, 20))
        for wanted in requests[4:]:
            found.ask(wanted)
        while not found.sampler.idle:
            steps.append(found.step())
    assert found.errors == {bad: ERRORS[kind]}
    assert {*raised_in} == {[bad in done for done in steps].index(True)}
    found.tickets.remove(bad)
    assert is_as_alone(found, seed)
    assert traffic.nothing_is_left(found.sampler)


def test_a_pass_that_does_not_fit_into_memory_is_made_smaller_before_anyone_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_large(_: Any, tokens_N: torch.Tensor, *__: Any) -> bool:
        return len(tokens_N) > 72

    fail_at(monkeypatch, BaseModel, "hidden_states_of", is_large, traffic.out_of_memory())
    fail_at(monkeypatch, CachedAttention, "attend", lambda _, __, q, *___: q.shape[1] > 1, traffic.out_of_memory())
    requests = [asked(tiny.tokens(20 + 5 * n, n), 2, adapter=n % 2, seed=n) for n in range(8)]
    found = traffic.together([*requests, scored(tiny.tokens(70, 3))], positions=2000)
    assert found.errors == {}
    for ticket, wanted in zip(found.tickets, requests, strict=False):
        assert traffic.plain(found.answers[ticket].result) == traffic.alone(wanted)


def test_what_fits_only_beside_fewer_others_is_tried_beside_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of those that run does not fit, however small a pass is."""

    def is_large(plan: Any, *_: Any) -> bool:
        return plan._cache.num_slots > 3

    fail_at(monkeypatch, CachedAttention, "attend", is_large, traffic.out_of_memory())
    requests = [asked(tiny.tokens(20, n), 1, seed=n) for n in range(12)]
    found = traffic.together(requests, positions=4000)
    assert found.errors == {}
    for ticket, wanted in zip(found.tickets, requests, strict=True):
        assert traffic.plain(found.answers[ticket].result) == traffic.alone(wanted)


def test_what_fits_once_the_prompts_of_others_are_dropped_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Traffic(traffic.sampler(2000))
    found.ask(asked(PREFIX))
    found.run()
    kept = lambda *_: sum(cache.num_tokens for cache in traffic.inside(found.sampler)._prompts.prefix_cache.caches) > 64  # noqa: E731
    fail_at(monkeypatch, BaseModel, "hidden_states_of", kept, traffic.out_of_memory())
    second = found.ask(asked(tiny.tokens(12, 0)))
    found.run()
    assert found.errors == {}
    assert traffic.plain(found.answers[second].result) == traffic.alone(asked(tiny.tokens(12, 0)))


def test_a_request_that_does_not_fit_even_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, BaseModel, "hidden_states_of", lambda _, t, *__: len(t) > 100, traffic.out_of_memory())
    found = Traffic(traffic.sampler(2000))
    good, bad = found.ask(asked(tiny.tokens(20, 0))), found.ask(asked(tiny.tokens(150, 0)))
    found.run()
    assert set(found.errors) == {bad}
    assert traffic.plain(found.answers[good].result) == traffic.alone(asked(tiny.tokens(20, 0)))


@example(call=0)
@given(st.integers(0, 10))
@costly(3)
def test_an_interruption_passes_through_and_all_tickets_can_be_told(call: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, BaseModel, "hidden_states_of", at_call(call), Interrupted())
        found = Traffic(traffic.sampler())
        for wanted in traffic.random_requests(0, COUNT):
            found.ask(wanted)
        with pytest.raises(Interrupted):
            found.run()
    told = found.sampler.tickets
    assert {*told, *found.answers} == set(found.tickets)
    assert len(told) + len(found.answers) == len(found.tickets)


def with_unchecked(wanted: traffic.Asked, **params: object) -> traffic.Asked:
    """With what the checks of inputs refuse."""
    assert isinstance(wanted.op, ops.Sample)
    kept = {field.name: getattr(wanted.op.params, field.name) for field in dataclasses.fields(SamplingParams)}
    return traffic.Asked(dataclasses.replace(wanted.op, params=unchecked(SamplingParams, **kept | params)), None)


def test_a_request_that_is_wrong_fails_with_its_own_error() -> None:
    found = Traffic(traffic.sampler())
    good = asked(tiny.tokens(12, 0), 2)
    wrong = [
        with_unchecked(asked(tiny.tokens(12, 0), 2), seed=-5),
        with_unchecked(asked(tiny.tokens(12, 1), 2), top_k=2**80),
        with_unchecked(asked(tiny.tokens(12, 2), 2), temperature="hot"),
        with_unchecked(asked(tiny.tokens(12, 2), 2), stop=5),
        asked([1, 2, 600]),
    ]
    tickets = [found.ask(wanted) for wanted in [good, *wrong, good]]
    found.run()
    assert set(found.errors) == set(tickets[1:-1])
    for ticket in (tickets[0], tickets[-1]):
        assert traffic.plain(found.answers[ticket].result) == traffic.alone(good)


@pytest.mark.parametrize("vocab_size", [512, 500])
def test_logits_of_a_broken_base_model_fail_by_name_and_leave_the_others_their_bits(vocab_size: int) -> None:
    """Only requests whose prompt has the token whose embedding is NaN; then a base model that is NaN for all."""
    llama = tiny.llama(vocab_size=vocab_size)
    model = adopt(llama, "t", fingerprint="t")
    good, bad = asked([1, 2, 3], 3), asked([1, 2, 7, 3], 3)
    fresh = lambda: Traffic(Sampler(model, KVBudget.of(model, None)))  # noqa: E731
    lonely = fresh()
    alone = lonely.ask(good)
    lonely.run()
    with torch.no_grad():
        llama.get_input_embeddings().weight[7] = torch.nan
    found = fresh()
    tickets = [found.ask(wanted) for wanted in (bad, good, scored([4, 7, 5]), good)]
    found.run()
    assert set(found.errors) == {tickets[0], tickets[2]}
    for error in found.errors.values():
        assert isinstance(error, InvalidRequest)
        assert "the logits are not finite numbers with the base model" in str(error)
    for ticket in (tickets[1], tickets[3]):
        assert traffic.plain(found.answers[ticket].result) == traffic.plain(lonely.answers[alone].result)


@pytest.mark.parametrize("where", ["one embedding", "a linear", "the head"])
def test_an_adapter_on_a_broken_base_model_is_not_said_to_have_diverged(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "PREPACKED_SHARE", 0.0)  # so that what breaks below is what it reads
    llama = tiny.llama()
    model = adopt(llama, "t", fingerprint="t", deterministic=False)
    with torch.no_grad():
        broken = {
            "one embedding": llama.get_input_embeddings().weight[7],
            "a linear": model.frozen_linears()[-2].weight_OI[3],
            "the head": llama.get_output_embeddings().weight[5],
        }
        broken[where].fill_(torch.nan)
    found = Traffic(Sampler(model, KVBudget.of(model, None)))
    asking = [asked([1, 2, 7], 2, adapter=0), scored([1, 7, 3], adapter=0), asked([7], 1, adapter=1)]
    tickets = [found.ask(wanted) for wanted in asking]
    found.run()
    assert set(found.errors) == set(tickets)
    for error in found.errors.values():
        assert "not finite numbers with the base model 't', also without this adapter; fetch it again" in str(error)


def test_one_adapter_that_has_diverged_is_tried_without_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests for it fail."""
    tries: list[Sequence[int]] = []
    is_finite_alone = Culprits._is_finite_alone
    monkeypatch.setattr(
        Culprits, "_is_finite_alone", lambda self, tokens: (tries.append(tokens), is_finite_alone(self, tokens))[1]
    )
    model = tiny.base_model()
    found = Traffic(Sampler(model, KVBudget.of(model, None)))
    tensors = {name: tensor * torch.nan for name, tensor in traffic.adapter(0).tensors.items()}
    diverged = dataclasses.replace(traffic.adapter(0), tensors=tensors)
    monkeypatch.setattr(traffic, "adapter", lambda seed: diverged)
    tickets = [found.ask(asked([1, 2, 7 + number], 2, adapter=0)) for number in range(5)]
    found.run()
    assert set(found.errors) == set(tickets)
    assert all("this adapter, which has diverged" in str(error) for error in found.errors.values())
    assert len(tries) == 1


@pytest.mark.parametrize("at_once", slow_but(1, [11, 1]))
@pytest.mark.parametrize("call", slow_but(2, [0, 5, 2]))
def test_a_stack_of_adapters_that_was_half_filled_is_not_read(call: int, at_once: int) -> None:
    """In the fast mode, where the factors of the adapters that run lie side by side: newcomers take the places of those
    that ended."""
    model = adopt(tiny.llama(), "fast", fingerprint="", deterministic=False)
    early = [asked(tiny.tokens(9 + n, n), 1, 20 if n < 5 else 3, n, temperature=0.0) for n in range(16)]
    late = [asked(tiny.tokens(7, n), 1, 8, n, temperature=0.0) for n in range(16, 27)]

    def run() -> Traffic:
        found = Traffic(Sampler(model, KVBudget.of(model, None)))
        for wanted in early:
            found.ask(wanted)
        for _ in range(5):
            found.step()
        for number, wanted in enumerate(late, start=1):
            found.ask(wanted)
            if number % at_once == 0:
                found.step()
        return found.run()

    whole = run()
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, Stack, "_fill", at_call(call), RuntimeError("a bug"))
        found = run()
    assert len(found.errors) <= 1
    for ticket, same in zip(found.tickets, whole.tickets, strict=True):
        if ticket not in found.errors:
            pairs = zip(found.answers[ticket].result.sequences, whole.answers[same].result.sequences, strict=True)
            for ours, expected in pairs:
                assert ours.tokens == expected.tokens
                assert ours.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_token_that_was_drawn_before_a_step_failed_may_have_been_the_last() -> None:
    requests = [asked(tiny.tokens(12, n), 2, 3, seed=n) for n in range(3)]
    for call in range(6):
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, Sampler, "_settle", at_call(call), RuntimeError("a bug"))
            found = Traffic(traffic.sampler(2000))
            for wanted in requests:
                found.ask(wanted)
            found.run()
        assert found.errors == {}
        for ticket, wanted in zip(found.tickets, requests, strict=True):
            assert traffic.plain(found.answers[ticket].result) == traffic.alone(wanted)


@given(st.sets(st.integers(0, 40)), st.integers(1, 41))
def test_halving_finds_those_with_which_it_raises_and_does_the_others_once(bad: set[int], count: int) -> None:
    done: list[int] = []

    def work(part: Any) -> None:
        if bad.intersection(part):
            raise Panic
        done.extend(part)

    failed = in_halves(list(range(count)), work)
    assert {one.item for one in failed} == bad & set(range(count))
    assert sorted(done) == [item for item in range(count) if item not in bad]


def test_cancelled_anywhere_and_at_any_time_the_others_are_as_alone() -> None:
    for seed in range(5):
        chosen, requests = random.Random(seed), traffic.random_requests(seed % 3, COUNT)
        found, cancelled = Traffic(traffic.sampler()), set()
        for wanted in requests:
            found.ask(wanted)
            for _ in range(chosen.choice([0, 1, 4])):
                found.step()
            ticket = chosen.choice(found.tickets)
            if chosen.random() < 0.5:
                is_open = ticket not in found.answers and ticket not in cancelled
                assert found.sampler.cancel(ticket) == is_open
                cancelled |= {ticket} if is_open else set()
        found.run()
        assert cancelled
        assert set(found.answers) == set(found.tickets) - cancelled
        for ticket, result in zip(found.tickets, traffic.expected(seed % 3, COUNT), strict=True):
            if ticket not in cancelled:
                assert traffic.plain(found.answers[ticket].result) == result
        assert traffic.nothing_is_left(found.sampler)

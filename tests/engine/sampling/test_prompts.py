"""Prompts in pieces, and what is taken over from earlier ones."""

import gc
import random
from typing import Any

import pytest

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.sampling import admission, prefix_cache, prompts
from stovetop.losses import CrossEntropy
from stovetop.types import ModelInput, SampleResponse, SamplingParams


@pytest.fixture
def engine() -> Engine:
    return tiny.engine()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass over the model had."""
    counts: list[int] = []
    model = type(tiny.base_model())
    original = model.hidden_states_of

    def counted(self: Any, tokens_N: Any, *rest: Any) -> Any:
        counts.append(len(tokens_N))
        return original(self, tokens_N, *rest)

    monkeypatch.setattr(model, "hidden_states_of", counted)
    return counts


def op(
    prompt: list[int], weights: AdapterWeights | None = None, n: int = 1, max_tokens: int = 2, **more: Any
) -> ops.Sample:
    params = SamplingParams(max_tokens, more.pop("seed", 0), [], more.pop("temperature", 1.0))
    return ops.Sample(
        tiny.named(weights), ModelInput.from_ints(prompt), n, params, more.get("logprobs", False), more.get("top", 0)
    )


def test_a_prompt_that_begins_as_an_earlier_one_takes_that_over(engine: Engine, passes: list[int]) -> None:
    first, second = tiny.tokens(30, 1), tiny.tokens(5, 2, tiny.tokens(30, 1)[:20])
    alone = tiny.run(tiny.engine(), op(second)).sequences[0]
    tiny.run(engine, op(first))
    passes.clear()
    response = tiny.run(engine, op(second))
    assert passes[0] == 5
    assert response.prompt_cache_hit_tokens == 20
    assert (response.sequences[0].tokens, response.sequences[0].logprobs) == (alone.tokens, alone.logprobs)


def test_prompts_that_come_together_and_begin_alike_are_computed_once(engine: Engine, passes: list[int]) -> None:
    """Also in pieces, and each gives what it gives alone; short ones do not wait for each other."""
    same = tiny.tokens(30, 1)
    asked = [op(same, seed=1), op(same, seed=2), op([*same[:20], 1, 2], seed=3), op([1, 2], seed=4), op([1, 2], seed=5)]
    expected = [tiny.run(tiny.engine(), each).sequences[0].logprobs for each in asked]
    passes.clear()
    tickets = [tiny.submit(engine, each) for each in asked]
    answers = {}
    while not engine.idle:
        answers |= {done.ticket: done.result.sequences[0].logprobs for done in engine.step()}
    assert [answers[ticket] for ticket in tickets] == expected
    assert passes[0] == 30 + 2 + 2
    assert sum(passes) == 30 + 2 + 2 + 2 + len(asked)  # then what is left of the third, and a token for each


def test_the_same_prompt_again_is_not_computed(engine: Engine, passes: list[int]) -> None:
    prompt = tiny.tokens(30, 1)
    first = tiny.run(engine, op(prompt)).sequences[0]
    passes.clear()
    again = tiny.run(engine, op(prompt)).sequences[0]
    assert passes == [1]  # for its second token
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)


def test_new_weights_never_meet_old_keys(engine: Engine) -> None:
    prompt = tiny.tokens(30, 1)
    adapter = tiny.trained_adapter(engine)
    old = tiny.run(engine, op(prompt, adapter.weights))
    tiny.run(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()))
    old_weights = tiny.freeze(engine, adapter)
    tiny.run(engine, ops.OptimStep(adapter, tiny.SGD))
    new = tiny.run(engine, op(prompt, adapter.weights))
    assert new.prompt_cache_hit_tokens == 0
    fresh = tiny.run(tiny.engine(), op(prompt, adapter.weights))
    assert new.sequences[0].logprobs == fresh.sequences[0].logprobs != old.sequences[0].logprobs
    again = tiny.run(engine, op(prompt, old_weights))
    assert again.prompt_cache_hit_tokens == 30
    assert again.sequences[0].logprobs == old.sequences[0].logprobs


def test_prompts_of_weights_that_are_gone_are_not_kept(engine: Engine) -> None:
    found = engine._sampler._prompts.prefix_cache  # pyright: ignore[reportPrivateUsage]  what is kept is memory
    for seed in range(4):
        tiny.run(engine, op(tiny.tokens(30, seed), tiny.trained_adapter(engine, seed).weights))
        engine.adapters.by_id.clear()
        gc.collect()
    assert len(found) <= 2


def test_what_is_kept_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_TOKENS", 100)
    found = engine._sampler._prompts.prefix_cache  # pyright: ignore[reportPrivateUsage]  what is kept is memory
    for seed in range(10):
        tiny.run(engine, op(tiny.tokens(30, seed)))
    assert found.num_tokens <= 100


def test_no_more_prompts_are_kept_than_can_be_looked_through(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_PROMPTS", 3)
    found = engine._sampler._prompts.prefix_cache  # pyright: ignore[reportPrivateUsage]  what is kept is memory
    for seed in range(5):
        tiny.run(engine, op(tiny.tokens(30, seed)))
    assert (len(found), found.num_tokens) == (3, 90)


def test_logprobs_of_a_prompt_are_computed_whole_and_in_any_pieces_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.tokens(70, 1)
    whole = tiny.run(engine, op(prompt, logprobs=True, top=2))
    monkeypatch.setattr(prompts, "CHUNK_TOKENS", 13)
    again = tiny.run(engine, op(prompt, logprobs=True, top=2))
    assert again.prompt_cache_hit_tokens == 0
    assert again.prompt_logprobs == whole.prompt_logprobs
    assert again.topk_prompt_logprobs == whole.topk_prompt_logprobs
    assert again.sequences[0].tokens == whole.sequences[0].tokens
    assert again.sequences[0].logprobs == whole.sequences[0].logprobs


def test_a_long_prompt_stalls_neither_running_sequences_nor_short_prompts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CHUNK_TOKENS", 10)
    running = tiny.submit(engine, op(tiny.tokens(5, 0), max_tokens=6))
    engine.step()
    long = tiny.submit(engine, op(tiny.tokens(200, 1)))
    short = tiny.submit(engine, op(tiny.tokens(8, 2)))
    ended: dict[ops.Ticket, int] = {}
    for step in range(40):
        ended |= {done.ticket: step for done in engine.step()}
    assert ended[running] == 4
    assert ended[short] <= 2
    assert ended[long] == 20


def test_memory_is_bounded_by_waiting() -> None:
    """Room for 4 sequences of a block, and the prompt of one: the others wait, and one that is too long for any company
    runs alone."""
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(320))
    running = engine._sampler._batch.running  # pyright: ignore[reportPrivateUsage]  how many run is memory
    tickets = [tiny.submit(engine, op(tiny.tokens(10, seed), n=3, max_tokens=10)) for seed in range(4)]
    tickets.append(tiny.submit(engine, op(tiny.tokens(200, 9), max_tokens=50)))
    most, results = 0, {}
    while not engine.idle:
        results |= {done.ticket: done.result for done in engine.step()}
        most = max(most, len(running))
    assert most == 4
    assert set(results) == set(tickets)


def test_random_traffic_never_deadlocks_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins, leaves, stops, full caches, long prompts, scores: all answered."""
    monkeypatch.setattr(prompts, "CHUNK_TOKENS", 16)
    engine = tiny.engine(max_kv_bytes=tiny.kv_bytes(1500))
    chosen = random.Random(0)
    weights = [None, *(tiny.trained_adapter(engine, seed).weights for seed in range(2))]
    open_tickets: set[ops.Ticket] = set()
    for number in range(40):
        prompt, owner = tiny.tokens(chosen.choice([1, 5, 40, 100]), number % 12), chosen.choice(weights)
        if chosen.random() < 0.2:
            open_tickets.add(tiny.submit(engine, ops.ComputeLogprobs(tiny.named(owner), ModelInput.from_ints(prompt))))
        else:
            stop = chosen.choice([None, [], list(range(0, 512, 9)), "a"])
            params = SamplingParams(chosen.randint(1, 20), number, stop, chosen.choice([0.0, 1.0]))
            asked = ops.Sample(tiny.named(owner), ModelInput.from_ints(prompt), chosen.randint(1, 5), params, False, 0)
            open_tickets.add(tiny.submit(engine, asked))
        for _ in range(chosen.randint(0, 3)):
            open_tickets -= {done.ticket for done in engine.step() if answered(done)}
    for _ in range(5000):
        if engine.idle:
            break
        open_tickets -= {done.ticket for done in engine.step() if answered(done)}
    assert engine.idle
    assert not open_tickets


def answered(done: ops.Finished) -> bool:
    assert done.error is None
    if isinstance(done.result, SampleResponse):
        assert isinstance(done.ticket.op, ops.Sample)
        assert len(done.result.sequences) == done.ticket.op.num_samples
    return True


def test_twins_of_a_prompt_that_is_too_long_to_keep_are_computed_once_all_the_same(
    engine: Engine, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_TOKENS", 20)
    tickets = [
        tiny.submit(engine, op(tiny.tokens(length, length), seed=seed)) for length in (30, 40) for seed in range(4)
    ]
    answers = {done.ticket for done in engine.step()} | {done.ticket for done in engine.step()}
    assert answers == set(tickets)
    assert passes == [70, 8]


def test_prompts_that_could_not_be_continued_yet_are_not_computed_ahead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HELD_TOKENS", 130)
    monkeypatch.setattr(admission, "MAX_RUNNING", 2)
    tickets = [tiny.submit(engine, op(tiny.tokens(40, seed), max_tokens=5)) for seed in range(12)]
    answers = set()
    while not engine.idle:
        answers |= {done.ticket for done in engine.step()}
        ready = engine._sampler._admission.ready  # pyright: ignore[reportPrivateUsage]  what is held is memory
        assert sum(len(prompt.tokens) for prompt in ready) <= 100
    assert answers == set(tickets)

"""Sampling: against the packed forward, alone and in company."""

import dataclasses
from typing import Any

import pytest
import torch

from costly import slow_but
from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.adopting import adopt
from stovetop.engine.sampling import admission
from stovetop.errors import InvalidRequest
from stovetop.losses import ImportanceSampling
from stovetop.types import Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams

PROMPT = tiny.tokens(12, 0)


def sample_op(prompt: list[int], n: int = 1, weights: AdapterWeights | None = None, **params: Any) -> ops.Sample:
    settings = SamplingParams(**{"max_tokens": 12, "seed": 1, "stop": []} | params)
    return ops.Sample(tiny.named(weights), ModelInput.from_ints(prompt), n, settings, False, 0)


def sample(engine: Engine, prompt: list[int], n: int = 1, **more: Any) -> list[SampledSequence]:
    return tiny.run(engine, sample_op(prompt, n, **more)).sequences


def step(engine: Engine) -> dict[ops.Ticket, SampleResponse]:
    finished = engine.step()
    assert all(done.error is None for done in finished)
    return {done.ticket: done.result for done in finished}


def rest(engine: Engine) -> dict[ops.Ticket, SampleResponse]:
    """What ends until nothing is left to do."""
    results: dict[ops.Ticket, SampleResponse] = {}
    while not engine.idle:
        results |= step(engine)
    return results


@pytest.fixture
def engine() -> Engine:
    return tiny.engine()


@pytest.fixture
def weights(engine: Engine) -> AdapterWeights:
    return tiny.trained_adapter(engine).weights


def test_greedy_takes_the_argmax_of_the_full_forward(engine: Engine, weights: AdapterWeights) -> None:
    sequence = sample(engine, PROMPT, weights=weights, temperature=0.0)[0]
    for length, token in enumerate(sequence.tokens):
        scored = ops.Sample(
            tiny.named(weights),
            ModelInput.from_ints([*PROMPT, *sequence.tokens[:length], 0]),
            1,
            SamplingParams(1, 0),
            False,
            1,
        )
        best, _ = tiny.run(engine, scored).topk_prompt_logprobs[-1][0]
        assert token == best


def test_samples_of_a_request_differ_and_come_again_for_the_same_seed(engine: Engine) -> None:
    first, again, other = (sample(engine, PROMPT, 4, seed=seed) for seed in (1, 1, 2))
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 4
    assert [s.tokens for s in first] != [s.tokens for s in other]


def test_neighbours_that_join_and_leave_change_nothing(engine: Engine, weights: AdapterWeights) -> None:
    """Other prompts, lengths, adapters and temperatures come and go while four requests run."""
    generator = torch.Generator().manual_seed(0)
    ours = [(tiny.tokens(5 + 3 * i, i), i) for i in range(4)]
    alone = [[s.tokens for s in sample(engine, prompt, 3, seed=seed, weights=weights)] for prompt, seed in ours]
    tickets, results = [], {}
    for prompt, seed in ours:
        length, count = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
        other = weights if count % 2 else None
        tiny.submit(engine, sample_op(tiny.tokens(length, length), count, other, max_tokens=length, temperature=0.5))
        tickets.append(tiny.submit(engine, sample_op(prompt, 3, weights, seed=seed)))
        results |= step(engine) | step(engine)
    results |= rest(engine)
    assert [[s.tokens for s in results[ticket].sequences] for ticket in tickets] == alone


def test_a_prompt_is_computed_once_for_all_its_samples(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = type(tiny.base_model()).hidden_states_of

    def counted(model: Any, tokens_N: Any, *rest: Any) -> torch.Tensor:
        seen.append(len(tokens_N))
        return original(model, tokens_N, *rest)

    monkeypatch.setattr(type(tiny.base_model()), "hidden_states_of", counted)
    sample(engine, PROMPT, 8, max_tokens=3)
    assert seen == [len(PROMPT), 8, 8]


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.3])
def test_on_policy_the_ratio_is_one_at_every_temperature(
    engine: Engine, weights: AdapterWeights, temperature: float
) -> None:
    adapter = tiny.trained_adapter(engine)
    n = len(PROMPT) - 1
    data = [
        Datum(
            ModelInput.from_ints([*PROMPT, *s.tokens][:-1]),
            {
                "target_tokens": [*PROMPT, *s.tokens][1:],
                "logprobs": [0.0] * n + (s.logprobs or []),
                "advantages": [0.0] * n + [1.0] * len(s.tokens),
            },
        )
        for s in sample(engine, PROMPT, 4, weights=weights, temperature=temperature)
    ]
    output = tiny.run(engine, ops.Forward(adapter, data, ImportanceSampling(temperature=temperature)))
    assert output.metrics["loss:sum"] == pytest.approx(-4 * 12, rel=1e-5)
    for datum, scored in zip(data, output.loss_fn_outputs, strict=True):
        gap = scored["logprobs"].array - datum.loss_fn_inputs["logprobs"].array
        assert abs(gap[n:]).max() < 1e-4


def test_a_stop_token_is_kept_once_with_its_logprob(engine: Engine) -> None:
    free = sample(engine, PROMPT, max_tokens=12)[0]
    stop = free.tokens[5]
    stopped = sample(engine, PROMPT, max_tokens=12, stop=[stop])[0]
    end = free.tokens.index(stop) + 1
    assert stopped.tokens == free.tokens[:end]
    assert stopped.logprobs == pytest.approx(free.logprobs[:end] if free.logprobs else [])
    assert (stopped.stop_reason, free.stop_reason) == ("stop", "length")


def test_a_stop_string_ends_a_sample_wherever_it_lies_in_tokens(engine: Engine) -> None:
    tokenizer = tiny.tokenizer()
    params = {"max_tokens": 40, "seed": 3}
    free = sample(engine, PROMPT, **params)[0]
    text = tokenizer.decode(free.tokens)
    readable = next(i for i in range(10, 38) if text[i : i + 2].isascii())
    stop = text[readable : readable + 2]
    stopped = sample(engine, PROMPT, **params, stop=stop)[0]
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert stop in tokenizer.decode(stopped.tokens)
    assert stop not in tokenizer.decode(stopped.tokens[:-1])


def test_the_end_of_text_stops_unless_stops_are_turned_off(engine: Engine) -> None:
    free = sample(engine, PROMPT)[0].tokens
    ending = Engine(dataclasses.replace(tiny.base_model(), stop_tokens=frozenset({free[4]})))
    until_end = free[: free.index(free[4]) + 1]
    for stop in (None, [511], "a string"):
        sequence = sample(ending, PROMPT, stop=stop)[0]
        assert (sequence.tokens, sequence.stop_reason) == (until_end, "stop")
    assert sample(ending, PROMPT, stop=[])[0].tokens == free


def test_scoring_and_sampling_share_a_step_and_agree(engine: Engine, weights: AdapterWeights) -> None:
    sequence = sample(engine, PROMPT, weights=weights)[0]
    whole = ModelInput.from_ints([*PROMPT, *sequence.tokens])
    scored = tiny.run(engine, ops.ComputeLogprobs(tiny.named(weights), whole))
    assert scored[0] is None
    assert scored[len(PROMPT) :] == pytest.approx(sequence.logprobs, abs=1e-5)
    asked = ops.Sample(tiny.named(weights), whole, 2, SamplingParams(2, 0, []), True, 3)
    response = tiny.run(engine, asked)
    assert response.prompt_logprobs == pytest.approx(scored)
    assert response.topk_prompt_logprobs[0] is None
    assert all(len(row) == 3 for row in response.topk_prompt_logprobs[1:])


def test_more_samples_than_fit_wait_their_turn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_RUNNING", 4)
    alone = [[s.tokens for s in sample(engine, tiny.tokens(6, i), 3, seed=i)] for i in range(5)]
    big = [s.tokens for s in sample(engine, PROMPT, 7)]
    tickets = [tiny.submit(engine, sample_op(tiny.tokens(6, i), 3, seed=i)) for i in range(5)]
    tickets.append(tiny.submit(engine, sample_op(PROMPT, 7)))
    results = rest(engine)
    assert [[s.tokens for s in results[ticket].sequences] for ticket in tickets] == [*alone, big]


def diverged(weights: AdapterWeights) -> AdapterWeights:
    """As after steps that were far too long: numbers, but their products are none."""
    return AdapterWeights(weights.config, {name: tensor * 1e30 for name, tensor in weights.tensors.items()})


@pytest.mark.parametrize("vocab_size", slow_but(1, [500, 512]))
@pytest.mark.parametrize("deterministic", [True, False])
def test_logits_that_are_no_numbers_fail_their_own_request_and_no_other(vocab_size: int, deterministic: bool) -> None:
    model = adopt(tiny.llama(vocab_size=vocab_size), "t", fingerprint="t", deterministic=deterministic)
    engine = Engine(model)
    healthy = tiny.trained_adapter(engine).weights
    prompts = [[1, 2, 3, index] for index in range(3)]
    alone = [sample(Engine(model), prompt, 3, weights=healthy, seed=index) for index, prompt in enumerate(prompts)]
    bad = diverged(tiny.trained_adapter(engine, 1).weights)
    tickets = [tiny.submit(engine, sample_op(prompts[0], 3, healthy, seed=0))]
    broken = [
        tiny.submit(engine, sample_op(prompts[1], 4, bad)),
        tiny.submit(engine, sample_op(prompts[1], 1, bad, temperature=0.0)),
    ]
    broken.append(tiny.submit(engine, ops.ComputeLogprobs(tiny.named(bad), ModelInput.from_ints(prompts[2]))))
    broken.append(tiny.submit(engine, dataclasses.replace(sample_op(prompts[2], 1, bad), topk_prompt_logprobs=2)))
    tickets += [tiny.submit(engine, sample_op(prompts[index], 3, healthy, seed=index)) for index in (1, 2)]
    done = {}
    while not engine.idle:
        done |= {finished.ticket: finished for finished in engine.step()}
    assert set(done) == {*tickets, *broken}
    for ticket in broken:
        assert isinstance(done[ticket].error, InvalidRequest)
        assert "not finite numbers with this adapter, which has diverged" in str(done[ticket].error)
    for ticket, expected in zip(tickets, alone, strict=True):
        for ours, theirs in zip(done[ticket].result.sequences, expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == (theirs.logprobs if deterministic else pytest.approx(theirs.logprobs, abs=1e-4))

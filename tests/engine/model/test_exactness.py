"""The deterministic mode: sampler and trainer give the same bits, in any company; refused where they do not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GemmaConfig, GemmaForCausalLM, PreTrainedModel

from engine import tiny
from engine.model.test_attention import SMALL, gpt_oss
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.kernels.arithmetic import Fast, RowExact
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model import exactness
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.errors import InvalidRequest
from stovetop.losses import ImportanceSampling
from stovetop.types import Datum, ModelInput, SampledSequence, SamplingParams

TEMPERATURES = [0.3, 0.6, 1.0, 1.3]


def test_a_float32_model_on_the_cpu_runs_row_exactly_by_default() -> None:
    assert isinstance(tiny.base_model().arithmetic, RowExact)
    assert isinstance(adopt(tiny.llama(), "fast", fingerprint="", deterministic=False).arithmetic, Fast)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny.llama().double(), "float32 or bfloat16 on the CPU, not float64"),
        (lambda: GemmaForCausalLM(GemmaConfig(**SMALL)), "activation 'gelu"),
        (gpt_oss, "num_experts"),
        (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, hidden_activation="silu")), "its rotary embedding"),
    ],
)
def test_where_it_does_not_hold_it_is_refused_by_name_and_off_by_default(
    make: Callable[[], PreTrainedModel], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"'mine' cannot run deterministically: .*{reason}"):
        adopt(make(), "mine", fingerprint="", deterministic=True)
    assert isinstance(adopt(make(), "mine", fingerprint="").arithmetic, Fast)


def test_a_library_fact_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowExact.linear

    def choosy(self: RowExact, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = original(self, x, weight, bias)
        return out * (1 + 1e-7) if x.shape[-2] >= 32 else out

    monkeypatch.setattr(RowExact, "linear", choosy)
    with pytest.raises(InvalidRequest, match="rounds otherwise with 32 rows"):
        adopt(tiny.llama(), "mine", fingerprint="", deterministic=True)


def test_a_promise_that_is_broken_is_found() -> None:
    """A model on the fast arithmetic does not keep it, which shows that the check can fail."""
    exact = tiny.base_model()
    fast = adopt(tiny.llama(num_hidden_layers=4, hidden_size=128), "fast", fingerprint="", deterministic=False)
    assert exactness.broken_promise(exact) is None
    assert exactness.broken_promise(fast) is not None


def rl_datum(prompt: list[int], sequence: SampledSequence) -> Datum:
    tokens, zeros = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": zeros + (sequence.logprobs or []),
            "advantages": zeros + [1.0] * len(sequence.tokens),
        },
    )


def gap(engine: Engine, adapter: Any, data: list[Datum], temperature: float) -> float:
    """Largest difference between the sampler's logprob of a sampled token and the trainer's."""
    engine.adapters.by_id.setdefault(adapter, adapter.adapter)  # of another engine on the same model
    output = tiny.run(engine, ops.Forward(adapter, data, ImportanceSampling(temperature=temperature)))
    gaps = [
        np.abs(scored["logprobs"].array - datum.loss_fn_inputs["logprobs"].array)[
            datum.loss_fn_inputs["advantages"].array > 0
        ]
        for datum, scored in zip(data, output.loss_fn_outputs, strict=True)
    ]
    return float(np.concatenate(gaps).max())


def in_bfloat16() -> BaseModel:
    try:
        return adopt(tiny.llama().bfloat16(), "tiny", fingerprint="", deterministic=True)
    except InvalidRequest as refused:
        pytest.skip(f"it is refused on this processor, as it is to be where it does not hold: {refused}")


def test_a_bfloat16_model_runs_row_exactly_where_that_is_asked_for() -> None:
    assert isinstance(adopt(tiny.llama().bfloat16(), "tiny", fingerprint="").arithmetic, Fast)
    assert isinstance(in_bfloat16().arithmetic, RowExact)


@pytest.mark.parametrize("model", [tiny.base_model, in_bfloat16])
def test_the_gap_is_zero_among_random_traffic_with_any_packing(model: Callable[[], BaseModel]) -> None:
    """Four adapters of mixed rank and targets, requests that join and leave, prompts that share prefixes."""
    base = model()
    engines = {size: Engine(base, max_tokens_per_pass=size) for size in (20, 4096)}
    engine, chosen = engines[4096], random.Random(0)
    adapters = [
        tiny.trained_adapter(engine, seed, rank=rank, train_mlp=mlp, train_unembed=unembed)
        for seed, (rank, mlp, unembed) in enumerate(
            [(2, True, True), (8, False, True), (5, True, False), (3, False, False)]
        )
    ]
    asked: dict[ops.Ticket, tuple[Any, list[int], float]] = {}
    answers: dict[ops.Ticket, list[SampledSequence]] = {}
    shared = tiny.tokens(40, 99)
    for number in range(14):
        prompt = tiny.tokens(chosen.randint(1, 30), number, shared[: chosen.choice([0, 10, 40])])
        adapter, temperature = chosen.choice(adapters), chosen.choice(TEMPERATURES)
        params = SamplingParams(chosen.randint(1, 20), number, [], temperature, chosen.choice([-1, 20]))
        op = ops.Sample(
            tiny.named(adapter.weights), ModelInput.from_ints(prompt), chosen.randint(1, 4), params, False, 0
        )
        asked[tiny.submit(engine, op)] = (adapter, prompt, temperature)
        for _ in range(chosen.randint(0, 6)):
            answers |= {done.ticket: done.result.sequences for done in engine.step()}
    while not engine.idle:
        answers |= {done.ticket: done.result.sequences for done in engine.step()}
    assert len(answers) == 14
    for temperature in TEMPERATURES:
        for adapter in adapters:
            data = [
                rl_datum(prompt, sequence)
                for ticket, (owner, prompt, used) in asked.items()
                if owner is adapter and used == temperature
                for sequence in answers[ticket]
            ]
            for other in engines.values() if data else ():
                assert gap(other, adapter, data, temperature) == 0.0


def test_scores_of_a_prompt_have_the_bits_of_a_forward_pass() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    sequences = [tiny.tokens(length, length) for length in (3, 70, 130)]
    tickets = [
        tiny.submit(engine, ops.ComputeLogprobs(tiny.named(adapter.weights), ModelInput.from_ints(s)))
        for s in sequences
    ]
    scored = {done.ticket: done.result for done in engine.step()}
    for ticket, sequence in zip(tickets, sequences, strict=True):
        output = tiny.run(engine, ops.Forward(adapter, [tiny.rl_datum(sequence, 0)], ImportanceSampling()))
        assert scored[ticket][1:] == output.loss_fn_outputs[0]["logprobs"].data


def gradient_bits(engine: Engine, data: list[Datum], calls: list[slice]) -> dict[str, torch.Tensor]:
    adapter = tiny.trained_adapter(engine)
    for call in calls:
        tiny.run(engine, ops.ForwardBackward(adapter, data[call], ImportanceSampling()))
    assert adapter.gradients is not None
    return adapter.gradients


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_same_data_and_packing_give_the_same_gradient_bits() -> None:
    data = [tiny.rl_datum(tiny.tokens(length, length), length) for length in (30, 12, 70)]
    whole = [slice(0, 3)]
    assert equal(gradient_bits(tiny.engine(), data, whole), gradient_bits(tiny.engine(), data, whole))


def test_micro_batch_invariance_gives_the_same_gradient_bits_for_any_split() -> None:
    data = [tiny.rl_datum(tiny.tokens(length, length), length) for length in (30, 12, 70, 5)]
    splits = [[slice(0, 4)], [slice(0, 1), slice(1, 4)], [slice(0, 2), slice(2, 3), slice(3, 4)]]
    results = [gradient_bits(tiny.engine(micro_batch_invariant=True), data, split) for split in splits]
    assert all(equal(results[0], result) for result in results[1:])


def test_re_decoding_in_another_batch_gives_the_same_tokens_and_logprobs() -> None:
    engine = tiny.engine()
    weights: AdapterWeights = tiny.trained_adapter(engine).weights
    prompts = [tiny.tokens(5 + 9 * i, i) for i in range(6)]

    def decode(together: bool) -> list[list[SampledSequence]]:
        ops_ = [
            ops.Sample(tiny.named(weights), ModelInput.from_ints(p), 3, SamplingParams(12, i, []), False, 0)
            for i, p in enumerate(prompts)
        ]
        if not together:
            return [tiny.run(engine, op).sequences for op in ops_]
        tickets = [tiny.submit(engine, op) for op in ops_]
        done = {}
        while not engine.idle:
            done |= {finished.ticket: finished.result.sequences for finished in engine.step()}
        return [done[ticket] for ticket in tickets]

    alone, batched = decode(False), decode(True)
    assert [[s.tokens for s in group] for group in alone] == [[s.tokens for s in group] for group in batched]
    assert [[s.logprobs for s in group] for group in alone] == [[s.logprobs for s in group] for group in batched]


def test_one_thread_or_two_give_the_same_bits() -> None:
    engine = tiny.engine()
    adapter = tiny.trained_adapter(engine)
    data = [tiny.rl_datum(tiny.tokens(length, length), length) for length in (30, 130)]
    threads, outputs = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            outputs.append(tiny.run(engine, ops.Forward(adapter, data, ImportanceSampling())))
    finally:
        torch.set_num_threads(threads)
    assert outputs[0].loss_fn_outputs == outputs[1].loss_fn_outputs

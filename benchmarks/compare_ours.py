"""Our side of compare.py, through the public clients."""

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from compare_work import (
    DECODED_ROWS,
    GROUP_SIZE,
    LEARNING_RATE,
    RANK,
    Numbers,
    Setting,
    decoding_speed,
    measured,
    num_trained,
    reward,
)

import stovetop as st
from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.errors import InvalidRequest

STEP = st.AdamParams(learning_rate=LEARNING_RATE)


@contextlib.contextmanager
def opened(setting: Setting, deterministic: bool | None) -> Iterator[ServiceClient]:
    with tempfile.TemporaryDirectory() as storage:
        options: dict[str, Any] = {"dtype": setting.dtype, "threads": setting.threads, "deterministic": deterministic}
        with st.ServiceClient("local", storage=storage, **options) as service:
            yield service


def new_client(service: ServiceClient, setting: Setting, seed: int = 0) -> TrainingClient:
    """Trains what PEFT's "all-linear" does."""
    return service.create_lora_training_client(str(setting.model), rank=RANK, seed=seed, train_unembed=False).result()


def new_trainer(service: ServiceClient, setting: Setting, seed: int = 0) -> TrainingClient:
    """The same. The first warms up the model with a few tokens."""
    trainer = new_client(service, setting, seed)
    if seed == 0:
        trainer.forward([datum(list(range(8)))], "cross_entropy").result()
    return trainer


def datum(sequence: list[int]) -> st.Datum:
    inputs = {"target_tokens": sequence[1:], "weights": [1.0] * (len(sequence) - 1)}
    return st.Datum(st.ModelInput.from_ints(sequence[:-1]), inputs)


def answer_datum(prompt: list[int], answer: list[int]) -> st.Datum:
    """Of which the answer is trained."""
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return st.Datum(st.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def vocab_size(trainer: TrainingClient) -> int:
    return len(trainer.get_tokenizer())


# ---- measures --------------------------------------------------------------------------------------------------------


def train(setting: Setting, deterministic: bool | None = None) -> Numbers:
    with opened(setting, deterministic) as service:
        trainer = new_trainer(service, setting)
        sequences = setting.train_data(vocab_size(trainer))
        data = [datum(sequence) for sequence in sequences]

        def step() -> None:
            results = [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(STEP)]
            for result in results:
                result.result()

        return measured(step, num_trained(sequences))._asdict()


def sample_equal(setting: Setting, deterministic: bool | None = None) -> Numbers:
    with opened(setting, deterministic) as service:
        sampler = service.create_sampling_client(base_model=str(setting.model)).result()
        prompts = setting.equal_prompts(len(sampler.get_tokenizer()))
        requests = [(prompt, setting.size.equal_tokens) for prompt in prompts]
        draw(sampler, [(prompts[0], 2)])
        num_tokens = len(prompts) * setting.size.equal_tokens
        return measured(lambda: draw(sampler, requests), num_tokens)._asdict()


def exact_mode(setting: Setting) -> Numbers:
    """Tokens per second of both verbs in float32, and the gap: the deterministic mode."""
    return _in_mode(replace(setting, dtype="float32"), deterministic=True)


def fast_mode(setting: Setting) -> Numbers:
    return _in_mode(replace(setting, dtype="float32"), deterministic=False)


def exact_bfloat16(setting: Setting) -> Numbers:
    """The same in bfloat16; no numbers where that is refused on this processor."""
    try:
        return _in_mode(replace(setting, dtype="bfloat16"), deterministic=True)
    except InvalidRequest:
        return dict.fromkeys(("train", "sample", "gap"), math.nan)


def fast_bfloat16(setting: Setting) -> Numbers:
    return _in_mode(replace(setting, dtype="bfloat16"), deterministic=False)


def _in_mode(setting: Setting, *, deterministic: bool) -> Numbers:
    small = replace(setting, size=replace(setting.size, batch_tokens=setting.size.batch_tokens[:1]))
    gaps = [value for name, value in flat(small, deterministic).items() if name.startswith("gap")]
    return {
        "train": train(setting, deterministic)["tokens_per_s"],
        "sample": sample_equal(setting, deterministic)["tokens_per_s"],
        "gap": max(gaps),
    }


def sample_ragged(setting: Setting) -> Numbers:
    with opened(setting, None) as service:
        sampler = service.create_sampling_client(base_model=str(setting.model)).result()
        draw(sampler, [([1, 2, 3], 2)])
        requests = ragged_requests(setting, sampler, setting.size.groups)
        return measured(lambda: draw(sampler, requests), sum(length for _, length in requests))._asdict()


def grpo(setting: Setting) -> Numbers:
    """A whole step: the policy's samples, rewards, advantages within each group, one update."""
    with opened(setting, None) as service:
        trainer = new_trainer(service, setting)
        tokenizer = trainer.get_tokenizer()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        requests = ragged_requests(setting, sampler, setting.size.grpo_groups)

        def step() -> None:
            policy = trainer.save_weights_and_get_sampling_client().result()
            sequences = draw(policy, requests)
            rewards = np.array([reward(tokenizer.decode(sequence.tokens)) for sequence in sequences])
            rewards_P_G = rewards.reshape(setting.size.grpo_groups, GROUP_SIZE)
            advantages = (rewards_P_G - rewards_P_G.mean(1, keepdims=True)).ravel()
            data = [
                rl_datum(prompt, sequence, advantage)
                for (prompt, _), sequence, advantage in zip(requests, sequences, advantages, strict=True)
            ]
            results = [trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(STEP)]
            for result in results:
                result.result()

        return measured(step, sum(length for _, length in requests))._asdict()


def flat(setting: Setting, deterministic: bool | None = None) -> Numbers:
    """Microseconds per trained token, and the gap in nats, at growing batches."""
    with opened(setting, deterministic) as service:
        trainer = new_trainer(service, setting)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sequences = draw(sampler, [(list(range(10, 20)), 24)] * 8)
        scored = [rl_datum(list(range(10, 20)), sequence, 1.0) for sequence in sequences]
        rng, numbers = setting.rng(), {}
        for num_tokens in setting.size.batch_tokens:
            filler = rng.integers(0, vocab_size(trainer), (num_tokens // 128, 129)).tolist()
            data = [rl_datum_of(sequence) for sequence in filler]
            backward = lambda data=data: trainer.forward_backward(data, "importance_sampling").result()  # noqa: E731
            numbers[f"time {num_tokens}"] = 1e6 * measured(backward, num_tokens).seconds / num_tokens
            output = trainer.forward([*scored, *data], "importance_sampling").result()
            numbers[f"gap {num_tokens}"] = gap(sequences, output)
        return numbers


def adapters(setting: Setting) -> Numbers:
    """Tokens per second of the same work spread over 1, 8 and 32 adapters: a step of each, then samples of each."""
    size = setting.size
    with opened(setting, None) as service:
        numbers = {}
        for count in (1, 8, 32):
            count = min(count, size.adapter_sequences)
            trainers = [new_trainer(service, setting, seed) for seed in range(count)]
            shape = (size.adapter_sequences, size.adapter_tokens + 1)
            sequences = setting.rng().integers(0, vocab_size(trainers[0]), shape).tolist()
            num_tokens = size.adapter_sequences * size.adapter_tokens

            def step(trainers: list[TrainingClient] = trainers, sequences: list[list[int]] = sequences) -> None:
                results: list[st.APIFuture[Any]] = []
                for index, trainer in enumerate(trainers):
                    mine = [datum(sequence) for sequence in sequences[index :: len(trainers)]]
                    results += [trainer.forward_backward(mine, "cross_entropy"), trainer.optim_step(STEP)]
                for result in results:
                    result.result()

            numbers[f"train {count}"] = measured(step, num_tokens).tokens_per_s
            samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]

            def sample(samplers: list[SamplingClient] = samplers, sequences: list[list[int]] = sequences) -> None:
                params = st.SamplingParams(max_tokens=size.adapter_tokens, stop=[], seed=0)
                results = [
                    samplers[index % len(samplers)].sample(st.ModelInput.from_ints(sequence[:16]), 1, params)
                    for index, sequence in enumerate(sequences)
                ]
                for result in results:
                    result.result()

            numbers[f"sample {count}"] = measured(sample, num_tokens).tokens_per_s
        return numbers


def load(setting: Setting) -> Numbers:
    """How often a second a model is loaded, and the first step on it done."""
    with opened(setting, None) as service:
        loading = measured(lambda: new_client(service, setting), 1).tokens_per_s
        trainer = new_client(service, setting)
        data = [datum(sequence) for sequence in setting.train_data(vocab_size(trainer))]
        first = measured(lambda: trainer.forward_backward(data, "cross_entropy").result(), 1).tokens_per_s
        return {"loads": loading, "first steps": first}


def decode(setting: Setting) -> Numbers:
    """Tokens per second of 1, 8 and 32 rows with one adapter, the prompts not counted."""
    with opened(setting, None) as service:
        sampler = new_trainer(service, setting).save_weights_and_get_sampling_client().result()
        rng, vocabulary, numbers = setting.rng(), len(sampler.get_tokenizer()), {}
        for count in DECODED_ROWS:
            prompts = rng.integers(0, vocabulary, (count, 32)).tolist()
            draws = partial(_draw_each, sampler, prompts)
            numbers[f"rows {count}"] = decoding_speed(draws, count, setting.size.equal_tokens)
        return numbers


def _draw_each(sampler: SamplingClient, prompts: list[list[int]], num_tokens: int) -> None:
    """So many tokens behind each prompt."""
    draw(sampler, [(prompt, num_tokens) for prompt in prompts])


def prompts_together(setting: Setting) -> Numbers:
    return _long_prompts(setting, same=True)


def prompts_apart(setting: Setting) -> Numbers:
    """As many tokens, of which no two sequences begin with the same one, so that nothing is shared."""
    return _long_prompts(setting, same=False)


def _long_prompts(setting: Setting, *, same: bool) -> Numbers:
    """Training on four answers to one prompt, by the length of the prompt: answers' tokens per second, and memory."""
    with opened(setting, None) as service:
        trainer = new_trainer(service, setting)
        rng, vocabulary, numbers = setting.rng(), vocab_size(trainer), {}
        for length in setting.size.long_prompts:
            prompt = rng.integers(0, vocabulary, length).tolist()
            answers = rng.integers(0, vocabulary, (4, 64)).tolist()
            data = [
                answer_datum(prompt if same else [index, *prompt[1:]], answer) for index, answer in enumerate(answers)
            ]
            cost = measured(lambda data=data: trainer.forward_backward(data, "cross_entropy").result(), 4 * 64)
            numbers |= {f"tokens_per_s {length}": cost.tokens_per_s, f"peak_bytes {length}": cost.peak_bytes}
        return numbers


# ---- pieces ----------------------------------------------------------------------------------------------------------


def draw(sampler: SamplingClient, requests: list[tuple[list[int], int]]) -> list[st.SampledSequence]:
    """All at once: each a prompt and how many tokens to draw."""
    results = [
        sampler.sample(st.ModelInput.from_ints(prompt), 1, st.SamplingParams(max_tokens=length, stop=[], seed=index))
        for index, (prompt, length) in enumerate(requests)
    ]
    return [result.result().sequences[0] for result in results]


def ragged_requests(setting: Setting, sampler: SamplingClient, num_groups: int) -> list[tuple[list[int], int]]:
    """One request a sample, since their lengths differ: the prompt of a group is still computed once."""
    tokenizer = sampler.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in setting.prompts(tokenizer.encode, num_groups)]
    return [(prompt, length) for prompt in prompts for length in setting.group_lengths()]


def rl_datum(prompt: list[int], sequence: st.SampledSequence, advantage: float) -> st.Datum:
    tokens = [*prompt, *sequence.tokens]
    zeros = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [*zeros, *(sequence.logprobs or [])],
        "advantages": [*zeros, *([advantage] * len(sequence.tokens))],
    }
    return st.Datum(st.ModelInput.from_ints(tokens[:-1]), inputs)


def rl_datum_of(tokens: list[int]) -> st.Datum:
    length = len(tokens) - 1
    inputs = {"target_tokens": tokens[1:], "logprobs": [-10.0] * length, "advantages": [1.0] * length}
    return st.Datum(st.ModelInput.from_ints(tokens[:-1]), inputs)


def gap(sequences: list[st.SampledSequence], output: st.ForwardBackwardOutput) -> float:
    """Largest difference between a sampled token's logprob by the sampler and by a training forward."""
    largest = 0.0
    for sequence, scored in zip(sequences, output.loss_fn_outputs, strict=False):
        trained = scored["logprobs"].array[-len(sequence.tokens) :]
        largest = max(largest, float(np.abs(trained - np.array(sequence.logprobs)).max()))
    return largest

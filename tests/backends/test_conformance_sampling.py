"""What sampling promises, of every backend: seeds, stops, truncation, logprobs, frozen weights."""

import asyncio
import math

import numpy as np
import pytest
from examples import OTHER_TOKENS, TOKENS, datum, logprobs, teach, train
from providers import Provider

from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.concurrency import map_together
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.types import Datum, ImageChunk, ModelInput, SampledSequence, SamplingParams, StopReason, TensorData

PROMPT = ModelInput.from_ints(TOKENS[:4])


@pytest.fixture
def sampler(provider: Provider, backend: ServiceClient) -> SamplingClient:
    return backend.create_sampling_client(base_model=provider.base_model).result()


def draw(sampler: SamplingClient, num_samples: int = 1, prompt: ModelInput = PROMPT, **params: object) -> list:
    """With every stop turned off and a fixed seed, unless said otherwise."""
    chosen = {"max_tokens": 12, "seed": 3, "stop": [], **params}
    return sampler.sample(prompt, num_samples, SamplingParams(**chosen)).result().sequences


def values_of(sequences: list[SampledSequence]) -> list[tuple[StopReason, list[int], list[float] | None]]:
    """All but the ids, which are new each time."""
    return [(sequence.stop_reason, sequence.tokens, sequence.logprobs) for sequence in sequences]


def tokens_of(sequences: list[SampledSequence]) -> list[list[int]]:
    return [sequence.tokens for sequence in sequences]


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_differ_and_come_again_with_their_seed(sampler: SamplingClient) -> None:
    first = draw(sampler, 8)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) > 1
    assert values_of(draw(sampler, 8)) == values_of(first)
    assert tokens_of(draw(sampler, 8, seed=4)) != tokens_of(first)


def test_without_a_seed_every_call_draws_anew(sampler: SamplingClient) -> None:
    assert tokens_of(draw(sampler, 4, seed=None)) != tokens_of(draw(sampler, 4, seed=None))


def test_a_sample_does_not_depend_on_what_else_runs(sampler: SamplingClient) -> None:
    alone = draw(sampler, 2)

    async def among_others() -> list[SampledSequence]:
        async def one(index: int) -> list[SampledSequence]:
            params = SamplingParams(
                max_tokens=12 if index == 7 else 3 + index, seed=3 if index == 7 else index, stop=[]
            )
            prompt = PROMPT if index == 7 else ModelInput.from_ints(OTHER_TOKENS[: 1 + index % 4])
            return (await sampler.sample(prompt, 2 if index == 7 else 3, params)).sequences

        return (await map_together(one, range(12)))[7]

    assert tokens_of(asyncio.run(among_others())) == tokens_of(alone)


def test_a_shorter_sample_is_the_beginning_of_a_longer_one(sampler: SamplingClient) -> None:
    assert tokens_of(draw(sampler, max_tokens=5))[0] == tokens_of(draw(sampler, max_tokens=12))[0][:5]


# ---- temperature and truncation --------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_most_probable_token_at_every_position(sampler: SamplingClient) -> None:
    sequences = draw(sampler, 2, temperature=0.0)
    assert sequences[0].tokens == sequences[1].tokens == draw(sampler, temperature=0.0, seed=99)[0].tokens
    whole = ModelInput.from_ints([*PROMPT.to_ints(), *sequences[0].tokens])
    response = sampler.sample(whole, 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=1).result()
    assert response.topk_prompt_logprobs is not None
    best = [position[0][0] for position in response.topk_prompt_logprobs[PROMPT.length :] if position]
    assert best == sequences[0].tokens


def test_logprobs_are_those_of_the_temperature_and_scale_with_it(sampler: SamplingClient) -> None:
    """The same two tokens: their logprobs differ by 1/T as much."""
    differences = {}
    for temperature in (0.5, 1.0, 2.0):
        seen: dict[int, float] = {}
        for sequence in draw(sampler, 200, max_tokens=1, temperature=temperature):
            seen[sequence.tokens[0]] = sequence.logprobs[0]
        assert sum(math.exp(logprob) for logprob in seen.values()) <= 1 + 1e-5
        differences[temperature] = seen
    common = sorted(set.intersection(*(set(seen) for seen in differences.values())))
    assert len(common) >= 2, "200 draws find some tokens at every temperature"
    apart = {t: seen[common[0]] - seen[common[1]] for t, seen in differences.items()}
    assert apart[0.5] == pytest.approx(2 * apart[1.0], abs=1e-3)
    assert apart[2.0] == pytest.approx(apart[1.0] / 2, abs=1e-3)


def test_top_k_and_top_p_choose_among_fewer_tokens_and_leave_the_logprobs_alone(sampler: SamplingClient) -> None:
    response = sampler.sample(
        ModelInput.from_ints([*PROMPT.to_ints(), 1]), 1, SamplingParams(max_tokens=1), topk_prompt_logprobs=3
    ).result()
    assert response.topk_prompt_logprobs is not None
    top = response.topk_prompt_logprobs[-1]
    assert top is not None
    best = dict(top)
    assert [logprob for _, logprob in top] == sorted(best.values(), reverse=True)
    drawn = draw(sampler, 60, max_tokens=1, top_k=3)
    assert {sequence.tokens[0] for sequence in drawn} == set(best)
    for sequence in drawn:
        assert sequence.logprobs[0] == pytest.approx(best[sequence.tokens[0]], abs=1e-4)
    enough_for_two = math.exp(top[0][1]) + math.exp(top[1][1]) / 2
    assert {s.tokens[0] for s in draw(sampler, 60, max_tokens=1, top_p=enough_for_two)} == {top[0][0], top[1][0]}
    assert {s.tokens[0] for s in draw(sampler, 10, max_tokens=1, top_p=1e-6)} == {top[0][0]}


# ---- stops -----------------------------------------------------------------------------------------------------------


def cut(sequence: SampledSequence, stop_at: int) -> SampledSequence:
    assert sequence.logprobs is not None
    return SampledSequence("stop", sequence.tokens[: stop_at + 1], sequence.logprobs[: stop_at + 1])


def same_sequence(one: SampledSequence, other: SampledSequence) -> bool:
    return (one.stop_reason, one.tokens) == (other.stop_reason, other.tokens) and bool(
        np.allclose(one.logprobs or [], other.logprobs or [], atol=1e-5)
    )


def test_without_a_stop_a_sample_ends_at_max_tokens(sampler: SamplingClient) -> None:
    (sequence,) = draw(sampler, max_tokens=7)
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == len(sequence.logprobs) == 7


def test_a_stop_token_ends_the_sample_and_is_there_once_with_its_logprob(sampler: SamplingClient) -> None:
    (free,) = draw(sampler)
    stop = free.tokens[4]
    (stopped,) = draw(sampler, stop=[stop])
    assert same_sequence(stopped, cut(free, free.tokens.index(stop)))


def test_a_stop_string_may_span_tokens_and_ends_the_sample_with_the_last_of_them(sampler: SamplingClient) -> None:
    decode = sampler.get_tokenizer().decode
    seed = next(seed for seed in range(50) if decode(draw(sampler, seed=seed)[0].tokens).isprintable())
    (free,) = draw(sampler, seed=seed)
    stop = decode(free.tokens)[3:5]
    stop_at = next(end for end in range(len(free.tokens)) if stop in decode(free.tokens[: end + 1]))
    for form in (stop, [stop], ["no such text", stop]):
        (stopped,) = draw(sampler, seed=seed, stop=form)
        assert same_sequence(stopped, cut(free, stop_at))


def test_a_stop_in_the_prompt_does_not_count(sampler: SamplingClient) -> None:
    tokenizer = sampler.get_tokenizer()
    word = "stop me"
    prompt = ModelInput.from_ints(tokenizer.encode(word, add_special_tokens=False))
    (sequence,) = draw(sampler, prompt=prompt, stop=[word], max_tokens=1)
    assert len(sequence.tokens) == 1


def test_end_of_text_stops_a_sample_unless_all_stops_are_off(provider: Provider, trainer: TrainingClient) -> None:
    end = trainer.get_tokenizer().eos_token_id
    assert end is not None
    teach(trainer, [*TOKENS[:4], 90, end, 91, 92, 93], provider.learning_rate)
    sampler = trainer.save_weights_and_get_sampling_client().result()

    def greedy(stop: object) -> tuple[StopReason, list[int]]:
        (sequence,) = draw(sampler, temperature=0.0, max_tokens=4, stop=stop)
        return sequence.stop_reason, sequence.tokens

    assert greedy(None) == ("stop", [90, end])
    assert greedy("never said") == ("stop", [90, end])
    assert greedy([91]) == ("stop", [90, end])
    assert greedy([90]) == ("stop", [90])
    assert greedy([]) == ("length", [90, end, 91, 92])


# ---- logprobs --------------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_those_of_training(
    provider: Provider, trainer: TrainingClient, sampler: SamplingClient
) -> None:
    whole = ModelInput.from_ints(TOKENS)
    first, *rest = sampler.compute_logprobs(whole).result()
    assert first is None
    np.testing.assert_allclose(np.array(rest, float), logprobs(trainer, [datum()]), atol=max(provider.tolerance, 1e-6))
    response = sampler.sample(whole, 1, SamplingParams(max_tokens=1, temperature=0.3), True, 4).result()
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    np.testing.assert_allclose(np.array(response.prompt_logprobs[1:], float), np.array(rest, float), atol=1e-5)
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None
    assert [len(position or []) for position in response.topk_prompt_logprobs[1:]] == [4] * (len(TOKENS) - 1)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_the_most_probable_tokens_are_told_in_place_of_each_that_is_drawn(
    sampler: SamplingClient, temperature: float
) -> None:
    params = SamplingParams(max_tokens=6, temperature=temperature, top_k=2, seed=3, stop=[])
    response = sampler.sample(PROMPT, 3, params, topk_sample_logprobs=4).result()
    plain = sampler.sample(PROMPT, 3, params).result()
    assert [each.tokens for each in response.sequences] == [each.tokens for each in plain.sequences]
    for sequence in response.sequences:
        assert sequence.topk_logprobs is not None
        assert sequence.logprobs is not None
        for row, token, logprob in zip(sequence.topk_logprobs, sequence.tokens, sequence.logprobs, strict=True):
            assert row is not None
            assert len(row) == 4
            assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
            assert dict(row[:2])[token] == pytest.approx(logprob, abs=1e-6)  # before top_k, at the temperature
    assert plain.sequences[0].topk_logprobs is None


def test_named_tokens_are_scored_in_place_of_those_of_a_prompt(sampler: SamplingClient) -> None:
    whole = ModelInput.from_ints(TOKENS)
    named = np.full((len(TOKENS) - 1, 3), -1)
    named[:, 0] = TOKENS[1:]
    named[2, 2] = 9
    params = SamplingParams(max_tokens=1)
    targets = TensorData.from_numpy(named)
    response = sampler.sample(whole, 1, params, True, 1, target_prompt_logprobs=targets).result()
    assert response.target_prompt_logprobs is not None
    assert response.prompt_logprobs is not None
    told_TK = response.target_prompt_logprobs.array
    np.testing.assert_allclose(told_TK[:, 0].astype(float), np.array(response.prompt_logprobs[1:], float), atol=1e-6)
    assert np.argwhere(told_TK[:, 1:] != 0).tolist() == [[2, 1]]
    assert sampler.sample(whole, 1, params).result().target_prompt_logprobs is None


def test_tokens_that_cannot_be_scored_are_refused(sampler: SamplingClient) -> None:
    for targets, reason in (
        (TensorData([5.0], "float32", (1, 1)), "must be int64"),
        (TensorData([5], "int64", (1, 1)), "must be int64 of shape"),
        (TensorData([-1] * (len(TOKENS) - 1), "int64", (len(TOKENS) - 1, 1)), "must name a token"),
        (TensorData([-2] * (len(TOKENS) - 1), "int64", (len(TOKENS) - 1, 1)), "outside the vocabulary"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            sampler.sample(
                ModelInput.from_ints(TOKENS), 1, SamplingParams(max_tokens=1), target_prompt_logprobs=targets
            )


def test_prompt_logprobs_come_only_when_asked_for(sampler: SamplingClient) -> None:
    response = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.3])
def test_on_the_policy_the_ratio_is_one_at_every_temperature(
    provider: Provider, trainer: TrainingClient, temperature: float
) -> None:
    train(trainer, 2, 0.05)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for sequence in draw(sampler, 3, temperature=temperature):
        prompt = PROMPT.to_ints()
        observed = [0.0] * (len(prompt) - 1)
        inputs = {
            "target_tokens": [*prompt[1:], *sequence.tokens],
            "logprobs": TensorData([*observed, *sequence.logprobs], "float32"),
            "advantages": [*observed, *[1.0] * len(sequence.tokens)],
        }
        sampled = Datum(ModelInput.from_ints([*prompt, *sequence.tokens[:-1]]), inputs)
        output = trainer.forward([sampled], "importance_sampling", {"temperature": temperature}).result()
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(observed) :]
        np.testing.assert_allclose(trained, np.array(sequence.logprobs, np.float32), rtol=0, atol=provider.tolerance)
        assert output.metrics["loss:sum"] == pytest.approx(-len(sequence.tokens), rel=1e-4)


def test_a_teacher_that_is_the_student_has_nothing_to_say(
    provider: Provider, trainer: TrainingClient, sampler: SamplingClient
) -> None:
    """Reverse KL at every position is zero, and would not be if targets were shifted by one."""
    taught = np.array(sampler.compute_logprobs(ModelInput.from_ints(TOKENS)).result()[1:], float)
    learned = logprobs(trainer, [datum()])
    np.testing.assert_allclose(learned - taught, 0.0, atol=max(provider.tolerance, 1e-6))
    assert np.abs(learned[1:] - taught[:-1]).max() > 0.01


# ---- frozen weights --------------------------------------------------------------------------------------------------


def test_a_sampling_client_is_frozen_at_the_weights_it_was_made_from(
    provider: Provider, trainer: TrainingClient, sampler: SamplingClient
) -> None:
    older = trainer.save_weights_and_get_sampling_client()
    teach(trainer, [*TOKENS[:4], 7, 7], provider.learning_rate)
    newer = trainer.save_weights_and_get_sampling_client(name="after")
    train(trainer, 5, provider.learning_rate, OTHER_TOKENS)
    assert tokens_of(draw(newer.result(), temperature=0.0, max_tokens=1)) == [[7]]
    assert values_of(draw(older.result(), 4)) == values_of(draw(sampler, 4)), "a fresh adapter is the base model"
    assert older.result().compute_logprobs(PROMPT).result() == sampler.compute_logprobs(PROMPT).result()


def test_a_sampling_client_is_taken_in_program_order(trainer: TrainingClient) -> None:
    trainer.forward_backward([datum()], "cross_entropy")
    before = trainer.save_weights_and_get_sampling_client()
    train(trainer, 1, 0.5)
    after = trainer.save_weights_and_get_sampling_client()
    whole = ModelInput.from_ints(TOKENS)
    assert before.result().compute_logprobs(whole).result() != after.result().compute_logprobs(whole).result()


def test_weights_saved_for_a_sampler_sample_like_those_in_memory(
    provider: Provider, backend: ServiceClient, trainer: TrainingClient
) -> None:
    train(trainer, 3, 0.05)
    in_memory = trainer.save_weights_and_get_sampling_client().result()
    path = trainer.save_weights_for_sampler("for-sampling").result().path
    for loaded in (trainer.create_sampling_client(path), backend.create_sampling_client(model_path=path)):
        assert values_of(draw(loaded.result(), 3)) == values_of(draw(in_memory, 3))
        assert loaded.result().get_base_model() == provider.base_model


def test_the_async_names_of_older_sdks_return_values(sampler: SamplingClient) -> None:
    async def run() -> tuple[int, int]:
        response = await sampler.sample_async(PROMPT, 2, SamplingParams(max_tokens=3, stop=[]))
        return len(response.sequences), len(await sampler.compute_logprobs_async(PROMPT))

    assert asyncio.run(run()) == (2, 4)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_prompt_and_max_tokens_over_the_context_are_refused_with_all_numbers(
    provider: Provider, backend: ServiceClient, sampler: SamplingClient
) -> None:
    limit = next(
        model.max_context_length
        for model in backend.get_server_capabilities().supported_models
        if model.model_name == provider.base_model
    )
    assert limit is not None
    with pytest.raises(InvalidRequest, match=f"prompt has 4 tokens and max_tokens is {limit - 3}.*{limit}"):
        draw(sampler, max_tokens=limit - 3)
    with pytest.raises(InvalidRequest, match=f"{limit + 1} tokens"):
        draw(sampler, prompt=ModelInput.from_ints([1] * (limit + 1)))
    with pytest.raises(InvalidRequest, match=str(limit)):
        draw(sampler, prompt=ModelInput.from_ints([1] * limit), max_tokens=None)


@pytest.mark.parametrize(
    ("prompt", "num_samples", "topk", "words"),
    [
        (ModelInput.empty(), 1, 0, "prompt is empty"),
        (ModelInput.from_ints([10**6]), 1, 0, "prompt: token id 1000000 at position 0"),
        (ModelInput([ImageChunk(b"", "png", 1)]), 1, 0, "prompt has an image"),
        (PROMPT, 0, 0, "num_samples must be an integer from 1 to 65536.*: 0"),
        (PROMPT, 1, -1, "topk_prompt_logprobs.*-1"),
        (PROMPT, 1, 10**6, "topk_prompt_logprobs.*1000000"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_the_call_itself(
    sampler: SamplingClient, prompt: ModelInput, num_samples: int, topk: int, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        sampler.sample(prompt, num_samples, SamplingParams(max_tokens=1), topk_prompt_logprobs=topk)


def test_a_stop_token_outside_the_vocabulary_is_refused(sampler: SamplingClient) -> None:
    with pytest.raises(InvalidRequest, match="stop: token id 1000000 at position 1 is outside the vocabulary"):
        draw(sampler, stop=[5, 10**6])


def test_a_sampling_client_is_of_weights_a_base_model_or_both(provider: Provider, backend: ServiceClient) -> None:
    with pytest.raises(InvalidRequest, match="needs a model_path or a base_model, or both"):
        backend.create_sampling_client()
    path = backend.create_lora_training_client(provider.base_model).result().save_weights_for_sampler("s").result().path
    both = backend.create_sampling_client(model_path=path, base_model=provider.base_model).result()
    assert both.get_base_model() == provider.base_model
    with pytest.raises(CheckpointError, match="was trained on"):
        backend.create_sampling_client(model_path=path, base_model=provider.other_model).result()


def test_prompt_logprobs_may_be_asked_for_at_the_end_only(provider: Provider, backend: ServiceClient) -> None:
    sampler = backend.create_sampling_client(base_model=provider.base_model).result()
    prompt, params = ModelInput.from_ints([1, 2, 3, 4, 5]), SamplingParams(max_tokens=1)
    whole = sampler.compute_logprobs(prompt).result()
    assert sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result() == [None] * 3 + whole[3:]
    assert sampler.compute_logprobs(prompt, prompt_logprobs_last_n=9).result() == whole
    assert sampler.compute_logprobs(prompt, prompt_logprobs_last_n=0).result() == [None] * 5
    response = sampler.sample(prompt, 1, params, True, 2, prompt_logprobs_last_n=1).result()
    assert response.prompt_logprobs is not None
    assert [value is None for value in response.prompt_logprobs] == [True] * 4 + [False]
    assert response.topk_prompt_logprobs is not None
    assert [value is None for value in response.topk_prompt_logprobs] == [True] * 4 + [False]


def test_every_sample_has_a_name_of_its_own(provider: Provider, backend: ServiceClient) -> None:
    samplers = [backend.create_sampling_client(base_model=provider.base_model).result() for _ in range(2)]
    prompt, params = ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=2)
    responses = [sampler.sample(prompt, 3, params).result() for sampler in samplers for _ in range(2)]
    names = [sequence.sequence_id for response in responses for sequence in response.sequences]
    assert len(set(names)) == 12
    assert all(names)

"""Samples: from what a client asks for to the call that draws it, and from what was drawn to a result."""

from typing import Any

from stovetop.client import SamplingClient, ServiceClient
from stovetop.futures import APIFuture
from stovetop.model_families import context_length_of
from stovetop.server import bodies, codec
from stovetop.server.completions import Completion
from stovetop.server.requests import Outcome, Request, Result
from stovetop.types import ModelInput, SampledSequence, SampleResponse, SamplingParams


def draw(client: SamplingClient, body: bodies.Sample, service: ServiceClient) -> APIFuture[Any]:
    """Begins to, with a client of this service."""
    prompt = ModelInput.from_ints(tokens_of(body))
    params, targets = SamplingParams(**body.sampling_params.model_dump()), body.target_prompt_logprobs
    if _only_scores(body) and prompt.length == context_length_of(service, client.get_base_model()):
        return client.compute_logprobs(prompt, body.prompt_logprobs_last_n)
    return client.sample(
        prompt,
        body.num_samples,
        params,
        include_prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else codec.read_targets(targets),
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
    )


def _only_scores(body: bodies.Sample) -> bool:
    """The SDK asks for logprobs with a sample of one token, for which a prompt may have left no room."""
    scores = body.prompt_logprobs and body.sampling_params.max_tokens == 1 and body.num_samples == 1
    more = body.topk_prompt_logprobs or body.topk_sample_logprobs or body.target_prompt_logprobs
    return bool(scores) and not more


def tokens_of(body: bodies.Sample) -> list[int]:
    """Of its prompt."""
    return [token for chunk in body.prompt.chunks for token in chunk.tokens]


def num_tokens_of(body: bodies.Sample) -> int:
    """That are computed and drawn at most; one that may fill its context counts for its prompt."""
    return len(tokens_of(body)) + body.num_samples * max(0, body.sampling_params.max_tokens or 0)


def completion_of(request: Request) -> Completion:
    """Of one that has ended."""
    if request.finished.exception() is not None:
        return Completion(request.id, None)
    result = request.finished.result()
    return Completion(request.id, None if result.form == "failed" else len(result.body))


def outcome_of(body: bodies.Sample, value: SampleResponse | list[float | None]) -> Outcome:
    """What was drawn, as a result."""
    if isinstance(value, list):  # logprobs of a prompt that fills the context: no token was drawn
        value = SampleResponse([SampledSequence("length", [], [])], prompt_logprobs=value)
    num_tokens = len(tokens_of(body)) + sum(len(sequence.tokens) for sequence in value.sequences)
    return Outcome(Result("sample", codec.write_sample(value, body.target_prompt_logprobs)), num_tokens=num_tokens)

# pyright: basic
"""The sampling client of a server: it checks and completes what it is asked as that of a local engine does, and hands
it to the SDK's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tinker

from stovetop.arguments import AtLeastNone, HowToSample, NumSamples, Prompt, Storage
from stovetop.backends.older_names import with_older_names
from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.models import UNKNOWN
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.values import samples_of, sdk_input, sdk_sampling, sdk_tensor
from stovetop.backends.sampling_client import last_of, tokens_of_samples
from stovetop.calls import Calls, Tokens
from stovetop.checks import checked
from stovetop.errors import CheckpointExists, InvalidRequest
from stovetop.futures import APIFuture, resolved
from stovetop.input_checks import (
    ModelLimits,
    check_model_input,
    check_sample,
    completed,
    fitting_memory,
)
from stovetop.sdk_differences import missing_attribute, refuse_to_pickle, require_neutral
from stovetop.tokenizing import Tokenizer
from stovetop.types import SampleResponse, SamplingParams, SaveWeightsForSamplerResponse, TensorData


@with_older_names("sampling")
class RemoteSamplingClient:
    """See `client.SamplingClient`."""

    def __init__(
        self,
        inner: tinker.SamplingClient,
        connection: Connection,
        require_open: Callable[[str], None],
        get_tokenizer: Callable[[str, Callable[[], Any]], Tokenizer],
        calls: Calls,
        *,
        is_base: bool,
    ) -> None:
        """`is_base`: it samples from the base model as it is."""
        self._inner = inner
        self._connection = connection
        self._require_open = require_open
        self._calls = calls
        self._get_tokenizer = get_tokenizer
        self._is_base = is_base
        self._limits: ModelLimits = connection.models().description(inner.get_base_model()).limits

    @checked
    def sample(
        self,
        prompt: Prompt,
        num_samples: NumSamples,
        sampling_params: HowToSample,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: AtLeastNone = 0,
        topk_sample_logprobs: AtLeastNone = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: AtLeastNone | None = None,
    ) -> APIFuture[SampleResponse]:
        self._require_open("sample")
        require_neutral(prompt_alt_tokens_k=prompt_alt_tokens_k)
        check_sample(
            prompt,
            sampling_params,
            self._limits,
            lambda: None,  # the server has one, or refuses
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
        )
        params = self._completed(sampling_params, prompt)
        sent = self._inner.sample(
            sdk_input(prompt),
            num_samples,
            sdk_sampling(params),
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            None if target_prompt_logprobs is None else sdk_tensor(target_prompt_logprobs),
            prompt_logprobs_last_n=_sent_last_n(prompt_logprobs_last_n, prompt.length, include_prompt_logprobs),
        )
        return self._brought(
            "sample",
            sent,
            lambda response: _cut(samples_of(response), prompt_logprobs_last_n),
            partial(tokens_of_samples, prompt.length),
        )

    @checked
    def compute_logprobs(
        self, prompt: Prompt, prompt_logprobs_last_n: AtLeastNone | None = None
    ) -> APIFuture[list[float | None]]:
        self._require_open("compute_logprobs")
        check_model_input(prompt, self._limits, what="prompt")
        fitting_memory(f"the prompt has {prompt.length} tokens", prompt.length, self._limits)
        if prompt_logprobs_last_n == 0:
            return resolved([None] * prompt.length)
        last_n = _sent_last_n(prompt_logprobs_last_n, prompt.length, True)
        sent = self._inner.compute_logprobs(sdk_input(prompt), last_n)
        return self._brought(
            "compute_logprobs", sent, lambda logprobs: list(logprobs), lambda _: Tokens(computed=prompt.length)
        )

    @checked
    def save(self, folder: Storage) -> APIFuture[SaveWeightsForSamplerResponse]:
        path = Path(folder).absolute()
        if path.exists():
            raise CheckpointExists(f"there is something at this path already; choose another: {path}")
        what = "the base model as it is, which has nothing to save" if self._is_base else "weights on a server"
        raise InvalidRequest(
            f"this client samples from {what}; to keep weights there, call save_weights_for_sampler of their training "
            f"client when they are frozen: {path}"
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._get_tokenizer(self._inner.get_base_model(), self._inner.get_tokenizer)

    def get_base_model(self) -> str:
        self._require_open("get_base_model")
        return self._inner.get_base_model()

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("SamplingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("SamplingClient", name)

    def _completed(self, params: SamplingParams, prompt: Any) -> SamplingParams:
        """With a seed, so that a sample that is asked for again is the same, and with max_tokens, where the context is
        known; where it is not, the server sees to it."""
        chosen = completed(params, prompt, self._limits)
        unknown = params.max_tokens is None and self._limits.context_length == UNKNOWN
        return replace(chosen, max_tokens=None) if unknown else chosen

    def _brought(
        self, verb: str, sent: Any, make: Callable[[Any], Any], count: Callable[[Any], Tokens]
    ) -> APIFuture[Any]:
        future = self._connection.pending("sampling")
        self._calls.follow(verb, future, count)
        self._connection.bring(sent, future, make, partial(error_of, what=verb))
        return APIFuture(future, lambda: _cancel(sent))


def _cancel(sent: Any) -> None:
    sent.future().cancel()


def _sent_last_n(last_n: int | None, length: int, scores: bool) -> int | None:
    """What the SDK takes: a number from 1 to one less than the prompt's length, and only with logprobs. The rest is cut
    here."""
    return last_n if last_n is not None and scores and 1 <= last_n < length else None


def _cut(response: SampleResponse, last_n: int | None) -> SampleResponse:
    prompt, topk = response.prompt_logprobs, response.topk_prompt_logprobs
    return SampleResponse(
        response.sequences,
        None if prompt is None else last_of(prompt, last_n),
        None if topk is None else last_of(topk, last_n),
        response.prompt_cache_hit_tokens,
        response.target_prompt_logprobs,
    )

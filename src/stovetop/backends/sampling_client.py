"""The sampling client over an engine in this process: it checks its input, completes it (a seed, how many tokens), and
enqueues an op on the engine's thread."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stovetop.arguments import AtLeastNone, HowToSample, NumSamples, Prompt, Storage
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import Call, OpenedBase, check_base
from stovetop.calls import Tokens
from stovetop.checks import checked, unchecked
from stovetop.engine import ops
from stovetop.errors import CheckpointExists, InvalidRequest
from stovetop.futures import APIFuture, ClientFuture
from stovetop.input_checks import check_model_input, check_sample, completed, fitting_memory
from stovetop.saved_states import SavedState
from stovetop.sdk_differences import missing_attribute, refuse_to_pickle, require_neutral
from stovetop.tokenizing import Tokenizer
from stovetop.types import SampledSequence, SampleResponse, SaveWeightsForSamplerResponse, TensorData


@with_older_names("sampling")
class InProcessSamplingClient:
    """See `client.SamplingClient`."""

    def __init__(
        self,
        base: OpenedBase,
        weights: ops.WeightsId | None,
        state: SavedState | None = None,
        queue: str | None = None,
    ) -> None:
        """`state` describes the weights; None, with the weights, where it is the base model as it is. Its calls wait in
        this `queue`, or in one of their own."""
        self._base = base
        self._weights = weights
        self._queue = queue or (base.new_weights("base model") if weights is None else weights)
        self._state = state
        if weights is not None:
            weakref.finalize(self, base.thread.forget, ops.DropWeights(weights)).atexit = False

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
        require_neutral(prompt_alt_tokens_k=prompt_alt_tokens_k)
        limits = self._base.limits
        check_sample(
            prompt,
            sampling_params,
            limits,
            self.get_tokenizer,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
        )
        params = completed(sampling_params, prompt, limits)
        self._base.observe(
            Call(
                "sampling",
                "sample",
                {"prompt": prompt, "num_samples": num_samples, "sampling_params": sampling_params},
            )
        )
        op = ops.Sample(
            self._weights,
            prompt,
            num_samples,
            params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            queue=self._queue,
        )
        sequence_ids = [f"sample-{next(self._base.sample_number)}" for _ in range(num_samples)]
        call = self._base.thread.call(
            "sample", op, lambda response: _as_asked(response, sequence_ids, prompt_logprobs_last_n)
        )
        self._base.calls.follow("sample", call.future(), partial(tokens_of_samples, prompt.length))
        return call

    @checked
    def compute_logprobs(
        self, prompt: Prompt, prompt_logprobs_last_n: AtLeastNone | None = None
    ) -> APIFuture[list[float | None]]:
        limits = self._base.limits
        check_model_input(prompt, limits, what="prompt")
        fitting_memory(f"the prompt has {prompt.length} tokens", prompt.length, limits)
        self._base.observe(Call("sampling", "compute_logprobs", {"prompt": prompt}))
        call = self._base.thread.call(
            "compute_logprobs",
            ops.ComputeLogprobs(self._weights, prompt, queue=self._queue),
            lambda logprobs: last_of(logprobs, prompt_logprobs_last_n),
        )
        self._base.calls.follow("compute_logprobs", call.future(), lambda _: Tokens(computed=prompt.length))
        return call

    @checked
    def save(self, folder: Storage) -> APIFuture[SaveWeightsForSamplerResponse]:
        if self._weights is None or self._state is None:
            raise InvalidRequest(
                "this client samples from the base model as it is, which has nothing to save; make another one like it "
                f"with create_sampling_client(base_model=...): {self._base.name!r}"
            )
        path = Path(folder).absolute()
        if path.exists():
            raise CheckpointExists(f"there is something at this path already; choose another: {path}")
        self._base.observe(Call("sampling", "save", {"folder": str(folder)}))
        meta = self._base.manifest(self._state.run, self._state.user_metadata)
        op = ops.SaveWeights(self._weights, path, meta, queue=self._queue)
        saving = self._base.thread.call("save", op, lambda _: SaveWeightsForSamplerResponse(str(path)))
        self._base.saves.add(path, replace(self._state, with_optimizer=False), saving.future())
        return saving

    def get_tokenizer(self) -> Tokenizer:
        return self._base.get_tokenizer()

    def get_base_model(self) -> str:
        self._base.thread.require_open("get_base_model")
        return self._base.name

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("SamplingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("SamplingClient", name)


def load_sampling_client(base: OpenedBase, path: str, state: SavedState, queue: str | None = None) -> ClientFuture[Any]:
    """A client of the weights that are saved at `path`, whose making is queued."""
    weights = base.new_weights(Path(path).name)
    loaded = base.thread.call(
        "create_sampling_client",
        ops.LoadWeights(weights, Path(path), queue=queue),
        lambda _: InProcessSamplingClient(base, weights, state, queue),
        partial(check_base, state, path, base.name),
        after=base.saves.under(Path(path)),
    )
    base.saves.add_load(Path(path), loaded.future())
    return ClientFuture(loaded.future(), loaded.cancel)


def tokens_of_samples(num_prompt_tokens: int, response: SampleResponse) -> Tokens:
    """What one call of `sample` was about."""
    num_drawn = sum(len(sequence.tokens) for sequence in response.sequences)
    return Tokens(num_prompt_tokens, response.prompt_cache_hit_tokens, num_drawn)


def last_of(values_T: list[Any], last_n: int | None) -> list[Any]:
    """The values of so many positions at the end, None before; of all for None."""
    first = 0 if last_n is None else max(0, len(values_T) - last_n)
    return [None] * first + values_T[first:]


def _as_asked(response: SampleResponse, sequence_ids: Sequence[str], last_n: int | None) -> SampleResponse:
    prompt, topk = response.prompt_logprobs, response.topk_prompt_logprobs
    return unchecked(
        SampleResponse,
        sequences=[
            unchecked(
                SampledSequence,
                stop_reason=sequence.stop_reason,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                sequence_id=name,
                topk_logprobs=sequence.topk_logprobs,
            )
            for sequence, name in zip(response.sequences, sequence_ids, strict=True)
        ],
        prompt_logprobs=None if prompt is None else last_of(prompt, last_n),
        topk_prompt_logprobs=None if topk is None else last_of(topk, last_n),
        prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
        target_prompt_logprobs=response.target_prompt_logprobs,
    )

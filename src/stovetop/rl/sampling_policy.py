"""The policy of rollouts that play at the same time: frozen weights, asked once for all that show the same prompt."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from stovetop.client import SamplingClient
from stovetop.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from stovetop.futures import APIFuture
from stovetop.seeds import seed_for
from stovetop.types import ModelInput, SampleResponse, SamplingParams


@dataclass(slots=True)
class _Request:
    num_samples: int = 0
    response: APIFuture[SampleResponse] | None = None  # None: others may join
    seed: int | None = None


class SamplingPolicy:
    """A TokenCompleter that samples for many rollouts at once. Calls for the same prompt that are made together become
    one request for several samples, so that a model computes the prompt of a group once.

    With a seed, answers depend on it, on the prompt, and on how many answers to that prompt were asked for before. That
    would not do for the later turns of a rollout, where it is a matter of time who asks first: `of_one_rollout`.
    """

    def __init__(
        self, sampling_client: SamplingClient, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> None:
        # What is wrong with these is refused here, not as one failed rollout after another.
        SamplingParams(max_tokens, seed, temperature=temperature)
        self._client = sampling_client
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._seed = seed
        # Requests that can still be joined, by prompt, stop condition and budget.
        self._open: dict[tuple[ModelInput, tuple[str | int, ...], int], _Request] = {}
        self._num_asked: Counter[ModelInput] = Counter()

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return (await self.draw(model_input, stop, max_tokens)).answer

    def of_one_rollout(self) -> TokenCompleter:
        """The same policy for one rollout. What it answers after the first turn depends on its first answer's draw and
        on the turn, whatever other rollouts ask meanwhile: a run that goes on draws the same."""
        return _OneRollout(self)

    async def draw(self, model_input: ModelInput, stop: StopCondition, max_tokens: int | None) -> "_Drawn":
        """One answer, drawn together with those of all others who ask for this prompt now."""
        key = (model_input, tuple(stop), self._budget(max_tokens))
        request = self._open.setdefault(key, _Request())
        index = request.num_samples
        request.num_samples += 1
        await asyncio.sleep(0)  # every rollout that is ready now gets here before the first goes on
        if request.response is None:
            self._open.pop(key, None)
            request.seed = self._next_seed(model_input, request.num_samples)
            request.response = self.submit(model_input, request.num_samples, request.seed, stop, max_tokens)
        return _Drawn(_answer(await request.response, index), request.seed, index)

    def submit(
        self, model_input: ModelInput, num_samples: int, seed: int | None, stop: StopCondition, max_tokens: int | None
    ) -> APIFuture[SampleResponse]:
        """Asks for so many answers, with a seed of their own."""
        params = SamplingParams(self._budget(max_tokens), seed, stop, self._temperature)
        return self._client.sample(model_input, num_samples, params)

    def _budget(self, max_tokens: int | None) -> int:
        return self._max_tokens if max_tokens is None else min(self._max_tokens, max_tokens)

    def _next_seed(self, prompt: ModelInput, num_samples: int) -> int | None:
        num_before = self._num_asked[prompt]
        self._num_asked[prompt] += num_samples
        if self._seed is None:
            return None
        return seed_for(self._seed, num_before, prompt)


class _Drawn(NamedTuple):
    """An answer, and what it was drawn with: the seed of a request, and which of its samples it was."""

    answer: TokensWithLogprobs
    seed: int | None
    place: int


class _OneRollout:
    """See `SamplingPolicy.of_one_rollout`."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._first: _Drawn | None = None
        self._num_turns = 0

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self._num_turns += 1
        if self._first is None or self._first.seed is None:
            self._first = await self._policy.draw(model_input, stop, max_tokens)
            return self._first.answer
        seed = seed_for(self._first.seed, self._first.place, self._num_turns)
        return _answer(await self._policy.submit(model_input, 1, seed, stop, max_tokens), 0)


def _answer(response: SampleResponse, index: int) -> TokensWithLogprobs:
    sequence = response.sequences[index]
    return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)

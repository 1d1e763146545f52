"""Completers: what answers a prompt. A token completer is what reinforcement learning calls a policy; a message
completer is what evaluations and judges talk to. Those here sample from a sampling client; whatever is called alike
will do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stovetop.client import SamplingClient
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.types import ModelInput, SampledSequence, SamplingParams, StopReason

StopCondition = list[str] | list[int]  # strings or token ids, never both


@dataclass(frozen=True, slots=True)
class TokensWithLogprobs:
    """Sampled tokens, the stop token included, and how they came to stop."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: StopReason = "stop"

    def __post_init__(self) -> None:
        if self.maybe_logprobs is not None and len(self.maybe_logprobs) != len(self.tokens):
            raise InvalidRequest(
                f"each token needs one logprob; there are {len(self.tokens)} tokens and {len(self.maybe_logprobs)} "
                "logprobs"
            )

    @property
    def logprobs(self) -> list[float]:
        """One for each token, at the temperature that it was sampled with. Refused where there are none."""
        if self.maybe_logprobs is None:
            raise InvalidRequest("these tokens carry no logprobs; training on them needs those of the sampler")
        return self.maybe_logprobs


class TokenCompleter(Protocol):
    """Continues a prompt. A call may ask for fewer tokens than the completer would give."""

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs: ...


class MessageCompleter(Protocol):
    """Answers a chat."""

    async def __call__(self, messages: Sequence[Message]) -> Message: ...


@dataclass(frozen=True, slots=True)
class SamplingTokenCompleter:
    """Samples one continuation, with its logprobs: a backend that leaves them out is an error, never zeros."""

    sampling_client: SamplingClient
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None  # prompt and continuation together; None: as long as the model's
    seed: int | None = None  # of every call, so calls with the same prompt are the same; None: a fresh one each time

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = SamplingParams(
            max_tokens=self._budget(model_input.length, max_tokens),
            seed=self.seed,
            stop=stop,
            temperature=self.temperature,
        )
        sequence = await _sample_one(self.sampling_client, model_input, params)
        if sequence.logprobs is None:
            raise RequestFailedError("the backend returned tokens without logprobs, which reinforcement learning needs")
        return TokensWithLogprobs(list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason)

    def _budget(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        budget = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        if self.context_window is None:
            return budget
        room = self.context_window - num_prompt_tokens
        if room < 1:
            raise InvalidRequest(
                f"the prompt leaves no room for an answer: it has {num_prompt_tokens} tokens, and the context window "
                f"is {self.context_window}"
            )
        return min(budget, room)


@dataclass(frozen=True, slots=True)
class SamplingMessageCompleter:
    """Samples the next assistant message. It has a role and content and nothing else: tool calls are left out."""

    sampling_client: SamplingClient
    renderer: Renderer
    max_tokens: int
    stop_condition: StopCondition | None = None  # None: the renderer's
    temperature: float = 1.0
    seed: int | None = None  # of every call; None: a fresh one each time

    async def __call__(self, messages: Sequence[Message]) -> Message:
        stop = self.renderer.get_stop_sequences() if self.stop_condition is None else self.stop_condition
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.seed, stop=stop, temperature=self.temperature)
        prompt = self.renderer.build_generation_prompt(messages)
        sequence = await _sample_one(self.sampling_client, prompt, params)
        message, _ = self.renderer.parse_response(sequence.tokens)
        return Message(role="assistant", content=message["content"])


async def _sample_one(client: SamplingClient, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
    response = await client.sample(prompt, num_samples=1, sampling_params=params)
    return response.sequences[0]

"""Completers: what answers a prompt. A token completer is what reinforcement learning calls a policy; a message
completer is what evaluations and judges talk to. Those here sample from a sampling client; whatever is called alike
will do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from stovetop.client import SamplingClient
from stovetop.errors import InvalidRequest, RequestFailedError
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.seeds import seed_for
from stovetop.tokenizing import Tokenizer
from stovetop.types import EncodedTextChunk, ModelInput, SampledSequence, SamplingParams, StopReason

PIECE_TOKENS = 8  # drawn before they are shown; fewer show sooner, more cost fewer calls

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
    seed: int | None = None  # that of a call is made of it and of the prompt; None: a fresh one each time

    async def __call__(
        self, model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = SamplingParams(
            max_tokens=self._budget(model_input.length, max_tokens),
            seed=_own_seed(self.seed, model_input),
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
    seed: int | None = None  # that of a call is made of it and of the prompt; None: a fresh one each time

    async def __call__(self, messages: Sequence[Message]) -> Message:
        return (await self.answer(messages)).message

    async def answer(self, messages: Sequence[Message]) -> "SampledMessage":
        """The message, and the tokens that it is made of."""
        stop = self.renderer.get_stop_sequences() if self.stop_condition is None else self.stop_condition
        prompt = self.renderer.build_generation_prompt(messages)
        seed = _own_seed(self.seed, prompt)
        params = SamplingParams(max_tokens=self.max_tokens, seed=seed, stop=stop, temperature=self.temperature)
        sequence = await _sample_one(self.sampling_client, prompt, params)
        message, _ = self.renderer.parse_response(sequence.tokens)
        return SampledMessage(prompt, sequence, Message(role="assistant", content=message["content"]))


class SampledMessage(NamedTuple):
    """An answer to a chat."""

    prompt: ModelInput
    sequence: SampledSequence
    message: Message


def _own_seed(seed: int | None, prompt: ModelInput) -> int | None:
    """Of one call: the same for the same prompt. With one seed for all prompts all answers would be drawn with the same
    random numbers, and a mean over prompts would be far less certain than it looks."""
    return None if seed is None else seed_for(seed, prompt)


async def _sample_one(client: SamplingClient, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
    response = await client.sample(prompt, num_samples=1, sampling_params=params)
    return response.sequences[0]


# ---- answers that are shown as they come ---------------------------------------------------------------------------


def sample_in_pieces(
    client: SamplingClient, prompt: ModelInput, params: SamplingParams, tokenizer: Tokenizer
) -> Iterator[SampledSequence]:
    """One continuation, a few tokens at a time. A sampling client returns whole samples, so each piece is one, and goes
    on where the last one ended: that draws from the same distribution as one long sample.

    The last piece has the stop reason "stop", or is the one that brings the tokens to `params.max_tokens`, which is
    needed. A stop string may lie across pieces, where the sampler does not see it: it is found here, and what was drawn
    behind it is left out. A seed would draw the same numbers for each piece, so there can be none.
    """
    if params.max_tokens is None or params.seed is not None:
        raise InvalidRequest(f"an answer in pieces needs max_tokens and no seed: {params}")
    stops = [item for item in ([params.stop] if isinstance(params.stop, str) else params.stop or ()) if item]
    strings = [stop for stop in stops if isinstance(stop, str)]
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        of_piece = replace(params, max_tokens=min(PIECE_TOKENS, params.max_tokens - len(tokens)))
        so_far = prompt.append(EncodedTextChunk(tokens)) if tokens else prompt
        piece = client.sample(so_far, 1, of_piece).result().sequences[0]
        tokens += piece.tokens
        if strings:
            piece = _ended(piece, _num_until_stop(tokenizer, tokens, len(piece.tokens), strings))
        yield piece
        if piece.stop_reason == "stop":
            return


def until_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first of these strings; None without one."""
    places = [text.index(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None


def without_beginning(text: str, stops: Sequence[str]) -> str:
    """The text without what could be the beginning of one of these strings, if it ends with that."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return text[:-size]
    return text


def _ended(piece: SampledSequence, num_tokens: int | None) -> SampledSequence:
    """The piece, if it ends with so many tokens; as it is for None."""
    if num_tokens is None:
        return piece
    logprobs = None if piece.logprobs is None else piece.logprobs[:num_tokens]
    top = None if piece.topk_logprobs is None else piece.topk_logprobs[:num_tokens]
    return SampledSequence("stop", piece.tokens[:num_tokens], logprobs, piece.sequence_id, top)


def _num_until_stop(tokenizer: Tokenizer, tokens: Sequence[int], num_new: int, stops: Sequence[str]) -> int | None:
    """How many of the last `num_new` tokens it takes until a stop string is there; None without one."""
    longest = max(len(stop.encode()) for stop in stops)
    tail = tokens[-(num_new + longest + 4) :]  # most tokens bring a byte at least, and a character has four at most
    first = len(tail) - num_new

    def has_stop(num_tokens: int) -> bool:
        text = tokenizer.decode(tail[: first + num_tokens])
        return any(stop in text for stop in stops)

    if not has_stop(num_new):
        return None
    return next(count for count in range(1, num_new + 1) if has_stop(count))

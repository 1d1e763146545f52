"""Answers, drawn: whole, by one call of the sampling client for each prompt, or in pieces, so that they can be shown as
they come (`completers.sample_in_pieces`).

In pieces is drawn what has one answer, no seed, no prompt to be told before it, and no logprobs beside those of the
tokens that are drawn. Everything else is drawn whole and sent when it is there: so a seed gives the same answer whether
it is streamed or not.

Shapes: `T` tokens of an answer, `K` alternatives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from stovetop.completers import sample_in_pieces, until_stop, without_beginning
from stovetop.concurrency import in_thread
from stovetop.futures import APIFuture
from stovetop.server.openai.bodies import BadParameter
from stovetop.server.openai.models import Target
from stovetop.tokenizing import Tokenizer
from stovetop.types import (
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    StopReason,
)

Alternatives = Sequence[tuple[int, float]]  # (token, logprob), the most probable first


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What is to be drawn."""

    id: str
    created_s: float  # since the epoch
    owner: str
    target: Target
    tokenizer: Tokenizer
    prompts: Sequence[ModelInput]
    params: SamplingParams
    num_choices: int  # of each prompt
    with_logprobs: bool = False
    num_alternatives: int = 0  # for each token
    scores_prompts: bool = False
    draws_none: bool = False  # only scores the prompts
    prompt_texts: Sequence[str] = ()  # to be told before the answers, one for each prompt; none: they are not
    context_length: int | None = None

    def __post_init__(self) -> None:
        max_tokens, room = self.params.max_tokens, self.room
        if room < 1:
            raise BadParameter(None, f"the prompt leaves no room for an answer{self._why}", "context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            told = f"max_tokens is {max_tokens}, and may be {room} at most{self._why}"
            raise BadParameter("max_tokens", told, "context_length_exceeded")

    @property
    def num_tokens(self) -> int:
        """That are computed and drawn at most; answers that may fill the context count for their prompts."""
        of_prompts = sum(prompt.length for prompt in self.prompts)
        return of_prompts + len(self.prompts) * self.num_choices * (self.params.max_tokens or 0)

    @property
    def room(self) -> int:
        """Tokens that the context leaves for an answer."""
        if self.context_length is None:
            return max(1, self.params.max_tokens or 1)
        longest = max(prompt.length for prompt in self.prompts)
        return self.context_length - longest

    @property
    def _why(self) -> str:
        longest = max(prompt.length for prompt in self.prompts)
        return f": the prompt has {longest} tokens, and the context of {self.target.base_model} {self.context_length}"


@dataclass(slots=True, eq=False)
class Choice:
    """One answer, as far as it is drawn."""

    prompt: int  # which one it answers
    tokens: list[int] = field(default_factory=list[int])
    logprobs_T: list[float] = field(default_factory=list[float])
    stop_reason: StopReason = "length"
    alternatives_TK: list[Alternatives] | None = None

    def add(self, sequence: SampledSequence) -> None:
        """Goes on with what was drawn further."""
        self.tokens += sequence.tokens
        self.logprobs_T += sequence.logprobs or []
        if sequence.topk_logprobs is not None:
            self.alternatives_TK = [*(self.alternatives_TK or []), *(row or [] for row in sequence.topk_logprobs)]
        self.stop_reason = sequence.stop_reason


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """At temperature 1; nothing for the first token."""

    logprobs_T: list[float | None]
    alternatives_TK: list[Alternatives | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """All answers to a job, those of one prompt beside each other."""

    choices: list[Choice]
    prompts: list[ScoredPrompt | None]
    num_cached: int = 0  # tokens of prompts that had been read before


def num_tokens_of(job: Job, choices: Sequence[Choice]) -> int:
    """That were read and drawn."""
    return sum(prompt.length for prompt in job.prompts) + sum(len(choice.tokens) for choice in choices)


async def draw(job: Job) -> Drawn:
    """All answers whole. No thread is held while they are drawn; when this is cancelled, the drawing ends."""
    responses = await _results(await in_thread(lambda: _begun(job)))
    choices = [_choice(index, each) for index, response in enumerate(responses) for each in response.sequences]
    if job.draws_none:
        choices = [Choice(choice.prompt) for choice in choices]
    return Drawn(
        choices,
        [_scored_prompt(job, response) for response in responses],
        sum(response.prompt_cache_hit_tokens for response in responses),
    )


def _begun(job: Job) -> list[APIFuture[SampleResponse]]:
    """A call for each prompt, or none."""
    calls: list[APIFuture[SampleResponse]] = []
    try:
        for prompt in job.prompts:
            calls.append(_begin(job, prompt))
    except BaseException:
        for call in calls:
            call.cancel()
        raise
    return calls


async def _results(calls: Sequence[APIFuture[SampleResponse]]) -> list[SampleResponse]:
    try:
        return [await call for call in calls]
    except BaseException:
        for call in calls:
            call.cancel()
        raise


def _begin(job: Job, prompt: ModelInput) -> APIFuture[SampleResponse]:
    return job.target.client.sample(
        prompt,
        1 if job.draws_none else job.num_choices,
        job.params,
        include_prompt_logprobs=job.scores_prompts,
        topk_prompt_logprobs=job.num_alternatives if job.scores_prompts else 0,
        topk_sample_logprobs=0 if job.draws_none else job.num_alternatives,
    )


def _choice(prompt: int, sequence: SampledSequence) -> Choice:
    choice = Choice(prompt)
    choice.add(sequence)
    return choice


def _scored_prompt(job: Job, response: SampleResponse) -> ScoredPrompt | None:
    if not job.scores_prompts or response.prompt_logprobs is None:
        return None
    return ScoredPrompt(list(response.prompt_logprobs), list(response.topk_prompt_logprobs or []) or None)


# ---- in pieces -----------------------------------------------------------------------------------------------------


def comes_in_pieces(job: Job) -> bool:
    """See above."""
    is_one = len(job.prompts) == 1 and job.num_choices == 1
    is_free = job.params.seed is None or job.params.temperature == 0.0
    return is_one and is_free and not job.num_alternatives and not job.prompt_texts


def draw_in_pieces(job: Job, choice: Choice) -> Iterator[int]:
    """The tokens of the one answer as they come; `choice` has at least those that were told. The first piece is waited
    for here, so that what is refused is refused before anything is told."""
    max_tokens = job.room if job.params.max_tokens is None else job.params.max_tokens
    params = replace(job.params, seed=None, max_tokens=max_tokens)
    pieces = sample_in_pieces(job.target.client, job.prompts[0], params, job.tokenizer)
    first = next(pieces)
    return _told(choice, chain([first], pieces))


def _told(choice: Choice, pieces: Iterator[SampledSequence]) -> Iterator[int]:
    for piece in pieces:
        choice.add(piece)
        yield from piece.tokens


# ---- texts ---------------------------------------------------------------------------------------------------------


def text_of(choice: Choice, tokenizer: Tokenizer, stops: Sequence[str]) -> str:
    """What an answer says, without what ended it."""
    text = tokenizer.decode(choice.tokens)
    cut = until_stop(text, stops)
    if cut is not None:
        return cut
    return text if choice.stop_reason == "length" else tokenizer.decode(choice.tokens[:-1])


@dataclass(slots=True)
class Shown:
    """Text that comes piece by piece, shown up to a stop string: what could be the beginning of one waits."""

    stops: Sequence[str]
    is_over: bool = False
    _waiting: str = ""

    def feed(self, text: str) -> str:
        """What can be shown by now."""
        if self.is_over:
            return ""
        text, self._waiting = self._waiting + text, ""
        cut = until_stop(text, self.stops)
        if cut is not None:
            self.is_over = True
            return cut
        shown = without_beginning(text, self.stops)
        self._waiting = text.removeprefix(shown)
        return shown

# pyright: basic
"""What the sampler works on: requests whose prompts are computed, their samples, and what samples start from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stovetop.checks import unchecked
from stovetop.engine.kernels.kv_cache import BLOCK
from stovetop.engine.kernels.packing import Segment
from stovetop.engine.kernels.shared_prefix import Prefix
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.ops import ComputeLogprobs, Finished, Sample
from stovetop.engine.sampling.not_finite import NotFinite
from stovetop.engine.sampling.prompt import Prompt
from stovetop.engine.sampling.stops import Stops
from stovetop.types import SampledSequence, SampleResponse, SamplingParams, TensorData


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, and its samples: none where its logprobs alone are asked for."""

    prompt: Prompt
    params: SamplingParams
    done: list[SampledSequence | None]
    is_computed: bool = False  # the prompt was, once, and samples can begin
    stops: Stops = field(default_factory=lambda: Stops(frozenset()))  # known from then on
    begun: "dict[int, Running]" = field(default_factory=dict)  # samples that have not ended, by index
    num_started: int = 0
    is_last_try: bool = False  # it did not fit into memory when it was alone, beside what others had left there

    @staticmethod
    def of(prompt: Prompt) -> "Request":
        match prompt.op:
            case Sample(num_samples=num_samples, params=params):
                return Request(prompt, params, [None] * num_samples)
            case ComputeLogprobs():
                return Request(prompt, SamplingParams(), [])

    @property
    def num_left(self) -> int:
        return len(self.done) - self.num_started

    @property
    def is_complete(self) -> bool:
        return self.is_computed and None not in self.done

    def stream(self, index: int) -> np.random.Generator:
        """The random numbers of one sample."""
        return np.random.default_rng([self.params.seed or 0, index])

    def answer(self) -> Finished:
        prompt = self.prompt
        if isinstance(prompt.op, ComputeLogprobs):
            return Finished(prompt.ticket, prompt.logprobs)
        sequences = [sequence for sequence in self.done if sequence is not None]
        response = unchecked(
            SampleResponse,
            sequences=sequences,
            prompt_logprobs=prompt.logprobs if prompt.wants_logprobs else None,
            topk_prompt_logprobs=prompt.top_logprobs if prompt.num_top else None,
            prompt_cache_hit_tokens=prompt.num_reused,
            target_prompt_logprobs=None
            if prompt.targets is None
            else TensorData(np.array(prompt.target_logprobs_TK, np.float32), "float32"),
        )
        return Finished(prompt.ticket, response)


@dataclass(slots=True, eq=False)
class Running:
    """One sequence being drawn, from a stream of random numbers of its own."""

    request: Request
    index: int  # among the samples of its request
    number: int  # counts all that ever began, upwards
    stream: np.random.Generator
    prefix: Prefix | None  # what the slot does not hold, for it is shared
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)  # in place of each token, if asked for
    uniform: float | None = None  # the random number of the next token, from when it is first asked for

    def next_uniform(self) -> float:
        """The same until a token is drawn with it, however often that is tried."""
        if self.uniform is None:
            self.uniform = self.stream.random()
        return self.uniform

    @property
    def num_top(self) -> int:
        """The most probable tokens that are asked for in place of each."""
        op = self.request.prompt.op
        return op.topk_sample_logprobs if isinstance(op, Sample) else 0

    @property
    def start(self) -> int:
        """The position in the sequence at which its slot begins."""
        return 0 if self.prefix is None else self.prefix.length

    @property
    def position(self) -> int:
        """Of the token drawn last, which is all that is not cached yet."""
        return len(self.request.prompt.tokens) + len(self.tokens) - 1

    @property
    def num_places(self) -> int:
        """Positions of its slot that the next pass reads."""
        return self.position - self.start + 1

    @property
    def grown(self) -> int:
        """Positions of its slot that it takes after a block more of tokens, if it gets that far."""
        most = len(self.request.prompt.tokens) - self.start + (self.request.params.max_tokens or 0)
        return min(self.num_places + 1 + BLOCK, most)

    def ended(self) -> bool:
        """Whether the token drawn last ends it. Raises NotFinite where that came from no finite logits."""
        if not math.isfinite(self.logprobs[-1]):
            raise NotFinite([*self.request.prompt.tokens, *self.tokens[:-1]])
        return len(self.tokens) == self.request.params.max_tokens or self.request.stops.hit(self.tokens)

    def result(self) -> SampledSequence:
        """Of a sequence that has ended. One whose last allowed token is a stop was stopped."""
        return unchecked(
            SampledSequence,
            stop_reason="stop" if self.request.stops.hit(self.tokens) else "length",
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            sequence_id=f"{self.request.prompt.ticket.number}:{self.index}",
            topk_logprobs=list(self.tops) if self.num_top else None,
        )


@dataclass(slots=True, eq=False)
class Start:
    """A prompt that samples go on from, once it is computed: those of a request that have not begun, or one that had to
    leave, whose prompt has what it had drawn at its end."""

    request: Request
    prompt: Prompt
    returning: Running | None = None

    @property
    def num_left(self) -> int:
        """Samples that go on from there."""
        return self.request.num_left if self.returning is None else 1

    @property
    def most_positions(self) -> int:
        """That one of them may come to take."""
        return len(self.request.prompt.tokens) + (self.request.params.max_tokens or 0)


def one_row_each(sequences: Sequence[Running]) -> tuple[list[AdapterWeights | None], list[Segment]]:
    """Whose each row of a pass is that has one row for each of these, in their order."""
    owners = [sequence.request.prompt.weights for sequence in sequences]
    return owners, [Segment(row, 1) for row in range(len(sequences))]

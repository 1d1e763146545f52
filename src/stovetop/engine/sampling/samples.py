# pyright: basic
"""What the sampler works on: requests whose prompts are computed, their samples, and what samples start from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stovetop.checks import unchecked
from stovetop.engine.kernels.kv_cache import BLOCK
from stovetop.engine.kernels.packing import Segment
from stovetop.engine.kernels.shared_prefix import Prefix
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.ops import Finished
from stovetop.engine.sampling.prompts import Prompt
from stovetop.engine.sampling.stops import Stops
from stovetop.types import SampledSequence, SampleResponse, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """A prompt that is computed, and its samples."""

    prompt: Prompt
    params: SamplingParams
    stops: Stops
    done: list[SampledSequence | None]
    num_started: int = 0

    @property
    def num_left(self) -> int:
        return len(self.done) - self.num_started

    def answer(self) -> Finished:
        prompt = self.prompt
        sequences = [sequence for sequence in self.done if sequence is not None]
        response = unchecked(
            SampleResponse,
            sequences=sequences,
            prompt_logprobs=prompt.logprobs if prompt.wants_logprobs else None,
            topk_prompt_logprobs=prompt.top_logprobs if prompt.num_top else None,
            prompt_cache_hit_tokens=prompt.num_reused,
        )
        return Finished(prompt.ticket, response)


@dataclass(slots=True, eq=False)
class Running:
    """One sequence being drawn, from a stream of random numbers of its own."""

    request: Request
    index: int  # among the samples of its request
    number: int  # counts all that ever began, upwards
    uniform: np.random.Generator
    prefix: Prefix | None  # what the slot does not hold, for it is shared
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

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
        return len(self.tokens) == self.request.params.max_tokens or self.request.stops.hit(self.tokens)

    def result(self) -> SampledSequence:
        """Of a sequence that has ended. One whose last allowed token is a stop was stopped."""
        return unchecked(
            SampledSequence,
            stop_reason="stop" if self.request.stops.hit(self.tokens) else "length",
            tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            sequence_id=f"{self.request.prompt.ticket.number}:{self.index}",
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

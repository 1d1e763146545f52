# pyright: basic
"""What the sampler works on: a request, the prompt that is computed for it, and its samples that run. How a prompt is
computed is in `prompts.py`, how tokens are drawn in `batch.py`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from stovetop.checks import unchecked
from stovetop.engine.kernels.kv_cache import BLOCK, KVCache, rounded_up
from stovetop.engine.kernels.packing import Segment
from stovetop.engine.kernels.shared_prefix import Prefix
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.ops import ComputeLogprobs, Finished, Sample, SamplingOp, Ticket, queue_of
from stovetop.engine.sampling.not_finite import NotFinite
from stovetop.engine.sampling.stops import Stops
from stovetop.engine.sampling.turns import Turn
from stovetop.types import SampledSequence, SampleResponse, SamplingParams, TensorData

PromptKey = tuple[int, bytes]  # equal for prompts of the same weights and the same tokens


@dataclass(slots=True, eq=False)
class Request:
    """What is asked of a prompt, logprobs of its tokens and samples that go on from it, and what is known of that."""

    ticket: Ticket
    op: SamplingOp
    weights: AdapterWeights | None  # None: the base model as it is
    prompt: "Prompt" = field(init=False)
    params: SamplingParams = field(init=False)
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    target_logprobs_TK: list[list[float]] = field(default_factory=list)  # of the tokens that were named
    num_reused: int = 0  # tokens of the prompt that were taken over from an earlier one
    is_computed: bool = False  # the prompt was, once: what was asked of it is known, and samples can begin
    stops: Stops = field(default_factory=lambda: Stops(frozenset()))  # known from then on
    done: list[SampledSequence | None] = field(init=False)  # one a sample, none where logprobs alone are asked for
    begun: "dict[int, Running]" = field(default_factory=dict)  # samples that have not ended, by index
    num_started: int = 0
    is_last_try: bool = False  # it did not fit into memory when it was alone, beside what others had left there

    def __post_init__(self) -> None:
        self.prompt = Prompt(self, self.op.prompt.to_ints())
        self.params = self.op.params if isinstance(self.op, Sample) else SamplingParams()
        self.done = [None] * (self.op.num_samples if isinstance(self.op, Sample) else 0)

    @property
    def queue(self) -> str:
        return queue_of(self.op)

    @property
    def wants_samples(self) -> bool:
        return isinstance(self.op, Sample)

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.op, ComputeLogprobs) or self.op.include_prompt_logprobs

    @property
    def num_top(self) -> int:
        return self.op.topk_prompt_logprobs if isinstance(self.op, Sample) else 0

    @property
    def targets(self) -> np.ndarray | None:
        """Token ids to be scored in place of each token but the first, (T, K); -1 is none."""
        named = self.op.target_prompt_logprobs if isinstance(self.op, Sample) else None
        return None if named is None else named.array

    @property
    def most_positions(self) -> int:
        """That one of its samples may come to take, with the prompt."""
        return len(self.prompt.tokens) + (self.params.max_tokens or 0)

    @property
    def num_left(self) -> int:
        """Samples that have not begun."""
        return len(self.done) - self.num_started

    @property
    def is_complete(self) -> bool:
        return self.is_computed and None not in self.done

    def stream(self, index: int) -> np.random.Generator:
        """The random numbers of one sample."""
        return np.random.default_rng([self.params.seed or 0, index])

    def check_finite(self) -> None:
        """The logprobs that are asked for. Raises NotFinite."""
        top = [logprob for row in self.top_logprobs[1:] for _, logprob in row or ()]
        named = [logprob for row in self.target_logprobs_TK for logprob in row]
        if not all(logprob is None or math.isfinite(logprob) for logprob in (*self.logprobs, *top, *named)):
            raise NotFinite(self.prompt.tokens)

    def answer(self) -> Finished:
        if isinstance(self.op, ComputeLogprobs):
            return Finished(self.ticket, self.logprobs)
        response = unchecked(
            SampleResponse,
            sequences=[sequence for sequence in self.done if sequence is not None],
            prompt_logprobs=self.logprobs if self.wants_logprobs else None,
            topk_prompt_logprobs=self.top_logprobs if self.num_top else None,
            prompt_cache_hit_tokens=self.num_reused,
            target_prompt_logprobs=None
            if self.targets is None
            else TensorData(np.array(self.target_logprobs_TK, np.float32), "float32"),
        )
        return Finished(self.ticket, response)


@dataclass(slots=True, eq=False)
class Prompt:
    """Tokens whose keys and values samples go on from: those of a request, or, for a sample that has lost its slot, the
    same with what it had drawn at their end."""

    request: Request
    tokens: list[int]
    returning: "Running | None" = None  # the sample that lost its slot
    cache: KVCache = field(default_factory=lambda: KVCache(0))  # of one slot, from when it is begun
    num_computed: int = 0
    last_hidden_E: Tensor | None = None  # of the last token, once it is computed
    turn: Turn = (0.0, 0)  # prompts have their turns in the order of these
    key: PromptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (id(self.weights), np.asarray(self.tokens, dtype=np.int64).tobytes())

    @property
    def weights(self) -> AdapterWeights | None:
        return self.request.weights

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.tokens)

    @property
    def is_computed_whole(self) -> bool:
        """Nothing is taken over from others, for logprobs of all its tokens are asked for."""
        asked = self.request
        return not asked.is_computed and (asked.wants_logprobs or asked.num_top > 0 or asked.targets is not None)

    @property
    def num_positions(self) -> int:
        """That its cache takes."""
        return rounded_up(len(self.tokens))

    @property
    def num_left(self) -> int:
        """Samples that go on from it."""
        return self.request.num_left if self.returning is None else 1

    def take_over(self, num_tokens: int) -> None:
        """So many of its tokens were computed before; what is answered is how it was at first."""
        self.num_computed = num_tokens
        if not self.request.is_computed:
            self.request.num_reused = num_tokens

    def forget_cache(self) -> None:
        """All its samples have begun, and have copied what they need."""
        self.cache = KVCache(0)

    def start_over(self) -> None:
        """Its memory is freed, and it is computed again from its first token."""
        self.cache, self.last_hidden_E, self.num_computed = KVCache(0), None, 0
        asked = self.request
        if not asked.is_computed:
            asked.num_reused, asked.logprobs, asked.top_logprobs, asked.target_logprobs_TK = 0, [None], [None], []


@dataclass(slots=True, eq=False)
class Running:
    """One sequence being drawn, from a stream of random numbers of its own."""

    request: Request
    index: int  # among the samples of its request
    number: int  # counts all that ever began, upwards
    stream: np.random.Generator
    prefix: Prefix | None = None  # what the slot does not hold, for it is shared
    source: Prompt | None = None  # what its slot is to be filled from; None once it is
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
        op = self.request.op
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
        return min(self.num_places + 1 + BLOCK, self.request.most_positions - self.start)

    def without_slot(self) -> Prompt:
        """What it goes on from after it has lost its slot."""
        self.source = Prompt(self.request, [*self.request.prompt.tokens, *self.tokens], returning=self)
        return self.source

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
            sequence_id=f"{self.request.ticket.number}:{self.index}",
            topk_logprobs=list(self.tops) if self.num_top else None,
        )


def one_row_each(sequences: Sequence[Running]) -> tuple[list[AdapterWeights | None], list[Segment]]:
    """Whose each row of a pass is that has one row for each of these, in their order."""
    return [sequence.request.weights for sequence in sequences], [Segment(row, 1) for row in range(len(sequences))]

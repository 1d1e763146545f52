# pyright: basic
"""A prompt on its way into the batch: its tokens, its keys and values, and what is known of it so far."""

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from stovetop.engine.kernels.kv_cache import KVCache, rounded_up
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.ops import ComputeLogprobs, Sample, Ticket
from stovetop.engine.sampling.not_finite import NotFinite
from stovetop.engine.sampling.turns import Turn

PromptKey = tuple[int, bytes]  # equal for prompts of the same weights and the same tokens


@dataclass(slots=True, eq=False)
class Prompt:
    ticket: Ticket
    op: Sample | ComputeLogprobs
    weights: AdapterWeights | None  # None: the base model as it is
    tokens: list[int]
    cache: KVCache  # of one slot
    is_again: bool = False  # it was computed before: its logprobs are known, and there is no use in keeping it
    num_computed: int = 0
    num_reused: int = 0  # of these, taken over from an earlier prompt
    last_hidden_E: Tensor | None = None  # of the last token, once it is computed
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    target_logprobs_TK: list[list[float]] = field(default_factory=list)  # of the tokens that were named
    turn: Turn = (0.0, 0)  # prompts have their turns in the order of these
    key: PromptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = (id(self.weights), np.asarray(self.tokens, dtype=np.int64).tobytes())

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.tokens)

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.op, ComputeLogprobs) or self.op.include_prompt_logprobs

    @property
    def is_computed_whole(self) -> bool:
        """Nothing is taken over from others, for logprobs of all its tokens are asked for."""
        return not self.is_again and (self.wants_logprobs or self.num_top > 0 or self.targets is not None)

    @property
    def num_top(self) -> int:
        return self.op.topk_prompt_logprobs if isinstance(self.op, Sample) else 0

    @property
    def targets(self) -> np.ndarray | None:
        """Token ids to be scored in place of each token but the first, (T, K); -1 is none."""
        named = self.op.target_prompt_logprobs if isinstance(self.op, Sample) else None
        return None if named is None else named.array

    def check_finite(self) -> None:
        """Of the logprobs that are asked for. Raises NotFinite."""
        top = [logprob for row in self.top_logprobs[1:] for _, logprob in row or ()]
        named = [logprob for row in self.target_logprobs_TK for logprob in row]
        if not all(logprob is None or math.isfinite(logprob) for logprob in (*self.logprobs, *top, *named)):
            raise NotFinite(self.tokens)

    def forget_cache(self) -> None:
        """All its samples have begun, and have copied what they need."""
        self.cache = KVCache(0)

    def start_over(self, num_layers: int) -> None:
        """Its memory is freed, and it is computed again from its first token."""
        self.cache, self.last_hidden_E, self.num_computed = KVCache(num_layers), None, 0
        if not self.is_again:
            self.num_reused, self.logprobs, self.top_logprobs, self.target_logprobs_TK = 0, [None], [None], []

    @property
    def num_positions(self) -> int:
        """That its cache takes."""
        return rounded_up(len(self.tokens))

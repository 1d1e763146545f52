# pyright: basic
"""The prefix cache: computed prompts that are kept in case they come again, and what others can take over from them.
The least recently used one goes first.

They are found by the weights that they were computed with, so new weights never meet old keys.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, common_length
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.sampling.request import Prompt, PromptKey

# The last one is kept in any case, and all go before anything else has too little memory. In a game of several turns,
# each prompt begins with the one of the turn before it: as many are kept as such a batch may have.
MAX_TOKENS, MAX_PROMPTS = 2**15, 256


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrompt:
    number: int
    key: PromptKey
    weights: "weakref.ref[AdapterWeights] | None"  # None: the base model
    tokens: list[int]
    cache: KVCache  # not written any more
    last_hidden_E: Tensor | None

    @property
    def is_orphan(self) -> bool:
        return self.weights is not None and self.weights() is None

    def is_of(self, weights: AdapterWeights | None) -> bool:
        return not self.is_orphan and (None if self.weights is None else self.weights()) is weights


class PrefixCache:
    def __init__(self) -> None:
        self._cached: OrderedDict[int, CachedPrompt] = OrderedDict()  # by number, the last used at the end
        self._newest: dict[PromptKey, CachedPrompt] = {}  # of those that are the same
        self._number = 0
        self.num_tokens = 0

    @property
    def caches(self) -> list[KVCache]:
        return [cached.cache for cached in self._cached.values()]

    def __len__(self) -> int:
        return len(self._cached)

    def add(self, prompt: Prompt) -> CachedPrompt:
        """Keeps a computed prompt for others; those of weights that are not held any more go, then the least recently
        used ones make room."""
        for cached in [cached for cached in self._cached.values() if cached.is_orphan]:
            self._remove(cached)
        of_weights = None if prompt.weights is None else weakref.ref(prompt.weights)
        self._number += 1
        newest = CachedPrompt(self._number, prompt.key, of_weights, prompt.tokens, prompt.cache, prompt.last_hidden_E)
        self._cached[newest.number] = self._newest[newest.key] = newest
        self.num_tokens += len(newest.tokens)
        while len(self._cached) > 1 and (self.num_tokens > MAX_TOKENS or len(self._cached) > MAX_PROMPTS):
            self.evict()
        return newest

    def evict(self) -> bool:
        """Forgets the least recently used one; False if there is none."""
        for cached in self._cached.values():
            self._remove(cached)
            return True
        return False

    def _remove(self, cached: CachedPrompt) -> None:
        del self._cached[cached.number]
        self.num_tokens -= len(cached.tokens)
        if self._newest.get(cached.key) is cached:
            del self._newest[cached.key]

    def clear(self) -> None:
        self._cached.clear()
        self._newest.clear()
        self.num_tokens = 0

    def same_as(self, prompt: Prompt) -> CachedPrompt | None:
        """Of the same weights and tokens."""
        cached = self._newest.get(prompt.key)
        # an id may be that of another by now
        return cached if cached is not None and cached.is_of(prompt.weights) else None

    def used(self, cached: CachedPrompt) -> None:
        if cached.number in self._cached:
            self._cached.move_to_end(cached.number)

    def begins_with(self, prompt: Prompt, num_tokens: int) -> bool:
        """Whether one begins with the first tokens of this prompt."""
        first = prompt.tokens[:num_tokens]
        return any(own.is_of(prompt.weights) and own.tokens[:num_tokens] == first for own in self._cached.values())

    def longest_match(self, prompt: Prompt) -> tuple[CachedPrompt | None, int]:
        """The one that has most in common with the beginning of a prompt, and how many tokens that is."""
        best, best_length = None, MIN_SHARED_TOKENS - 1
        for cached in self._cached.values():
            length = common_length(cached.tokens, prompt.tokens[:-1]) if cached.is_of(prompt.weights) else 0
            if length > best_length:
                best, best_length = cached, length
        return best, best_length

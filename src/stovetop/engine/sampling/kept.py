# pyright: basic
"""Computed prompts that are kept in case they come again, the last used longest; what others can take over from them.

They are found by the weights that they were computed with, so new weights never meet old keys.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, common_length
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.sampling.prompt import Prompt, PromptKey

# The last one is kept in any case, and all go before anything else has too little memory. In a game of several turns,
# each prompt begins with the one of the turn before it: as many are kept as such a batch may have.
KEPT_TOKENS, KEPT_PROMPTS = 2**15, 256


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
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


class KeptPrompts:
    def __init__(self) -> None:
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # by number, the last used at the end
        self._newest: dict[PromptKey, Kept] = {}  # of those that are the same
        self._number = 0
        self.num_tokens = 0

    @property
    def caches(self) -> list[KVCache]:
        return [kept.cache for kept in self._kept.values()]

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prompt: Prompt) -> Kept:
        """Keeps a computed prompt for others; those of weights that are not held any more go, then the least recently
        used ones make room."""
        for kept in [kept for kept in self._kept.values() if kept.is_orphan]:
            self._drop(kept)
        of_weights = None if prompt.weights is None else weakref.ref(prompt.weights)
        self._number += 1
        newest = Kept(self._number, prompt.key, of_weights, prompt.tokens, prompt.cache, prompt.last_hidden_E)
        self._kept[newest.number] = self._newest[newest.key] = newest
        self.num_tokens += len(newest.tokens)
        while len(self._kept) > 1 and (self.num_tokens > KEPT_TOKENS or len(self._kept) > KEPT_PROMPTS):
            self.drop()
        return newest

    def drop(self) -> bool:
        """Forgets the one that was not used for longest; False if there is none."""
        for kept in self._kept.values():
            self._drop(kept)
            return True
        return False

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.number]
        self.num_tokens -= len(kept.tokens)
        if self._newest.get(kept.key) is kept:
            del self._newest[kept.key]

    def clear(self) -> None:
        self._kept.clear()
        self._newest.clear()
        self.num_tokens = 0

    def same_as(self, prompt: Prompt) -> Kept | None:
        """Of the same weights and tokens."""
        kept = self._newest.get(prompt.key)
        return kept if kept is not None and kept.is_of(prompt.weights) else None  # an id may be that of another by now

    def used(self, kept: Kept) -> None:
        if kept.number in self._kept:
            self._kept.move_to_end(kept.number)

    def begins_with(self, prompt: Prompt, num_tokens: int) -> bool:
        """Whether one begins with the first tokens of this prompt."""
        first = prompt.tokens[:num_tokens]
        return any(kept.is_of(prompt.weights) and kept.tokens[:num_tokens] == first for kept in self._kept.values())

    def longest_beginning(self, prompt: Prompt) -> tuple[Kept | None, int]:
        """The one that has most in common with the beginning of a prompt, and how many tokens that is."""
        best, best_length = None, MIN_SHARED_TOKENS - 1
        for kept in self._kept.values():
            length = common_length(kept.tokens, prompt.tokens[:-1]) if kept.is_of(prompt.weights) else 0
            if length > best_length:
                best, best_length = kept, length
        return best, best_length

# pyright: basic
"""The memory for keys and values: how much is allocated, and what is freed first when more is needed.

It is counted in positions: slots times positions of the cache of the running samples and of that of their shared
prefixes, and positions of prompts that are begun, that are computed and wait to be continued, and that are kept in case
they come again. All together never take more than the limit. The prefix cache, and room that is no longer used, are
freed here; what is freed next, `admission.py` chooses.
"""

from collections.abc import Sequence

from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.sampling.batch import Batch, CacheSize
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.ready import Ready


class KVMemory:
    def __init__(self, limit: int, batch: Batch, prompts: Prompts, ready: Ready) -> None:
        """`limit` is in positions."""
        self.limit = limit
        self._batch = batch
        self._prompts = prompts
        self._ready = ready

    @property
    def held_positions(self) -> int:
        """Positions of prompts that wait to be continued."""
        return _num_tokens(self._held)

    @property
    def _held(self) -> list[KVCache]:
        return [*self._ready.caches, *self._batch.source_caches]

    @property
    def prompt_positions(self) -> int:
        """The same, with those that are begun."""
        return self.held_positions + self._prompts.begun_positions

    @property
    def allocated(self) -> int:
        return self._batch.cache.num_tokens + self._besides

    @property
    def _besides(self) -> int:
        """What all but the running samples have."""
        caches = [*self._held, *self._prompts.prefix_cache.caches]
        return _num_tokens(caches) + self._prompts.begun_positions + self._batch.prefixes.num_allocated

    def make(self, num_positions: int) -> None:
        """Frees what is idle until there is memory for so many positions more."""
        while self.allocated + num_positions > self.limit:
            if not (self._free_idle() or self._batch.cache.shrink(*self._batch.in_use)):
                return

    def reserve(self, size: CacheSize) -> bool:
        """Room for the running samples; False if something that is not idle would have to be freed for it."""
        running = self._batch.cache
        if size.num_slots <= running.num_slots and size.num_positions <= running.num_positions:
            return True
        while size.num_tokens + self._besides > self.limit:
            if not self._free_idle():
                return False
        self.bound()
        running.reserve(*size)
        return True

    def bound(self) -> None:
        """The cache of the running samples may from now on grow as far as the others leave it room."""
        self._batch.cache.max_tokens = self.limit - self._besides

    def _free_idle(self) -> bool:
        return self._prompts.prefix_cache.evict() or self._batch.prefixes.shrink()


def _num_tokens(caches: Sequence[KVCache]) -> int:
    """Of which some may be the same."""
    return sum({id(cache): cache.num_tokens for cache in caches}.values())

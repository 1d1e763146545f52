# pyright: basic
"""The memory for keys and values: how much is allocated, and what is freed first when more is needed.

It is counted in positions: slots times positions of the cache of the running samples and of that of their shared
prefixes, and positions of prompts that are begun, that are computed and wait to be continued, and that are kept in case
they come again. All together never take more than the limit. Kept prompts, and room that is no longer used, are freed
here; what is freed next, the sampler chooses.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stovetop.engine.kernels.kv_cache import KVCache, rounded_up
from stovetop.engine.kernels.shared_prefix import SharedPrefixes
from stovetop.engine.sampling.open_requests import Ready
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.samples import Start


class Size(NamedTuple):
    """Of the cache of the running samples."""

    num_slots: int
    num_positions: int

    @property
    def num_tokens(self) -> int:
        return self.num_slots * rounded_up(self.num_positions)


class KVMemory:
    def __init__(
        self,
        limit: int,
        running: KVCache,
        prefixes: SharedPrefixes,
        prompts: Prompts,
        ready: Ready,
        sources: Sequence[Start],
    ) -> None:
        """`limit` is in positions. `ready` and `sources` are the sampler's: what waits to be continued, and what is
        about to be copied into slots."""
        self.limit = limit
        self._running = running
        self._prefixes = prefixes
        self._prompts = prompts
        self._ready = ready
        self._sources = sources

    @property
    def held_positions(self) -> int:
        """Positions of prompts that wait to be continued."""
        return _num_tokens(self._held)

    @property
    def _held(self) -> list[KVCache]:
        return [*self._ready.caches, *(start.prompt.cache for start in self._sources)]

    @property
    def prompt_positions(self) -> int:
        """The same, with those that are begun."""
        return self.held_positions + self._prompts.begun_positions

    @property
    def allocated(self) -> int:
        return self._running.num_tokens + self._besides

    @property
    def _besides(self) -> int:
        """What all but the running samples have."""
        caches = [*self._held, *self._prompts.kept_caches()]
        return _num_tokens(caches) + self._prompts.begun_positions + self._prefixes.num_allocated

    def make(self, num_positions: int, in_use: Size) -> None:
        """Frees what is idle until there is memory for so many positions more. Of the cache of the running samples only
        `in_use` is needed."""
        while self.allocated + num_positions > self.limit:
            if not (self._free_idle() or self._running.shrink(*in_use)):
                return

    def reserve(self, size: Size) -> bool:
        """Room for the running samples; False if something that is not idle would have to be freed for it."""
        if size.num_slots <= self._running.num_slots and size.num_positions <= self._running.num_positions:
            return True
        while size.num_tokens + self._besides > self.limit:
            if not self._free_idle():
                return False
        self.bound()
        self._running.reserve(*size)
        return True

    def bound(self) -> None:
        """The cache of the running samples may from now on grow as far as the others leave it room."""
        self._running.max_tokens = self.limit - self._besides

    def _free_idle(self) -> bool:
        return self._prompts.drop_kept() or self._prefixes.shrink()


def _num_tokens(caches: Sequence[KVCache]) -> int:
    """Of which some may be the same."""
    return sum({id(cache): cache.num_tokens for cache in caches}.values())

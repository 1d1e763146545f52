# pyright: basic
"""Prompts that are computed and have samples for which there is no room yet. What a step asks of them costs the same
however many there are."""

from collections import OrderedDict
from collections.abc import Iterator

from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.sampling.request import Prompt, Request
from stovetop.engine.sampling.turns import Turn, Turns


class Ready:
    """The queue for which the fewest tokens were drawn is served first, and in each the oldest prompt; what a sample
    costs is known when it has ended, so it counts then."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[int, Prompt] = OrderedDict()  # by id, oldest first
        self._queues: dict[str, OrderedDict[int, Prompt]] = {}  # the same by queue
        self._of_cache: dict[int, dict[int, Prompt]] = {}  # the same by id of the cache, which several may share
        self._turn_of: dict[str, Turn] = {}  # of the next sample of each queue
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(list(self._prompts.values()))

    def __contains__(self, prompt: Prompt) -> bool:
        return id(prompt) in self._prompts

    @property
    def caches(self) -> list[KVCache]:
        """Each once."""
        return [next(iter(prompts.values())).cache for prompts in self._of_cache.values()]

    @property
    def first(self) -> Prompt:
        """From which the next sample is to go on."""
        queue = min(self._turn_of, key=self._turn_of.__getitem__)
        return next(iter(self._queues[queue].values()))

    def has_several_from(self, cache: KVCache) -> bool:
        """Whether more than one sample goes on from it."""
        prompts = self._of_cache.get(id(cache), {})
        return len(prompts) > 1 or any(prompt.num_left > 1 for prompt in prompts.values())

    def append(self, prompt: Prompt) -> None:
        queue = prompt.request.queue
        self._prompts[id(prompt)] = prompt
        self._queues.setdefault(queue, OrderedDict())[id(prompt)] = prompt
        self._of_cache.setdefault(id(prompt.cache), {})[id(prompt)] = prompt
        if queue not in self._turn_of:
            self._turn_of[queue] = self._turns.next(queue, 1)

    def begin_sample(self, prompt: Prompt, *, is_last: bool) -> None:
        """One of the samples of the first begins, and the next turn of its queue comes behind those of others."""
        queue = prompt.request.queue
        self._turns.served(self._turn_of[queue])
        if is_last:
            self.remove(prompt)
        else:  # its memory is freed after that of those of which no sample has begun
            self._prompts.move_to_end(id(prompt), last=False)
        if queue in self._turn_of:
            self._turn_of[queue] = self._turns.next(queue, 1)

    def charge(self, request: Request, num_tokens: int) -> None:
        """So many tokens were drawn for it."""
        self._turns.charge(request.queue, num_tokens)

    def remove(self, prompt: Prompt) -> None:
        """If it is there."""
        if self._prompts.pop(id(prompt), None) is None:
            return
        queue, cache = prompt.request.queue, id(prompt.cache)
        del self._queues[queue][id(prompt)], self._of_cache[cache][id(prompt)]
        if not self._queues[queue]:
            del self._queues[queue], self._turn_of[queue]
        if not self._of_cache[cache]:
            del self._of_cache[cache]

    def pop(self) -> Prompt:
        """The newest, out of it."""
        prompt = next(reversed(self._prompts.values()))
        self.remove(prompt)
        return prompt

    def clear(self) -> None:
        for table in (self._prompts, self._queues, self._of_cache, self._turn_of):
            table.clear()

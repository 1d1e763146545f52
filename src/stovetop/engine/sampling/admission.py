# pyright: basic
"""Which samples are admitted to the running batch, and which leave it when memory runs out.

Memory is bounded (`kv_memory.py`) and claimed as sequences grow, not for all that may come of them. Where it runs out,
the caches of prompts that are not continued yet are freed, then the sequences that were admitted last are preempted:
what they drew is kept, its keys and values are computed again when there is room, and they go on. After that nothing is
admitted until a sequence has ended, so that the same ones are not preempted again and again. A sequence that does not
fit beside others runs alone; one that would not fit even then was refused when it came.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from stovetop.engine.kernels.kv_cache import BLOCK
from stovetop.engine.kernels.shared_prefix import Prefix
from stovetop.engine.sampling.batch import Batch, CacheSize, Newcomer
from stovetop.engine.sampling.kv_memory import KVMemory
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.ready import Ready
from stovetop.engine.sampling.request import Prompt, Running
from stovetop.engine.sampling.waiting import Room

MAX_RUNNING = 512  # sequences
HELD_TOKENS, HELD_SHARE = 2**16, 0.25  # positions, and of those there are, for prompts that cannot be continued yet


class Admission:
    def __init__(self, batch: Batch, prompts: Prompts, limit: int) -> None:
        """`limit` is in positions."""
        self._batch = batch
        self._prompts = prompts
        self.ready = Ready()
        self.memory = KVMemory(limit, batch, prompts, self.ready)
        self._is_full = False  # memory ran out, and no sequence has ended since
        self._numbers = itertools.count()

    def room_for_prompts(self) -> Room:
        """What the running samples leave, with a block more for each of them."""
        limit = self.memory.limit
        grown = CacheSize(len(self._batch.running), self._batch.longest_grown)
        left = limit - grown.num_tokens - self._batch.prefixes.num_tokens() - self.memory.prompt_positions
        ahead = self.memory.held_positions + self._prompts.begun_positions_of_samples
        most_ahead = min(HELD_TOKENS, int(HELD_SHARE * limit))
        begun = self._prompts.begun_positions
        return Room(0 if self._is_full else left, begun, ahead, most_ahead, self.memory.make)

    def make_room(self) -> None:
        """For the next token of every running sequence."""
        while not self.memory.reserve(self._batch.in_use):
            if self._prompts.drop_begun():
                pass
            elif self.ready:
                self._compute_again(self.ready.pop())
            else:
                assert len(self._batch.running) > 1, "a sequence alone has room: longer ones are refused"
                self._preempt(max(self._batch.running, key=lambda sequence: sequence.number))
            self._is_full = True
        self.memory.bound()

    def admit(self) -> list[Newcomer]:
        """Starts samples while there is room, queues in turn. Their slots are filled."""
        if self._is_full or not self.ready:
            return []
        running, num_before = self._batch.running, len(self._batch.running)
        longest, prompt_positions = self._batch.longest_grown, self.memory.prompt_positions
        while self.ready and self._start_next(longest, prompt_positions):
            longest = max(longest, running[-1].grown)
        if len(running) == num_before:
            return []
        has_room = self.memory.reserve(CacheSize(len(running), max(sequence.num_places for sequence in running) + 1))
        assert has_room, "a sequence begins where there is room"
        newcomers = self._batch.fill_slots()
        for _, source in newcomers:
            if source not in self.ready:
                source.forget_cache()
        return newcomers

    def remove(self, sequences: Sequence[Running]) -> None:
        """Out of the batch."""
        if sequences:
            self._batch.remove(sequences)
            self._is_full = False

    def clear(self) -> None:
        """Forgets all of them."""
        self._batch.clear()
        self.ready.clear()
        self._is_full = False

    def _preempt(self, sequence: Running) -> None:
        """Its slot is freed, and it goes on when its prompt and what it has drawn are computed again."""
        self.remove([sequence])
        self._prompts.add(sequence.without_slot(), first=True)

    def _compute_again(self, prompt: Prompt) -> None:
        """Its memory is freed."""
        prompt.start_over()
        self._prompts.add(prompt, first=True)

    def _start_next(self, longest: int, prompt_positions: int) -> bool:
        """Whether there was room for one more sample of the first prompt. `longest` is the longest slot of those that
        run, and `prompt_positions` are the positions that prompts have."""
        prompt, prefixes, num_running = self.ready.first, self._batch.prefixes, len(self._batch.running)
        prefix, shared = self._batch.shared(prompt, by_several=self.ready.has_several_from(prompt.cache))
        is_new = shared > 0 and prefix is None
        places, most = (length - shared for length in (len(prompt.tokens) + 1, prompt.request.most_positions))
        longest = max(longest, min(places + BLOCK, most) if num_running else places)
        size = CacheSize(num_running + 1, longest)
        num_shared = prefixes.num_tokens(prompt.cache, shared) if is_new else prefixes.num_tokens()
        fits = size.num_tokens + num_shared + prompt_positions <= self.memory.limit
        if not num_running and not fits:
            self._start_alone(prompt)
        elif fits and size.num_slots <= MAX_RUNNING:
            if is_new:
                self.memory.make(num_shared - prefixes.num_allocated)
                prefix = prefixes.join(prompt.cache, shared)
            elif prefix is not None:
                prefixes.rejoin(prefix)
            self._begin(prompt, prefix)
        else:
            return False
        return True

    def _begin(self, prompt: Prompt, prefix: Prefix | None) -> Running:
        """The next sample of the first that is ready."""
        request, sequence = prompt.request, prompt.returning
        self.ready.begin_sample(prompt, is_last=prompt.num_left == 1)
        if sequence is None:
            index = request.num_started
            sequence = request.begun[index] = Running(request, index, next(self._numbers), request.stream(index))
            request.num_started += 1
        sequence.prefix = prefix
        self._batch.join(sequence, prompt)
        return sequence

    def _start_alone(self, prompt: Prompt) -> None:
        """Nothing runs, and there is no room for the first that is ready beside the caches of other prompts: these are
        freed. Where there is none beside its own prompt, the prompt's cache becomes its slot."""
        for other in reversed(list(self.ready)):
            if other is not prompt:
                self.ready.remove(other)
                self._compute_again(other)
        while self._prompts.drop_begun() or self._prompts.prefix_cache.evict():
            pass
        sequence = self._begin(prompt, None)
        if CacheSize(1, len(prompt.tokens) + 1).num_tokens + prompt.cache.num_tokens > self.memory.limit:
            self._batch.cache.take_over(prompt.cache)
            if prompt in self.ready:
                self.ready.remove(prompt)
                sequence.source = replace(prompt)
                self._compute_again(prompt)

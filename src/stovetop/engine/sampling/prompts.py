# pyright: basic
"""Prompts on their way into the batch: each is computed once, in chunks, and what prompts of the same weights have in
common is not computed again.

A step computes at most `STEP_TOKENS` tokens, at most `CHUNK_TOKENS` of them of one prompt, of each in turn: a long
prompt neither stalls the sequences that are being drawn nor the short prompts behind it. A prompt whose first half is
just being computed for another waits for that. Finished prompts are kept (`prefix_cache.py`) as long as their memory
is not needed: one that is the same as one of them is not computed at all, and shares its cache. A prompt whose own
logprobs are asked for is computed whole.

A prompt is begun when there is memory for its keys and values; how much there is, `admission.py` says (`Room`). One
whose memory was taken for others is computed again later. A pass that raises is tried again in halves (`halves.py`):
nothing is known of a prompt before the pass that computed it has succeeded.

Shapes: `N` tokens of a pass, `T` tokens of one chunk, `E` hidden size, `K` tokens per position asked for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stovetop.engine.kernels.attention_plans import PrefillAttention, PrefillChunk, pack_of_chunks
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, Pack
from stovetop.engine.lora.routing import AdapterRows, Rows, Stack, prompt_rows, rows_by_owner
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.head import Head, pair_logprobs, top_logprobs
from stovetop.engine.sampling.halves import Failed, each, in_halves
from stovetop.engine.sampling.prefix_cache import CachedPrompt, PrefixCache
from stovetop.engine.sampling.request import Prompt
from stovetop.engine.sampling.waiting import Room, WaitingPrompts

STEP_TOKENS = {"cpu": 2048, "cuda": 16384}  # of all prompts, in a step: how long running samples wait
CHUNK_TOKENS = 512  # of one prompt, in a pass; sampling at half and double of it: 1.00, 0.99 (benchmarks/constants.py)


class Computed(NamedTuple):
    """What a step has made of prompts."""

    done: list[Prompt]
    failed: list[Failed[Prompt]]


class Prompts:
    """All prompts that are not yet computed, and those that may be used again."""

    def __init__(self, model: BaseModel, stack: Stack) -> None:
        """`stack` is that of the adapters that run."""
        self._model = model
        self._stack = stack
        self._waiting = WaitingPrompts()
        self._begun: OrderedDict[int, Prompt] = OrderedDict()  # those with memory, by id, in the order of their turns
        self._new: dict[int, Prompt] = {}  # those that wait and were not yet looked up in the prefix cache
        self.prefix_cache = PrefixCache()

    def add(self, prompt: Prompt, *, first: bool = False) -> None:
        """Behind the others of its queue, or before all."""
        self._waiting.add(prompt, first=first)
        self._new[id(prompt)] = prompt

    def remove(self, prompt: Prompt) -> None:
        """If it is there."""
        self._waiting.remove(prompt)
        self._begun.pop(id(prompt), None)
        self._new.pop(id(prompt), None)

    @property
    def idle(self) -> bool:
        return len(self._waiting) == 0 and not self._begun

    @property
    def begun_positions(self) -> int:
        """Positions that those take which are being computed."""
        return sum(prompt.num_positions for prompt in self._begun.values())

    @property
    def begun_positions_of_samples(self) -> int:
        """The same of those that samples go on from."""
        return sum(prompt.num_positions for prompt in self._begun.values() if prompt.request.wants_samples)

    def drop_begun(self) -> bool:
        """The last one that was begun starts over later; False if there is none."""
        if not self._begun:
            return False
        _, prompt = self._begun.popitem()
        prompt.start_over()
        self.add(prompt, first=True)
        return True

    def clear(self) -> None:
        """Forgets all of them."""
        for table in (self._waiting, self._begun, self._new, self.prefix_cache):
            table.clear()

    def step(self, room: Room, running: Sequence[AdapterWeights]) -> Computed:
        """Computes a chunk of as many prompts as fit. `running` are the adapters that keep their places in the stack.
        Those that failed are there until they are removed."""
        done, (taken, failed) = self._known(), self._taken(room)
        chunks = [taken[index] for index in self._stack.in_order([chunk.prompt.weights for chunk in taken])]
        failed_chunks = in_halves(chunks, lambda part: self._compute(part, running if part is chunks else None))
        failed += [Failed(one.item.prompt, one.error) for one in failed_chunks]
        gone = {id(one.item) for one in failed}
        for prompt in [chunk.prompt for chunk in taken if id(chunk.prompt) not in gone]:
            if prompt.is_computed:
                self._begun.pop(id(prompt))
                done.append(prompt)
                if not prompt.request.is_computed:  # there is no use in keeping what is computed again
                    done += self._twins(self.prefix_cache.add(prompt))  # now, before others push it out
            else:  # behind those of its queue that had no turn
                self._waiting.have_turn_last(prompt)
                self._begun.move_to_end(id(prompt))
        return Computed(done, failed)

    def _taken(self, room: Room) -> "tuple[list[_Chunk], list[Failed[Prompt]]]":
        """Prompts whose turn it is, and how many tokens of each; and those that failed when they were begun."""
        taken: list[_Chunk] = []
        failed: list[Failed[Prompt]] = []
        num_left = STEP_TOKENS.get(self._model.device.type, STEP_TOKENS["cpu"])
        begun = sorted(self._begun.values(), key=lambda prompt: prompt.turn)
        for prompt in self._waiting.in_turn(begun, room):
            if num_left == 0:
                break
            if id(prompt) not in self._begun:
                if not room.allows(prompt):
                    continue
                if self._is_half_on_its_way(prompt):
                    room.num_put_off += 1
                    continue
                room.take(prompt)
                self._begun[id(prompt)] = prompt
                new = each([prompt], self._start)
                failed += new
                if new:
                    continue
            length = min(len(prompt.tokens) - prompt.num_computed, CHUNK_TOKENS, num_left)
            taken.append(_Chunk(prompt, length))
            self._waiting.has_turn(prompt)
            num_left -= length
        for prompt in [*(chunk.prompt for chunk in taken), *(one.item for one in failed)]:
            self._waiting.remove(prompt)
            self._new.pop(id(prompt), None)
        return taken, failed

    def _compute(self, taken: "Sequence[_Chunk]", running: Sequence[AdapterWeights] | None) -> None:
        """One pass over all chunks: their keys and values enter the caches, and what becomes known of the prompts is
        noted, all of it or nothing. `running` is None for a part of what was to be one pass, which does without the
        stack."""
        prompts = [prompt for prompt, _ in taken]
        chunks: list[PrefillChunk] = []
        for prompt, length in taken:
            first_row = chunks[-1].rows.stop if chunks else 0
            chunks.append(PrefillChunk(prompt.cache, prompt.num_computed, length, first_row))
        tokens = [prompt.tokens[chunk.start : chunk.end] for prompt, chunk in zip(prompts, chunks, strict=True)]
        packed = pack_of_chunks(chunks, tokens)
        plan = PrefillAttention(chunks, self._model.arithmetic, self._model.device)
        try:
            parts = self._parts([prompt.weights for prompt in prompts], packed, running)
            hidden_NE = self._model.hidden_states(packed, plan, parts)
        except BaseException:
            self._stack.clear()  # which may be half filled
            raise
        found = [_found(self._model, *own, hidden_NE) for own in zip(prompts, chunks, strict=True)]
        for prompt, chunk, known in zip(prompts, chunks, found, strict=True):  # nothing here can fail
            prompt.num_computed = chunk.end
            prompt.last_hidden_E = known.last_hidden_E
            prompt.request.logprobs += known.logprobs
            prompt.request.top_logprobs += known.top_logprobs
            prompt.request.target_logprobs_TK += known.target_logprobs_TK

    def _parts(
        self, owners: list[AdapterWeights | None], packed: Pack, running: Sequence[AdapterWeights] | None
    ) -> AdapterRows:
        """Which row belongs to which adapter."""
        if running is not None and self._model.arithmetic.can_stack:
            return prompt_rows(owners, packed.segments, self._model.device, self._stack, running)
        return rows_by_owner(owners, packed.segments, self._model.device)

    # ---- what was computed before ------------------------------------------------------------------------------------

    def _known(self) -> list[Prompt]:
        """Those that have come since the last step and are the same as one that is kept: there is nothing to
        compute."""
        new, self._new = self._new, {}
        alike = [self.prefix_cache.same_as(prompt) for prompt in new.values() if not prompt.is_computed_whole]
        return [twin for cached in alike if cached is not None for twin in self._twins(cached)]

    def _twins(self, cached: CachedPrompt) -> list[Prompt]:
        """Those that wait and are the same, out of the queue and computed."""
        same = self._waiting.same_as(cached.key)
        for prompt in same:
            self.remove(prompt)
            prompt.cache, prompt.last_hidden_E = cached.cache, cached.last_hidden_E
            prompt.take_over(len(prompt.tokens))
        if same:
            self.prefix_cache.used(cached)
        return same

    def _is_half_on_its_way(self, prompt: Prompt) -> bool:
        """Whether a prompt that is being computed begins with the first half of this one, and none in the prefix
        cache."""
        if prompt.is_computed_whole or len(prompt.tokens) <= MIN_SHARED_TOKENS:
            return False
        half = max(MIN_SHARED_TOKENS, (len(prompt.tokens) + 1) // 2)
        begun = [other for other in self._begun.values() if other.weights is prompt.weights]
        # the last of them first, for most prompts differ there
        begun = [other for other in begun if other.tokens[half - 1 : half] == prompt.tokens[half - 1 : half]]
        if not any(other.tokens[:half] == prompt.tokens[:half] for other in begun):
            return False
        return not self.prefix_cache.begins_with(prompt, half)

    def _start(self, prompt: Prompt) -> None:
        """From the longest beginning that a prompt in the prefix cache shares. The last token is always computed:
        drawing needs its hidden state."""
        prompt.cache = KVCache(self._model.num_layers)
        prompt.cache.reserve(1, len(prompt.tokens))
        if prompt.is_computed_whole:
            return
        cached, length = self.prefix_cache.longest_match(prompt)
        if cached is not None:
            prompt.cache.copy_from(cached.cache, 0, [0], length)
            prompt.take_over(length)
            self.prefix_cache.used(cached)


class _Chunk(NamedTuple):
    """So many tokens of a prompt, that are computed in this step."""

    prompt: Prompt
    length: int


class _Found(NamedTuple):
    """What a pass tells of a prompt."""

    logprobs: list[float | None]
    top_logprobs: list[list[tuple[int, float]] | None]
    target_logprobs_TK: list[list[float]]
    last_hidden_E: Tensor | None


def _found(model: BaseModel, prompt: Prompt, chunk: PrefillChunk, hidden_NE: Tensor) -> _Found:
    """Logprobs of the tokens that follow each row, where they are asked for: the prompt's last row has none. And of
    that row, the hidden state."""
    hidden_TE, asked = hidden_NE[chunk.rows], prompt.request
    following = prompt.tokens[chunk.start + 1 : chunk.end + 1]
    found = _Found([], [], [], hidden_TE[-1].clone() if chunk.end == len(prompt.tokens) else None)
    if asked.is_computed or not following:
        return found
    head, rows_TE = model.head([] if prompt.weights is None else [Rows(prompt.weights)]), hidden_TE[: len(following)]
    if asked.wants_logprobs:
        rows_P, targets_P = (torch.tensor(of, device=hidden_TE.device) for of in (range(len(following)), following))
        found.logprobs.extend(pair_logprobs(head, rows_TE, rows_P, targets_P).tolist())
    if asked.num_top:
        tops = (tensor_TK.tolist() for tensor_TK in top_logprobs(head, rows_TE, asked.num_top))
        found.top_logprobs.extend(list(zip(*row, strict=True)) for row in zip(*tops, strict=True))
    if asked.targets is not None:
        found.target_logprobs_TK.extend(_named(head, rows_TE, asked.targets[chunk.start : chunk.start + len(rows_TE)]))
    return found


def _named(head: Head, rows_TE: Tensor, targets_TK: np.ndarray) -> list[list[float]]:
    """Logprobs of the tokens that are named for each row; 0 for -1."""
    logprobs_TK = np.zeros(targets_TK.shape)
    rows_P, columns_P = np.nonzero(targets_TK != -1)  # in the order of the rows
    if len(rows_P):
        tokens_P, device = torch.from_numpy(targets_TK[rows_P, columns_P]), rows_TE.device
        found_P = pair_logprobs(head, rows_TE, torch.from_numpy(rows_P).to(device), tokens_P.to(device))
        logprobs_TK[rows_P, columns_P] = found_P.tolist()
    return [row_K.tolist() for row_K in logprobs_TK]

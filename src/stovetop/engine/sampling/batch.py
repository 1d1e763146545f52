# pyright: basic
"""The running batch: sequences in the first slots of a cache, so that the pass over them reads a view. A slot that ends
is filled with the last one. Samples of one prompt share what is cached of it (`shared_prefix.py`).

A pass draws a token for each of its sequences, or none for any: what a pass writes into the cache, it writes again when
it is tried again, and random numbers are remembered until they are used.

Shapes: `S` running sequences, `E` hidden size.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stovetop.engine.kernels.kv_cache import KVCache, rounded_up
from stovetop.engine.kernels.shared_prefix import MIN_PREFIX_TOKENS, Prefix, SharedPrefixes
from stovetop.engine.lora.routing import AdapterRows, Stack, rows_by_owner, stacked_rows
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoding import Step, decoded
from stovetop.engine.sampling.drawing import draw, most_probable
from stovetop.engine.sampling.halves import Failed, in_halves
from stovetop.engine.sampling.request import Prompt, Running, one_row_each

IDLE_CACHE_SHARE = 0.2  # of the available memory, that an idle cache may have besides


class RecordedDecoding(Protocol):
    """Does what `decoding.decoded` does, by repeating recorded passes: `untried/captured.py` has one."""

    works: bool  # False: a pass could not be recorded, so every pass is an ordinary one

    def __call__(self, step: Step) -> Tensor: ...


RecordDecoding = Callable[[BaseModel], RecordedDecoding | None]  # None where passes of a model cannot be recorded


class CacheSize(NamedTuple):
    """Of the cache of the running samples."""

    num_slots: int
    num_positions: int

    @property
    def num_tokens(self) -> int:
        return self.num_slots * rounded_up(self.num_positions)


class Newcomer(NamedTuple):
    sequence: Running
    source: Prompt  # that it goes on from


class Batch:
    def __init__(self, model: BaseModel, stack: Stack, recorded: RecordedDecoding | None) -> None:
        self._model = model
        self._stack = stack
        self._recorded = recorded
        self.cache = KVCache(model.num_layers, doubling=recorded is not None)
        self.prefixes = SharedPrefixes(model.num_layers)
        self.running: list[Running] = []  # in the order of their slots

    @property
    def records(self) -> bool:
        return self._recorded is not None and self._recorded.works

    @property
    def in_use(self) -> CacheSize:
        filled = [sequence for sequence in self.running if sequence.source is None]
        return CacheSize(len(filled), max((sequence.num_places for sequence in filled), default=0))

    @property
    def source_caches(self) -> list[KVCache]:
        """Which slots are to be filled from."""
        return [sequence.source.cache for sequence in self.running if sequence.source is not None]

    @property
    def longest_grown(self) -> int:
        """Of the slots, with a block more for each."""
        return max((sequence.grown for sequence in self.running), default=0)

    def shared(self, prompt: Prompt, *, by_several: bool) -> tuple[Prefix | None, int]:
        """What a sample can share of its prompt, and how much: a prefix that is there, or None and a length for one
        that is worth it, or None and 0. `by_several`: more samples are to go on from there."""
        if prompt.returning is not None:
            prefix = prompt.returning.prefix
            return (prefix, prefix.length) if prefix is not None and self.prefixes.has(prefix) else (None, 0)
        length, prefix = self._num_shared(prompt), self.prefixes.find(prompt.cache)
        is_alone = not by_several and prefix is None
        if length == 0 or is_alone or not self.prefixes.would_balance(prefix):
            return None, 0
        return prefix, length

    def _num_shared(self, prompt: Prompt) -> int:
        """How much of a prompt its samples can share: as much as attention reads in whole blocks."""
        if self.records or not self._model.attends_plainly:  # a recorded pass has slots only
            return 0
        length = len(prompt.tokens) - len(prompt.tokens) % self._model.arithmetic.key_multiple
        return length if length >= MIN_PREFIX_TOKENS else 0

    def join(self, sequence: Running, source: Prompt) -> None:
        """It has a slot from now on; what it goes on from is in it after `fill_slots`."""
        sequence.source = source
        self.running.append(sequence)

    def fill_slots(self) -> list[Newcomer]:
        """What is computed of the prompts of those that have joined, and not shared, goes into their slots."""
        newcomers: list[Newcomer] = []
        alike: dict[tuple[int, int], tuple[Prompt, list[int]]] = {}
        for slot, sequence in enumerate(self.running):
            source, sequence.source = sequence.source, None
            if source is not None:
                newcomers.append(Newcomer(sequence, source))
                if source.cache.num_slots > 0:  # otherwise it became the slot
                    alike.setdefault((id(source.cache), sequence.start), (source, []))[1].append(slot)
        for (_, position), (source, slots) in alike.items():
            self.cache.copy_from(source.cache, 0, slots, len(source.tokens) - position, start=position)
        return newcomers

    def remove(self, sequences: Sequence[Running]) -> None:
        """Out of the batch."""
        for sequence in sequences:
            if sequence.prefix is not None:
                self.prefixes.leave(sequence.prefix)
        gone = set(map(id, sequences))
        is_left = [id(sequence) not in gone for sequence in self.running]
        num_left = sum(is_left)
        holes = [slot for slot in range(num_left) if not is_left[slot]]
        movers = [slot for slot in range(num_left, len(is_left)) if is_left[slot]]
        for hole, slot in zip(holes, movers, strict=True):
            moved = self.running[slot]
            self.cache.copy_from(self.cache, slot, [hole], moved.position - moved.start)
            self.running[hole] = moved
        del self.running[num_left:]

    def rest(self) -> None:
        """Frees the memory that nothing runs in: not for recordings, which would be lost with what they read, if it
        leaves the others room."""
        if self.records and self.cache.num_bytes <= IDLE_CACHE_SHARE * available_bytes(self._model.device):
            return
        if not self.running:
            self.cache.clear()
            self._stack.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        for sequence in self.running:
            sequence.source = None
        self.running.clear()
        self.cache.clear()
        self.prefixes.clear()
        self._stack.clear()

    # ---- passes ------------------------------------------------------------------------------------------------------

    def draw_next(self) -> list[Failed[Running]]:
        """One pass over the running sequences: each one's last token goes in, its next is drawn. Returns those for
        which that failed, and none was."""
        failed = in_halves(range(len(self.running)), self._decode)
        return [Failed(self.running[one.item], one.error) for one in failed]

    def draw_first(self, newcomers: Sequence[Newcomer]) -> list[Failed[Running]]:
        """The same for those that have joined."""

        def draw_some(some: Sequence[Newcomer]) -> None:
            sequences = [sequence for sequence, _ in some]
            # not the stack: it is that of all running sequences, and would take the newcomers for all
            parts = rows_by_owner(*one_row_each(sequences), self._model.device)
            hidden = [source.last_hidden_E for _, source in some if source.last_hidden_E is not None]
            self._draw(sequences, torch.stack(hidden), parts)

        return [Failed(one.item.sequence, one.error) for one in in_halves(newcomers, draw_some)]

    def _decode(self, slots: Sequence[int]) -> None:
        """A pass over neighbouring slots: a part of the batch does without the stack and without recordings."""
        is_whole = len(slots) == len(self.running)
        order = self._in_order() if is_whole else list(slots)
        sequences, first = [self.running[slot] for slot in order], slots[0]
        try:
            parts = self._parts(sequences) if is_whole else rows_by_owner(*one_row_each(sequences), self._model.device)
            step = Step(
                self.cache,
                [sequence.tokens[-1] for sequence in sequences],
                [sequence.position for sequence in sequences],
                [sequence.position - sequence.start for sequence in sequences],
                parts,
                self.prefixes.of([self.running[slot].prefix for slot in slots], self._model.device),
                None if order == list(slots) else [slot - first for slot in order],
                first,
            )
            recorded = self._recorded if is_whole else None
            hidden_SE = decoded(self._model, step) if recorded is None else recorded(step)
            self._draw(sequences, hidden_SE, parts)
        except BaseException:
            self._stack.clear()  # which may be half filled
            raise

    def _draw(self, sequences: Sequence[Running], hidden_SE: Tensor, parts: AdapterRows) -> None:
        """A token for each sequence from its hidden state."""
        head = self._model.head(parts)
        outputs_SV = head.outputs(hidden_SE)
        tops = _tops(sequences, outputs_SV, head.logits_of)  # first, for a draw may overwrite the outputs
        params = [sequence.request.params for sequence in sequences]
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=hidden_SE.device)  # noqa: E731
        drawn = draw(
            outputs_SV,
            column([p.temperature for p in params], torch.float32),
            column([p.top_k for p in params], torch.int64),
            column([p.top_p for p in params], torch.float32),
            column([sequence.next_uniform() for sequence in sequences], torch.float64),
            head.logits_of,
        )
        found = list(zip(sequences, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), tops, strict=True))
        for sequence, token, logprob, top in found:  # nothing here can fail
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.tops.append(top)
            sequence.uniform = None

    def _in_order(self) -> list[int]:
        """The slots, in the order in which a pass has their rows: rows of one adapter side by side, where a batched
        product then need not gather them."""
        owners, _ = one_row_each(self.running)
        num_rows = set(Counter(map(id, owners)).values())
        if self.records or not self._model.arithmetic.can_stack or None in owners or len(num_rows) > 1:
            return list(range(len(owners)))
        return self._stack.in_order(owners)

    def _parts(self, sequences: Sequence[Running]) -> AdapterRows:
        """Which row belongs to which adapter, when all running sequences have one."""
        owners, singles = one_row_each(sequences)
        if self._model.arithmetic.can_stack:
            stacked = stacked_rows(owners, singles, self._model.device, self._stack)
            if stacked is not None:
                return [stacked]
        return rows_by_owner(owners, singles, self._model.device)


def _tops(
    sequences: Sequence[Running], outputs_SV: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> list[list[tuple[int, float]] | None]:
    """The most probable tokens for each sequence that asks for some."""
    tops: list[list[tuple[int, float]] | None] = [None] * len(sequences)
    asking = [row for row, sequence in enumerate(sequences) if sequence.num_top > 0]
    if asking:
        params = [sequences[row].request.params for row in asking]
        temperature_B = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=outputs_SV.device)
        most = max(sequences[row].num_top for row in asking)
        found = most_probable(outputs_SV[asking], temperature_B, most, logits_of)
        for row, tokens_K, logprobs_K in zip(asking, found.tokens_BK.tolist(), found.logprobs_BK.tolist(), strict=True):
            tops[row] = list(zip(tokens_K, logprobs_K, strict=True))[: sequences[row].num_top]
    return tops

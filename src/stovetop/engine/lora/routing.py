# pyright: basic
"""Which rows of a pass belong to which adapter, so that adapters of different rank and targets run side by side; and
the stack in which many of them sample together.

Shapes: `N` packed tokens, `I` inputs, `O` outputs of a linear, `R` rank, `K` adapters, `M` rows of one of them.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.engine.kernels.packing import Segment
from stovetop.engine.kernels.precision import precise_dtype
from stovetop.engine.kernels.row_groups import RowGroups, row_groups
from stovetop.engine.lora.low_rank import ALL, Batched, Factors, LowRank, Product, Siblings, SideBySide
from stovetop.engine.lora.weights import AdapterWeights, factors_of
from stovetop.target_names import HEAD


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a pass that one adapter acts on."""

    adapter: AdapterWeights
    rows: slice | Tensor = field(default_factory=lambda: ALL)

    def of(self, siblings: Siblings) -> LowRank | None:
        found = [factors_of(self.adapter, name) for name in siblings.names]
        if not any(found):
            return None
        by_sibling = [None if own is None else Factors(*own) for own in found]
        return LowRank(siblings, by_sibling, self.adapter.scale, self.rows)


class Stack:
    """The factors of the adapters that run together, side by side in slots: copies in the dtypes in which the products
    run, made of each group of siblings when it first asks. Ranks below the largest are padded with zeros, which add
    nothing. Newcomers take the slots of those that left, so a batch that changes does not copy everybody again; until
    then, who left may come back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._slots: list[weakref.ref[AdapterWeights] | None] = []
        self._in_use: set[int] = set()  # the slots of those that were asked for last
        self._rank = 0
        self._factors: dict[tuple[Siblings, torch.dtype], SideBySide | None] = {}
        self.version = 1  # grows when factors come or move

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def num_slots_with(self, adapters: Sequence[AdapterWeights]) -> int:
        """How many slots there are once these are taken in."""
        return self.num_slots if self._can_take(adapters) else 1 << (len(adapters) - 1).bit_length()

    def slots_of(self, adapters: Sequence[AdapterWeights]) -> list[int]:
        """Where each of these is, now or from now on."""
        if not self._can_take(adapters):
            self._start_over(adapters)
        places, wanted = self._places(), set(map(id, adapters))
        taken = {slot for own, slot in places.items() if own in wanted}
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        alive = set(places.values())
        free.sort(key=lambda slot: slot in alive)  # first those whose adapter is gone
        newcomers = [adapter for adapter in adapters if id(adapter) not in places]
        for slot, adapter in zip(free, newcomers, strict=False):
            self._slots[slot] = weakref.ref(adapter)
            self._fill(slot, adapter)
            places[id(adapter)] = slot
        self._in_use = {places[id(adapter)] for adapter in adapters}
        return [places[id(adapter)] for adapter in adapters]

    def in_order(self, owners: Sequence[AdapterWeights | None]) -> list[int]:
        """Indices of `owners`, those of one adapter side by side, adapters in the order of their slots; then others."""
        places = self._places()
        for owner in owners:
            places.setdefault(id(owner), self.num_slots + len(places))
        return sorted(range(len(owners)), key=lambda index: places[id(owners[index])])

    def _places(self) -> dict[int, int]:
        """The slots of those that are alive, by id."""
        return {id(owner): slot for slot, owner in enumerate(self._owners()) if owner is not None}

    def _owners(self) -> list[AdapterWeights | None]:
        """By slot; None for a slot that is free, or whose adapter is gone."""
        return [None if own is None else own() for own in self._slots]

    def factors(self, siblings: Siblings, num_rows: int) -> SideBySide | None:
        """None where no adapter trains any of them."""
        # logits are float32; and for few rows of one adapter, whose products are small, it is the faster dtype
        is_precise = HEAD in siblings.names or (self.num_slots == 1 and num_rows <= PRECISE_ROWS)
        key = (siblings, precise_dtype(self.dtype) if is_precise else self.dtype)
        if key not in self._factors:
            self._forget_idle()
            self._factors[key] = self._stacked(*key)
            self.version += 1
        return self._factors[key]

    def clear(self) -> None:
        self._slots, self._rank, self._factors = [], 0, {}
        self.version += 1

    def _can_take(self, adapters: Sequence[AdapterWeights]) -> bool:
        """Whether there is room for these, in number and rank, and not far too much."""
        fits = all(adapter.config.rank <= self._rank for adapter in adapters)
        return fits and len(adapters) <= self.num_slots < MOST_SLOTS * len(adapters)

    def _start_over(self, adapters: Sequence[AdapterWeights]) -> None:
        num_slots = self.num_slots_with(adapters)
        self._slots = [*map(weakref.ref, adapters), *[None] * (num_slots - len(adapters))]
        self._rank, self._factors = max(adapter.config.rank for adapter in adapters), {}
        self.version += 1

    def _fill(self, slot: int, adapter: AdapterWeights) -> None:
        for key, factors in list(self._factors.items()):
            own = Rows(adapter).of(key[0])
            if own is not None and (factors is None or not factors.has_room_for(own)):  # the first that trains these
                del self._factors[key]
                self.version += 1
            elif factors is not None:
                factors.clear(slot)
                if own is not None:
                    factors.put(slot, own)

    def _forget_idle(self) -> None:
        """Those who left: their tensors may lie elsewhere by now, and cannot be read."""
        self._slots = [own if slot in self._in_use else None for slot, own in enumerate(self._slots)]

    def _stacked(self, siblings: Siblings, dtype: torch.dtype) -> SideBySide | None:
        found = [None if owner is None else Rows(owner).of(siblings) for owner in self._owners()]
        return SideBySide.of(found, self._rank, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StackRows:
    """The rows of a pass that each adapter of a stack acts on."""

    stack: Stack
    groups: RowGroups  # by slot

    def of(self, siblings: Siblings) -> Batched | None:
        stacked = self.stack.factors(siblings, self.groups.num_rows)
        return None if stacked is None else Batched(siblings, self.groups, stacked)


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of a pass that each of several adapters acts on, without a stack."""

    adapters: Sequence[AdapterWeights]
    groups: RowGroups  # by adapter
    dtype: torch.dtype  # of the products

    def of(self, siblings: Siblings) -> Batched | None:
        found = [Rows(adapter).of(siblings) for adapter in self.adapters]
        rank = max(adapter.config.rank for adapter in self.adapters)
        stacked = SideBySide.of(found, rank, self.dtype)
        return None if stacked is None else Batched(siblings, self.groups, stacked, found)


# rough bounds of what is computed in vain: a stack, so many times the rows that it has, or so many in any case
MAX_PADDING, FREE_PADDED_ROWS = 3, 64
MAX_BATCH_PADDING = 1.5  # a batch, times the rows that it has
MOST_SLOTS = 4  # times the adapters that run: a stack that is larger starts over
# benchmarks/constants.py, in bfloat16 on a CPU: half and double give so many times the speed, give or take 0.04
PRECISE_ROWS = 32  # of one adapter, up to which its products are in float32: 0.94, 0.99
MIN_BATCHED = 4  # adapters of a batch: 1.02, 1.00

AdapterRows = Sequence[Rows | StackRows | BatchRows]  # of one pass. Rows in no part meet the base model as it is


@dataclass(slots=True)
class Routing:
    """Shared by all linears of a model. It holds from one pass to the next, so that layers which are computed again on
    the way back find what they found on the way there."""

    parts: AdapterRows = ()


def low_ranks(parts: AdapterRows, siblings: Siblings) -> list[Product]:
    """What the parts of a pass add to these linears."""
    return [low_rank for part in parts if (low_rank := part.of(siblings)) is not None]


def rows_by_owner(
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment], device: torch.device
) -> list[Rows]:
    """Which rows each adapter acts on, where segment i belongs to `owners[i]` (None: the base model as it is)."""
    grouped = _grouped(owners, segments)
    if len(grouped) == 1:
        return [] if owners[0] is None else [Rows(owners[0])]
    return [Rows(w, _slice_or_indices(rows, device)) for w, rows in grouped if w is not None]


def _slice_or_indices(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def stacked_rows(
    owners: Sequence[AdapterWeights | None],
    segments: Sequence[Segment],
    device: torch.device,
    stack: Stack,
) -> StackRows | None:
    """The same for a stack, which takes the adapters in. None where there is no adapter, or where they differ so much
    in rows that most of the batched products would be padding."""
    grouped = [(w, rows) for w, rows in _grouped(owners, segments) if w is not None]
    if not grouped or (_padding(grouped) > MAX_PADDING and len(grouped) * _most(grouped) > FREE_PADDED_ROWS):
        return None
    return _in_stack(grouped, stack.slots_of([w for w, _ in grouped]), segments, device, stack)


def _in_stack(
    grouped: "_Grouped", slots: Sequence[int], segments: Sequence[Segment], device: torch.device, stack: Stack
) -> StackRows:
    rows_K: list[list[int]] = [[] for _ in range(stack.num_slots)]
    for slot, (_, rows) in zip(slots, grouped, strict=False):
        rows_K[slot] = rows
    return StackRows(stack, row_groups(rows_K, sum(segment.length for segment in segments), device))


def prompt_rows(
    owners: Sequence[AdapterWeights | None],
    segments: Sequence[Segment],
    device: torch.device,
    stack: Stack,
    running: Sequence[AdapterWeights],
) -> AdapterRows:
    """The same for prompts: from the stack of those that are `running` beside them, which takes in the adapters that
    are about to join, where most of it has rows."""
    grouped = [(w, rows) for w, rows in _grouped(owners, segments) if w is not None]
    everybody = list({id(w): w for w in [*(w for w, _ in grouped), *running]}.values())
    num_slots, num_running = stack.num_slots_with(everybody), len(set(map(id, running)))
    num_rows = sum(len(rows) for _, rows in grouped)
    is_too_large = 0 < MOST_SLOTS * num_running <= num_slots  # for those that run: it would start over for them
    if len(grouped) < MIN_BATCHED or is_too_large or num_slots * _most(grouped) > MAX_BATCH_PADDING * num_rows:
        return batched_rows(owners, segments, device, stack.dtype)
    return [_in_stack(grouped, stack.slots_of(everybody), segments, device, stack)]


def batched_rows(
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment], device: torch.device, dtype: torch.dtype
) -> AdapterRows:
    """The same in batched products of this dtype, where there are several adapters of about as many rows each.
    Differentiable."""
    grouped = [(w, rows) for w, rows in _grouped(owners, segments) if w is not None]
    if len(grouped) < MIN_BATCHED or _padding(grouped) > MAX_BATCH_PADDING:
        return rows_by_owner(owners, segments, device)
    num_rows = sum(segment.length for segment in segments)
    return [BatchRows([w for w, _ in grouped], row_groups([rows for _, rows in grouped], num_rows, device), dtype)]


_Grouped = Sequence[tuple[AdapterWeights | None, list[int]]]


def _padding(grouped: _Grouped) -> float:
    """Rows of a batched product with its padding, by those without."""
    return len(grouped) * _most(grouped) / sum(len(rows) for _, rows in grouped)


def _most(grouped: _Grouped) -> int:
    return max(len(rows) for _, rows in grouped)


def _grouped(
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment]
) -> list[tuple[AdapterWeights | None, list[int]]]:
    grouped: dict[int, tuple[AdapterWeights | None, list[int]]] = {}
    for owner, segment in zip(owners, segments, strict=True):
        grouped.setdefault(id(owner), (owner, []))[1].extend(segment.rows)
    return list(grouped.values())

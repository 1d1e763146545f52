# pyright: basic
"""Which rows of a pass belong to which adapter, so that adapters of different rank and targets run side by side; and
the stack in which many of them sample together.

Shapes: `N` packed tokens, `I` inputs, `O` outputs of a linear, `R` rank, `K` adapters, `M` rows of one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stovetop.engine.lora import AdapterWeights, factors_of
from stovetop.engine.low_rank import ALL, LowRank, Places, Stacked
from stovetop.engine.packing import Segment
from stovetop.engine.target_names import HEAD


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a pass that one adapter acts on."""

    adapter: AdapterWeights
    rows: slice | Tensor = field(default_factory=lambda: ALL)

    def of(self, name: str) -> LowRank | None:
        factors = factors_of(self.adapter, name)
        return None if factors is None else LowRank(*factors, self.rows)


class Stack:
    """The factors of the adapters that run together, side by side in slots: a copy in the dtype in which the products
    run, made of each linear when it first asks. Ranks below the largest are filled up with zeros, which add nothing.
    Newcomers take the slots of those that left, so a batch that changes does not copy everybody again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._slots: list[AdapterWeights | None] = []
        self._rank = 0
        self._factors: dict[str, tuple[Tensor, Tensor] | None] = {}

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def slots_of(self, adapters: Sequence[AdapterWeights]) -> list[int]:
        """Where each of these is; all others have left."""
        wanted = set(map(id, adapters))
        self._slots = [own if id(own) in wanted else None for own in self._slots]
        known = set(map(id, self._slots))
        newcomers = [adapter for adapter in adapters if id(adapter) not in known]
        free = [slot for slot, own in enumerate(self._slots) if own is None]
        rank = max(adapter.config.rank for adapter in adapters)
        if len(newcomers) > len(free) or rank > self._rank or 4 * len(adapters) <= self.num_slots:
            self._start_over(adapters, rank)
        else:
            for slot, adapter in zip(free, newcomers, strict=False):
                self._slots[slot] = adapter
                self._fill(slot, adapter)
        places = {id(own): slot for slot, own in enumerate(self._slots)}
        return [places[id(adapter)] for adapter in adapters]

    def factors(self, name: str) -> tuple[Tensor, Tensor] | None:
        """(K, I, R) and (K, R, O), the second with the scales in it; None where no adapter trains this linear."""
        if name not in self._factors:
            self._factors[name] = self._stacked(name)
        return self._factors[name]

    def clear(self) -> None:
        self._slots, self._rank, self._factors = [], 0, {}

    def _start_over(self, adapters: Sequence[AdapterWeights], rank: int) -> None:
        num_slots = 1 << (len(adapters) - 1).bit_length()
        self._slots = [*adapters, *[None] * (num_slots - len(adapters))]
        self._rank, self._factors = rank, {}

    def _fill(self, slot: int, adapter: AdapterWeights) -> None:
        self._factors = {name: factors for name, factors in self._factors.items() if factors is not None}
        for name, factors in self._factors.items():
            _write(slot, factors, factors_of(adapter, name))

    def _stacked(self, name: str) -> tuple[Tensor, Tensor] | None:
        found = [None if adapter is None else factors_of(adapter, name) for adapter in self._slots]
        some = next((factors for factors in found if factors is not None), None)
        if some is None:
            return None
        # logits are float32; and for one adapter, whose products are small, it is the faster dtype
        dtype = some[0].dtype if name == HEAD or self.num_slots == 1 else self._dtype
        stacked = (
            some[0].new_zeros(len(found), some[0].shape[1], self._rank, dtype=dtype),
            some[1].new_zeros(len(found), self._rank, some[1].shape[0], dtype=dtype),
        )
        for slot, factors in enumerate(found):
            _write(slot, stacked, factors)
        return stacked


def _write(slot: int, stacked: tuple[Tensor, Tensor] | None, factors: tuple[Tensor, Tensor, float] | None) -> None:
    assert stacked is not None, "linears that nobody trained are looked up anew"
    a_KIR, b_KRO = stacked
    a_KIR[slot].zero_()
    b_KRO[slot].zero_()
    if factors is not None:
        a_RI, b_OR, scale = factors
        a_KIR[slot, :, : len(a_RI)] = a_RI.t()
        b_KRO[slot, : len(a_RI)] = b_OR.t() * scale


@dataclass(frozen=True, slots=True, eq=False)
class StackRows:
    """The rows of a pass that each adapter of a stack acts on."""

    stack: Stack
    places: Places

    def of(self, name: str) -> Stacked | None:
        factors = self.stack.factors(name)
        return None if factors is None else Stacked(self.places, *factors)


MOST_FILLING, FEW_ROWS = 3, 64  # a stack may compute so many times the rows that it has, or so many in any case

Parts = Sequence[Rows | StackRows]  # of one pass. Rows in no part meet the base model as it is


@dataclass(slots=True)
class Routing:
    """Shared by all linears of a model. It holds from one pass to the next, so that layers which are computed again on
    the way back find what they found on the way there."""

    parts: Parts = ()

    def of(self, name: str) -> list[LowRank | Stacked]:
        return low_ranks(self.parts, name)


def low_ranks(parts: Parts, name: str) -> list[LowRank | Stacked]:
    """What the parts of a pass add to one linear."""
    return [low_rank for part in parts if (low_rank := part.of(name)) is not None]


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
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment], device: torch.device, stack: Stack
) -> StackRows | None:
    """The same for a stack, which takes the adapters in. None where there is no adapter, or where they differ so much
    in rows that most of the batched products would be filling."""
    grouped = [(w, rows) for w, rows in _grouped(owners, segments) if w is not None]
    num_own, most = sum(len(rows) for _, rows in grouped), max((len(rows) for _, rows in grouped), default=0)
    if not grouped or len(grouped) * most > max(MOST_FILLING * num_own, FEW_ROWS):
        return None
    slots = stack.slots_of([w for w, _ in grouped])
    rows_KM = [[0] * most for _ in range(stack.num_slots)]
    own, kept = [], []
    for slot, (_, rows) in sorted(zip(slots, grouped, strict=True), key=lambda item: item[0]):
        rows_KM[slot][: len(rows)] = rows
        own += rows
        kept += range(slot * most, slot * most + len(rows))
    on_device = lambda values: torch.tensor(values, device=device)  # noqa: E731
    is_full = len(kept) == stack.num_slots * most
    is_whole = is_full and stack.num_slots == 1 and own == list(range(sum(segment.length for segment in segments)))
    return StackRows(stack, Places(on_device(rows_KM), on_device(own), None if is_full else on_device(kept), is_whole))


def _grouped(
    owners: Sequence[AdapterWeights | None], segments: Sequence[Segment]
) -> list[tuple[AdapterWeights | None, list[int]]]:
    grouped: dict[int, tuple[AdapterWeights | None, list[int]]] = {}
    for owner, segment in zip(owners, segments, strict=True):
        grouped.setdefault(id(owner), (owner, []))[1].extend(segment.rows)
    return list(grouped.values())

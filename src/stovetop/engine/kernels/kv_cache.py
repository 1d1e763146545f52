# pyright: basic
"""Keys and values of running samples: one slot per sequence, one pair of tensors per layer.

Slots 0..S-1 are in use and contiguous, so decoding reads a view. A slot that ends is filled with the last one.

Shapes: `S` slots, `G` key/value heads, `L` positions, `D` head size, `M` rows of one write, `T`
positions of a run.
"""

import torch
from torch import Tensor

BLOCK = 64  # positions are added in blocks of this many: a multiple of those in which attention reads them


def rounded_up(num_positions: int) -> int:
    """To whole blocks."""
    return -(-num_positions // BLOCK) * BLOCK


class KVCache:
    """Grows as it is written; `num_slots` and `num_positions` say how large it is."""

    def __init__(self, num_layers: int, max_tokens: int | None = None, *, doubling: bool = False) -> None:
        """It keeps the room that it has, up to `max_tokens` slots times positions. With `doubling` it grows to a power
        of two of slots, so that it moves seldom."""
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._doubling = doubling
        self.max_tokens = max_tokens
        self.num_slots = 0
        self.num_positions = 0
        self.version = 0  # grows when tensors move

    def reserve(self, num_slots: int, num_positions: int) -> None:
        """From now on there is room for this many; what is there of them stays."""
        needed = (num_slots, rounded_up(num_positions))
        doubled = (1 << (num_slots - 1).bit_length() if self._doubling else num_slots, needed[1])
        for slots, positions in (self._with(*doubled), self._with(*needed), doubled, needed):
            if self.max_tokens is None or slots * positions <= self.max_tokens:
                break
        self.num_slots, self.num_positions = slots, positions

    def _with(self, num_slots: int, num_positions: int) -> tuple[int, int]:
        """The room that there is, and this."""
        return max(self.num_slots, num_slots), max(self.num_positions, num_positions)

    @property
    def num_tokens(self) -> int:
        """Slots times positions that there is room for."""
        return self.num_slots * self.num_positions

    def shrink(self, num_slots: int, num_positions: int) -> bool:
        """Gives back what is there beyond this; whether there was anything."""
        rounded = rounded_up(num_positions)
        if self.num_slots <= num_slots and self.num_positions <= rounded:
            return False
        if num_slots == 0:
            self.clear()
            return True
        self.num_slots, self.num_positions = min(self.num_slots, num_slots), min(self.num_positions, rounded)
        self.settle()
        return True

    def take_over(self, other: "KVCache") -> None:
        """What another cache holds, which is empty afterwards."""
        self._layers, other._layers = other._layers, [None] * len(self._layers)
        self.num_slots, self.num_positions = other.num_slots, other.num_positions
        self.version += 1
        other.clear()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._layers if tensors is not None for tensor in tensors)

    def settle(self) -> None:
        """Makes the room that is reserved now, and not when it is written, in the layers that hold something."""
        for layer, tensors in enumerate(self._layers):
            if tensors is not None:
                key_SGLD, value_SGLD = tensors
                self._room(layer, key_SGLD[0], value_SGLD[0])

    def write(self, layer: int, slots_M: Tensor, positions_M: Tensor, key_GMD: Tensor, value_GMD: Tensor) -> None:
        key_SGLD, value_SGLD = self._room(layer, key_GMD, value_GMD)
        key_SGLD[slots_M, :, positions_M] = key_GMD.transpose(0, 1)
        value_SGLD[slots_M, :, positions_M] = value_GMD.transpose(0, 1)

    def write_run(self, layer: int, slot: int, start: int, key_GTD: Tensor, value_GTD: Tensor) -> None:
        """Positions [start, start + T) of one slot."""
        key_SGLD, value_SGLD = self._room(layer, key_GTD, value_GTD)
        end = start + key_GTD.shape[1]
        key_SGLD[slot, :, start:end] = key_GTD
        value_SGLD[slot, :, start:end] = value_GTD

    def read(self, layer: int, num_slots: int, num_positions: int, first_slot: int = 0) -> tuple[Tensor, Tensor]:
        """The first positions of so many slots, from `first_slot` on."""
        key_SGLD, value_SGLD = self._filled(layer)
        slots = slice(first_slot, first_slot + num_slots)
        return key_SGLD[slots, :, :num_positions], value_SGLD[slots, :, :num_positions]

    def copy_from(
        self, other: "KVCache", source: int, targets: list[int], num_positions: int, *, start: int = 0
    ) -> None:
        """Positions from `start` on of slot `source` of a cache, be it this one, to the first of `targets`."""
        positions = slice(start, start + num_positions)
        where: int | Tensor | None = targets[0] if len(targets) == 1 else None
        for layer in range(len(self._layers)):
            key_SGLD, value_SGLD = other._filled(layer)
            key_GLD, value_GLD = key_SGLD[source, :, positions], value_SGLD[source, :, positions]
            for own_SGLD, new_GLD in zip(self._room(layer, key_GLD, value_GLD), (key_GLD, value_GLD), strict=True):
                if where is None:
                    where = torch.tensor(targets, device=own_SGLD.device)
                own_SGLD[where, :, :num_positions] = new_GLD
                own_SGLD[where, :, num_positions:] = 0.0  # masked, but a weight of 0 times NaN would be NaN

    def clear(self) -> None:
        """Gives the memory back."""
        self._layers = [None] * len(self._layers)
        self.num_slots = self.num_positions = 0
        self.version += 1

    def _filled(self, layer: int) -> tuple[Tensor, Tensor]:
        tensors = self._layers[layer]
        assert tensors is not None, "a layer is read after it was written"
        return tensors

    def _room(self, layer: int, key_GMD: Tensor, value_GMD: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer, brought to the reserved size. Fresh room is zero, never garbage: a masked weight of 0
        times a NaN would be a NaN."""
        tensors = self._layers[layer]
        if tensors is None or (tensors[0].shape[0], tensors[0].shape[2]) != (self.num_slots, self.num_positions):
            key, value = (
                self._resized(None if tensors is None else tensors[i], new)
                for i, new in enumerate((key_GMD, value_GMD))
            )
            tensors = self._layers[layer] = (key, value)
            self.version += 1
        return tensors

    def _resized(self, old_SGLD: Tensor | None, like_GMD: Tensor) -> Tensor:
        num_heads, _, size = like_GMD.shape
        new_SGLD = like_GMD.new_zeros(self.num_slots, num_heads, self.num_positions, size)
        if old_SGLD is not None:
            slots, positions = min(self.num_slots, old_SGLD.shape[0]), min(self.num_positions, old_SGLD.shape[2])
            new_SGLD[:slots, :, :positions] = old_SGLD[:slots, :, :positions]
        return new_SGLD

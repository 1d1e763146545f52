# pyright: basic
"""What one call of attention is given besides its queries: keys and values, which row sees which of them, and how a
layer bends its scores.

Shapes: `S` calls, `H` query heads, `G` key/value heads, `Q` query rows, `L` key rows, `D` head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class How:
    """What one layer's attention asks for besides causality, in every pass the same."""

    scale: float
    window: int | None = None  # a row sees this many rows, itself included
    softcap: float | None = None  # scores s become softcap·tanh(s / softcap)
    sinks_H: Tensor | None = None  # one more logit per head, which takes weight and brings nothing

    @property
    def is_plain(self) -> bool:
        """Only then training may use `causal_run`, and samples may share a prefix: neither knows anything but causality
        and the scale."""
        return self.window is None and self.softcap is None and self.sinks_H is None


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Row q of call s sees keys 0..position_SQ[s, q], or as many of the last of them as a window lets it. The first
    dimension may be 1. Masks of single rows, for which all layers of a decoding pass ask, are made once."""

    position_SQ: Tensor
    _made: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def hidden(self, num_keys: int, window: int | None, rows: slice = slice(None)) -> Tensor:
        """(S, 1, Q, L): whether a row does not see a key."""
        return self._once(("hidden", num_keys, window), lambda: self._hidden(num_keys, window, rows))

    def penalty(self, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """(S, 1, Q, L): what is added to a score: 0, or minus infinity where the row does not see the key."""

        def make() -> Tensor:
            hidden = self.hidden(num_keys, window)
            return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)

        return self._once(("penalty", num_keys, window, dtype), make)

    def _hidden(self, num_keys: int, window: int | None, rows: slice) -> Tensor:
        key_L = torch.arange(num_keys, device=self.position_SQ.device)
        position_SQ1 = self.position_SQ[:, rows, None]
        hidden_SQL = key_L > position_SQ1
        if window is not None:
            hidden_SQL |= key_L <= position_SQ1 - window
        return hidden_SQL[:, None]

    def _once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        if self.position_SQ.shape[1] > 1:  # of many rows they are large, and asked for by few
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class Seen(NamedTuple):
    """Keys and values, and which of them each row sees. Keys that no row sees are finite."""

    key_SGLD: Tensor
    value_SGLD: Tensor
    sight: Sight

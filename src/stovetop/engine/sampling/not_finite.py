# pyright: basic
"""Logits that are not finite numbers, and whose fault that is: an adapter's, or the base model's that it stands on.

Shapes: `N` packed tokens, `E` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from weakref import WeakSet

import torch

from stovetop.engine.containment import Contained
from stovetop.engine.kernels.packing import pack
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.base_model import BaseModel
from stovetop.errors import InvalidRequest

MOST_TOKENS, PASS_TOKENS = 4096, 512  # that the base model is tried with: others wait for a pass at most

TOLD = "the logits are not finite numbers with"


class NotFinite(Exception):
    """Found in a sequence of these tokens, or behind the last of them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self.tokens = tokens


class Culprits:
    """Names what is at fault. An adapter is found guilty once, whatever else it is asked for."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model
        self._diverged: WeakSet[AdapterWeights] = WeakSet()

    def error(self, found: NotFinite, weights: AdapterWeights | None) -> InvalidRequest:
        """What a request for these weights is told."""
        if weights is not None and (weights in self._diverged or self._is_finite_alone(found.tokens)):
            self._diverged.add(weights)
            return InvalidRequest(f"{TOLD} this adapter, which has diverged; go back to an earlier state")
        alone = "" if weights is None else ", also without this adapter"
        larger = "" if self._model.dtype == torch.float32 else ", or open it with dtype='float32'"
        return InvalidRequest(f"{TOLD} the base model {self._model.limits.name!r}{alone}; fetch it again{larger}")

    @torch.inference_mode()
    def _is_finite_alone(self, tokens: Sequence[int]) -> bool:
        """Whether the base model gives finite numbers for runs of these tokens. So it is taken to do where that cannot
        be found out."""
        tokens = tokens[-MOST_TOKENS:]
        is_finite = True
        with Contained():
            is_finite = all(
                self._is_finite_for(tokens[start : start + PASS_TOKENS]) for start in range(0, len(tokens), PASS_TOKENS)
            )
        return is_finite

    def _is_finite_for(self, tokens: Sequence[int]) -> bool:
        packed = pack([tokens])
        hidden_NE = self._model.hidden_states(packed, self._model.packed_attention(packed), [])
        logits_1V = self._model.head([]).logits(hidden_NE[-1:])
        return bool(torch.isfinite(hidden_NE).all() and torch.isfinite(logits_1V).all())

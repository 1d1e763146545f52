# pyright: basic
"""One pass of decoding: the last token of running sequences goes in, the hidden states of the next come out.

Shapes: `S` running sequences, one slot of the cache each; `E` hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stovetop.engine.kernels.attention_plans import CachedAttention
from stovetop.engine.kernels.kv_cache import KVCache
from stovetop.engine.kernels.shared_prefix import PrefixPass
from stovetop.engine.lora.routing import AdapterRows
from stovetop.engine.model.base_model import BaseModel


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a pass is made of, by row."""

    cache: KVCache
    tokens_S: list[int]
    positions_S: list[int]  # of these tokens in their sequences
    places_S: list[int]  # in their slots, which hold less than the sequence where a prefix is shared
    parts: AdapterRows = ()
    prefixes: PrefixPass | None = None  # by slot
    slots_S: list[int] | None = None  # None: row i belongs to slot i
    first_slot: int = 0  # of the cache, where slots are counted from; `prefixes` and `slots_S` too

    @property
    def num_keys(self) -> int:
        """That the pass reads of every slot."""
        return max(self.places_S) + 1


def decoded(model: BaseModel, step: Step) -> Tensor:
    """(S, E). The tokens' keys and values are in the cache after it."""
    step.cache.reserve(step.first_slot + len(step.tokens_S), step.num_keys)
    on_device = lambda values: torch.tensor(values, device=model.device)  # noqa: E731
    slots_S = None if step.slots_S is None else on_device(step.slots_S)
    places_S = on_device(step.places_S)
    plan = CachedAttention(
        step.cache, model.arithmetic, places_S, step.num_keys, step.prefixes, slots_S, step.first_slot
    )
    return model.hidden_states_of(on_device(step.tokens_S), on_device(step.positions_S), plan, step.parts)

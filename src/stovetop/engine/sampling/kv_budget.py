# pyright: basic
"""How much memory keys and values may take, and how many positions of a model that is."""

from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.engine.kernels.kv_cache import BLOCK
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.errors import InvalidRequest

SHARE_OF_KV = 0.3  # of the memory that is available when the model is loaded


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`layer_bytes` are those of one position, by layer."""

    limit_bytes: int
    layer_bytes: Sequence[int]

    @property
    def position_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def num_positions(self) -> int:
        """That all caches together may have. A cache that grows moves layer by layer, and while it does, the largest
        layer is there twice: that too is within the limit."""
        return self.limit_bytes // (self.position_bytes + max(self.layer_bytes))

    @property
    def longest_sequence(self) -> int:
        """Prompt and answer together, that can run alone: its slot and what it shares are rounded up to blocks."""
        return (self.num_positions // BLOCK - 1) * BLOCK

    def too_long(self, num_tokens: int) -> str:
        return (
            f"{num_tokens} tokens, prompt and max_tokens together, do not fit into the memory for keys and values: "
            f"max_kv_bytes is {self.limit_bytes}, which is enough for {self.longest_sequence} tokens of "
            f"{self.position_bytes} bytes each; lower max_tokens, shorten the prompt or raise max_kv_bytes"
        )

    @staticmethod
    def of(model: BaseModel, limit_bytes: int | None) -> "KVBudget":
        """None: a share of what is available now."""
        share = int(SHARE_OF_KV * available_bytes(model.device)) if limit_bytes is None else limit_bytes
        budget = KVBudget(share, model.kv_bytes)
        if budget.longest_sequence < BLOCK:
            least = 2 * BLOCK * (budget.position_bytes + max(budget.layer_bytes))
            raise InvalidRequest(
                f"max_kv_bytes must be at least {least}, for the keys and values of {BLOCK} tokens of "
                f"{model.limits.name}: {share}"
            )
        return budget

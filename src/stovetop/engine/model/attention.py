# pyright: basic
"""Our attention function, registered with transformers under the name `stovetop`.

A model of the library projects and rotates queries, keys and values of one packed row `[1, N]` and calls `attend`;
which row sees which is the *plan* of the pass (`kernels/attention_plans.py`), which every module of the model knows.

Sliding windows, soft-capped scores and attention sinks, which some models pass as arguments, are honoured; a model
whose attention asks for something else is refused when it is loaded (`proving.py`).

Shapes: `N` packed tokens, `H` query heads, `G` key/value heads, `D` head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from stovetop.engine.kernels.attention_plans import AttentionPlan
from stovetop.engine.kernels.sight import How

NAME = "stovetop"


@dataclass(slots=True, eq=False)
class CurrentPlan:
    """Shared by all modules of a model. The plan holds from one pass to the next, so that layers which are computed
    again on the way back find the one they had on the way there."""

    plan: AttentionPlan | None = None

    def given_to(self, trunk: torch.nn.Module) -> "CurrentPlan":
        for module in trunk.modules():
            module.current_plan = self  # pyright: ignore[reportArgumentType]  a plain attribute
        return self


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What the library calls in every layer, with queries (1, H, N, D) and keys and values (1, G, N, D). The plan
    comes with the module: not every layer of the library hands on what the model's forward is given."""
    current: CurrentPlan = module.current_plan  # pyright: ignore[reportAssignmentType]  see CurrentPlan
    assert current.plan is not None, "a pass sets its plan before the model runs"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = How(scale, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]  every attention of the library has one
    return current.plan.attend(layer, query[0], key[0], value[0], how)[None], None


AttentionInterface.register(NAME, attend)

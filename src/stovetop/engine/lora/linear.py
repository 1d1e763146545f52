# pyright: basic
"""The place for adapters beside frozen linears."""

from dataclasses import dataclass

from torch import Tensor, nn

from stovetop.engine.kernels.arithmetic import Arithmetic, FrozenLinear
from stovetop.engine.lora.low_rank import Siblings, adapted
from stovetop.engine.lora.routing import AdapterRows, Routing, low_ranks


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Siblings as one frozen linear, and whatever adapters a pass brings to them."""

    siblings: Siblings
    linear: FrozenLinear

    def __call__(
        self, x_NI: Tensor, parts: AdapterRows, arithmetic: Arithmetic, residual_NO: Tensor | None = None
    ) -> Tensor:
        return adapted(x_NI, self.linear, low_ranks(parts, self.siblings), arithmetic, residual_NO)


class LoraLinear(nn.Module):
    """In the place of one linear of a model of the library."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.projection = Projection(Siblings((name,)), FrozenLinear(base.weight, base.bias))
        self.routing = routing
        self.arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:
        out_NO = self.projection(x.flatten(0, -2), self.routing.parts, self.arithmetic)
        return out_NO.view(*x.shape[:-1], -1)

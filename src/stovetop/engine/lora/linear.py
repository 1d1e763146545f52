# pyright: basic
"""The place for adapters beside every `Linear` of a base model, whose weights are frozen and shared."""

from torch import Tensor, nn

from stovetop.engine.kernels.arithmetic import Arithmetic, Frozen
from stovetop.engine.lora.low_rank import adapted_linear
from stovetop.engine.lora.routing import Routing


class LoraLinear(nn.Module):
    """A frozen linear and whatever adapters the current routing brings."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.base = base
        self.frozen = Frozen(base.weight, base.bias)  # found faster than through the module, 210 times a token
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, *self.frozen, self.routing.of(self.name), self.arithmetic)

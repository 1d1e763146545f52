"""What a batch's loss is divided by. Losses are sums over tokens, so dividing is a change of the data: of the numbers
that a loss multiplies with, `weights` or `advantages`. The data of a whole optimizer step is divided at once and may
then be split over as many `forward_backward`s as one likes: their gradients add up to the same.

It is exact where the loss is proportional to these numbers, which all are but "dro" and custom ones.

Shape suffixes: `D` datums, `N` positions of one datum.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.types import Datum, TensorData

Normalize = Literal["sum", "token", "example"]
"""The loss of an optimizer step. "sum": over tokens, as the losses are. "token": the mean over the active tokens of all
datums. "example": the mean over the examples of each one's mean over its active tokens, so that a long one counts as
much as a short one.

Active are the tokens with mask 1 where there is a `mask`, those with a weight else. Two answers with token losses
(1, 3) and six times ½ have the sum 7, the token mean 0.875 and the example mean 1.25.
"""


def normalize_data(
    data_D: Sequence[Datum], normalize: Normalize, examples_D: Sequence[Hashable] | None = None
) -> list[Datum]:
    """The data of one optimizer step, scaled. `examples_D` tells which example each datum belongs to, where one may
    have several, as an episode does (`rl.data_processing.DatumMetadata`); without it each datum is one."""
    if normalize == "sum":
        return list(data_D)
    if normalize not in get_args(Normalize):
        raise UnknownName("normalize", normalize, get_args(Normalize))
    num_active_D = [_num_active(index, datum) for index, datum in enumerate(data_D)]
    if normalize == "token":
        total = sum(num_active_D)
        return [_scaled(datum, 1 / total) if total else datum for datum in data_D]
    examples_D = range(len(data_D)) if examples_D is None else examples_D
    num_active = Counter[Hashable]()
    for example, number in zip(examples_D, num_active_D, strict=True):
        num_active[example] += number
    num_examples = sum(number > 0 for number in num_active.values())  # one without an active token has no mean
    return [
        _scaled(datum, 1 / (num_active[example] * num_examples)) if num_active[example] else datum
        for datum, example in zip(data_D, examples_D, strict=True)
    ]


def _num_active(index: int, datum: Datum) -> int:
    for name in ("mask", "weights"):
        if name in datum.loss_fn_inputs:
            return int(np.count_nonzero(datum.loss_fn_inputs[name].array))
    raise InvalidRequest(
        f"datum {index} has neither mask nor weights to count active tokens by; normalize it before the mask is taken "
        f"off: it has {sorted(datum.loss_fn_inputs)}"
    )


def _scaled(datum: Datum, factor: float) -> Datum:
    scaled = {
        name: TensorData.adopt(_product(datum.loss_fn_inputs[name], factor))
        for name in ("weights", "advantages")
        if name in datum.loss_fn_inputs
    }
    return Datum(datum.model_input, datum.loss_fn_inputs | scaled)


def _product(tensor: TensorData, factor: float) -> npt.NDArray[np.float32]:
    return np.multiply(tensor.array, factor, dtype=np.float64).astype(np.float32)

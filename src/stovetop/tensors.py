"""Tensors that belong to no framework, and how numbers come into them: from lists, from numpy and from torch."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from stovetop.checks import take
from stovetop.errors import InvalidRequest
from stovetop.rules import Instance, ListOf, OneOf, Whole, is_a, is_torch, shown

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["int64", "float32"]

_NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {"int64": np.dtype(np.int64), "float32": np.dtype(np.float32)}
_DTYPE = OneOf(("int64", "float32"))
_SIZES = ListOf(Whole(0))
_ARRAY = Instance((np.ndarray,))


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A tensor of int64 or float32 that belongs to no framework. The array is read-only; two are equal when
    dtype, shape and every value are.

        TensorData.from_numpy(np.zeros(3, np.float32)).to_torch()
    """

    array: npt.NDArray[np.generic]

    def __init__(
        self, data: Iterable[float] | npt.NDArray[np.generic], dtype: TensorDtype, shape: Sequence[int] | None = None
    ) -> None:
        if dtype != "int64" and dtype != "float32":
            take(_DTYPE, dtype, "TensorData.dtype")
        array = _own_array(data, dtype)
        if shape is not None:
            sizes = take(_SIZES, shape, "TensorData.shape")
            if math.prod(sizes) != array.size:
                raise InvalidRequest(
                    f"TensorData has {array.size} values, which do not fill TensorData.shape: {tuple(sizes)}"
                )
            try:
                array = array.reshape(sizes)
            except ValueError as error:  # more axes than numpy has, or an empty tensor of 2^62 rows
                raise InvalidRequest(
                    f"TensorData.shape must be one that numpy has ({error}): {shown(sizes)}"
                ) from error
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its copies, pickled or deep, are read-only too."""
        return type(self).adopt, (self.array,)

    @classmethod
    def from_numpy(cls, array: npt.NDArray[np.generic]) -> Self:
        """Integers become int64, floats float32; anything else is refused."""
        if type(array) is not np.ndarray:
            take(_ARRAY, array, "TensorData.from_numpy: array")
        if array.dtype.kind not in "iuf":
            raise InvalidRequest(
                f"TensorData.from_numpy: array must hold integers or floats, not {array.dtype}: {shown(array)}"
            )
        return cls(array, "float32" if array.dtype.kind == "f" else "int64")

    @classmethod
    def adopt(cls, array: npt.NDArray[np.generic]) -> Self:
        """Takes an int64 or float32 array as it is, without a copy: it becomes read-only, and nobody may hold another
        view of it that can be written to."""
        take(_ARRAY, array, "TensorData.adopt: array")
        if array.dtype not in _NUMPY_DTYPES.values():
            raise InvalidRequest(f"TensorData adopts int64 and float32, not {array.dtype}")
        tensor = object.__new__(cls)
        array.flags.writeable = False
        object.__setattr__(tensor, "array", array)
        return tensor

    @classmethod
    def from_torch(cls, tensor: "torch.Tensor") -> Self:
        """A copy on the CPU, without gradient. Integers become int64, floats float32."""
        if not is_torch(tensor):
            raise InvalidRequest(f"TensorData.from_torch: tensor must be a torch tensor: {shown(tensor)}")
        return cls.from_numpy(_numpy_of("TensorData.from_torch: tensor", tensor))

    @property
    def dtype(self) -> TensorDtype:
        """ "int64" or "float32"."""
        return "int64" if self.array.dtype == np.int64 else "float32"

    @property
    def shape(self) -> list[int]:
        """One number for each axis; [] of a scalar."""
        return list(self.array.shape)

    @property
    def data(self) -> list[float]:
        """The values as one flat list."""
        return self.array.ravel().tolist()

    def tolist(self) -> list[float]:
        """The values in nested lists of this shape."""
        return self.array.tolist()

    def to_numpy(self) -> npt.NDArray[np.generic]:
        """The array itself, which is read-only."""
        return self.array

    def to_torch(self) -> "torch.Tensor":
        """A new tensor, which may be written to."""
        import torch

        return torch.tensor(self.array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(self.array, other.array, equal_nan=self.dtype == "float32")

    __hash__ = None  # pyright: ignore[reportAssignmentType]  an array has no cheap hash; equality is by value


def _own_array(data: Iterable[float] | npt.NDArray[np.generic], dtype: TensorDtype) -> npt.NDArray[np.generic]:
    """The same numbers in an array that nobody else holds."""
    given = _numbers(data)
    if given.dtype == _NUMPY_DTYPES[dtype]:
        return given.copy() if isinstance(data, np.ndarray) else given
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(_NUMPY_DTYPES[dtype])
    if dtype == "int64" and (changed := given[array != given]).size:
        raise InvalidRequest(f"TensorData of int64 needs whole numbers of 64 bits: {changed[0]}")
    return array


def _numbers(data: Iterable[float] | npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    usual = data.__class__ is np.ndarray or data.__class__ is list or data.__class__ is tuple
    plain = data if usual else list(in_order("TensorData.data", data))
    try:
        array = np.asarray(plain)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"TensorData.data must be a rectangular array of numbers: {error}") from error
    if array.dtype.kind not in "iuf":
        raise InvalidRequest(
            f"TensorData.data must be a rectangular array of numbers of 64 bits, not of {array.dtype}: {shown(data)}"
        )
    return array


def in_order(what: str, items: Any) -> Iterable[Any]:
    """What can be gone through and has an order; text holds no numbers (bytes do)."""
    if items.__class__ is tuple:
        return items
    if is_torch(items):
        items = _numpy_of(what, items)
    if is_a(items, np.ndarray):
        return items.tolist() if items.ndim else [items]
    if not is_a(items, Iterable) or is_a(items, str, Set, Mapping):
        raise InvalidRequest(f"{what} must be a list, or another sequence, of numbers: {shown(items)}")
    return items


def _numpy_of(what: str, tensor: "torch.Tensor") -> npt.NDArray[np.generic]:
    """On the CPU, without gradient; the floats of 8 and 16 bits, some of which numpy lacks, as float32."""
    if tensor.is_meta or tensor.is_quantized or str(tensor.layout) != "torch.strided":
        kind = "quantized" if tensor.is_quantized else f"{tensor.device}, {tensor.layout}"
        raise InvalidRequest(f"{what} must be dense and hold its numbers, see to_dense() and dequantize(): {kind}")
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()

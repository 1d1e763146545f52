# pyright: basic
"""Where the tensors of adapters lie: those in use in the memory of the device, idle ones out of its way.

When all together take more than a limit, the least recently used are offloaded: from a GPU to the memory of the
host, and from the memory of the host to a file that is mapped in its place, whose pages the system keeps or drops as it
likes. No adapter is refused for coming late, and what is brought back has the same bits.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from weakref import WeakKeyDictionary, WeakSet

import torch

from stovetop.engine.containment import Contained
from stovetop.engine.counts import Counts
from stovetop.engine.lora.weights import AdapterWeights, Moments, Tensors

log = logging.getLogger(__name__)

Holder = AdapterWeights | Moments  # values that hold the tensors; where these lie may change, what they are may not


class Residency:
    def __init__(self, device: torch.device, limit_bytes: int, folder: Path, counts: Counts | None = None) -> None:
        """`folder` takes the files of idle adapters; they have no name there, and end with the process."""
        self._device = device
        self._counts = counts or Counts()
        self._limit_bytes = limit_bytes
        self._folder = folder
        self._resident: WeakKeyDictionary[Holder, int] = WeakKeyDictionary()  # their bytes; the last used at the end
        self._idle: WeakSet[Holder] = WeakSet()

    @property
    def num_idle(self) -> int:
        """Values that were moved away and not used since."""
        return len(self._idle)

    def use(self, holders: Iterable[Holder]) -> None:
        """Each is in the memory of the device from now on, until others push it out."""
        for holder in holders:
            if holder in self._idle:
                _replace(holder, self._brought_back)
                self._counts.num_adapters_moved += 1
                self._idle.remove(holder)
            num_bytes = self._resident.pop(holder, None)
            self._resident[holder] = _num_bytes(holder) if num_bytes is None else num_bytes

    def tidy(self, in_use: Iterable[Holder]) -> None:
        """Offloads idle values until the others keep to the limit. Those in use stay, however many they are."""
        over = sum(self._resident.values()) - self._limit_bytes
        if over <= 0:
            return
        stay = set(in_use)
        for holder, num_bytes in list(self._resident.items()):
            if over <= 0:
                return
            if holder not in stay and num_bytes > 0:
                self._offload(holder)
                over -= num_bytes

    def _offload(self, holder: Holder) -> None:
        with Contained() as outcome:
            _replace(holder, self._mapped if self._device.type == "cpu" else _on_host)
        error = outcome.error
        if error is not None:  # such as a full disk, or no memory for a map: the adapter is where it was
            log.warning("idle adapters stay in memory from now on, for there is no room in %s: %r", self._folder, error)
            self._limit_bytes = sys.maxsize
            return
        del self._resident[holder]
        self._idle.add(holder)
        self._counts.num_adapters_moved += 1

    def _mapped(self, tensors: Tensors) -> Tensors:
        """The same in a file without a name, which is gone when the last tensor is."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self._folder) as file:  # no name from the start: a killed process leaves nothing behind
            for tensor in tensors.values():
                assert tensor.dtype == torch.float32, "factors and moments are float32"
                file.write(tensor.contiguous().numpy().tobytes())
            file.flush()
            sizes = [tensor.numel() for tensor in tensors.values()]
            flat = torch.from_file(f"/dev/fd/{file.fileno()}", shared=False, size=sum(sizes), dtype=torch.float32)
        pieces = flat.split(sizes)
        return {name: piece.view(tensors[name].shape) for name, piece in zip(tensors, pieces, strict=True)}

    def _brought_back(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self._device, copy=True) for name, tensor in tensors.items()}


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _replace(holder: Holder, move: Callable[[Tensors], Tensors]) -> None:
    moved = [move(tensors) if tensors else {} for tensors in _tensors_of(holder)]
    for tensors, new in zip(_tensors_of(holder), moved, strict=True):
        tensors.update(new)


def _tensors_of(holder: Holder) -> list[Tensors]:
    match holder:
        case AdapterWeights():
            return [holder.tensors]
        case Moments():
            return [holder.mean, holder.square]


def _num_bytes(holder: Holder) -> int:
    return sum(t.numel() * t.element_size() for tensors in _tensors_of(holder) for t in tensors.values())

# pyright: basic
"""The adapters of an engine and the weights that samples are drawn with, by their ids, and what ops do to them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from stovetop.durable import Disk
from stovetop.engine import ops
from stovetop.engine.files.adapter_files import SavedAdapter, check_fits, read_adapter, snapshot
from stovetop.engine.lora.weights import AdapterWeights, chosen, initial_weights, refuse_too_large
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.residency import Residency
from stovetop.engine.training.adapter import Adapter
from stovetop.engine.training.trainer import GivenGradients, Graph, MicroBatch, Task, Trainer
from stovetop.errors import Cancelled, InvalidRequest
from stovetop.input_checks import check_lora
from stovetop.types import Datum


@dataclass(slots=True, eq=False)
class _Scored:
    """What a custom loss is computed from, until it is known what became of the loss."""

    data: Sequence[Datum]
    micro_batches: list[MicroBatch]
    graph: Graph | None = None


class Adapters:
    def __init__(self, model: BaseModel, trainer: Trainer, residency: Residency, disk: Disk) -> None:
        self._model = model
        self._trainer = trainer
        self._residency = residency
        self._disk = disk
        self.by_id: dict[ops.AdapterId, Adapter] = {}
        self.weights: dict[ops.WeightsId, AdapterWeights] = {}
        self._scored: dict[ops.ScoreId, _Scored] = {}

    def micro_batches(self, op: ops.OrderedOp) -> list[MicroBatch]:
        """The passes over the model that an op needs: none for most."""
        match op:
            case ops.Forward() | ops.ForwardBackward():
                return self._trainer.micro_batches(op.data)
            case ops.Score():
                self._scored[op.scored] = scored = _Scored(op.data, self._trainer.micro_batches(op.data))
                return scored.micro_batches
            case ops.BackwardFrom() if op.scored in self._scored:
                return self._scored[op.scored].micro_batches
            case _:
                return []

    def task(self, op: ops.PassesOp, micro_batches: Sequence[MicroBatch]) -> Task:
        """The beginning of an op that needs passes."""
        adapter = self._adapter(op.adapter)
        match op:
            case ops.Forward():
                return Task(adapter, op.data, op.loss, deque(micro_batches))
            case ops.ForwardBackward():
                return Task(adapter, op.data, op.loss, deque(micro_batches), backward=True)
            case ops.Score():
                return Task(adapter, op.data, None, deque(micro_batches), keeps_graph=self._may_keep(micro_batches))
            case ops.BackwardFrom():
                scored = self._scored.get(op.scored)
                if scored is None:
                    raise InvalidRequest(
                        f"there are no logprobs of this name: they could not be computed, or were used: {op.scored!r}"
                    )
                given = GivenGradients([tensor.to_torch().to(self._model.device) for tensor in op.gradients])
                return Task(adapter, scored.data, given, deque(micro_batches), backward=True, graph=scored.graph)
            case _:
                assert_never(op)

    def _may_keep(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether the graph of a pass may wait for a loss: one at a time, so that memory is bounded by two passes. The
        others are computed again, which gives the same."""
        return len(micro_batches) == 1 and all(scored.graph is None for scored in self._scored.values())

    def scored(self, op: ops.Score, task: Task) -> None:
        """The logprobs of a custom loss are there."""
        self._scored[op.scored].graph = task.graph

    def failed(self, op: ops.Op, error: BaseException) -> None:
        """What follows from the failure of an op: after a forward_backward that failed, whatever it failed of, the
        adapter must not step. One that was taken back is as if it never was."""
        match op:
            case ops.ForwardBackward() | ops.Score() | ops.BackwardFrom():
                adapter = self.by_id.get(op.adapter)
                if adapter is not None and not isinstance(error, Cancelled):
                    adapter.fail(error)
                if isinstance(op, ops.Score):
                    self.forget_scored(op.scored)
            case _:
                pass

    def forget_graphs(self) -> bool:
        """Makes room in memory: what was kept is computed again when it is needed. Whether there was anything."""
        kept = [scored for scored in self._scored.values() if scored.graph is not None]
        for scored in kept:
            scored.graph = None
        return bool(kept)

    def forget_scored(self, scored: ops.ScoreId | None) -> None:
        if scored is not None:
            self._scored.pop(scored, None)

    def use(self, op: ops.OrderedOp) -> None:
        """What an op works on is in the memory of the device from now on, until others push it out."""
        if not isinstance(op, ops.CreateAdapter | ops.LoadAdapter | ops.LoadWeights):
            adapter = self._adapter(op.adapter)
            self._residency.use([adapter.weights, adapter.moments])

    def note_new(self, op: ops.OrderedOp) -> None:
        """What an op has made counts from now on."""
        match op:
            case ops.LoadWeights():
                self._residency.use([self.weights[op.weights]])
            case ops.CreateAdapter() | ops.LoadAdapter() | ops.OptimStep() | ops.RestoreAdapter():
                adapter = self.by_id[op.adapter]
                self._residency.use([adapter.weights, adapter.moments])
            case _:
                pass

    def do(self, op: ops.OrderedOp) -> ops.Result:
        """An op that needs no pass."""
        match op:
            case ops.CreateAdapter():
                check_lora(op.config, self._model.untrainable)
                targets = chosen(op.config, self._model.targets)
                refuse_too_large(op.config.rank, targets, available_bytes(self._model.device))
                return self._add(op.adapter, Adapter(initial_weights(op.config, targets, self._model.device)))
            case ops.LoadAdapter():
                saved = self._read(op.path, op.with_optimizer)
                return self._add(op.adapter, Adapter(saved.weights, saved.moments))
            case ops.OptimStep():
                return self._adapter(op.adapter).optim_step(op.params)
            case ops.TakeBack():
                return None
            case ops.Spoil():
                return self._adapter(op.adapter).fail(InvalidRequest(op.reason))
            case ops.SaveAdapter():
                adapter = self._adapter(op.adapter)
                moments = adapter.share_moments() if op.with_optimizer else None
                meta = dict(op.meta)
                return snapshot(op.path, adapter.weights, moments, meta, overwrite=op.overwrite, disk=self._disk)
            case ops.RestoreAdapter():
                saved = self._read(op.path, op.with_optimizer)
                return self._adapter(op.adapter).restore(saved.weights, saved.moments)
            case ops.Freeze():
                self.weights[op.weights] = self._adapter(op.adapter).weights
            case ops.LoadWeights():
                self.weights[op.weights] = self._read(op.path, with_optimizer=False).weights
            case ops.DropAdapter():
                del self.by_id[op.adapter]
            case ops.Forward() | ops.ForwardBackward() | ops.Score() | ops.BackwardFrom():
                raise AssertionError("these are done in passes")
            case _:
                assert_never(op)

    def snapshot_of_weights(self, op: ops.SaveWeights) -> ops.Snapshot:
        weights, meta = self.weights[op.weights], dict(op.meta)
        return snapshot(op.path, weights, None, meta, overwrite=False, disk=self._disk)

    def _add(self, name: ops.AdapterId, adapter: Adapter) -> None:
        if name in self.by_id:
            raise InvalidRequest(f"there is an adapter of this name; choose another: {name!r}")
        self.by_id[name] = adapter

    def _adapter(self, name: ops.AdapterId) -> Adapter:
        if name not in self.by_id:
            raise InvalidRequest(f"there is no adapter of this name: it could not be made, or was dropped: {name!r}")
        return self.by_id[name]

    def _read(self, path: Path, with_optimizer: bool) -> SavedAdapter:
        saved = read_adapter(path, with_optimizer=with_optimizer, device=self._model.device)
        check_fits(saved, self._model.targets, self._model.output.weight_OI, path)
        return saved

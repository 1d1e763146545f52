# pyright: basic
"""Forward and backward: what the training verbs do, on checked input.

Datums, of one adapter or of several, are packed in passes of a bounded number of tokens, in the order they came. The
losses of a pass are summed, so its gradient adds to the earlier ones and the cut into passes changes nothing but
rounding; with one datum a pass and the row-exact arithmetic, not even that: then any split over passes and calls gives
the same bits.

Shapes: `N` tokens of one datum, `K` targets per position, `P` pairs (row, target) of a pass.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from stovetop.engine.containment import Contained
from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, Pack, Segment, common_length, joined, micro_batches, pack
from stovetop.engine.lora.routing import Rows, batched_rows
from stovetop.engine.lora.weights import AdapterWeights, Tensors, factors_of
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.head import pair_logprobs
from stovetop.engine.training.adapter import Adapter
from stovetop.engine.training.loss_math import LossInputs, can_train, loss_sum
from stovetop.errors import InvalidRequest
from stovetop.losses import Loss, temperature_of
from stovetop.target_names import HEAD
from stovetop.types import Datum, ForwardBackwardOutput, TensorData

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class GivenGradients:
    """A loss of which only the gradient is known, so Σ gradient·logprob will do. They are by datum, each shaped as its
    logprobs."""

    gradients: Sequence[Tensor]


class MicroBatch(NamedTuple):
    """Data of one pass, by index, and how many tokens it has: those counted once that data begin with alike."""

    indices: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Logprobs, by datum, with what leads back from them to the factors of an adapter."""

    logprobs: list[Tensor]
    leaves: Tensors


@dataclass(slots=True, eq=False)
class Task:
    """Data of one adapter on their way through the passes that they need."""

    adapter: Adapter
    data: Sequence[Datum]
    loss: Loss | GivenGradients | None  # None where only logprobs are asked for
    micro_batches: deque[MicroBatch]  # of the passes that are left
    backward: bool = False
    keeps_graph: bool = False  # of its one pass, if there is memory for it
    graph: Graph | None = None  # that was kept, or from which to go back
    total: float = 0.0
    logprobs: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None  # after which there are no more passes

    @property
    def is_done(self) -> bool:
        return self.error is not None or not self.micro_batches

    def take(self, computed: "_Computed") -> None:
        """What a pass gave. Where that fails the task fails: the pass cannot be done again."""
        with Contained() as outcome:
            if self.backward:
                self.adapter.gradients = _sum(self.adapter.gradients, computed.gradients)
            self.total += computed.loss
            self.logprobs += computed.logprobs
            self.graph = computed.graph
        self.error = outcome.error

    def output(self) -> ForwardBackwardOutput:
        """Of a task that is done. Raises what it failed with."""
        if self.error is not None:
            raise self.error
        outputs = [{"logprobs": TensorData.from_torch(tensor)} for tensor in self.logprobs]
        return ForwardBackwardOutput("logprobs", outputs, {} if self.loss is None else {"loss:sum": self.total})


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What one task has in a pass."""

    task: Task
    indices: Sequence[int]  # of its data

    @property
    def data(self) -> list[Datum]:
        return [self.task.data[index] for index in self.indices]

    @property
    def temperature(self) -> float:
        loss = self.task.loss
        return 1.0 if loss is None or isinstance(loss, GivenGradients) else temperature_of(loss)


class _Computed(NamedTuple):
    """What a pass gave for one share."""

    loss: float
    logprobs: list[Tensor]
    gradients: Tensors  # none of a forward pass
    graph: Graph | None = None  # where it is to be kept


class Trainer:
    def __init__(self, model: BaseModel, max_tokens_per_pass: int) -> None:
        self._model = model
        self._max_tokens = max_tokens_per_pass

    def micro_batches(self, data: Sequence[Datum]) -> list[MicroBatch]:
        """The passes that data of one adapter need: as many tokens in each as fit."""
        tokens = [datum.model_input.to_ints() for datum in data]
        commons = [0, *(common_length(before, after) for before, after in pairwise(tokens))]
        shared = [common if common >= MIN_SHARED_TOKENS else 0 for common in commons]
        lengths = list(map(len, tokens))
        return [
            MicroBatch(range(cut.start, cut.stop), sum(lengths[cut]) - sum(shared[cut.start + 1 : cut.stop]))
            for cut in micro_batches(lengths, self._max_tokens, shared)
        ]

    def run_pass(self, tasks: Sequence[Task], make_room: Callable[[], bool]) -> None:
        """The next pass of each, all in one. Tasks are of different adapters and of one kind; one that keeps a graph,
        or goes back from one, is alone. Where a pass fails, each task is tried alone, so that one that fails does not
        touch the others; one that does not fit into memory is tried in halves, once `make_room` has no more to free."""
        waiting = deque([[_Share(task, task.micro_batches.popleft().indices) for task in tasks]])
        while waiting:
            shares = [share for share in waiting.popleft() if share.task.error is None]
            computed: list[_Computed] = []
            with Contained() as outcome:
                computed = self._compute(shares) if shares else []
            if outcome.error is None:
                for share, own in zip(shares, computed, strict=True):
                    share.task.take(own)
            elif isinstance(outcome.error, torch.OutOfMemoryError):
                waiting.extendleft([shares] if make_room() else reversed(_halves(shares, outcome.error)))
            elif len(shares) == 1:
                shares[0].task.error = outcome.error
            else:
                waiting.extendleft([share] for share in reversed(shares))

    def _compute(self, shares: Sequence[_Share]) -> list[_Computed]:
        """Changes no adapter."""
        (*_, last) = tasks = [share.task for share in shares]
        if last.graph is not None:
            loss = _total_loss(shares[0], last.graph.logprobs)
            return [_Computed(0.0, [], own) for own in _gradients(loss, [last.graph.leaves])]
        weights, needs_graph = [task.adapter.weights for task in tasks], last.backward or last.keeps_graph
        with torch.set_grad_enabled(needs_graph), torch.inference_mode(not needs_graph):
            weights = [_leaves(own) for own in weights] if needs_graph else weights
            scored = self._score(shares, weights)
            losses = [_total_loss(share, logprobs) for share, logprobs in zip(shares, scored, strict=True)]
            gradients: list[Tensors] = [{} for _ in shares]
            if last.backward:
                gradients = _gradients(torch.stack(losses).sum(), [own.tensors for own in weights])
            graph = Graph(scored[0], weights[0].tensors) if last.keeps_graph else None
            return [
                _Computed(loss.item(), [tensor.detach() for tensor in logprobs], own, graph)
                for loss, logprobs, own in zip(losses, scored, gradients, strict=True)
            ]

    def _score(self, shares: Sequence[_Share], weights: Sequence[AdapterWeights]) -> list[list[Tensor]]:
        """One packed pass: hidden states of every token once, then the log-probability of every target, (N,) or (N, K)
        for each datum of each share."""
        packs = [pack([datum.model_input.to_ints() for datum in share.data]) for share in shares]
        starts = list(accumulate((packed.num_tokens for packed in packs), initial=0))
        segments = [Segment(start, end - start) for start, end in pairwise(starts)]
        parts = batched_rows(weights, segments, self._model.device, self._model.dtype)
        padding = -starts[-1] % self._model.arithmetic.row_multiple
        packed = joined([*packs, pack([[0] * padding])] if padding else packs)
        plan = self._model.packed_attention(packed)
        hidden_NE = self._model.hidden_states(packed, plan, parts)
        asked = [_targets(share, own) for share, own in zip(shares, packs, strict=True)]
        scored: dict[int, list[Tensor]] = {}
        for together in _scored_together(shares, weights):
            pairs = (
                torch.cat([asked[index].rows_P + starts[index] for index in together]),
                torch.cat([asked[index].targets_P for index in together]),
                torch.cat([asked[index].trained_P for index in together]),
            )
            rows_P, targets_P, trained_P = (each.to(self._model.device) for each in pairs)
            head, temperature = self._model.head([Rows(weights[together[0]])]), shares[together[0]].temperature
            logprobs_P = pair_logprobs(head, hidden_NE, rows_P, targets_P, temperature, trained_P)
            for index, own_P in zip(together, logprobs_P.split([len(asked[i].rows_P) for i in together]), strict=True):
                flat = own_P.split([shape.numel() for shape in asked[index].shapes])
                scored[index] = [each.view(shape) for each, shape in zip(flat, asked[index].shapes, strict=True)]
        return [scored[index] for index in range(len(shares))]


def _scored_together(shares: Sequence[_Share], weights: Sequence[AdapterWeights]) -> list[list[int]]:
    """Shares that one pass of the head can do: those with the same temperature that leave the head alone."""
    groups: dict[tuple[float, int | None], list[int]] = {}
    for index, (share, own) in enumerate(zip(shares, weights, strict=True)):
        trains_head = factors_of(own, HEAD) is not None
        groups.setdefault((share.temperature, index if trains_head else None), []).append(index)
    return list(groups.values())


def _halves(shares: list[_Share], error: Exception) -> list[list[_Share]]:
    """Two passes for one that does not fit into memory; none where a datum alone does not."""
    if len(shares) > 1:
        return [shares[: len(shares) // 2], shares[len(shares) // 2 :]]
    (share,) = shares
    share.task.keeps_graph = False
    if share.task.graph is not None:  # without it there is more room, and it may be used up in part
        share.task.graph = None
        return [shares]
    half = len(share.indices) // 2
    log.warning("a pass of %d datums does not fit into memory: trying two halves", len(share.indices))
    if half == 0:
        share.task.error = _too_large(share.data[0], error)
        return []
    return [[_Share(share.task, share.indices[:half])], [_Share(share.task, share.indices[half:])]]


class _Targets(NamedTuple):
    """The pairs that data ask for, datum after datum, and the shapes of the data's targets."""

    rows_P: Tensor
    targets_P: Tensor
    trained_P: Tensor  # whether it can have a gradient that is not zero
    shapes: list[torch.Size]


def _targets(share: _Share, packed: Pack) -> _Targets:
    rows, targets, trained, shapes = [], [], [], []
    for index, datum in enumerate(share.data):
        target = datum.loss_fn_inputs["target_tokens"].to_torch()
        rows.append(torch.tensor(packed.rows_of(index)).repeat_interleave(target[0].numel()))
        targets.append(target.flatten())
        trained.append(_can_train(share.task.loss, datum, target).flatten())
        shapes.append(target.shape)
    return _Targets(torch.cat(rows), torch.cat(targets), torch.cat(trained), shapes)


def _can_train(loss: Loss | GivenGradients | None, datum: Datum, like: Tensor) -> Tensor:
    """Of a loss that is not known yet all can."""
    if loss is None or isinstance(loss, GivenGradients):
        return torch.ones_like(like, dtype=torch.bool)
    return can_train(loss, _inputs(datum, like))


def _too_large(datum: Datum, error: Exception) -> InvalidRequest:
    failure = InvalidRequest(
        f"a datum of {datum.model_input.length} tokens does not fit into memory on its own; pass recompute=True to the "
        "service, or shorten it"
    )
    failure.__cause__ = error
    return failure


def _leaves(weights: AdapterWeights) -> AdapterWeights:
    """The same factors as leaves of a fresh graph."""
    return replace(weights, tensors={name: t.detach().requires_grad_() for name, t in weights.tensors.items()})


def _gradients(loss: Tensor, leaves: Sequence[Tensors]) -> list[Tensors]:
    flat = [tensor for own in leaves for tensor in own.values()]
    gradients = iter(torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True))
    return [{name: next(gradients) for name in own} for own in leaves]


def _sum(old: Tensors | None, new: Tensors) -> Tensors:
    """Into the old ones, which are held nowhere else."""
    return {name: old[name].add_(new[name]) for name in new} if old else new


def _total_loss(share: _Share, logprobs: list[Tensor]) -> Tensor:
    match share.task.loss:
        case None:
            sums = [torch.zeros((), dtype=torch.float32)]
        case GivenGradients(gradients):
            own = [gradients[index] for index in share.indices]
            sums = [(scored * gradient).sum() for scored, gradient in zip(logprobs, own, strict=True)]
        case loss:
            pairs = zip(share.data, logprobs, strict=True)
            sums = [loss_sum(loss, scored, _inputs(datum, scored)) for datum, scored in pairs]
    return torch.stack(sums).sum()


def _inputs(datum: Datum, like: Tensor) -> LossInputs:
    return {
        name: tensor.to_torch().to(like.device)
        for name, tensor in datum.loss_fn_inputs.items()
        if name != "target_tokens"
    }

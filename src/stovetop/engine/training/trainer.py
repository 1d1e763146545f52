# pyright: basic
"""Forward, backward and the state of an adapter: what the training verbs do, on checked input.

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
from itertools import accumulate, groupby, pairwise
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stovetop.engine.kernels.packing import MIN_SHARED_TOKENS, Pack, Segment, common_length, joined, micro_batches, pack
from stovetop.engine.lora.routing import Rows, batched_rows
from stovetop.engine.lora.weights import AdapterWeights, Tensors, factors_of
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.head import pair_logprobs
from stovetop.engine.training.adapter import Adapter
from stovetop.engine.training.custom_loss import judge
from stovetop.engine.training.loss_math import LossInputs, loss_sum
from stovetop.errors import InvalidRequest
from stovetop.losses import Loss, temperature_of
from stovetop.target_names import HEAD
from stovetop.types import Datum, ForwardBackwardOutput, TensorData

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A loss of which only the gradient is known, so Σ gradient·logprob will do. `gradients` are by datum, each shaped
    as its logprobs."""

    gradients: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Data of one adapter, and their loss; None where only logprobs are asked for."""

    adapter: Adapter
    data: Sequence[Datum]
    loss: Loss | Given | None


class _Unit(NamedTuple):
    job: int
    index: int  # among the data of its job
    datum: Datum


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What one adapter has in a pass."""

    job: int
    weights: AdapterWeights
    indices: Sequence[int]  # of its data, among those of the job
    data: Sequence[Datum]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The logprobs of data, by datum; with the graph that leads to them where all data fit into one pass."""

    logprobs: list[Tensor]
    share: _Share | None  # of that pass, whose factors are the leaves of the graph; None without a graph


@dataclass(slots=True, eq=False)
class _Progress:
    """What the passes over a job have given so far; after an error there are no more."""

    total: float = 0.0
    logprobs: list[Tensor] = field(default_factory=list)
    error: Exception | None = None

    def result(self) -> ForwardBackwardOutput | Exception:
        return self.error or _output(self.logprobs, {"loss:sum": self.total})


class Trainer:
    def __init__(self, model: BaseModel, max_tokens_per_pass: int) -> None:
        self._model = model
        self._max_tokens = max_tokens_per_pass

    def forward(self, jobs: Sequence[Job]) -> list[ForwardBackwardOutput | Exception]:
        with torch.inference_mode():
            return [progress.result() for progress in self._run(jobs, backward=False)]

    def forward_backward(self, jobs: Sequence[Job]) -> list[ForwardBackwardOutput | Exception]:
        """Each job's result, or why it failed; one that fails does not touch the others. Gradients are added to those
        of the adapters, each of which has one job."""
        results = [progress.result() for progress in self._run(jobs, backward=True)]
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Exception):
                job.adapter.fail(result)
        return results

    def _run(self, jobs: Sequence[Job], *, backward: bool) -> list[_Progress]:
        progress = [_Progress() for _ in jobs]
        waiting = deque(self._passes(_units(jobs)))
        while waiting:
            units = [unit for unit in waiting.popleft() if progress[unit.job].error is None]
            if not units:
                continue
            try:
                self._pass(jobs, units, progress, backward=backward)
            except torch.OutOfMemoryError as error:
                log.warning("a pass of %d datums does not fit into memory: trying two halves", len(units))
                clear_frames(error.__traceback__)  # which hold what did not fit
                if len(units) == 1:
                    progress[units[0].job].error = _too_large(units[0].datum, error)
                waiting.extendleft([] if len(units) == 1 else (units[len(units) // 2 :], units[: len(units) // 2]))
            except Exception as error:  # of one of the jobs: each is tried alone
                clear_frames(error.__traceback__)  # which hold the activations of all
                alone = [list(own) for _, own in groupby(units, key=lambda unit: unit.job)]
                if len(alone) == 1:
                    progress[units[0].job].error = error
                waiting.extendleft([] if len(alone) == 1 else reversed(alone))
        return progress

    def _pass(self, jobs: Sequence[Job], units: list[_Unit], progress: list[_Progress], *, backward: bool) -> None:
        """Takes effect as a whole or not at all."""
        shares = [
            _Share(
                index,
                _leaves(jobs[index].adapter.weights) if backward else jobs[index].adapter.weights,
                [unit.index for unit in own],
                [unit.datum for unit in own],
                _temperature_of(jobs[index].loss),
            )
            for index, own in ((index, list(own)) for index, own in groupby(units, key=lambda unit: unit.job))
        ]
        scored = self._score(shares)
        losses = [
            _total_loss(jobs[share.job].loss, share, logprobs) for share, logprobs in zip(shares, scored, strict=True)
        ]
        if backward:
            gradients = _gradients(torch.stack(losses).sum(), [share.weights.tensors for share in shares])
            for share, own in zip(shares, gradients, strict=True):
                jobs[share.job].adapter.gradients = _sum(jobs[share.job].adapter.gradients, own)
        for share, loss, logprobs in zip(shares, losses, scored, strict=True):
            progress[share.job].total += loss.item()
            progress[share.job].logprobs += [tensor.detach() for tensor in logprobs]

    def forward_backward_custom(
        self, adapter: Adapter, data: Sequence[Datum], loss_fn: Callable[..., Any]
    ) -> ForwardBackwardOutput:
        """In three phases: the logprobs of all data; the user's loss on them, which is given nothing of the model; the
        way back from its gradient. The first and the last keep to the bound on a pass."""
        try:
            scored = self.score(adapter, data)
            judged = judge(loss_fn, data, scored.logprobs)
            self.backward_from(adapter, data, scored, judged.gradients)
        except Exception as error:
            adapter.fail(error)
            raise
        return _output(judged.logprobs, {**judged.metrics, "loss:sum": judged.loss})

    def score(self, adapter: Adapter, data: Sequence[Datum]) -> Scored:
        """Only where one pass holds all data is its graph kept for the way back: more than a pass would not fit."""
        job = Job(adapter, data, None)
        if len(self._passes(_units([job]))) == 1:
            share = _Share(0, _leaves(adapter.weights), range(len(data)), data)
            try:
                return Scored(self._score([share])[0], share)
            except torch.OutOfMemoryError as error:
                clear_frames(error.__traceback__)  # which hold what did not fit; in smaller passes it may
        with torch.no_grad():
            (progress,) = self._run([job], backward=False)
        if progress.error is not None:
            raise progress.error
        return Scored(progress.logprobs, None)

    def backward_from(
        self, adapter: Adapter, data: Sequence[Datum], scored: Scored, gradients: Sequence[Tensor]
    ) -> None:
        """Adds to the adapter's gradients those of a loss whose gradients with respect to the logprobs are given."""
        loss = Given(gradients)
        if scored.share is None:
            (progress,) = self._run([Job(adapter, data, loss)], backward=True)
            if progress.error is not None:
                raise progress.error
            return
        total = _total_loss(loss, scored.share, scored.logprobs)
        (own,) = _gradients(total, [scored.share.weights.tensors])
        adapter.gradients = _sum(adapter.gradients, own)

    def _passes(self, units: list[_Unit]) -> list[list[_Unit]]:
        """As many tokens as fit, those counted once that data of one adapter begin with alike."""
        tokens = [unit.datum.model_input.to_ints() for unit in units]
        shared = [0] * len(units)
        for index, ((before, first), (unit, second)) in enumerate(pairwise(zip(units, tokens, strict=True)), start=1):
            common = common_length(first, second) if before.job == unit.job else 0
            shared[index] = common if common >= MIN_SHARED_TOKENS else 0
        return [units[cut] for cut in micro_batches(list(map(len, tokens)), self._max_tokens, shared)]

    def _score(self, shares: Sequence[_Share]) -> list[list[Tensor]]:
        """One packed pass: hidden states of every token once, then the log-probability of every target, (N,) or (N, K)
        for each datum of each share."""
        packs = [pack([datum.model_input.to_ints() for datum in share.data]) for share in shares]
        starts = list(accumulate((packed.num_tokens for packed in packs), initial=0))
        segments = [Segment(start, end - start) for start, end in pairwise(starts)]
        parts = batched_rows([share.weights for share in shares], segments, self._model.device)
        filling = -starts[-1] % self._model.arithmetic.row_multiple
        packed = joined([*packs, pack([[0] * filling])] if filling else packs)
        plan = self._model.packed_attention(packed)
        hidden_NE = self._model.hidden_states(packed, plan, parts)
        asked = [_targets(share.data, own) for share, own in zip(shares, packs, strict=True)]
        scored: dict[int, list[Tensor]] = {}
        for together in self._scored_together(shares):
            rows_P = torch.cat([asked[index].rows_P + starts[index] for index in together])
            targets_P = torch.cat([asked[index].targets_P for index in together])
            head = self._model.head([Rows(shares[together[0]].weights)])
            on = self._model.device
            temperature = shares[together[0]].temperature
            logprobs_P = pair_logprobs(head, hidden_NE, rows_P.to(on), targets_P.to(on), temperature)
            for index, own_P in zip(together, logprobs_P.split([len(asked[i].rows_P) for i in together]), strict=True):
                flat = own_P.split([shape.numel() for shape in asked[index].shapes])
                scored[index] = [each.view(shape) for each, shape in zip(flat, asked[index].shapes, strict=True)]
        return [scored[index] for index in range(len(shares))]

    def _scored_together(self, shares: Sequence[_Share]) -> list[list[int]]:
        """Shares that one pass of the head can do: those with the same temperature that leave the head alone."""
        groups: dict[tuple[float, int | None], list[int]] = {}
        for index, share in enumerate(shares):
            trains_head = factors_of(share.weights, HEAD) is not None
            groups.setdefault((share.temperature, index if trains_head else None), []).append(index)
        return list(groups.values())


class _Targets(NamedTuple):
    """The pairs that data ask for, datum after datum, and the shapes of the data's targets."""

    rows_P: Tensor
    targets_P: Tensor
    shapes: list[torch.Size]


def _targets(data: Sequence[Datum], packed: Pack) -> _Targets:
    rows, targets, shapes = [], [], []
    for index, datum in enumerate(data):
        target = datum.loss_fn_inputs["target_tokens"].to_torch()
        rows.append(torch.tensor(packed.rows_of(index)).repeat_interleave(target[0].numel()))
        targets.append(target.flatten())
        shapes.append(target.shape)
    return _Targets(torch.cat(rows), torch.cat(targets), shapes)


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


def _units(jobs: Sequence[Job]) -> list[_Unit]:
    return [_Unit(number, index, datum) for number, job in enumerate(jobs) for index, datum in enumerate(job.data)]


def _temperature_of(loss: Loss | Given | None) -> float:
    return 1.0 if loss is None or isinstance(loss, Given) else temperature_of(loss)


def _total_loss(loss: Loss | Given | None, share: _Share, logprobs: list[Tensor]) -> Tensor:
    match loss:
        case None:
            sums = [torch.zeros(())]
        case Given(gradients):
            own = [gradients[index] for index in share.indices]
            sums = [(scored * gradient).sum() for scored, gradient in zip(logprobs, own, strict=True)]
        case _:
            pairs = zip(share.data, logprobs, strict=True)
            sums = [loss_sum(loss, scored, _inputs(datum, scored)) for datum, scored in pairs]
    return torch.stack(sums).sum()


def _inputs(datum: Datum, like: Tensor) -> LossInputs:
    return {
        name: tensor.to_torch().to(like.device)
        for name, tensor in datum.loss_fn_inputs.items()
        if name != "target_tokens"
    }


def _output(logprobs: list[Tensor], metrics: dict[str, float]) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData.from_torch(tensor)} for tensor in logprobs]
    return ForwardBackwardOutput("logprobs", outputs, metrics)

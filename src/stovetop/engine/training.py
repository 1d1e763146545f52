# pyright: basic
"""Forward, backward and the state of one adapter: what the training verbs do, on checked input.

Datums are packed in passes of a bounded number of tokens, in the order they came. The losses of a pass are summed, so
its gradient adds to the earlier ones and the cut into passes changes nothing but rounding; with one datum a pass and
the row-exact arithmetic, not even that: then any split over passes and calls gives the same bits.

Shapes: `N` tokens of one datum, `K` targets per position, `P` pairs (row, target) of a pass.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stovetop.engine.attention import PackedAttention
from stovetop.engine.logprobs import pair_logprobs
from stovetop.engine.lora import AdapterWeights, Rows
from stovetop.engine.loss_math import LossInputs, loss_sum
from stovetop.engine.model import BaseModel
from stovetop.engine.optim import Moments, Tensors, adamw
from stovetop.engine.packing import micro_batches, pack
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.losses import Loss, temperature_of
from stovetop.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse, TensorData

log = logging.getLogger(__name__)


class Adapter:
    """One training client's adapter: weights, moments, and the gradients since the last step. All three are values that
    are replaced, never changed in place."""

    def __init__(self, weights: AdapterWeights, moments: Moments | None = None) -> None:
        self.weights = weights
        self.moments = moments or Moments()
        self.gradients: Tensors | None = None
        self._failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """A forward_backward failed: the next step must not use what the others gathered."""
        self._failure = self._failure or error

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        gradients, failure = self.gradients, self._failure
        self.gradients, self._failure = None, None
        if failure is not None:
            raise InvalidRequest(
                f"a forward_backward before it failed, so its gradients are dropped: {failure}"
            ) from failure
        if gradients is None:
            raise InvalidRequest("there is no gradient; call forward_backward before optim_step")
        stepped = adamw(self.weights.tensors, gradients, self.moments, params)
        self.weights = replace(self.weights, tensors=stepped.weights)
        self.moments = stepped.moments
        return OptimStepResponse(
            {
                "grad_norm": stepped.grad_norm,
                "update_norm": stepped.update_norm,
                "skipped_nonfinite": float(stepped.skipped),
            }
        )

    def restore(self, weights: AdapterWeights, moments: Moments) -> None:
        if weights.tensors.keys() != self.weights.tensors.keys():
            other = sorted(weights.tensors.keys() ^ self.weights.tensors.keys())
            raise CheckpointError(
                f"this state trains other linears than the client ({len(other)} tensors differ, first {other[0]}); "
                "make a client from that state"
            )
        self.weights, self.moments = weights, moments
        self.gradients, self._failure = None, None


class _Scored(NamedTuple):
    """The model's log-probabilities of each datum's targets, (N,) or (N, K), and the factors they depend on."""

    logprobs: list[Tensor]
    leaves: Tensors


class Trainer:
    def __init__(self, model: BaseModel, max_tokens_per_pass: int) -> None:
        self._model = model
        self._max_tokens = max_tokens_per_pass

    def forward(self, adapter: Adapter, data: Sequence[Datum], loss: Loss) -> ForwardBackwardOutput:
        total, logprobs = 0.0, []
        with torch.inference_mode():
            for part in self._passes(data):
                scored = self._score(adapter.weights, part, temperature_of(loss))
                total += _total_loss(loss, part, scored.logprobs).item()
                logprobs += scored.logprobs
        return _output(logprobs, {"loss:sum": total})

    def forward_backward(self, adapter: Adapter, data: Sequence[Datum], loss: Loss) -> ForwardBackwardOutput:
        total, logprobs = 0.0, []
        waiting = deque(self._passes(data))
        while waiting:
            part = waiting.popleft()
            try:
                scored = self._score(_leaves(adapter.weights), part, temperature_of(loss))
                part_loss = _total_loss(loss, part, scored.logprobs)
                gradients = _gradients(part_loss, scored.leaves)
            except torch.OutOfMemoryError:
                waiting.extendleft(reversed(_halves(part)))
                continue
            adapter.gradients = _sum(adapter.gradients, gradients)
            total += part_loss.item()
            logprobs += [tensor.detach() for tensor in scored.logprobs]
        return _output(logprobs, {"loss:sum": total})

    def forward_backward_custom(
        self, adapter: Adapter, data: Sequence[Datum], loss_fn: Callable[..., Any]
    ) -> ForwardBackwardOutput:
        """One forward; the user's loss on detached log-probabilities; one backward from its gradient."""
        weights = _leaves(adapter.weights)
        logprobs = [tensor for part in self._passes(data) for tensor in self._score(weights, part, 1.0).logprobs]
        seen = [tensor.detach().requires_grad_() for tensor in logprobs]
        try:
            loss, metrics = loss_fn(list(data), seen)
        except Exception as error:  # a fault of the caller's function, not of ours
            raise InvalidRequest(f"the custom loss raised {error!r}") from error
        if loss.numel() != 1 or not loss.requires_grad:
            raise InvalidRequest(
                f"a custom loss must return one number that depends on the logprobs it was given: {loss!r}"
            )
        d_logprobs = torch.autograd.grad(loss, seen, allow_unused=True, materialize_grads=True)
        surrogate = torch.stack([(p * d).sum() for p, d in zip(logprobs, d_logprobs, strict=True)]).sum()
        adapter.gradients = _sum(adapter.gradients, _gradients(surrogate, weights.tensors))
        return _output(seen, {**metrics, "loss:sum": loss.item()})

    def _passes(self, data: Sequence[Datum]) -> list[Sequence[Datum]]:
        lengths = [datum.model_input.length for datum in data]
        return [data[cut] for cut in micro_batches(lengths, self._max_tokens)]

    def _score(self, weights: AdapterWeights, data: Sequence[Datum], temperature: float) -> _Scored:
        """One packed pass: hidden states of every token once, then the log-probability of every target."""
        packed = pack([datum.model_input.to_ints() for datum in data])
        plan = PackedAttention(packed, self._model.arithmetic, self._model.device)
        hidden_NE = self._model.hidden_states(packed, plan, [Rows(weights)])
        rows, targets, shapes = [], [], []
        for index, datum in enumerate(data):
            target = datum.loss_fn_inputs["target_tokens"].to_torch()
            row_N = torch.tensor(packed.rows_of(index))
            rows.append(row_N.repeat_interleave(target[0].numel()))
            targets.append(target.flatten())
            shapes.append(target.shape)
        rows_P, targets_P = (torch.cat(tensors).to(self._model.device) for tensors in (rows, targets))
        logprobs_P = pair_logprobs(self._model.head(weights), hidden_NE, rows_P, targets_P, temperature)
        split = logprobs_P.split([shape.numel() for shape in shapes])
        return _Scored([flat.view(shape) for flat, shape in zip(split, shapes, strict=True)], weights.tensors)


def _halves(data: Sequence[Datum]) -> list[Sequence[Datum]]:
    """What is tried when a pass did not fit into memory; a single datum cannot be cut."""
    if len(data) == 1:
        raise InvalidRequest(
            f"a datum of {data[0].model_input.length} tokens does not fit into memory on its own; pass recompute=True "
            "to the service, or shorten it"
        )
    log.warning("a pass of %d datums does not fit into memory: trying two halves", len(data))
    return [data[: len(data) // 2], data[len(data) // 2 :]]


def _leaves(weights: AdapterWeights) -> AdapterWeights:
    """The same factors as leaves of a fresh graph."""
    return replace(weights, tensors={name: t.detach().requires_grad_() for name, t in weights.tensors.items()})


def _gradients(loss: Tensor, leaves: Tensors) -> Tensors:
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def _sum(old: Tensors | None, new: Tensors) -> Tensors:
    return {name: old[name] + new[name] for name in new} if old else new


def _total_loss(loss: Loss, data: Sequence[Datum], logprobs: list[Tensor]) -> Tensor:
    sums = [loss_sum(loss, scored, _inputs(datum, scored)) for datum, scored in zip(data, logprobs, strict=True)]
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

# pyright: basic
# (what a user's function returns may be anything)
"""A user's loss: called in a thread of its own, between the forward and the backward pass, and checked before any
gradient is added.

    Score (engine) -> logprobs -> the user's function (here) -> its gradient -> BackwardFrom (engine)

While the function runs, later calls of the same client wait for it, in the engine; those of others go on. It may call
other clients; a call of its own client would wait for itself and is refused.
"""

import inspect
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stovetop.backends.engine_thread import EngineThread, Expected, settle
from stovetop.checks import take
from stovetop.client import CustomLossFn
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, pending
from stovetop.rules import ANY_NUMBER, DictOf, shown
from stovetop.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch


class CustomLosses:
    """Those of one training client."""

    def __init__(self, thread: EngineThread, adapter: ops.AdapterId) -> None:
        self._thread = thread
        self._adapter = adapter
        self._numbers = itertools.count(1)
        self._running: int | None = None  # the thread in which one runs

    def refuse_within(self, verb: str) -> None:
        """A call of this client from within its own loss would wait for itself."""
        if self._running == threading.get_ident():
            raise InvalidRequest(
                f"{verb}: a custom loss cannot call the client that it is computed for, whose calls wait for it; call "
                "another client, or do this before or after the loss"
            )

    def run(self, what: str, data: Sequence[Datum], loss_fn: CustomLossFn) -> APIFuture[ForwardBackwardOutput]:
        """The whole call: its future has the output, or why it failed."""
        future = pending()
        expected = self._thread.expect(what, future)
        scored = ops.ScoreId(f"{self._adapter}:{next(self._numbers)}")

        def judged(output: ForwardBackwardOutput) -> None:
            arguments = (expected, scored, data, loss_fn, output)
            threading.Thread(target=self._judge, args=arguments, name=f"custom loss of {what}", daemon=True).start()

        score = self._thread.call(what, ops.Score(self._adapter, data, scored), judged)
        score.future().add_done_callback(lambda done: _failed(done.exception(), expected))
        return APIFuture(future, score.cancel)

    def _judge(
        self,
        expected: Expected,
        scored: ops.ScoreId,
        data: Sequence[Datum],
        loss_fn: CustomLossFn,
        output: ForwardBackwardOutput,
    ) -> None:
        """In a thread of its own."""
        logprobs = [each["logprobs"] for each in output.loss_fn_outputs]
        self._running = threading.get_ident()
        try:
            loss, metrics, gradients = judge(loss_fn, data, logprobs)
        except InvalidRequest as error:
            answer: ops.Op = ops.Spoil(self._adapter, str(error), scored)
            result: InvalidRequest | ForwardBackwardOutput = error
        else:
            answer = ops.BackwardFrom(self._adapter, scored, gradients)
            result = ForwardBackwardOutput("logprobs", output.loss_fn_outputs, {**metrics, "loss:sum": loss})
        finally:
            self._running = None

        def finish(_: None) -> None:
            error = result if isinstance(result, InvalidRequest) else None
            settle(expected.future, expected.what, result, error)

        try:
            ended = expected.call(answer, finish)
            ended.add_done_callback(lambda done: _failed(done.exception(), expected))
        except InvalidRequest as error:  # the service was closed meanwhile
            expected.fail(error)
        finally:
            expected.end()


def _failed(error: BaseException | None, expected: Expected) -> None:
    """The whole fails where one of its ops does."""
    if error is not None:
        expected.fail(error)
        expected.end()


_METRICS = DictOf(ANY_NUMBER)
_DEPENDS = "a custom loss must return one number that depends on the logprobs it was given, so that they get a gradient"


class Judged(NamedTuple):
    """What a custom loss said."""

    loss: float
    metrics: dict[str, float]
    gradients: list[TensorData]  # of the loss with respect to the logprobs, by datum


def judge(loss_fn: CustomLossFn, data: Sequence[Datum], logprobs: Sequence[TensorData]) -> Judged:
    """Calls a user's loss with logprobs. It returns a finite number that depends on them, and metrics by name; anything
    else is an InvalidRequest that says what came."""
    seen = [tensor.to_torch().requires_grad_() for tensor in logprobs]
    try:
        returned = loss_fn(list(data), list(seen))
    except BaseException as error:  # a fault of the caller's function, not of ours; sys.exit() in it ends no thread
        raise InvalidRequest(f"the custom loss raised {error!r}") from error
    if inspect.iscoroutine(returned):
        returned.close()
        raise InvalidRequest("the custom loss must be a plain function, not an async one")
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise InvalidRequest(f"a custom loss must return two values, (loss, metrics): {shown(returned)}")
    loss, metrics = returned
    loss = _checked_loss(loss)
    gradients = [TensorData.from_torch(gradient) for gradient in _gradients(loss, seen)]
    return Judged(loss.item(), _checked_metrics(metrics), gradients)


def _checked_loss(loss: Any) -> "torch.Tensor":
    import torch

    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise InvalidRequest(
            f"the loss that a custom loss returns must be a torch tensor with one number: {_described(loss)}"
        )
    if not loss.requires_grad:
        raise InvalidRequest(f"{_DEPENDS}: {loss!r}")
    if not torch.isfinite(loss):
        raise InvalidRequest(f"the loss that a custom loss returns must be finite: {loss.item()}")
    return loss


def _described(loss: Any) -> str:
    import torch

    return f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, torch.Tensor) else shown(loss)


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Numbers by name; a tensor with one number is one too."""
    import torch

    if isinstance(metrics, dict):
        single = {k: v.item() for k, v in metrics.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
        metrics = {**metrics, **single}
    return take(_METRICS, metrics, "the metrics that a custom loss returns")


def _gradients(loss: "torch.Tensor", seen: "list[torch.Tensor]") -> "list[torch.Tensor]":
    import torch

    try:
        gradients = torch.autograd.grad(loss, seen, allow_unused=True)
    except RuntimeError as error:  # such as a tensor that the function changed in place
        raise InvalidRequest(f"the custom loss has no gradient: {error}") from error
    if all(gradient is None for gradient in gradients):
        raise InvalidRequest(f"{_DEPENDS}: {loss!r}")
    for index, gradient in enumerate(gradients):
        if gradient is not None and not torch.isfinite(gradient).all():
            raise InvalidRequest(
                "the gradient of the custom loss must be finite; with respect to the logprobs of "
                f"data[{index}] it is: {gradient}"
            )
    return [torch.zeros_like(p) if g is None else g for p, g in zip(seen, gradients, strict=True)]

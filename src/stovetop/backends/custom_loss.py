# pyright: basic
# (what a user's function returns may be anything)
"""A user's loss: called in a thread of its own, between the forward and the backward pass, and checked before any
gradient is added.

    Score (engine) -> logprobs -> the user's function (here) -> its gradient -> BackwardFrom (engine)

While the function runs, later calls of the same client wait for it, in the engine; those of others go on. It may call
other clients; a call of its own client would wait for itself and is refused.
"""

import contextlib
import contextvars
import inspect
import itertools
import threading
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stovetop.arguments import CustomLossFn
from stovetop.backends.accepted import settle
from stovetop.backends.endings import Helper
from stovetop.backends.engine_thread import EngineThread
from stovetop.backends.expected import Expected, enter, refuse_own_client
from stovetop.checks import take
from stovetop.engine import ops
from stovetop.errors import Cancelled, InvalidRequest, ServiceClosed
from stovetop.futures import APIFuture, pending, when_done
from stovetop.rules import ANY_NUMBER, DictOf, shown
from stovetop.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch


class CustomLosses:
    """Those of one training client."""

    def __init__(self, thread: EngineThread, adapter: ops.AdapterId) -> None:
        self.thread = thread
        self.adapter = adapter
        self.running: Expected | None = None  # the one that the engine holds this client's other ops for
        self.given_up: str | None = None  # why; then a closing service does not begin the next ones
        self._numbers = itertools.count(1)

    def refuse_within(self, verb: str) -> None:
        """A call of this client from within its own loss would wait for itself."""
        refuse_own_client(self.running, verb)

    def run(self, what: str, data: Sequence[Datum], loss_fn: CustomLossFn) -> APIFuture[ForwardBackwardOutput]:
        """The whole call: its future has the output, or why it failed."""
        call = _Call(self, what, data, loss_fn, ops.ScoreId(f"{self.adapter}:{next(self._numbers)}"))
        return APIFuture(call.future, call.cancel)


class _Call:
    """One custom loss. It is ended once: by what the function returned, by a failure of the forward pass, by being
    cancelled, or because it took too long."""

    def __init__(
        self, losses: CustomLosses, what: str, data: Sequence[Datum], loss_fn: CustomLossFn, scored: ops.ScoreId
    ) -> None:
        self.future = pending(losses.adapter)
        self._losses = losses
        self._what = what
        self._data = data
        self._loss_fn = loss_fn
        self._scored = scored
        self._context = contextvars.copy_context()  # a loss within a loss is known as that
        self._lock = threading.Lock()  # protects the next two
        self._cancelled = False
        self._ended = False
        self._expected = Expected(what, self._give_up, self._settle)
        losses.thread.expect(self._expected)
        kept = [Datum(datum.model_input, datum.loss_fn_inputs) for datum in data]  # the function may change its own
        try:
            self._score = losses.thread.call(what, ops.Score(losses.adapter, kept, scored), self._begin)
        except BaseException:  # the queue is full
            losses.thread.forget_expected(self._expected)
            raise
        when_done(self._score.future(), lambda done: self._without_scores(done.exception()))

    def cancel(self) -> None:
        """Until the gradients are on their way, nothing was added."""
        with self._lock:
            self._cancelled = True
            has_begun = self._expected.began_s is not None
        self._score.cancel()
        if has_begun:
            self._end(ops.TakeBack(self._losses.adapter, self._scored), Cancelled())

    # ---- in the engine's thread --------------------------------------------------------------------------------------

    def _begin(self, output: ForwardBackwardOutput) -> None:
        """The logprobs are there, and the engine holds what comes after them until `_end`."""
        with self._lock:
            cancelled = self._cancelled
            self._expected.began_s = time.monotonic()
        self._losses.running = self._expected
        if cancelled:
            self._end(ops.TakeBack(self._losses.adapter, self._scored), Cancelled())
        elif self._losses.given_up is not None and self._losses.thread.closed:
            self._refuse(InvalidRequest(f"this loss was not begun, because of an earlier one: {self._losses.given_up}"))
        else:
            try:
                name = f"custom loss of {self._what}"
                Helper(self._losses.thread.crew, lambda: self._context.run(self._judge, output), name)
            except BaseException as error:  # the system has no thread to give
                refusal = InvalidRequest(f"the custom loss could not be begun: {error!r}")
                refusal.__cause__ = error
                self._refuse(refusal)

    def _without_scores(self, error: BaseException | None) -> None:
        if error is not None:
            self._end(None, error)

    def _give_up(self, reason: str) -> None:
        self._losses.given_up = reason
        self._refuse(InvalidRequest(reason))

    # ---- in the thread of the loss -----------------------------------------------------------------------------------

    def _judge(self, output: ForwardBackwardOutput) -> None:
        enter(self._expected)
        logprobs = [each["logprobs"] for each in output.loss_fn_outputs]
        try:
            loss, metrics, gradients = judge(self._loss_fn, self._data, logprobs)
        except InvalidRequest as error:
            self._refuse(error)
        else:
            answer = ops.BackwardFrom(self._losses.adapter, self._scored, gradients)
            metrics = {**metrics, "loss:sum": loss}
            self._end(answer, ForwardBackwardOutput("logprobs", output.loss_fn_outputs, metrics))

    # ---- in any thread -----------------------------------------------------------------------------------------------

    def _refuse(self, error: InvalidRequest) -> None:
        self._end(ops.Spoil(self._losses.adapter, str(error), self._scored), error)

    def _end(self, answer: "ops.LossAnswer | None", result: BaseException | ForwardBackwardOutput) -> None:
        """`answer` tells the engine what became of the loss; the future has `result` when that is done."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if self._losses.running is self._expected:
            self._losses.running = None
        thread = self._losses.thread
        if answer is None:
            self._settle(result)
        else:
            with contextlib.suppress(ServiceClosed):  # the engine has ended meanwhile, and with it the call
                told = thread.call_expected(self._expected, answer)
                when_done(told, lambda done: self._settle(done.exception() or result))
        thread.forget_expected(self._expected)

    def _settle(self, result: BaseException | ForwardBackwardOutput) -> None:
        error = result if isinstance(result, BaseException) else None
        settle(self.future, self._what, result, error)


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
    with _settings_kept():
        try:
            returned = loss_fn(list(data), list(seen))
        except BaseException as error:  # a fault of the caller's function, not of ours; sys.exit() in it ends no thread
            raise InvalidRequest(f"the custom loss raised {_described_error(error)}") from error
        try:
            return _judged(returned, seen)
        except InvalidRequest:
            raise
        except BaseException as error:  # of a backward or a metric that the caller wrote, or a tensor without values
            why = _described_error(error)
            raise InvalidRequest(f"what the custom loss returned cannot be used: {why}") from error


@contextlib.contextmanager
def _settings_kept() -> Generator[None]:
    """What a loss changes of torch in the whole process ends with it. All else that changes results is its thread's."""
    import torch

    from stovetop.engine.machine import SHARED

    dtype, precision = SHARED.default_dtype, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        SHARED.restore_default_dtype(dtype)  # not what it was while a model was loaded
        torch.set_float32_matmul_precision(precision)


def _described_error(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:  # also written by the caller
        return type(error).__name__


def _judged(returned: Any, seen: "list[torch.Tensor]") -> Judged:
    for value in (returned, *returned) if isinstance(returned, tuple | list) else (returned,):
        if inspect.iscoroutine(value):
            value.close()
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

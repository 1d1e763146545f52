# pyright: basic
"""A user's loss over the wire: a forward at the server, the user's function here, and a backward with its gradients, as
the weights of cross-entropy: -Σ w·p has the gradient of any loss of p for w = -dLoss/dp.

Unlike the SDK's own, one that raises leaves its client as usable as before: the next optim_step fails with the reason.
Later calls of the same client wait meanwhile; those of others go on.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import tinker

from stovetop.arguments import CustomLossFn
from stovetop.backends.accepted import settle
from stovetop.backends.custom_loss import judge
from stovetop.backends.endings import Helper
from stovetop.backends.expected import Expected, enter, is_within, refuse_own_client
from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.gradients import Gradients
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.turns import Turn, Turns
from stovetop.backends.remote.values import output_of, with_weights
from stovetop.errors import Cancelled, InvalidRequest, ServiceClosed
from stovetop.futures import APIFuture, pending, when_done
from stovetop.types import Datum, ForwardBackwardOutput

LOSS = "cross_entropy"


class RemoteLosses:
    """Those of one training client."""

    def __init__(
        self,
        connection: Connection,
        turns: Turns,
        inner: Callable[[], tinker.TrainingClient],
        gradients: Gradients,
    ) -> None:
        self.connection = connection
        self.turns = turns
        self.inner = inner
        self.gradients = gradients
        self.running: Expected | None = None

    def refuse_within(self, verb: str) -> None:
        """A call of this client from within its own loss would wait for itself."""
        refuse_own_client(self.running, verb)

    def is_within(self) -> bool:
        """Whether the code that asks is a part of the loss that runs."""
        return self.running is not None and is_within(self.running)

    def run(self, what: str, data: Sequence[Datum], loss_fn: CustomLossFn, owner: str) -> APIFuture[Any]:
        """The whole call: its future has the output, or why it failed."""
        call = _Call(self, what, data, loss_fn, self.connection.pending(owner))
        self.turns.put(call.turn)
        return APIFuture(call.future, call.cancel)


class _Call:
    """One custom loss. It ends once: by what the function returned, by a failure before, or by being cancelled."""

    def __init__(
        self, losses: RemoteLosses, what: str, data: Sequence[Datum], loss_fn: CustomLossFn, future: "Future[Any]"
    ) -> None:
        self.future = future
        self.turn = Turn(self._begin, self._fail)
        self._losses = losses
        self._what = what
        self._data = data
        self._loss_fn = loss_fn
        self._forward = [with_weights(datum, np.zeros(datum.loss_fn_inputs["target_tokens"].shape)) for datum in data]
        self._context = contextvars.copy_context()  # a loss within a loss is known as that
        self._expected = Expected(what, self._give_up, self._fail)
        self._ended = False
        self._lock = threading.Lock()  # protects it
        self._released: Future[None] = pending()  # then later calls go on

    def cancel(self) -> None:
        """Until the gradients are on their way, nothing was added."""
        if self._losses.turns.take_back(self.turn) or self._end():
            self._fail(Cancelled())
            self._release()

    def _begin(self) -> "Future[None]":
        self._losses.gradients.require_usable()
        scored: Future[Any] = pending()
        connection = self._losses.connection
        sent = self._losses.inner().forward(self._forward, LOSS)
        connection.bring(sent, scored, output_of, partial(error_of, what=self._what))
        when_done(scored, self._scored)
        self._losses.running = self._expected
        return self._released

    def _scored(self, scored: "Future[Any]") -> None:
        error = scored.exception()
        if error is None:
            try:
                output: ForwardBackwardOutput = scored.result()
                judge_here = partial(self._judge, output)
                Helper(
                    self._losses.connection.crew,
                    lambda: self._context.run(judge_here),
                    f"custom loss of {self._what}",
                )
                return
            except BaseException as raised:  # the system has no thread to give
                error = raised
        if self._end():
            self._losses.gradients.spoil(str(error))
            self._fail(error)
            self._release()

    def _judge(self, output: ForwardBackwardOutput) -> None:
        """In a thread of its own."""
        enter(self._expected)
        try:
            logprobs = [each["logprobs"] for each in output.loss_fn_outputs]
            judged = judge(self._loss_fn, self._data, logprobs)
        except InvalidRequest as error:
            self._refuse(error)
            return
        if not self._end():
            return
        weighted = [
            with_weights(datum, np.negative(gradient.array))
            for datum, gradient in zip(self._data, judged.gradients, strict=True)
        ]
        metrics = {**judged.metrics, "loss:sum": judged.loss}
        result = ForwardBackwardOutput("logprobs", output.loss_fn_outputs, metrics)
        try:
            sent = self._losses.inner().forward_backward(weighted, LOSS)
            self._losses.gradients.added()
            fail = partial(error_of, what=self._what)
            self._losses.connection.bring(sent, self.future, lambda _: result, fail)
        except BaseException as error:  # of the SDK; it belongs to the one who waits
            self._fail(error)
        finally:
            self._release()

    def _give_up(self, reason: str) -> None:
        self._refuse(InvalidRequest(reason))

    def _refuse(self, error: InvalidRequest) -> None:
        if self._end():
            self._losses.gradients.spoil(str(error))
            self._fail(error)
            self._release()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ServiceClosed):
            self.future.set_exception(error)
        else:
            settle(self.future, self._what, None, error)

    def _end(self) -> bool:
        """Whether it had not ended."""
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended

    def _release(self) -> None:
        if self._losses.running is self._expected:
            self._losses.running = None
        if not self._released.done():
            self._released.set_result(None)

# pyright: basic
"""What one training client knows of its gradients at the server, where a part of what a step was to learn from
is missing: after a custom loss that raised, or `spoil`. The next optim_step fails then, and what was gathered is to be
dropped.

A server of ours is told (losses.SPOIL). Another one is sent no optim_step; if it has gathered something, there is no
way to drop that but to load a state, and nothing is trained before.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import tinker

from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.values import sdk_datum
from stovetop.errors import InvalidRequest
from stovetop.input_checks import check_step
from stovetop.losses import SPOIL
from stovetop.types import Datum, ModelInput

_UNUSED = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})  # the SDK sends no empty list


class Gradients:
    """Of one client. Used in its turns alone."""

    def __init__(self, connection: Connection, inner: Callable[[], tinker.TrainingClient]) -> None:
        self._connection = connection
        self._inner = inner
        self._some = False  # since the last step
        self._spoilt: str | None = None  # why the next step must fail, where the server is not told
        self._stuck: str | None = None  # why no step can be made any more

    def added(self) -> None:
        """A forward_backward is on its way."""
        self._some = True

    def loaded(self) -> None:
        """A load drops them."""
        self._some, self._spoilt, self._stuck = False, None, None

    def spoil(self, reason: str) -> "Future[Any]":
        """The next step fails with this reason. The future is done when the server has been told."""
        told = self._connection.pending(str(self._inner().model_id))
        if self._connection.models().spoils:
            sent = self._inner().forward_backward([sdk_datum(_UNUSED)], SPOIL, {"reason": reason})  # type: ignore[arg-type]  a name of ours
            self._connection.bring(sent, told, lambda _: None, partial(error_of, what="spoil"))
        else:
            self._spoilt = self._spoilt or reason
            told.set_result(None)
        return told

    def require_usable(self) -> None:
        """Refuses to train on what should have been dropped."""
        if self._stuck is not None:
            raise InvalidRequest(
                "the gradients from before a failure are still at the server, which has no way to drop them; load a "
                f"state into this client, or make one from the last that was saved: {self._stuck}"
            )

    def step(self) -> None:
        """An optim_step uses them up. Refuses one that must fail and of which the server does not know."""
        self.require_usable()
        some, self._some = self._some, False
        reason, self._spoilt = self._spoilt, None
        if reason is not None:
            self._stuck = reason if some else None
            check_step(None, InvalidRequest(reason))

# pyright: basic
"""What one training client owns: the weights of an adapter, its optimizer, and the gradients since the last step."""

import weakref
from dataclasses import replace

from stovetop.engine.lora.weights import AdapterWeights, Moments, Tensors
from stovetop.engine.training.optimizer import MomentsLost, Stepped, adamw
from stovetop.errors import CheckpointError, InvalidRequest
from stovetop.input_checks import check_step
from stovetop.types import AdamParams, OptimStepResponse


class Adapter:
    """One training client's adapter: weights, moments, and the gradients since the last step. The weights are a value
    that is replaced, never changed in place, for samplers hold it too."""

    def __init__(self, weights: AdapterWeights, moments: Moments | None = None) -> None:
        self.weights = weights
        self.moments = moments or Moments()
        self.gradients: Tensors | None = None
        self._failure: BaseException | None = None
        self._lost: BaseException | None = None  # what left the moments between two steps
        self._shared: weakref.ref[Moments] | None = None

    def share_moments(self) -> Moments:
        """The moments as they are now. As long as the result is alive a step leaves its tensors as they are and makes
        new ones; after that it works in place again."""
        self._require_moments()
        shared = self._still_shared()
        if shared is None:
            shared = replace(self.moments, mean=dict(self.moments.mean), square=dict(self.moments.square))
            self._shared = weakref.ref(shared)
        return shared

    def _still_shared(self) -> Moments | None:
        return None if self._shared is None else self._shared()

    def _require_moments(self) -> None:
        if self._lost is not None:
            raise InvalidRequest(
                f"the optimizer's moments were lost when an optim_step failed; load a saved state: {self._lost!r}"
            ) from self._lost

    def fail(self, error: BaseException) -> None:
        """A forward_backward failed: the next step must not use what the others gathered."""
        self._failure = self._failure or error

    def optim_step(self, params: AdamParams) -> OptimStepResponse:
        gradients, failure = self.gradients, self._failure
        self.gradients, self._failure = None, None
        check_step(gradients, failure)
        assert gradients is not None, "check_step has refused that"
        self._require_moments()
        keep_moments, stepped = self._still_shared() is not None, None
        try:
            stepped = adamw(self.weights.tensors, gradients, self.moments, params, keep_moments=keep_moments)
            weights, response = replace(self.weights, tensors=stepped.weights), _response(stepped)
        except BaseException as error:  # the step is told to have failed, so it has not happened
            cause = (error.__cause__ or error) if isinstance(error, MomentsLost) else error
            if isinstance(error, MomentsLost) or stepped is not None:
                self._lost = cause
            raise cause from None
        self.weights, self.moments = weights, stepped.moments
        if not stepped.skipped:
            self._shared = None
        return response

    def restore(self, weights: AdapterWeights, moments: Moments) -> None:
        if weights.tensors.keys() != self.weights.tensors.keys():
            other = sorted(weights.tensors.keys() ^ self.weights.tensors.keys())
            raise CheckpointError(
                f"this state trains other linears than the client ({len(other)} tensors differ, first {other[0]}); "
                "make a client from that state"
            )
        self.weights, self.moments, self._shared = weights, moments, None
        self.gradients, self._failure, self._lost = None, None, None


def _response(stepped: Stepped) -> OptimStepResponse:
    return OptimStepResponse(
        {
            "grad_norm": stepped.grad_norm,
            "update_norm": stepped.update_norm,
            "skipped_nonfinite": float(stepped.skipped),
        }
    )

"""A base model that is open in this process: what its sampling and training clients share, and which saved states fit
it."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stovetop.backends.engine_thread import EngineThread
from stovetop.backends.pending_saves import PendingSaves
from stovetop.client import Tokenizer
from stovetop.engine import ops
from stovetop.errors import CheckpointError
from stovetop.input_checks import ModelLimits
from stovetop.saved_states import SavedState


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a client made it: what the recording backend keeps."""

    client: str  # model id of a training client, "sampling" or "service"
    verb: str
    arguments: dict[str, Any]


Observer = Callable[[Call], None]


@dataclass(frozen=True, slots=True, eq=False)
class OpenedBase:
    """What the clients of one base model share."""

    name: str  # of the base model, as the user gave it
    thread: EngineThread
    storage: Path
    observe: Observer
    saves: PendingSaves  # of the service
    sample_number: "itertools.count[int]"  # of the service, so that every sample has a name of its own
    weights_number: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @property
    def limits(self) -> ModelLimits:
        """What the model can read."""
        return self.description.limits

    @property
    def fingerprint(self) -> str:
        """Tells base models apart by content."""
        return self.description.fingerprint

    @property
    def description(self) -> ops.Description:
        """What the engine says of itself, once it is loaded."""
        return self.thread.engine.description

    def manifest(
        self, run: Mapping[str, Any], user_metadata: Mapping[str, str], ttl_seconds: int | None = None
    ) -> dict[str, ops.Json]:
        """What the manifest of a save says, but for what the engine knows. Nothing here is ever deleted by itself:
        `ttl_seconds` is kept for whoever cleans up."""
        return {
            "base_model": self.name,
            "fingerprint": self.fingerprint,
            "user_metadata": user_metadata,
            "ttl_seconds": ttl_seconds,
            "run": run,
        }

    def get_tokenizer(self) -> Tokenizer:
        """That of the model; refused for a model without one."""
        return self.thread.engine.get_tokenizer()

    def new_weights(self, origin: str) -> ops.WeightsId:
        """A name for weights that are to be frozen or loaded."""
        return ops.WeightsId(f"{origin}@{next(self.weights_number)}")


def checked_state(path: str, base: OpenedBase, *, with_optimizer: bool) -> SavedState:
    """A saved state that fits this base model, as far as it says, and holds what is asked for."""
    state = base.saves.describe(Path(path))
    if state.fingerprint not in (None, base.fingerprint):
        raise CheckpointError(
            f"this state was trained on {state.base_model!r}, not on {base.name!r} (or on other weights of that "
            f"name); make a client for that model: {path}"
        )
    if with_optimizer and not state.with_optimizer:
        raise CheckpointError(f"these are weights for sampling, without an optimizer; use a path of save_state: {path}")
    return state

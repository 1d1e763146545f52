"""A base model that is open in this process: what its sampling and training clients share, and which saved states fit
it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stovetop.backends.engine_thread import EngineThread
from stovetop.errors import CheckpointError
from stovetop.saved_states import SavedState, describe


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
    sample_number: "itertools.count[int]"  # of the service, so that every sample has a name of its own


def checked_state(path: str, base: OpenedBase, *, with_optimizer: bool) -> SavedState:
    """A saved state that fits this base model, as far as it says, and holds what is asked for."""
    state = describe(Path(path))
    if state.fingerprint not in (None, base.thread.engine.fingerprint):
        raise CheckpointError(
            f"this state was trained on {state.base_model!r}, not on {base.name!r} (or on other weights of that "
            f"name); make a client for that model: {path}"
        )
    if with_optimizer and not state.with_optimizer:
        raise CheckpointError(f"these are weights for sampling, without an optimizer; use a path of save_state: {path}")
    return state

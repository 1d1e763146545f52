"""The base models that a service has open in this process: what the clients of one share, which saved states fit it,
and how all of them end."""

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stovetop.arguments import Preload
from stovetop.backends.endings import Crew, stop, wait_for
from stovetop.backends.engine_thread import CLOSED, EngineThread
from stovetop.backends.pending_saves import PendingSaves
from stovetop.backends.queues import QueueBounds
from stovetop.calls import Calls
from stovetop.engine import ops
from stovetop.errors import CheckpointError, InvalidRequest, ServiceClosed, UnknownName
from stovetop.futures import APIFuture, refuse_in_fork
from stovetop.input_checks import ModelLimits
from stovetop.model_store import canonical_name
from stovetop.saved_states import SavedState
from stovetop.tokenizing import Tokenizer
from stovetop.types import LoraConfig


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a client made it: what the recording backend keeps."""

    client: str  # model id of a training client, "sampling" or "service"
    verb: str
    arguments: dict[str, Any]


Observer = Callable[[Call], None]
OpenEngine = Callable[[str], ops.Engine]  # of the base model of this name; takes as long as loading it


class BaseModels(Protocol):
    """The base models that a service could open."""

    def name_of(self, base_model: str) -> str:
        """The one name of a base model, whichever of its names is given. Refuses one that there cannot be."""
        ...

    def names(self) -> list[str]:
        """Those that are known without looking further."""
        ...


@dataclass(frozen=True, slots=True)
class NamedModels:
    """The base models of these names; None: every name is one."""

    listed: Sequence[str] | None = None

    def name_of(self, base_model: str) -> str:
        if self.listed is None:
            return canonical_name(base_model)
        if base_model not in self.listed:
            raise UnknownName("base_model", base_model, self.listed)
        return base_model

    def names(self) -> list[str]:
        return list(self.listed or ())


def to_preload(preload: Preload, names: Iterable[str] | None) -> list[str]:
    """The names of the models that `preload` means, where these are all that there are; None: there may be any."""
    if not isinstance(preload, bool):
        return list(preload)
    if preload and names is None:
        raise InvalidRequest("preload=True means all of `models`; pass models={name: folder}, or preload=[name]: True")
    return list(names or ()) if preload else []


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class OpenedBase:
    """What the clients of one base model share. It is there for as long as its service or one of its clients is; then
    what was accepted is finished, and the model goes."""

    name: str
    thread: EngineThread
    storage: Path
    observe: Observer
    saves: PendingSaves  # of the service
    sample_number: "itertools.count[int]"  # of the service, so that every sample has a name of its own
    weights_number: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    calls: Calls = field(default_factory=Calls)  # of the service, for those who listen
    shared: "OpenedBase | None" = None  # of a view: the one that it is, which is there for as long as this

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


def described_state(path: str, saves: PendingSaves, *, with_optimizer: bool) -> SavedState:
    """A saved state, or one that is being saved, that holds what is asked for."""
    state = saves.describe(Path(path))
    check_optimizer(state, path, with_optimizer=with_optimizer)
    return state


def check_optimizer(state: SavedState, path: str, *, with_optimizer: bool) -> None:
    """Refuses to load an optimizer that was not saved."""
    if with_optimizer and not state.with_optimizer:
        raise CheckpointError(f"these are weights for sampling, without an optimizer; use a path of save_state: {path}")


def check_shape(state: SavedState, own: LoraConfig) -> None:
    """Refuses a saved adapter of another shape than that of the client which is to load it."""
    if replace(state.lora, seed=own.seed) != own:
        raise InvalidRequest(f"this adapter is {own}, the saved one {state.lora}; make a client from that state")


def check_base(state: SavedState, path: str, name: str, model: ops.Description) -> None:
    """Refuses a saved state of another base model than this one, as far as it says."""
    if state.fingerprint not in (None, model.fingerprint):
        raise CheckpointError(
            f"this state was trained on {state.base_model!r}, not on {name!r} (or on other weights of that "
            f"name); make a client for that model: {path}"
        )


def checked_state(path: str, base: OpenedBase, *, with_optimizer: bool) -> SavedState:
    """A saved state that fits this base model and holds what is asked for."""
    state = described_state(path, base.saves, with_optimizer=with_optimizer)
    check_base(state, path, base.name, base.description)
    return state


class OpenedBases:
    """The base models that one service has open, each with an engine on a thread of its own. Models load there: nothing
    here waits for one. Closed once and for all by `close` or `drop`."""

    def __init__(
        self,
        open_engine: OpenEngine,
        models: BaseModels,
        storage: Path,
        observe: Observer,
        saves: PendingSaves,
        bounds: QueueBounds,
    ) -> None:
        self._open_engine = open_engine
        self._models = models
        self._storage = storage
        self._observe = observe
        self._saves = saves
        self._bounds = bounds
        self._sample_number = itertools.count(1)
        self.calls = Calls()
        self._opened: dict[str, OpenedBase] = {}
        self._closed = False
        self._lock = threading.Lock()  # protects both, so that no model is loaded twice, or after the end
        self._process = os.getpid()
        self._crew = Crew()

    def open(self, base_model: str) -> OpenedBase:
        """The base model of this name: the one that is open, or one that begins to load. An engine that died, or that
        could not be loaded, is followed by a new one."""
        self.require_open()
        name = self._models.name_of(base_model)
        with self._lock:
            self.require_open()
            base = self._opened.get(name)
            if base is None or base.thread.failed is not None:
                thread = EngineThread(partial(self._open_engine, name), name, self._crew, self._bounds)
                base = OpenedBase(
                    name, thread, self._storage, self._observe, self._saves, self._sample_number, calls=self.calls
                )
                weakref.finalize(base, thread.finish).atexit = False  # at exit the crew ends
                self._opened[name] = base
            return base

    def at(self, storage: Path) -> "SharedBases":
        """The same for clients that save elsewhere."""
        return SharedBases(self, storage)

    def require_open(self, what: str | None = None) -> None:
        """Refuses what a closed service, or a copy of one in a forked process, can do no more."""
        refuse_in_fork(self._process, what)
        if self._closed:
            raise ServiceClosed(CLOSED if what is None else f"{what}: {CLOSED}")

    def refuse_within_loss(self, what: str) -> None:
        """Refuses what would wait for the custom loss that calls it."""
        for thread in self._threads():
            thread.refuse_within_loss(what)

    def lengths(self) -> dict[str, int | None]:
        """The base models there are, with their longest context in tokens where they are loaded."""
        opened = {thread.name: _description(thread) for thread in self._threads() if thread.failed is None}
        lengths = {name: None if each is None else each.limits.context_length for name, each in opened.items()}
        return {name: lengths.get(name) for name in sorted({*self._models.names(), *opened})}

    def descriptions(self) -> dict[str, ops.Description]:
        """What the base models that are loaded say of themselves."""
        described = {thread.name: _description(thread) for thread in self._threads() if thread.failed is None}
        return {name: each for name, each in described.items() if each is not None}

    def figures(self) -> dict[str, float]:
        """What the engines have done so far, all together; see `client.ServiceClient.engine_figures`."""
        sums: dict[str, float] = {}
        for thread in self._threads():
            if thread.failed is None and thread.loaded.done() and thread.loaded.exception() is None:
                done = asdict(thread.loaded.result().counts) | {"waiting_s": thread.waiting_s}
                sums = {name: sums.get(name, 0) + value for name, value in done.items()}
        return sums

    @property
    def failed(self) -> BaseException | None:
        """What one of the engines died of, or why it could not be loaded."""
        return next((thread.failed for thread in self._threads() if thread.failed is not None), None)

    def finish(self) -> list[APIFuture[None]]:
        """Accepts no more. The futures are there when all that was accepted is done, and callbacks have returned: in
        one, those are left out which would wait for it."""
        if not self._is_ours():
            return []
        with self._lock:
            self._closed = True
        ended = [(thread, thread.finish()) for thread in self._threads()]
        return [future for thread, future in ended if not thread.callbacks.run_here()]

    def close(self) -> None:
        """Finishes what was accepted, and ends the engines. Interrupted by Ctrl-C, it drops what has not begun."""
        try:
            self.finish()
            for thread in self._threads():
                if not thread.callbacks.run_here():  # it waits for them
                    wait_for(thread)
        except BaseException as error:
            self.drop(error)
            self.stop()
            raise

    def drop(self, error: BaseException) -> None:
        """Accepts no more, and does not begin what has not begun."""
        self.finish()
        for thread in self._threads():
            thread.drop(f"the service was closed after {error!r}", warn=False)

    def stop(self) -> None:
        """After `drop`: waits until the engines have ended."""
        stop(thread for thread in self._threads() if not thread.callbacks.run_here())

    def _threads(self) -> list[EngineThread]:
        return [base.thread for base in list(self._opened.values())] if self._is_ours() else []

    def _is_ours(self) -> bool:
        """A forked child has a copy of the service and none of its threads: there is nothing to end in it."""
        return os.getpid() == self._process


class SharedBases(OpenedBases):
    """The base models of another service, for clients that save elsewhere. To close them only refuses new clients."""

    def __init__(self, whole: OpenedBases, storage: Path) -> None:
        vars(self).update(vars(whole))
        self._whole = whole
        self._storage = storage
        self.calls = Calls()

    def open(self, base_model: str) -> OpenedBase:
        self.require_open()
        base = self._whole.open(base_model)
        return replace(base, storage=self._storage, calls=self.calls, shared=base)

    def require_open(self, what: str | None = None) -> None:
        super().require_open(what)
        self._whole.require_open(what)

    def finish(self) -> list[APIFuture[None]]:
        self._closed = True
        return []

    def close(self) -> None:
        self.finish()

    def drop(self, error: BaseException) -> None:
        self.finish()

    def stop(self) -> None:
        pass


def _description(thread: EngineThread) -> ops.Description | None:
    """None while it loads, or where it could not be loaded."""
    if not thread.loaded.done() or thread.loaded.exception() is not None:
        return None
    return thread.loaded.result().description

"""The service over engines in this process: it opens one for each base model that is asked for, makes the clients
(`training_client.py`, `sampling_client.py`), and closes. Which engine is the backend's choice."""

import itertools
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeGuard

from stovetop.backends.engine_thread import EngineThread
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import Call, Observer, OpenedBase, checked_state
from stovetop.backends.pending_saves import PendingSaves
from stovetop.backends.sampling_client import InProcessSamplingClient, load_sampling_client
from stovetop.backends.saved_runs import LiveRun, RunLabels, SavedRuns, clear_killed_saves
from stovetop.backends.training_client import InProcessTrainingClient
from stovetop.checks import checked
from stovetop.client import MAX_NAME, BaseModel, CloseStatus, ServiceClient, StatePath, UserMetadata
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, ClientFuture, resolved
from stovetop.model_store import canonical_name
from stovetop.saved_states import base_model_of
from stovetop.sdk_differences import refuse_to_pickle, require_neutral
from stovetop.types import AdamOptimizerConfig, GetServerCapabilitiesResponse, LoraConfig, Rank, Seed, SupportedModel


@with_older_names("get_server_capabilities")
@with_older_names(
    "create_lora_training_client",
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
    "create_sampling_client",
    value=True,
)
class InProcessServiceClient(ServiceClient):
    """See `client.ServiceClient`. Opens one engine per base model, when it is first asked for. Made by `over`, since
    calling a ServiceClient opens the provider that is named.

    `async with` or `with` closes it: what was accepted is finished, then the engines go. When the block is left by an
    exception, what has not begun is dropped instead: its futures fail, saying so.
    """

    calls: list[Call]  # every call of every client, in order, when `record` is set

    _open_engine: Callable[[str], ops.Engine]
    _storage: Path
    _models: Callable[[], list[str]]
    _observe: Observer
    _labels: RunLabels
    _runs: dict[str, LiveRun]  # by model id
    _saves: PendingSaves
    _bases: dict[str, OpenedBase]
    _sample_number: "itertools.count[int]"
    _lock: threading.Lock  # protects _bases, so that two threads never load one model twice

    @classmethod
    def over(
        cls,
        open_engine: Callable[[str], ops.Engine],
        storage: Path,
        *,
        models: Callable[[], list[str]],
        labels: RunLabels,
        record: bool = False,
    ) -> Self:
        """A service over one engine for each base model that is asked for; `open_engine` makes them when they are first
        needed."""
        service = object.__new__(cls)
        service._open_engine = open_engine
        service._storage = storage.expanduser().resolve()
        clear_killed_saves(service._storage)
        service._models = models
        service.calls = []
        service._observe = service.calls.append if record else lambda call: None
        service._labels = labels
        service._runs = {}
        service._saves = PendingSaves()
        service._bases = {}
        service._sample_number = itertools.count(1)
        service._lock = threading.Lock()
        return service

    @checked
    def create_lora_training_client(
        self,
        base_model: BaseModel,
        rank: Rank = 32,
        seed: Seed | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: UserMetadata | None = None,
        optimizer: AdamOptimizerConfig | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(optimizer=optimizer)
        seed = secrets.randbits(63) if seed is None else seed
        config = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        arguments = {"base_model": base_model, "config": config, "user_metadata": user_metadata}
        base = self._base(base_model)
        base.thread.engine.check_lora(config)
        self._observe(Call("service", "create_lora_training_client", arguments))
        return self._training_client(base, config, user_metadata, lambda name: ops.CreateAdapter(name, config))

    @checked
    def create_training_client_from_state(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        optimizer: AdamOptimizerConfig | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(weights_access_token=weights_access_token, optimizer=optimizer)
        return self._from_state("create_training_client_from_state", path, base_model, user_metadata, False)

    @checked
    def create_training_client_from_state_with_optimizer(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(weights_access_token=weights_access_token)
        verb = "create_training_client_from_state_with_optimizer"
        return self._from_state(verb, path, base_model, user_metadata, True)

    @checked
    def create_sampling_client(
        self,
        model_path: StatePath | None = None,
        base_model: BaseModel | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[Any]:
        require_neutral(retry_config=retry_config, record_stability_info=record_stability_info)
        if model_path is None and base_model is None:
            raise InvalidRequest("needs a model_path or a base_model, or both: neither is given")
        self._observe(Call("service", "create_sampling_client", {"model_path": model_path, "base_model": base_model}))
        if model_path is not None:
            base = self._base(base_model or base_model_of(Path(model_path), self._saves.describe))
            return load_sampling_client(base, model_path)
        client = InProcessSamplingClient(self._base(str(base_model)), None)
        return ClientFuture(resolved(client).future())

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("ServiceClient")

    def create_rest_client(self) -> SavedRuns:
        return SavedRuns.over(self._storage, self._runs, self._saves, self.get_server_capabilities)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        lengths = {name: base.limits.context_length for name, base in self._bases.items()}
        names = sorted({*self._models(), *lengths})
        return GetServerCapabilitiesResponse(
            [SupportedModel(name, lengths.get(name), trainable=True, sampleable=True) for name in names]
        )

    @checked
    def close(self, status: CloseStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Finishes what was accepted, and ends the engines. Interrupted by Ctrl-C, it drops what has not begun."""
        with self._dropping_on_error():
            for base in self._bases.values():
                base.thread.finish()
            for base in self._bases.values():
                base.thread.close()
        return resolved(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if _is_failure(error):
            self._drop(error)
        else:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if _is_failure(error):
            self._drop(error)
            return
        with self._dropping_on_error():
            for ended in [base.thread.finish() for base in self._bases.values()]:
                await ended  # the event loop goes on meanwhile
        self.close()

    def _drop(self, error: BaseException) -> None:
        for base in self._bases.values():
            base.thread.drop(f"the service was closed after {error!r}", warn=False)
        for base in self._bases.values():
            base.thread.stop()

    @contextmanager
    def _dropping_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._drop(error)
            raise

    def _base(self, name: str) -> OpenedBase:
        name = canonical_name(name)
        with self._lock:
            if name not in self._bases:
                thread = EngineThread(lambda: self._open_engine(name), name)
                try:
                    thread.engine  # noqa: B018  an unknown model is refused here, not by the first call that uses it
                except BaseException as error:  # Ctrl-C among them, while the thread still loads
                    thread.drop(f"it could not be loaded: {error!r}")
                    thread.stop()
                    raise
                self._bases[name] = OpenedBase(
                    name, thread, self._storage, self._observe, self._saves, self._sample_number
                )
            return self._bases[name]

    def _from_state(
        self, verb: str, path: str, base_model: str | None, user_metadata: UserMetadata | None, with_optimizer: bool
    ) -> ClientFuture[Any]:
        base = self._base(base_model or base_model_of(Path(path), self._saves.describe))
        config = checked_state(path, base, with_optimizer=with_optimizer).lora
        arguments = {"path": path, "base_model": base_model, "user_metadata": user_metadata}
        self._observe(Call("service", verb, arguments))
        after = base.saves.under(Path(path))
        return self._training_client(
            base, config, user_metadata, lambda name: ops.LoadAdapter(name, Path(path), with_optimizer), after
        )

    def _training_client(
        self,
        base: OpenedBase,
        config: LoraConfig,
        user_metadata: UserMetadata | None,
        op: Callable[[ops.AdapterId], ops.Op],
        after: "Sequence[Future[Any]]" = (),
    ) -> ClientFuture[Any]:
        """`op` makes the adapter of this name, when the saves in `after` are done."""
        model_id = f"{Path(base.name).name[:MAX_NAME]}-{secrets.token_hex(4)}"
        run = LiveRun(model_id, base.name, config, self._labels.with_metadata(user_metadata))
        self._runs[model_id] = run
        made = base.thread.call(
            f"making {model_id}",
            op(ops.AdapterId(model_id)),
            lambda _: InProcessTrainingClient(base, config, run),
            after=after,
        )
        return ClientFuture(made.future(), made.cancel)


def _is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether a `with` block was left because something went wrong. sys.exit() and sys.exit(0) say that nothing did."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)

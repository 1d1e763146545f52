"""The service over engines in this process: it makes the clients (`training_client.py`, `sampling_client.py`) of the
base models that it opens (`opened_base.py`), and closes. Which engine is the backend's choice."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeGuard

from stovetop.arguments import MAX_NAME, BaseModel, CloseStatus, ModelId, OnCall, StatePath, Storage, UserMetadata
from stovetop.backends.accepted import Check
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import (
    BaseModels,
    Call,
    Observer,
    OpenedBase,
    OpenedBases,
    OpenEngine,
    check_base,
    described_state,
)
from stovetop.backends.pending_saves import PendingSaves
from stovetop.backends.queues import USUAL_BOUNDS, QueueBounds
from stovetop.backends.sampling_client import InProcessSamplingClient, load_sampling_client
from stovetop.backends.saved_runs import LiveRun, RunLabels, SavedRuns, clear_killed_saves
from stovetop.backends.training_client import InProcessTrainingClient
from stovetop.checks import checked
from stovetop.client import ServiceClient
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, ClientFuture, resolved, then, when_done
from stovetop.input_checks import check_lora
from stovetop.saved_states import base_model_of
from stovetop.sdk_differences import refuse_to_pickle, require_neutral
from stovetop.types import AdamOptimizerConfig, GetServerCapabilitiesResponse, LoraConfig, Rank, Seed, SupportedModel


@with_older_names("service")
class InProcessServiceClient(ServiceClient):
    """See `client.ServiceClient`. Opens one engine per base model, when it is first asked for. Made by `over`, since
    calling a ServiceClient opens the provider that is named.

    `async with` or `with` closes it: what was accepted is finished, then the engines go. When the block is left by an
    exception, what has not begun is dropped instead: its futures fail, saying so. A service that is dropped without
    being closed ends like one that is closed, as soon as no client of it is left.

    Clients take turns by their queues. Each has one of its own, unless it is made by `in_queue`.
    """

    calls: list[Call]  # every call of every client, in order, when `record` is set

    _storage: Path
    _observe: Observer
    _labels: RunLabels
    _runs: dict[str, LiveRun]  # by model id
    _all_runs: dict[str, LiveRun]  # and those of all views (`at`): engines tell their adapters apart by model id
    _saves: PendingSaves
    _bases: OpenedBases
    _queue: str | None

    @classmethod
    def over(
        cls,
        open_engine: OpenEngine,
        storage: Path,
        *,
        models: BaseModels,
        labels: RunLabels,
        preload: Sequence[str] = (),
        bounds: QueueBounds = USUAL_BOUNDS,
        record: bool = False,
    ) -> Self:
        """A service over one engine for each base model that is asked for; `open_engine` makes them when they are first
        needed, or, those of `preload`, now."""
        service = object.__new__(cls)
        service._storage = storage.expanduser().resolve()
        clear_killed_saves(service._storage)
        service.calls = []
        service._observe = service.calls.append if record else _not_recorded
        service._labels = labels
        service._runs = {}
        service._all_runs = {}
        service._saves = PendingSaves()
        service._queue = None
        service._bases = OpenedBases(open_engine, models, service._storage, service._observe, service._saves, bounds)
        for name in preload:
            service._bases.open(name)
        return service

    @checked
    def at(self, storage: Storage) -> Self:
        """See `client.ServiceClient.at`."""
        self._bases.require_open("at")
        service = object.__new__(type(self))
        vars(service).update(vars(self))
        service._storage = Path(storage).expanduser().resolve()
        clear_killed_saves(service._storage)
        service._runs = {}
        service._bases = self._bases.at(service._storage)
        return service

    @checked
    def listening(self, listener: OnCall) -> AbstractContextManager[None]:
        """See `client.ServiceClient.listening`."""
        return self._bases.calls.told_to(listener)

    def engine_figures(self) -> Mapping[str, float]:
        """See `client.ServiceClient.engine_figures`."""
        return self._bases.figures()

    def in_queue(self, queue: str | None) -> Self:
        """This service, whose clients wait in the queue of this name, and with them those that they make: all of them
        have together what a single client has. None: each in a queue of its own."""
        service = object.__new__(type(self))
        vars(service).update(vars(self))
        service._queue = queue
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
        *,
        model_id: ModelId | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(optimizer=optimizer)
        seed = secrets.randbits(63) if seed is None else seed
        config = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        arguments = {"base_model": base_model, "config": config, "user_metadata": user_metadata}
        base = self._bases.open(base_model)
        made = self._training_client(
            base,
            model_id,
            lambda adapter: ops.CreateAdapter(adapter, config),
            config,
            user_metadata,
            lambda model: check_lora(config, model.untrainable),
        )
        self._observe(Call("service", "create_lora_training_client", arguments))
        return made

    @checked
    def create_training_client_from_state(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        optimizer: AdamOptimizerConfig | None = None,
        *,
        model_id: ModelId | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(weights_access_token=weights_access_token, optimizer=optimizer)
        verb = "create_training_client_from_state"
        return self._from_state(verb, path, base_model, model_id, user_metadata, with_optimizer=False)

    @checked
    def create_training_client_from_state_with_optimizer(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        *,
        model_id: ModelId | None = None,
    ) -> ClientFuture[Any]:
        require_neutral(weights_access_token=weights_access_token)
        verb = "create_training_client_from_state_with_optimizer"
        return self._from_state(verb, path, base_model, model_id, user_metadata, with_optimizer=True)

    @checked
    def create_sampling_client(
        self,
        model_path: StatePath | None = None,
        base_model: BaseModel | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[Any]:
        require_neutral(retry_config=retry_config, record_stability_info=record_stability_info)
        self._bases.require_open()
        if model_path is not None:
            state = described_state(model_path, self._saves, with_optimizer=False)
            base = self._bases.open(base_model or base_model_of(Path(model_path), self._saves.describe))
            client = load_sampling_client(base, model_path, state, self._queue)
        elif base_model is not None:
            base, queue = self._bases.open(base_model), self._queue
            client = ClientFuture(then(base.thread.loaded, lambda _: InProcessSamplingClient(base, None, queue=queue)))
        else:
            raise InvalidRequest("needs a model_path or a base_model, or both: neither is given")
        self._observe(Call("service", "create_sampling_client", {"model_path": model_path, "base_model": base_model}))
        return client

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("ServiceClient")

    def create_rest_client(self) -> SavedRuns:
        self._bases.require_open("create_rest_client")
        return SavedRuns.over(
            self._storage, self._runs, self._saves, self.get_server_capabilities, self._bases.require_open
        )

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        self._bases.require_open("get_server_capabilities")
        return GetServerCapabilitiesResponse(
            [
                SupportedModel(name, length, trainable=True, sampleable=True)
                for name, length in self._bases.lengths().items()
            ]
        )

    def release(self, client: InProcessTrainingClient) -> None:
        """Takes the adapter of this client out of memory, behind all that was called. Nothing may be called on the
        client any more; another one of its `model_id` can be made, from what was saved."""
        self._forget(client.model_id)
        client.release()

    def descriptions(self) -> dict[str, ops.Description]:
        """What the base models that are loaded say of themselves, by name."""
        self._bases.require_open("descriptions")
        return self._bases.descriptions()

    @property
    def failed(self) -> BaseException | None:
        """What one of its engines died of, or why it could not be loaded."""
        return self._bases.failed

    @checked
    def close(self, status: CloseStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Finishes what was accepted, and ends the engines. Interrupted by Ctrl-C, it drops what has not begun. Refused
        in a custom loss of this service, for which it would wait."""
        self._bases.refuse_within_loss("close")
        self._bases.close()
        return resolved(None)

    def __enter__(self) -> Self:
        self._bases.require_open()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._bases.refuse_within_loss("leaving the service")
        if _is_failure(error):
            self._bases.drop(error)
            self._bases.stop()
        else:
            self._bases.close()

    async def __aenter__(self) -> Self:
        self._bases.require_open()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """The event loop goes on meanwhile."""
        self._bases.refuse_within_loss("leaving the service")
        try:
            if _is_failure(error):
                self._bases.drop(error)
            else:
                for ended in self._bases.finish():
                    await ended
        except BaseException as while_finishing:
            self._bases.drop(while_finishing)
            raise
        finally:
            await asyncio.to_thread(self._bases.stop)

    def _from_state(
        self,
        verb: str,
        path: str,
        base_model: str | None,
        model_id: str | None,
        user_metadata: UserMetadata | None,
        *,
        with_optimizer: bool,
    ) -> ClientFuture[Any]:
        self._bases.require_open()
        state = described_state(path, self._saves, with_optimizer=with_optimizer)
        base = self._bases.open(base_model or base_model_of(Path(path), self._saves.describe))
        made = self._training_client(
            base,
            model_id,
            lambda adapter: ops.LoadAdapter(adapter, Path(path), with_optimizer),
            state.lora,
            user_metadata,
            partial(check_base, state, path, base.name),
            self._saves.under(Path(path)),
        )
        self._saves.add_load(Path(path), made.future())
        arguments = {"path": path, "base_model": base_model, "user_metadata": user_metadata}
        self._observe(Call("service", verb, arguments))
        return made

    def _training_client(
        self,
        base: OpenedBase,
        model_id: str | None,
        op: Callable[[ops.AdapterId], ops.Op],
        config: LoraConfig,
        user_metadata: UserMetadata | None,
        check: Check,
        after: "Sequence[Future[Any]]" = (),
    ) -> ClientFuture[Any]:
        """`op` makes the adapter of this name when the saves in `after` are done; `check` is what the base model has to
        say, once it is loaded."""
        model_id = model_id or f"{Path(base.name).name[:MAX_NAME]}-{secrets.token_hex(4)}"
        run = LiveRun(model_id, base.name, config, self._labels.with_metadata(user_metadata))
        forget, queue = partial(self._forget, model_id), self._queue
        if self._all_runs.setdefault(model_id, run) is not run:
            raise InvalidRequest(f"model_id must be new to this service; choose another, or none: {model_id!r}")
        self._runs[model_id] = run
        try:
            made = base.thread.call(
                f"making {model_id}",
                replace(op(ops.AdapterId(model_id)), queue=queue),
                lambda _: InProcessTrainingClient(base, config, run, queue),
                check,
                after=after,
            )
        except BaseException:
            forget()
            raise
        when_done(made.future(), lambda made: None if made.exception() is None else forget())
        return ClientFuture(made.future(), made.cancel)

    def _forget(self, model_id: str) -> None:
        """The name is free again."""
        self._runs.pop(model_id, None)
        self._all_runs.pop(model_id, None)


def _not_recorded(_call: Call) -> None:
    pass


def _is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether a `with` block was left because something went wrong. sys.exit() and sys.exit(0) say that nothing did."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)

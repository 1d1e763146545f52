# pyright: basic
"""The service of a server: it makes the clients, and closes."""

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self

import tinker

from stovetop.arguments import BaseModel, CloseStatus, ModelId, OnCall, StatePath, Storage, UserMetadata
from stovetop.backends.expected import refuse_own_service
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import check_base, check_optimizer
from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.rest import RemoteRestClient
from stovetop.backends.remote.sampling import RemoteSamplingClient
from stovetop.backends.remote.saves import OwnSaves, require_path
from stovetop.backends.remote.tokenizers import tokenizer_of
from stovetop.backends.remote.training import RemoteTrainingClient
from stovetop.backends.remote.turns import Turn, Turns
from stovetop.calls import Calls
from stovetop.checks import checked
from stovetop.client import ServiceClient
from stovetop.errors import (
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    NotFoundError,
    ServiceClosed,
    StovetopError,
)
from stovetop.futures import APIFuture, ClientFuture, refuse_in_fork, resolved
from stovetop.input_checks import check_lora
from stovetop.sdk_differences import refuse_to_pickle, require_neutral
from stovetop.tokenizing import Tokenizer
from stovetop.types import AdamOptimizerConfig, GetServerCapabilitiesResponse, LoraConfig, Rank, Seed

CLOSED = "the service is closed; open another one"


@with_older_names("service")
class RemoteServiceClient(ServiceClient):
    """See `client.ServiceClient`. Made by `over`, since calling a ServiceClient opens the provider that is named.

    `with` closes it: what was accepted is waited for, then the session ends. When the block is left by an exception,
    what has not been sent is dropped; what the server has, it may still do.
    """

    connection: Connection
    saves: OwnSaves
    _user_metadata: UserMetadata
    _tokenizer: Callable[[str], Tokenizer] | None
    _clients: "weakref.WeakSet[RemoteTrainingClient]"
    _closed: bool
    calls: Calls
    _whole: "RemoteServiceClient | None"  # of a view: the service that it is of, whose connection it is
    _process: int

    @classmethod
    def over(
        cls,
        connection: Connection,
        user_metadata: UserMetadata,
        tokenizer: Callable[[str], Tokenizer] | None = None,
    ) -> Self:
        """A service over this connection; `tokenizer` finds those of its models."""
        service = object.__new__(cls)
        service.connection = connection
        service.saves = OwnSaves()
        service._user_metadata = user_metadata
        service._tokenizer = tokenizer
        service._clients = weakref.WeakSet()
        service._closed = False
        service._whole = None
        service.calls = Calls()
        service._process = os.getpid()
        weakref.finalize(service, connection.end).atexit = False
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
        _refuse_model_id(model_id)
        self.require_open("create_lora_training_client")
        models, config = self.connection.models(), LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        name = models.name_of(base_model)
        check_lora(config, models.description(name).untrainable)
        return self._made(
            f"making a client of {name}",
            lambda sdk: sdk.create_lora_training_client(
                name, rank, seed, train_mlp, train_attn, train_unembed, user_metadata
            ),
            lambda inner: self._training_client(inner, config, user_metadata),
        )

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
        require_neutral(optimizer=optimizer)
        _refuse_model_id(model_id)
        name = self._base_for(path, base_model, with_optimizer=False)
        return self._from_state(
            path,
            lambda sdk: sdk.create_training_client_from_state(path, name, user_metadata, weights_access_token),
            user_metadata,
        )

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
        _refuse_model_id(model_id)
        name = self._base_for(path, base_model, with_optimizer=True)
        return self._from_state(
            path,
            lambda sdk: sdk.create_training_client_from_state_with_optimizer(
                path, name, user_metadata, weights_access_token
            ),
            user_metadata,
        )

    @checked
    def create_sampling_client(
        self,
        model_path: StatePath | None = None,
        base_model: BaseModel | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[Any]:
        require_neutral(record_stability_info=record_stability_info)
        self.require_open("create_sampling_client")
        if model_path is not None:
            return self.sampling_client_from(model_path, base_model, retry_config)
        if base_model is None:
            raise InvalidRequest("needs a model_path or a base_model, or both: neither is given")
        name = self.connection.models().name_of(base_model)
        return self._made(
            f"making a sampling client of {name}",
            lambda sdk: sdk.create_sampling_client(base_model=name, retry_config=retry_config),  # type: ignore[arg-type]  the SDK's own
            lambda inner: self.sampling_client(inner, is_base=True),
        )

    @checked
    def at(self, storage: Storage) -> Self:
        """See `client.ServiceClient.at`."""
        self.require_open("at")
        service = object.__new__(type(self))
        vars(service).update(vars(self))
        service._whole = self
        service.calls = Calls()
        service._clients = weakref.WeakSet()
        return service

    @checked
    def listening(self, listener: OnCall) -> AbstractContextManager[None]:
        """See `client.ServiceClient.listening`."""
        return self.calls.told_to(listener)

    def engine_figures(self) -> Mapping[str, float]:
        """Of a server nothing is known."""
        return {}

    def create_rest_client(self) -> RemoteRestClient:
        self.require_open("create_rest_client")
        return RemoteRestClient.over(self.connection, self.saves, self.require_open)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        self.require_open("get_server_capabilities")
        return self.connection.capabilities(self.connection.rest())

    @checked
    def close(self, status: CloseStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Waits for what was accepted, then ends the session. Refused in a custom loss of this service."""
        self._refuse_within_loss("close")
        was_closed, self._closed = self._closed, True
        if self._whole is None and not was_closed:
            self.connection.finish()
            self.connection.close(status, detail)
        return resolved(None)

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("ServiceClient")

    def __enter__(self) -> Self:
        self.require_open("entering the service")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._refuse_within_loss("leaving the service")
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif not self._closed:
            self._closed = True
            self._drop(error)

    async def __aenter__(self) -> Self:
        self.require_open("entering the service")
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """The event loop goes on meanwhile."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)

    # ---- what the clients of this service ask ----------------------------------------------------------------------

    def require_open(self, what: str) -> None:
        """Refuses what a closed service, or a copy of one in a forked process, can do no more."""
        refuse_in_fork(self._process, what)
        if self._closed:
            raise ServiceClosed(f"{what}: {CLOSED}")
        if self._whole is not None:
            self._whole.require_open(what)

    def find_tokenizer(self, name: str, by_sdk: Callable[[], Any]) -> Tokenizer:
        """That of a base model."""
        return tokenizer_of(name, by_sdk) if self._tokenizer is None else self._tokenizer(name)

    def sampling_client(self, inner: tinker.SamplingClient, *, is_base: bool) -> RemoteSamplingClient:
        """Of the SDK's client."""
        return RemoteSamplingClient(
            inner, self.connection, self.require_open, self.find_tokenizer, self.calls, is_base=is_base
        )

    def sampling_client_from(
        self, path: str, base_model: str | None, retry_config: object | None = None
    ) -> ClientFuture[Any]:
        """Of what was saved at this path, which must be of this base model, where one is named."""
        name = self._base_for(path, base_model, with_optimizer=False)

        def make(inner: tinker.SamplingClient) -> RemoteSamplingClient:
            found = inner.get_base_model()
            if name not in (None, found):
                raise CheckpointError(
                    f"this state was trained on {found!r}, not on {name!r}; make a client for that model: {path}"
                )
            return self.sampling_client(inner, is_base=False)

        return self._made(
            f"making a sampling client from {path}",
            lambda sdk: sdk.create_sampling_client(model_path=path, retry_config=retry_config),  # type: ignore[arg-type]  the SDK's own
            make,
            CheckpointNotFound,
            self.saves.pending(path),
        )

    # ---- making clients --------------------------------------------------------------------------------------------

    def _training_client(
        self, inner: tinker.TrainingClient, config: LoraConfig | None, user_metadata: UserMetadata | None
    ) -> RemoteTrainingClient:
        client = RemoteTrainingClient(inner, self, config, {**self._user_metadata, **(user_metadata or {})})
        self._clients.add(client)
        return client

    def _base_for(self, path: str, base_model: str | None, *, with_optimizer: bool) -> str | None:
        """The server's name of the base model that a state is to be used with; refuses what is known not to fit."""
        self.require_open("ServiceClient")
        require_path(path)
        models, state = self.connection.models(), self.saves.find(path)
        name = None if base_model is None else models.name_of(base_model)
        if state is not None:
            check_optimizer(state, path, with_optimizer=with_optimizer)
            if name is not None:
                check_base(state, path, name, models.description(name))
        return name

    def _from_state(
        self, path: str, create: Callable[[tinker.ServiceClient], Any], user_metadata: UserMetadata | None
    ) -> ClientFuture[Any]:
        def make(inner: tinker.TrainingClient) -> RemoteTrainingClient:
            state = self.saves.find(path)
            return self._training_client(inner, None if state is None else state.lora, user_metadata)

        what = f"making a client from {path}"
        return self._made(what, create, make, CheckpointNotFound, self.saves.pending(path))

    def _made(
        self,
        what: str,
        create: Callable[[tinker.ServiceClient], Any],
        make: Callable[[Any], Any],
        missing: type[StovetopError] = NotFoundError,
        after: "Sequence[Future[Any]]" = (),
    ) -> ClientFuture[Any]:
        """A client that the SDK makes, when the saves in `after` are done."""
        future = self.connection.pending("service")
        fail = partial(error_of, what=what, missing=missing)

        def ask() -> None:
            try:
                made = create(self.connection.sdk())
            except BaseException as error:  # the session could not be made; it belongs to the one who waits
                future.set_exception(fail(error))
            else:
                self.connection.bring(made, future, make, fail)

        Turns().put(Turn(lambda: self.connection.make(ask), lambda error: future.set_exception(fail(error)), after))
        return ClientFuture(future)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _refuse_within_loss(self, what: str) -> None:
        refuse_own_service(any(client.is_in_loss() for client in list(self._clients)), what)

    def _drop(self, error: BaseException) -> None:
        for client in list(self._clients):
            client.drop(error)
        if self._whole is None:
            self.connection.drop(error)
            self.connection.close("errored" if isinstance(error, Exception) else "interrupted", repr(error)[:1000])


def _refuse_model_id(model_id: str | None) -> None:
    if model_id is not None:
        raise InvalidRequest(f"model_id is chosen by the server; leave it out: {model_id!r}")

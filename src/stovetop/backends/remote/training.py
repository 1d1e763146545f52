# pyright: basic
"""The training client of a server: each verb checks its input as that of a local engine does, and hands it to the SDK's
client in its turn."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import tinker

from stovetop.arguments import CheckpointName, CustomLossFn, HowToStep, StatePath, Ttl, UserMetadata
from stovetop.backends.accepted import settle
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import check_base, check_optimizer, check_shape
from stovetop.backends.remote.connection import Connection
from stovetop.backends.remote.custom_loss import RemoteLosses
from stovetop.backends.remote.gradients import Gradients
from stovetop.backends.remote.refusals import error_of
from stovetop.backends.remote.saves import OwnSaves, require_path
from stovetop.backends.remote.turns import Turn, Turns
from stovetop.backends.remote.values import output_of, sdk_datum, sdk_step
from stovetop.calls import Calls, Tokens
from stovetop.checks import checked
from stovetop.engine import ops
from stovetop.errors import (
    Cancelled,
    CheckpointExists,
    CheckpointNotFound,
    InvalidRequest,
    RequestFailedError,
    StovetopError,
)
from stovetop.futures import APIFuture, ClientFuture, when_done
from stovetop.input_checks import Data, check_data, check_shapes, the_one_of
from stovetop.losses import LossConfig, parse_loss
from stovetop.saved_states import SavedState
from stovetop.sdk_differences import missing_attribute, refuse_to_pickle, require_neutral
from stovetop.tinker_paths import path_of
from stovetop.tokenizing import Tokenizer
from stovetop.types import (
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


class Service(Protocol):
    """What a training client asks of the service that made it."""

    connection: Connection
    saves: OwnSaves
    calls: Calls

    def require_open(self, what: str) -> None:
        """Refuses what a closed service can do no more."""
        ...

    def sampling_client(self, inner: tinker.SamplingClient, *, is_base: bool) -> Any:
        """Ours, of the SDK's."""
        ...

    def sampling_client_from(self, path: str, base_model: str | None) -> ClientFuture[Any]:
        """Of what was saved."""
        ...

    def find_tokenizer(self, name: str, by_sdk: Callable[[], Any]) -> Tokenizer:
        """That of a base model."""
        ...


@with_older_names("training")
class RemoteTrainingClient:
    """See `client.TrainingClient`."""

    def __init__(
        self,
        inner: tinker.TrainingClient,
        service: Service,
        config: LoraConfig | None,
        user_metadata: UserMetadata,
    ) -> None:
        """`config` is None of a state that another service saved: the protocol tells its rank alone."""
        self._inner = inner
        self._service = service
        self._connection = service.connection
        self._config = config
        self._user_metadata = user_metadata
        self._turns = Turns()
        self._gradients = Gradients(self._connection, lambda: self._inner)
        self._number = itertools.count(1)
        self._rank = inner.get_info().lora_rank if config is None else config.rank
        name = inner.get_info().model_data.model_name
        assert name is not None, "the protocol has it"
        self._base_model = name
        self._model: ops.Description = self._connection.models().description(name)
        self._losses = RemoteLosses(self._connection, self._turns, lambda: self._inner, self._gradients)

    @property
    def model_id(self) -> str:
        """The server's. Another one after a load, where the SDK loads by making a new client."""
        return str(self._inner.model_id)

    @checked
    def forward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._measure("forward", data, loss_fn, loss_fn_config)

    @checked
    def forward_backward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._measure("forward_backward", data, loss_fn, loss_fn_config)

    @checked
    def forward_backward_custom(
        self,
        data: Data,
        loss_fn: CustomLossFn,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        require_neutral(loss_type_input=loss_type_input)
        check_shapes(data, self._model.limits)
        what = self._named("forward_backward_custom")
        call = self._losses.run(what, list(data), loss_fn, self.model_id)
        num_tokens = sum(datum.model_input.length for datum in data)
        self._service.calls.follow("forward_backward_custom", call.future(), lambda _: Tokens(computed=num_tokens))
        return call

    @checked
    def spoil(self, reason: str) -> APIFuture[None]:
        what = self._named("spoil")
        future = self._connection.pending(self.model_id)

        def begin() -> None:
            when_done(self._gradients.spoil(reason), lambda _: future.set_result(None))

        return self._put(Turn(begin, partial(_fail, future, what)), future)

    @checked
    def optim_step(
        self, optim_params: HowToStep | None = None, *, adam_params: HowToStep | None = None
    ) -> APIFuture[OptimStepResponse]:
        params = sdk_step(the_one_of(optim_params, adam_params))

        def send(inner: tinker.TrainingClient) -> Any:
            self._gradients.step()
            return inner.optim_step(params)

        return self._call("optim_step", send, lambda response: OptimStepResponse(dict(response.metrics or {})))

    @checked
    def save_state(
        self,
        name: CheckpointName,
        ttl_seconds: Ttl | None = None,
        overwrite: bool = False,
        user_metadata: UserMetadata | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        return self._save(
            "save_state",
            "weights",
            name,
            lambda inner: inner.save_state(name, ttl_seconds, overwrite, user_metadata),
            lambda response: SaveWeightsResponse(response.path),
            overwrite=overwrite,
            lasts=ttl_seconds is None,
        )

    @checked
    def save_weights_for_sampler(
        self, name: CheckpointName, ttl_seconds: Ttl | None = None, user_metadata: UserMetadata | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self._save(
            "save_weights_for_sampler",
            "sampler_weights",
            name,
            lambda inner: inner.save_weights_for_sampler(name, ttl_seconds, user_metadata),
            lambda response: SaveWeightsForSamplerResponse(response.path),
            overwrite=False,
            lasts=ttl_seconds is None,
        )

    @checked
    def load_state(self, path: StatePath, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        return self._load("load_state", path, weights_access_token, with_optimizer=False)

    @checked
    def load_state_with_optimizer(
        self, path: StatePath, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return self._load("load_state_with_optimizer", path, weights_access_token, with_optimizer=True)

    @checked
    def save_weights_and_get_sampling_client(
        self,
        name: CheckpointName | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> ClientFuture[Any]:
        """Frozen at the weights as of this call, in the server's memory; `name` has no effect there."""
        require_neutral(record_stability_info=record_stability_info, kind=kind)
        frozen = self._call(
            "save_weights_and_get_sampling_client",
            lambda inner: inner.save_weights_and_get_sampling_client(retry_config=retry_config),  # type: ignore[arg-type]  the SDK's own
            lambda made: self._service.sampling_client(made, is_base=False),
        )
        return ClientFuture(frozen.future(), frozen.cancel)

    @checked
    def create_sampling_client(
        self, model_path: StatePath, retry_config: object | None = None, record_stability_info: bool = False
    ) -> ClientFuture[Any]:
        require_neutral(retry_config=retry_config, record_stability_info=record_stability_info)
        self._service.require_open("create_sampling_client")
        return self._service.sampling_client_from(model_path, self._base_model)

    def get_info(self) -> GetInfoResponse:
        self._service.require_open("get_info")
        data = ModelData(arch="lora", model_name=self._base_model, tokenizer_id=self._base_model)
        return GetInfoResponse(
            data, self.model_id, True, self._rank, self._base_model, user_metadata=self._user_metadata
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._service.find_tokenizer(self._base_model, lambda: self._inner.get_tokenizer())

    def is_in_loss(self) -> bool:
        """Whether the code that asks is a part of a custom loss of this client."""
        return self._losses.is_within()

    def drop(self, error: BaseException) -> None:
        """What has not been handed to the SDK fails: the service was closed after this error."""
        self._turns.drop(RequestFailedError(f"dropped because the service was closed after {error!r}", "user"))

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("TrainingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("TrainingClient", name)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _named(self, verb: str) -> str:
        """What errors call this call."""
        self._service.require_open(verb)
        self._losses.refuse_within(verb)
        return f"{verb} (call {next(self._number)} of {self.model_id})"

    def _call(
        self,
        verb: str,
        send: Callable[[tinker.TrainingClient], Any],
        make: Callable[[Any], Any],
        num_tokens: int = 0,
    ) -> APIFuture[Any]:
        what = self._named(verb)
        future = self._connection.pending(self.model_id)
        self._service.calls.follow(verb, future, lambda _: Tokens(computed=num_tokens))

        def begin() -> "Future[Any] | None":
            self._connection.bring(send(self._inner), future, make, partial(error_of, what=what))
            return self._connection.numbered(self._inner) if verb == "save_weights_for_sampler" else None

        return self._put(Turn(begin, partial(_fail, future, what)), future)

    def _put(self, turn: Turn, future: "Future[Any]") -> APIFuture[Any]:
        self._turns.put(turn)

        def cancel() -> None:
            if self._turns.take_back(turn):
                turn.fail(Cancelled())

        return APIFuture(future, cancel)

    def _measure(
        self, verb: Literal["forward", "forward_backward"], data: Data, loss_fn: str, config: LossConfig | None
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss of these data, with or without a gradient."""
        loss = parse_loss(loss_fn, config)
        check_data(data, loss, self._model.limits)
        sent_config = self._connection.models().sent_config(loss, config)
        sent = [sdk_datum(datum) for datum in data]

        def send(inner: tinker.TrainingClient) -> Any:
            if verb == "forward":
                return inner.forward(sent, loss_fn, sent_config)  # type: ignore[arg-type]  parse_loss knows the name
            self._gradients.require_usable()
            self._gradients.added()
            return inner.forward_backward(sent, loss_fn, sent_config)  # type: ignore[arg-type]  the same

        return self._call(verb, send, output_of, sum(datum.model_input.length for datum in data))

    # ---- states ----------------------------------------------------------------------------------------------------

    def _save(
        self,
        verb: str,
        kind: str,
        name: str,
        send: Callable[[tinker.TrainingClient], Any],
        make: Callable[[Any], Any],
        *,
        overwrite: bool,
        lasts: bool,
    ) -> APIFuture[Any]:
        saves, path = self._service.saves, path_of(self.model_id, kind, name)
        if not overwrite and saves.is_there(path):
            raise CheckpointExists(f"{kind} {name!r} exists; choose another name or pass overwrite=True: {path}")
        saving = self._call(verb, send, make)
        fingerprint = self._model.fingerprint or None
        state = None
        if self._config is not None:
            state = SavedState(self._base_model, fingerprint, self._config, with_optimizer=kind == "weights")
        saves.add(path, state, saving.future(), lasts=lasts)
        return saving

    def _load(
        self, verb: str, path: str, weights_access_token: str | None, *, with_optimizer: bool
    ) -> APIFuture[LoadWeightsResponse]:
        require_path(path)
        state = self._service.saves.find(path)
        if state is not None:
            check_optimizer(state, path, with_optimizer=with_optimizer)
            check_base(state, path, self._base_model, self._model)
            if self._config is not None:
                check_shape(state, self._config)
        what = self._named(verb)
        future = self._connection.pending(self.model_id)
        fail = partial(error_of, what=what, missing=CheckpointNotFound)
        # The SDK's public load_state warns and logs an error at every call, and will go; what is below it does neither.
        in_place = vars(tinker.TrainingClient).get("_load_state_impl")

        def begin() -> "Future[Any] | None":
            self._gradients.loaded()
            if in_place is not None:
                sent = in_place(self._inner, path, with_optimizer, weights_access_token)
                self._connection.bring(sent, future, lambda _: LoadWeightsResponse(path), fail)
                return None
            self._connection.make(lambda: self._replace(path, weights_access_token, future, fail, with_optimizer))
            return future

        return self._put(Turn(begin, partial(_fail, future, what), self._service.saves.pending(path)), future)

    def _replace(
        self,
        path: str,
        token: str | None,
        future: "Future[Any]",
        fail: Callable[[BaseException], BaseException],
        with_optimizer: bool,
    ) -> None:
        """Another client of the SDK, made from the state: later calls go to it."""

        def replaced(inner: tinker.TrainingClient) -> LoadWeightsResponse:
            rank = inner.get_info().lora_rank
            if rank not in (None, self._rank):
                raise InvalidRequest(
                    f"this adapter has rank {self._rank}, the saved one {rank}; make a client from that state"
                )
            self._inner = inner
            return LoadWeightsResponse(path)

        try:
            sdk = self._connection.sdk()
            create = (
                sdk.create_training_client_from_state_with_optimizer
                if with_optimizer
                else sdk.create_training_client_from_state
            )
            made = create(path, self._base_model, self._user_metadata, token)
        except BaseException as error:  # of the SDK; it belongs to the one who waits
            future.set_exception(fail(error))
        else:
            self._connection.bring(made, future, replaced, fail)


def _fail(future: "Future[Any]", what: str, error: BaseException) -> None:
    """A call that was not handed to the SDK, or that the SDK refused."""
    if isinstance(error, StovetopError):
        settle(future, what, None, error)
    else:
        with suppress(InvalidStateError):
            future.set_exception(error_of(error, what))

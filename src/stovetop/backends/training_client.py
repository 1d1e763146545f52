"""The training client over an engine in this process: each verb checks its input, enqueues an op on the engine's thread
(`engine_thread.py`), and returns the future of its result. What an op does stands in `engine/ops.py`."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

from stovetop.arguments import CheckpointName, CustomLossFn, HowToStep, StatePath, Ttl, UserMetadata
from stovetop.backends.custom_loss import CustomLosses
from stovetop.backends.older_names import with_older_names
from stovetop.backends.opened_base import Call, OpenedBase, check_shape, checked_state, described_state
from stovetop.backends.sampling_client import InProcessSamplingClient, load_sampling_client
from stovetop.backends.saved_runs import LiveRun
from stovetop.calls import Tokens
from stovetop.checks import checked
from stovetop.engine import ops
from stovetop.errors import CheckpointExists
from stovetop.futures import APIFuture, ClientFuture
from stovetop.input_checks import Data, check_data, check_shapes, the_one_of
from stovetop.losses import LossConfig, parse_loss
from stovetop.saved_states import SavedState
from stovetop.sdk_differences import missing_attribute, refuse_to_pickle, require_neutral
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

Response = TypeVar("Response", SaveWeightsResponse, SaveWeightsForSamplerResponse)


@with_older_names("training")
class InProcessTrainingClient:
    """See `client.TrainingClient`."""

    def __init__(self, base: OpenedBase, config: LoraConfig, run: LiveRun, queue: str | None = None) -> None:
        """Its calls wait in this `queue`, or in one of their own."""
        self._queue = queue
        self.model_id = run.model_id
        self._base = base
        self._adapter = ops.AdapterId(run.model_id)
        self._losses = CustomLosses(base.thread, self._adapter)
        self._config = config
        self._run = run
        self._number = itertools.count(1)
        self._dropped = weakref.finalize(self, base.thread.forget, ops.DropAdapter(self._adapter))
        self._dropped.atexit = False

    def release(self) -> None:
        """See `InProcessServiceClient.release`."""
        self._dropped()

    @checked
    def forward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._measure("forward", ops.Forward, data, loss_fn, loss_fn_config)

    @checked
    def forward_backward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self._measure("forward_backward", ops.ForwardBackward, data, loss_fn, loss_fn_config)

    @checked
    def forward_backward_custom(
        self,
        data: Data,
        loss_fn: CustomLossFn,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        require_neutral(loss_type_input=loss_type_input)
        check_shapes(data, self._base.limits)
        what = self._observed("forward_backward_custom", {"data": list(data), "loss_fn": loss_fn})
        call = self._losses.run(what, list(data), loss_fn)
        num_tokens = sum(datum.model_input.length for datum in data)
        self._base.calls.follow("forward_backward_custom", call.future(), lambda _: Tokens(computed=num_tokens))
        return call

    @checked
    def spoil(self, reason: str) -> APIFuture[None]:
        return self._call("spoil", {"reason": reason}, ops.Spoil(self._adapter, reason))

    @checked
    def optim_step(
        self, optim_params: HowToStep | None = None, *, adam_params: HowToStep | None = None
    ) -> APIFuture[OptimStepResponse]:
        params = the_one_of(optim_params, adam_params)
        op = ops.OptimStep(self._adapter, params)
        return self._call("optim_step", {"optim_params": params}, op)

    @checked
    def save_state(
        self,
        name: CheckpointName,
        ttl_seconds: Ttl | None = None,
        overwrite: bool = False,
        user_metadata: UserMetadata | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        path = self._path("weights", name, overwrite)
        op = self._save_op(path, ttl_seconds, user_metadata, with_optimizer=True, overwrite=overwrite)
        return self._save("save_state", name, op, SaveWeightsResponse(str(path)))

    @checked
    def save_weights_for_sampler(
        self, name: CheckpointName, ttl_seconds: Ttl | None = None, user_metadata: UserMetadata | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        path = self._path("sampler_weights", name, overwrite=False)
        op = self._save_op(path, ttl_seconds, user_metadata, with_optimizer=False, overwrite=False)
        return self._save("save_weights_for_sampler", name, op, SaveWeightsForSamplerResponse(str(path)))

    @checked
    def load_state(self, path: StatePath, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        require_neutral(weights_access_token=weights_access_token)
        return self._load("load_state", path, with_optimizer=False)

    @checked
    def load_state_with_optimizer(
        self, path: StatePath, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        require_neutral(weights_access_token=weights_access_token)
        return self._load("load_state_with_optimizer", path, with_optimizer=True)

    @checked
    def save_weights_and_get_sampling_client(
        self,
        name: CheckpointName | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> ClientFuture[Any]:
        """Frozen at the weights as of this call; nothing is written, so `name` is only recorded."""
        require_neutral(retry_config=retry_config, record_stability_info=record_stability_info, kind=kind)
        weights = self._base.new_weights(self.model_id)
        frozen = self._call(
            "save_weights_and_get_sampling_client",
            {"name": name},
            ops.Freeze(self._adapter, weights),
            lambda _: InProcessSamplingClient(self._base, weights, self._state(with_optimizer=False), self._queue),
        )
        return ClientFuture(frozen.future(), frozen.cancel)

    @checked
    def create_sampling_client(
        self, model_path: StatePath, retry_config: object | None = None, record_stability_info: bool = False
    ) -> ClientFuture[Any]:
        require_neutral(retry_config=retry_config, record_stability_info=record_stability_info)
        self._base.thread.require_open()
        state = described_state(model_path, self._base.saves, with_optimizer=False)
        client = load_sampling_client(self._base, model_path, state, self._queue)
        self._base.observe(Call(self.model_id, "create_sampling_client", {"model_path": model_path}))
        return client

    def get_info(self) -> GetInfoResponse:
        self._base.thread.require_open("get_info")
        data = ModelData(arch="lora", model_name=self._base.name, tokenizer_id=self._base.name)
        return GetInfoResponse(
            data, self.model_id, True, self._config.rank, self._base.name, user_metadata=self._run.labels.user_metadata
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._base.get_tokenizer()

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("TrainingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("TrainingClient", name)

    def _call(
        self,
        verb: str,
        arguments: dict[str, Any],
        op: ops.Op,
        finish: Callable[[Any], Any] = lambda result: result,
        after: "Sequence[Future[Any]]" = (),
    ) -> APIFuture[Any]:
        op = replace(op, queue=self._queue)
        call = self._base.thread.call(self._observed(verb, arguments), op, finish, after=after)
        self._base.calls.follow(verb, call.future(), lambda _: Tokens(computed=ops.num_tokens(op)))
        return call

    def _observed(self, verb: str, arguments: dict[str, Any]) -> str:
        """What errors call this call."""
        self._losses.refuse_within(verb)
        self._base.observe(Call(self.model_id, verb, arguments))
        return f"{verb} (call {next(self._number)} of {self.model_id})"

    def _measure(
        self,
        verb: str,
        make_op: type[ops.Forward] | type[ops.ForwardBackward],
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """The loss of these data, with or without a gradient."""
        loss = parse_loss(loss_fn, config)
        check_data(data, loss, self._base.limits)
        arguments = {"data": list(data), "loss_fn": loss_fn, "loss_fn_config": dict(config or {})}
        return self._call(verb, arguments, make_op(self._adapter, list(data), loss))

    def _path(self, kind: str, name: str, overwrite: bool) -> Path:
        path = self._base.storage / "checkpoints" / self.model_id / kind / name
        if path.exists() and not overwrite:
            raise CheckpointExists(f"{kind} {name!r} exists; choose another name or pass overwrite=True: {path}")
        return path

    def _save_op(
        self,
        path: Path,
        ttl_seconds: int | None,
        user_metadata: UserMetadata | None,
        *,
        with_optimizer: bool,
        overwrite: bool,
    ) -> ops.SaveAdapter:
        metadata = {**self._run.labels.user_metadata, **(user_metadata or {})}
        meta = self._base.manifest(self._run.described(), metadata, ttl_seconds)
        return ops.SaveAdapter(self._adapter, path, meta, with_optimizer, overwrite)

    def _save(self, verb: str, name: str, op: ops.SaveAdapter, response: Response) -> APIFuture[Response]:
        saving = self._call(verb, {"name": name}, op, lambda _: response)
        metadata = cast("dict[str, str]", op.meta["user_metadata"])  # `_save_op` puts it there
        state = replace(self._state(with_optimizer=op.with_optimizer), user_metadata=metadata)
        self._base.saves.add(op.path, state, saving.future())
        return saving

    def _state(self, *, with_optimizer: bool) -> SavedState:
        """As it is described where it is saved."""
        run, base = self._run, self._base
        metadata = run.labels.user_metadata
        return SavedState(base.name, base.fingerprint, self._config, with_optimizer, run.described(), metadata)

    def _load(self, verb: str, path: str, *, with_optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        check_shape(checked_state(path, self._base, with_optimizer=with_optimizer), self._config)
        op, after = ops.RestoreAdapter(self._adapter, Path(path), with_optimizer), self._base.saves.under(Path(path))
        loaded = self._call(verb, {"path": path}, op, lambda _: LoadWeightsResponse(path), after)
        self._base.saves.add_load(Path(path), loaded.future())
        return loaded

"""Clients over an engine in this process. Which engine is the backend's choice.

Every verb checks its input, enqueues an op on the engine's thread (`engine_thread.py`) and returns the future of its
result. What an op does stands in `engine/ops.py`.
"""

import itertools
import secrets
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeGuard

import numpy as np

from stovetop.backends.engine_thread import EngineThread
from stovetop.backends.older_names import with_older_names
from stovetop.backends.saved_runs import LiveRun, RunLabels, SavedRuns
from stovetop.checks import checked, take, unchecked
from stovetop.client import (
    MAX_NAME,
    AtLeastNone,
    BaseModel,
    CheckpointName,
    CloseStatus,
    CustomLossFn,
    HowToSample,
    HowToStep,
    NumSamples,
    Prompt,
    ServiceClient,
    StatePath,
    Tokenizer,
    Ttl,
    UserMetadata,
)
from stovetop.engine import ops
from stovetop.engine.saved_states import SavedState, base_model_of, describe
from stovetop.errors import CheckpointError, CheckpointExists, InvalidRequest
from stovetop.futures import APIFuture, ClientFuture, pending, resolved
from stovetop.losses import (
    Data,
    LossConfig,
    ModelLimits,
    check_data,
    check_model_input,
    check_shapes,
    check_token_ids,
    parse_loss,
)
from stovetop.model_store import canonical_name
from stovetop.rules import Whole
from stovetop.sdk_differences import missing_attribute, refuse_to_pickle, require_neutral
from stovetop.types import (
    AdamOptimizerConfig,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelData,
    OptimStepResponse,
    Rank,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    Seed,
    SupportedModel,
    TensorData,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as a client made it: what the recording backend keeps."""

    client: str  # model id of a training client, "sampling" or "service"
    verb: str
    arguments: dict[str, Any]


Observer = Callable[[Call], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """What the clients of one base model share."""

    name: str  # of the base model, as the user gave it
    thread: EngineThread
    storage: Path
    observe: Observer
    sample_number: "itertools.count[int]"  # of the service, so that every sample has a name of its own


@with_older_names("sample", "compute_logprobs", value=True)
@with_older_names("get_base_model")
class InProcessSamplingClient:
    """See `client.SamplingClient`."""

    def __init__(self, base: _Base, weights: ops.Weights | None) -> None:
        self._base = base
        self._weights = weights

    @checked
    def sample(
        self,
        prompt: Prompt,
        num_samples: NumSamples,
        sampling_params: HowToSample,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: AtLeastNone = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: AtLeastNone | None = None,
    ) -> APIFuture[SampleResponse]:
        require_neutral(
            "sample",
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
        )
        limits = self._base.thread.engine.limits
        check_model_input(prompt, limits, what="prompt")
        take(Whole(0, limits.vocab_size), topk_prompt_logprobs, "topk_prompt_logprobs")
        self._check_stop(sampling_params)
        params = _completed(sampling_params, prompt, limits)
        self._base.observe(
            Call(
                "sampling",
                "sample",
                {"prompt": prompt, "num_samples": num_samples, "sampling_params": sampling_params},
            )
        )
        op = ops.Sample(self._weights, prompt, num_samples, params, include_prompt_logprobs, topk_prompt_logprobs)
        sequence_ids = [f"sample-{next(self._base.sample_number)}" for _ in range(num_samples)]
        return self._base.thread.call(
            "sample", op, lambda response: _as_asked(response, sequence_ids, prompt_logprobs_last_n)
        )

    @checked
    def compute_logprobs(
        self, prompt: Prompt, prompt_logprobs_last_n: AtLeastNone | None = None
    ) -> APIFuture[list[float | None]]:
        limits = self._base.thread.engine.limits
        check_model_input(prompt, limits, what="prompt")
        _checked_memory(f"the prompt has {prompt.length} tokens", prompt.length, limits)
        self._base.observe(Call("sampling", "compute_logprobs", {"prompt": prompt}))
        return self._base.thread.call(
            "compute_logprobs",
            ops.ComputeLogprobs(self._weights, prompt),
            lambda logprobs: _last(logprobs, prompt_logprobs_last_n),
        )

    def _check_stop(self, params: SamplingParams) -> None:
        """A stop string needs a tokenizer, a stop token its place in the vocabulary."""
        stop = () if params.stop is None else params.stop
        ids = [item for item in stop if isinstance(item, int)]
        if len(ids) < len(stop):
            try:
                self.get_tokenizer()
            except InvalidRequest as error:
                raise InvalidRequest(f"SamplingParams.stop has strings, but {error}") from error
        check_token_ids(np.array(ids, np.int64), self._base.thread.engine.limits, what="SamplingParams.stop")

    def get_tokenizer(self) -> Tokenizer:
        return self._base.thread.engine.get_tokenizer()

    def get_base_model(self) -> str:
        return self._base.name

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("SamplingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("SamplingClient", name)


@with_older_names(
    "forward",
    "forward_backward",
    "forward_backward_custom",
    "optim_step",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
    "get_info",
)
@with_older_names("save_weights_and_get_sampling_client", "create_sampling_client", value=True)
class InProcessTrainingClient:
    """See `client.TrainingClient`."""

    def __init__(self, base: _Base, adapter: ops.Adapter, config: LoraConfig, run: LiveRun) -> None:
        self.model_id = run.model_id
        self._base = base
        self._adapter = adapter
        self._config = config
        self._run = run
        self._number = itertools.count(1)

    @checked
    def forward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        loss = parse_loss(loss_fn, loss_fn_config)
        check_data(data, loss, self._base.thread.engine.limits)
        arguments = {"data": list(data), "loss_fn": loss_fn, "loss_fn_config": dict(loss_fn_config or {})}
        return self._call("forward", arguments, ops.Forward(self._adapter, list(data), loss))

    @checked
    def forward_backward(
        self, data: Data, loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        loss = parse_loss(loss_fn, loss_fn_config)
        check_data(data, loss, self._base.thread.engine.limits)
        arguments = {"data": list(data), "loss_fn": loss_fn, "loss_fn_config": dict(loss_fn_config or {})}
        return self._call("forward_backward", arguments, ops.ForwardBackward(self._adapter, list(data), loss))

    @checked
    def forward_backward_custom(
        self,
        data: Data,
        loss_fn: CustomLossFn,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        require_neutral("forward_backward_custom", loss_type_input=loss_type_input)
        check_shapes(data, self._base.thread.engine.limits)
        op = ops.ForwardBackwardCustom(self._adapter, list(data), loss_fn)
        return self._call("forward_backward_custom", {"data": list(data), "loss_fn": loss_fn}, op)

    @checked
    def optim_step(
        self, optim_params: HowToStep | None = None, *, adam_params: HowToStep | None = None
    ) -> APIFuture[OptimStepResponse]:
        params = optim_params if adam_params is None else adam_params
        if params is None or (optim_params is not None and adam_params is not None):
            given = "neither is given" if params is None else "both are given"
            raise InvalidRequest(f"pass optim_params, AdamParams(...), or adam_params, its older name: {given}")
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
        return self._call("save_state", {"name": name}, op, lambda _: SaveWeightsResponse(str(path)))

    @checked
    def save_weights_for_sampler(
        self, name: CheckpointName, ttl_seconds: Ttl | None = None, user_metadata: UserMetadata | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        path = self._path("sampler_weights", name, overwrite=False)
        op = self._save_op(path, ttl_seconds, user_metadata, with_optimizer=False, overwrite=False)
        return self._call(
            "save_weights_for_sampler", {"name": name}, op, lambda _: SaveWeightsForSamplerResponse(str(path))
        )

    @checked
    def load_state(self, path: StatePath, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        require_neutral("load_state", weights_access_token=weights_access_token)
        return self._load("load_state", path, with_optimizer=False)

    @checked
    def load_state_with_optimizer(
        self, path: StatePath, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        require_neutral("load_state_with_optimizer", weights_access_token=weights_access_token)
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
        require_neutral(
            "save_weights_and_get_sampling_client",
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            kind=kind,
        )
        frozen = self._call(
            "save_weights_and_get_sampling_client",
            {"name": name},
            ops.Freeze(self._adapter),
            lambda weights: InProcessSamplingClient(self._base, weights),
        )
        return ClientFuture(frozen.future())

    @checked
    def create_sampling_client(
        self, model_path: StatePath, retry_config: object | None = None, record_stability_info: bool = False
    ) -> ClientFuture[Any]:
        require_neutral(
            "create_sampling_client", retry_config=retry_config, record_stability_info=record_stability_info
        )
        self._base.observe(Call(self.model_id, "create_sampling_client", {"model_path": model_path}))
        return _load_sampling_client(self._base, model_path)

    def get_info(self) -> GetInfoResponse:
        data = ModelData(arch="lora", model_name=self._base.name, tokenizer_id=self._base.name)
        return GetInfoResponse(
            data, self.model_id, True, self._config.rank, self._base.name, user_metadata=self._run.labels.user_metadata
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._base.thread.engine.get_tokenizer()

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("TrainingClient")

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("TrainingClient", name)

    def _call(
        self, verb: str, arguments: dict[str, Any], op: ops.Op, finish: Callable[[Any], Any] = lambda result: result
    ) -> APIFuture[Any]:
        self._base.observe(Call(self.model_id, verb, arguments))
        return self._base.thread.call(f"{verb} (call {next(self._number)} of {self.model_id})", op, finish)

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
        """Nothing here is ever deleted by itself: a `ttl_seconds` is kept in the manifest for whoever cleans up."""
        meta = {
            "base_model": self._base.name,
            "fingerprint": self._base.thread.engine.fingerprint,
            "user_metadata": {**self._run.labels.user_metadata, **(user_metadata or {})},
            "ttl_seconds": ttl_seconds,
            "run": self._run.described(),
        }
        return ops.SaveAdapter(self._adapter, path, meta, with_optimizer, overwrite)

    def _load(self, verb: str, path: str, *, with_optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        saved, own = _checked_state(path, self._base, with_optimizer=with_optimizer).lora, self._config
        if replace(saved, seed=own.seed) != own:
            raise InvalidRequest(f"this adapter is {own}, the saved one {saved}; make a client from that state")
        op = ops.RestoreAdapter(self._adapter, Path(path), with_optimizer)
        return self._call(verb, {"path": path}, op, lambda _: LoadWeightsResponse(path))


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
    _bases: dict[str, _Base]
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
        service._models = models
        service.calls = []
        service._observe = service.calls.append if record else lambda call: None
        service._labels = labels
        service._runs = {}
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
        require_neutral("create_lora_training_client", optimizer=optimizer)
        seed = secrets.randbits(63) if seed is None else seed
        config = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        arguments = {"base_model": base_model, "config": config, "user_metadata": user_metadata}
        base = self._base(base_model)
        base.thread.engine.check_lora(config)
        self._observe(Call("service", "create_lora_training_client", arguments))
        return self._training_client(base, ops.CreateAdapter(config), config, user_metadata)

    @checked
    def create_training_client_from_state(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        optimizer: AdamOptimizerConfig | None = None,
    ) -> ClientFuture[Any]:
        verb = "create_training_client_from_state"
        require_neutral(verb, weights_access_token=weights_access_token, optimizer=optimizer)
        return self._from_state(verb, path, base_model, user_metadata, False)

    @checked
    def create_training_client_from_state_with_optimizer(
        self,
        path: StatePath,
        base_model: BaseModel | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[Any]:
        verb = "create_training_client_from_state_with_optimizer"
        require_neutral(verb, weights_access_token=weights_access_token)
        return self._from_state(verb, path, base_model, user_metadata, True)

    @checked
    def create_sampling_client(
        self,
        model_path: StatePath | None = None,
        base_model: BaseModel | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[Any]:
        verb = "create_sampling_client"
        require_neutral(verb, retry_config=retry_config, record_stability_info=record_stability_info)
        if model_path is None and base_model is None:
            raise InvalidRequest("needs a model_path or a base_model, or both: neither is given")
        self._observe(Call("service", verb, {"model_path": model_path, "base_model": base_model}))
        if model_path is not None:
            base = self._base(base_model or base_model_of(Path(model_path)))
            return _load_sampling_client(base, model_path)
        base = self._base(str(base_model))
        return _made(base, lambda: InProcessSamplingClient(base, None))

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle("ServiceClient")

    def create_rest_client(self) -> SavedRuns:
        return SavedRuns.over(self._storage, self._runs, self.get_server_capabilities)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        lengths = {name: base.thread.engine.limits.context_length for name, base in self._bases.items()}
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
            base.thread.drop(f"the service was closed after {error!r}")
        for base in self._bases.values():
            base.thread.stop()

    @contextmanager
    def _dropping_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._drop(error)
            raise

    def _base(self, name: str) -> _Base:
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
                self._bases[name] = _Base(name, thread, self._storage, self._observe, self._sample_number)
            return self._bases[name]

    def _from_state(
        self, verb: str, path: str, base_model: str | None, user_metadata: UserMetadata | None, with_optimizer: bool
    ) -> ClientFuture[Any]:
        base = self._base(base_model or base_model_of(Path(path)))
        config = _checked_state(path, base, with_optimizer=with_optimizer).lora
        arguments = {"path": path, "base_model": base_model, "user_metadata": user_metadata}
        self._observe(Call("service", verb, arguments))
        return self._training_client(base, ops.LoadAdapter(Path(path), with_optimizer), config, user_metadata)

    def _training_client(
        self, base: _Base, op: ops.Op, config: LoraConfig, user_metadata: UserMetadata | None
    ) -> ClientFuture[Any]:
        model_id = f"{Path(base.name).name[:MAX_NAME]}-{secrets.token_hex(4)}"
        run = LiveRun(model_id, base.name, config, self._labels.with_metadata(user_metadata))
        self._runs[model_id] = run
        made = base.thread.call(
            f"making {model_id}", op, lambda adapter: InProcessTrainingClient(base, adapter, config, run)
        )
        return ClientFuture(made.future())


def _last(values_T: list[Any], last_n: int | None) -> list[Any]:
    """The values of so many positions at the end, None before; of all for None."""
    first = 0 if last_n is None else max(0, len(values_T) - last_n)
    return [None] * first + values_T[first:]


def _as_asked(response: SampleResponse, sequence_ids: Sequence[str], last_n: int | None) -> SampleResponse:
    prompt, topk = response.prompt_logprobs, response.topk_prompt_logprobs
    return unchecked(
        SampleResponse,
        sequences=[
            unchecked(
                SampledSequence,
                stop_reason=sequence.stop_reason,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                sequence_id=name,
            )
            for sequence, name in zip(response.sequences, sequence_ids, strict=True)
        ],
        prompt_logprobs=None if prompt is None else _last(prompt, last_n),
        topk_prompt_logprobs=None if topk is None else _last(topk, last_n),
        prompt_cache_hit_tokens=response.prompt_cache_hit_tokens,
    )


def _is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether a `with` block was left because something went wrong. sys.exit() and sys.exit(0) say that nothing did."""
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _made(base: _Base, make: Callable[[], Any]) -> ClientFuture[Any]:
    future: Future[Any] = pending()
    future.set_result(make())
    return ClientFuture(future)


def _load_sampling_client(base: _Base, path: str) -> ClientFuture[Any]:
    _checked_state(path, base, with_optimizer=False)
    loaded = base.thread.call(
        "create_sampling_client",
        ops.LoadWeights(Path(path)),
        lambda weights: InProcessSamplingClient(base, weights),
    )
    return ClientFuture(loaded.future())


def _checked_state(path: str, base: _Base, *, with_optimizer: bool) -> SavedState:
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


def _completed(params: SamplingParams, prompt: Prompt, limits: ModelLimits) -> SamplingParams:
    """Params with a seed and a max_tokens that fits the context and, where it was left out, the memory."""
    room = limits.context_length - prompt.length
    what = f"the prompt has {prompt.length} tokens and max_tokens is {params.max_tokens}"
    fitting = _checked_memory(what, prompt.length + (params.max_tokens or 1), limits)
    max_tokens = min(room, fitting - prompt.length) if params.max_tokens is None else params.max_tokens
    if max_tokens > room or room == 0:
        remedy = f"lower max_tokens to {room}" if room else "shorten the prompt"
        raise InvalidRequest(
            f"{what}; together they exceed the context of {limits.name}, {limits.context_length}; {remedy}"
        )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return replace(params, max_tokens=max_tokens, seed=seed)


def _checked_memory(what: str, num_tokens: int, limits: ModelLimits) -> int:
    """How long a sequence may become; one that could never fit into memory is refused."""
    if limits.longest_sequence is None:
        return limits.context_length
    if limits.longest_sequence < num_tokens <= limits.context_length:
        raise InvalidRequest(
            f"{what}; {num_tokens} tokens in all do not fit into the memory for keys and values, which is enough for "
            f"{limits.longest_sequence}; lower max_tokens, shorten the prompt, or open the service with a larger "
            "max_kv_bytes"
        )
    return limits.longest_sequence

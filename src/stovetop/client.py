"""The joint everything meets at: what a service, a training client and a sampling client are. No I/O.

**Every verb enqueues when it is called** and returns an `APIFuture` to await or `.result()`. Calls on one training
client take effect in the order they were made: submit `forward_backward` and `optim_step` together, await them later.
Bad input is refused by the call itself; an accepted call that fails, fails its own future and says which call it was.

Some parameters are here because programs written for the Tinker SDK pass them. Where one can have no effect in this
process, its default is accepted and any other value refused, with the reason: `sdk_differences.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from stovetop.arguments import AccessScope, CloseStatus, CustomLossFn, UserMetadata
from stovetop.calls import Listener
from stovetop.futures import APIFuture, ClientFuture
from stovetop.losses import LossConfig
from stovetop.sdk_differences import missing_attribute
from stovetop.tokenizing import Tokenizer
from stovetop.types import (
    AdamOptimizerConfig,
    AdamParams,
    CheckpointsListResponse,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)


@runtime_checkable
class SamplingClient(Protocol):
    """Draws tokens from weights that never change: those it was made from. Older clients stay valid."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`.

        include_prompt_logprobs  logprobs of the prompt's tokens, at temperature 1, as in `compute_logprobs`
        topk_prompt_logprobs     so many (token, logprob), the most probable first, for each position of the prompt
        prompt_logprobs_last_n   both only for so many positions at the prompt's end, and None before; None: for all
        topk_sample_logprobs     so many (token, logprob) in place of each token that is drawn, as its own logprob is:
                                 at the temperature, before top_k and top_p
        target_prompt_logprobs   token ids, int64 (tokens of the prompt - 1, K): those of row i are scored in place of
                                 the prompt's token i + 1, at temperature 1; -1 names none, and is answered with 0

        `prompt_alt_tokens_k` is the SDK's and not offered: anything but its default is refused.
        """
        ...

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of each token given those before it, at temperature 1. The first has none; with
        `prompt_logprobs_last_n`, only so many at the end have one."""
        ...

    def get_tokenizer(self) -> Tokenizer:
        """That of the base model."""
        ...

    def get_base_model(self) -> str:
        """The name of the base model, as the client was made with it."""
        ...

    def save(self, folder: str | Path) -> APIFuture[SaveWeightsForSamplerResponse]:
        """The weights that this client samples from, as a new folder like those of `save_weights_for_sampler`: a client
        that was frozen in memory (`save_weights_and_get_sampling_client`) can be made again in another process, by
        `create_sampling_client(path)`. A method of ours, which the SDK has not."""
        ...


@runtime_checkable
class TrainingClient(Protocol):
    """One adapter, its gradients and its optimizer."""

    @property
    def model_id(self) -> str:
        """Names this client: in errors, in the paths of what it saves, and as `training_run_id` of a `RestClient`."""
        ...

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """What `forward_backward` returns, without a gradient: the weights are measured as they are."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the loss, summed over the tokens of all data, to what earlier calls left since the last
        `optim_step`. `losses.py` has the table of losses: formulas, sources, which inputs each datum needs, options.

        `loss_fn_outputs` has one dict for each datum, in order: `logprobs`, float32, shaped like its target_tokens,
        (N,) or (N, K), at temperature 1 unless `loss_fn_config` has another. `metrics["loss:sum"]` is the loss.
        A datum that lacks an input, or has one of the wrong shape, is refused by the call.
        """
        ...

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFn,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """`loss_fn(data, logprobs)` gets one tensor a datum, shaped like its target_tokens, and returns (loss,
        metrics). The gradient is autograd's, through the model.

        It is called in a thread of its own; later calls of this client wait for it. It may call other clients, such as
        a sampler that was frozen before. A call of this client is refused, since it would wait for itself; from a
        thread that the function starts itself it does wait, and `cancel()` of the future ends that. What the function
        raises fails this call, and so does a loss that is not one finite number: no gradient is added, and the next
        optim_step says why.

        Give tensors that it makes their dtype: the default one belongs to the whole process, and is another while
        transformers makes a model in bfloat16.
        """
        ...

    def spoil(self, reason: str) -> APIFuture[None]:
        """Part of what the next optim_step was to learn from is missing: it fails with this `reason`, and the gradients
        gathered so far are dropped then. A method of ours, which the SDK has not: a server calls it in place of a
        forward_backward that it accepted and then could not use."""
        ...

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """One AdamW step (Loshchilov & Hutter 2019, arXiv:1711.05101) on the gradients gathered so far, which are then
        dropped. `adam_params` is an older name of `optim_params`: one of the two is needed.

        Metrics: `grad_norm`, before it is clipped, and `update_norm`, both over all trained matrices together;
        `skipped_nonfinite`, 1 where a number was not finite, so that nothing was changed, else 0.
        """
        ...

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: UserMetadata | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Weights and optimizer. The path that comes back is absolute."""
        ...

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Weights only: the optimizer starts afresh."""
        ...

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Weights and optimizer as they were saved. Gradients that no `optim_step` has used yet are dropped. A state of
        another rank, other matrices or another base model is refused."""
        ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: UserMetadata | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Weights alone, as of this call: to sample from, or to export. The path that comes back is absolute.
        There is no optimizer in it: `load_state` takes it, `load_state_with_optimizer` does not."""
        ...

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
        kind: Literal["snapshot"] = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """A sampling client frozen at the weights as of this call. Nothing is written; a name is not needed."""
        ...

    def create_sampling_client(
        self, model_path: str, retry_config: object | None = None, record_stability_info: bool = False
    ) -> ClientFuture[SamplingClient]:
        """From weights that were saved before (`save_weights_for_sampler`, `save_state`), not those in training: see
        `save_weights_and_get_sampling_client`."""
        ...

    def get_info(self) -> GetInfoResponse:
        """The base model, the rank, the optimizer and the metadata, as the client was made with them."""
        ...

    def get_tokenizer(self) -> Tokenizer:
        """That of the base model."""
        ...


class ServiceClient:
    """Makes training and sampling clients. `ServiceClient(...)` opens the provider that `base_url` names; each provider
    is a subclass that has every method of this one.

    base_url       None or "local": models run in this process. "recording": a deterministic fake for tests. An address,
                   http://127.0.0.1:8765, or "tinker": a server, or hosted Tinker, through the official SDK
    api_key        read by remote services alone; None: what the SDK finds
    user_metadata  goes into every checkpoint
    project_id, display_name
                   labels of yours, which go into every checkpoint too
    storage        where checkpoints are saved; each provider has a default
    engine         options of the provider, see `open_service` in `backends/local.py`, `recording/` and `remote/`
    """

    def __new__(
        cls,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        user_metadata: UserMetadata | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        storage: str | Path | None = None,
        **engine: Any,
    ) -> "ServiceClient":
        from stovetop.backends import open_service

        return open_service(
            base_url,
            api_key=api_key,
            user_metadata=user_metadata,
            project_id=project_id,
            display_name=display_name,
            default_headers_overrides=default_headers_overrides,
            storage=storage,
            options=engine,
        )

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: UserMetadata | None = None,
        optimizer: AdamOptimizerConfig | None = None,
        *,
        model_id: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A new adapter of this rank, with `alpha` 32 as everywhere at Tinker, which changes nothing until it is
        trained. `seed` fixes its initial factors; None draws one, so that two clients differ. The output head is
        trained too, unless `train_unembed` is false.

        All creators return at once. The model loads meanwhile, if it is the first client of it, and what only a loaded
        model can refuse is refused by the future. `model_id` is the client's, of which there may be one in a service;
        None: a new one, with the base model's name in it."""
        ...

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        optimizer: AdamOptimizerConfig | None = None,
        *,
        model_id: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        """The weights of a saved state, with a fresh optimizer. `base_model` says where the base model lies, if not
        under the name in the state."""
        ...

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: UserMetadata | None = None,
        weights_access_token: str | None = None,
        *,
        model_id: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        """A saved state exactly as it was: the next step is the one that would have been."""
        ...

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: object | None = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[SamplingClient]:
        """From saved weights, or from the base model as it is. With both, the weights must be an adapter of that base
        model."""
        ...

    def at(self, storage: str | Path) -> "ServiceClient":
        """This service for one of several runs: its clients share the base models with all others and save under
        `storage`. Closed, it refuses new clients, and this service goes on. A server saves on its own disk."""
        ...

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Within, `listener` is told of each call of this service's clients that is made from now on, when it is
        answered: how long it took, and how many tokens it was about. It is called in the thread that brings results,
        so it has to be quick."""
        ...

    def engine_figures(self) -> Mapping[str, float]:
        """What the engines in this process have done since they were loaded, by name: training_s, sampling_s and
        waiting_s (seconds), num_training_passes, num_trained_tokens, num_sampling_steps, num_adapters_moved. All only
        grow, and are those of all services that share the engines (`at`). Of a server nothing is known: {}."""
        ...

    def create_rest_client(self) -> "RestClient":
        """What was saved: by this service, and where it saves."""
        ...

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The models that clients can be made of, with their longest contexts in tokens."""
        ...

    def close(self, status: CloseStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Finishes what was accepted, then lets the models go: after it every call of this service and of its clients
        is refused with ServiceClosed. `with` calls it; a block that is left by an exception drops what has not begun
        instead."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object, /) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object, /
    ) -> None: ...

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("ServiceClient", name)


class RestClient:
    """What was saved, by run. `RestClient(...)` takes what `ServiceClient(...)` takes that matters here.

    The path of a checkpoint (`tinker_path`) is what `save_state` and `save_weights_for_sampler` returned. Methods of
    the SDK's client that concern accounts, sharing and billing are refused by name.
    """

    def __new__(
        cls, *, base_url: str | None = None, api_key: str | None = None, storage: str | Path | None = None
    ) -> "RestClient":
        return ServiceClient(base_url, api_key=api_key, storage=storage).create_rest_client()

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        """A training client by its `model_id`: one of this service, or one that has saved something."""
        ...

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The run that saved what is at this path, which may be anywhere on this machine."""
        ...

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Enough to make a client like the one that saved this."""
        ...

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> APIFuture[TrainingRunsResponse]:
        """The latest first. With `project_id`, those with that label."""
        ...

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """What one run has saved, the latest first."""
        ...

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """What all runs have saved, the latest first."""
        ...

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Deletes a checkpoint that this service could have saved; there is no way back."""
        ...

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """The same by path. Outside of where the service saves, nothing is deleted."""
        ...

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """As of `ServiceClient`."""
        ...

    if not TYPE_CHECKING:  # where a checker should find only what there is

        def __getattr__(self, name: str) -> object:
            return missing_attribute("RestClient", name)

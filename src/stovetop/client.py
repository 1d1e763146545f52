"""The joint everything meets at: what a service, a training client and a sampling client are. Protocols, no I/O.

**Every verb enqueues when it is called** and returns an `APIFuture` to await or `.result()`. Calls on one training
client take effect in the order they were made: submit `forward_backward` and `optim_step` together, await them later.
Bad input is refused by the call itself; an accepted call that fails, fails its own future and says which call it was.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from stovetop.futures import APIFuture, ClientFuture
from stovetop.losses import LossConfig
from stovetop.types import (
    AdamParams,
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
)

if TYPE_CHECKING:
    import torch

    CustomLossFn = Callable[[Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]

UserMetadata = dict[str, str]


class Tokenizer(Protocol):
    """What the package asks of a tokenizer: the part of the transformers interface that it uses."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | dict[str, str] | None: ...
    def __len__(self) -> int: ...
    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that are matched as whole strings, before any others: control tokens are among them."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def convert_tokens_to_ids(self, tokens: str) -> int: ...
    def apply_chat_template(
        self, conversation: Sequence[Any], *, tokenize: bool, add_generation_prompt: bool = False, **template: Any
    ) -> Any: ...


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
    ) -> APIFuture[SampleResponse]: ...

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob of each token given those before it, at temperature 1. The first has none."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...
    def get_base_model(self) -> str: ...


@runtime_checkable
class TrainingClient(Protocol):
    """One adapter, its gradients and its optimizer."""

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Loss and logprobs; leaves no gradient."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the summed loss to what earlier calls left since the last `optim_step`."""
        ...

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: "CustomLossFn"
    ) -> APIFuture[ForwardBackwardOutput]:
        """`loss_fn(data, logprobs)` gets one tensor a datum, shaped like its target_tokens, and returns (loss,
        metrics). The gradient is autograd's, through the model."""
        ...

    def optim_step(self, optim_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """One AdamW step on the gradients gathered so far, which are then dropped."""
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

    def load_state(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Weights only: the optimizer starts afresh."""
        ...

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadWeightsResponse]: ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: UserMetadata | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]: ...

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> ClientFuture[SamplingClient]:
        """A sampling client frozen at the weights as of this call. Nothing is written; a name is not needed."""
        ...

    def create_sampling_client(self, model_path: str) -> ClientFuture[SamplingClient]: ...
    def get_info(self) -> GetInfoResponse: ...
    def get_tokenizer(self) -> Tokenizer: ...


@runtime_checkable
class ServiceClient(Protocol):
    """Makes training and sampling clients."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: UserMetadata | None = None,
    ) -> ClientFuture[TrainingClient]: ...

    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: UserMetadata | None = None
    ) -> ClientFuture[TrainingClient]:
        """The weights of a saved state, with a fresh optimizer."""
        ...

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: UserMetadata | None = None
    ) -> ClientFuture[TrainingClient]:
        """A saved state exactly as it was: the next step is the one that would have been."""
        ...

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> ClientFuture[SamplingClient]:
        """From saved weights, or from the base model as it is."""
        ...

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse: ...
    def close(self) -> None:
        """Finishes what was accepted, then lets the models go. `with` calls it."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

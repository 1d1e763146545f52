"""The `..._async` names of older SDKs, for code that was written against them. Nothing in this package calls them.

`forward_backward_async` and its kin are coroutines that enqueue and return the `APIFuture`, which has `result_async()`;
`sample_async`, `compute_logprobs_async` and the `create_..._async` return the value itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

C = TypeVar("C")

_RETURNED: dict[str, tuple[str, ...]] = {  # by kind of client: the older form returns what the verb returns
    "service": ("get_server_capabilities",),
    "training": (
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "optim_step",
        "save_state",
        "load_state",
        "load_state_with_optimizer",
        "save_weights_for_sampler",
        "get_info",
    ),
    "sampling": ("get_base_model",),
    "rest": (),
}
_VALUES: dict[str, tuple[str, ...]] = {  # it returns what the future brings
    "service": (
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "create_sampling_client",
    ),
    "training": ("save_weights_and_get_sampling_client", "create_sampling_client"),
    "sampling": ("sample", "compute_logprobs"),
    "rest": (
        "get_training_run",
        "get_training_run_by_tinker_path",
        "list_training_runs",
        "list_checkpoints",
        "list_user_checkpoints",
        "delete_checkpoint",
        "delete_checkpoint_from_tinker_path",
    ),
}


def with_older_names(kind: Literal["service", "training", "sampling", "rest"]) -> Callable[[type[C]], type[C]]:
    """A decorator of a class of clients of this kind, which adds `verb_async` beside each verb that had one."""

    def add(cls: type[C]) -> type[C]:
        for verb in _RETURNED[kind]:
            setattr(cls, f"{verb}_async", _coroutine(getattr(cls, verb), value=False))
        for verb in _VALUES[kind]:
            setattr(cls, f"{verb}_async", _coroutine(getattr(cls, verb), value=True))
        return cls

    return add


def _coroutine(verb: Callable[..., Any], *, value: bool) -> Callable[..., Any]:
    @wraps(verb)
    async def older(*args: Any, **kwargs: Any) -> Any:
        future = verb(*args, **kwargs)
        return await future if value else future

    return older

"""Whether a base model can do what a client asks of it: one place, which every provider uses. What no model could do is
refused before, by the types (`types.py`) and the rules of arguments (`checks.py`).

Shapes: `N` tokens of one datum, `K` targets per position.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from stovetop.checks import check, take
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy, Loss
from stovetop.model_input import ImageChunk, ModelInput
from stovetop.rules import Instance, ListOf, Whole, is_a, shown
from stovetop.tensors import TensorData
from stovetop.types import AdamParams, Datum, LoraConfig, SamplingParams


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a base model can read."""

    name: str
    vocab_size: Annotated[int, Whole(1)]
    context_length: Annotated[int, Whole(1)]
    longest_sequence: Annotated[int, Whole(1)] | None = None  # that memory for keys and values allows; None: any

    def __post_init__(self) -> None:
        check(self)


def check_lora(config: LoraConfig, untrainable: Mapping[str, str]) -> None:
    """Refuses an adapter one of whose flags would do nothing, or do it in part. `untrainable` are the parts that no
    adapter of this base model can train, with the reason."""
    wanted = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
    for part, reason in untrainable.items():
        if wanted[part]:
            raise InvalidRequest(f"train_{part}=True cannot be honoured by this base model: {reason}; pass False")


def check_data(data: Sequence[Datum], loss: Loss, limits: ModelLimits) -> None:
    """Refuses what the loss or the model cannot use, naming the datum's index, the field, the value and the limit."""
    check_shapes(data, limits)
    for index, datum in enumerate(data):
        missing = [name for name in loss.inputs if name not in datum.loss_fn_inputs]
        if missing:
            raise InvalidRequest(
                f"datum {index} lacks {', '.join(missing)}; {loss.name} needs {', '.join(loss.inputs)}: "
                f"it has {sorted(datum.loss_fn_inputs)}"
            )
        extra = sorted(set(datum.loss_fn_inputs) - set(loss.inputs))
        if extra:
            raise InvalidRequest(
                f"datum {index} has {', '.join(extra)}, which {loss.name} does not read "
                f"(it reads {', '.join(loss.inputs)}); remove it, so that nothing is silently ignored"
            )
        for name in loss.inputs:
            _check_input(index, name, datum)
        if not isinstance(loss, CrossEntropy) and datum.loss_fn_inputs["target_tokens"].array.ndim != 1:
            raise InvalidRequest(
                f"datum {index}: {loss.name} takes one target per position; target_tokens has shape "
                f"{tuple(datum.loss_fn_inputs['target_tokens'].shape)}. Only cross_entropy takes (N, K)"
            )


_DATA = ListOf(Instance((Datum,)), at_least=1, hint="several sequences make one list: [Datum(...), Datum(...)]")
Data = Annotated[Sequence[Datum], _DATA]


def check_shapes(data: Sequence[Datum], limits: ModelLimits) -> None:
    """The part of `check_data` that holds for every loss, also a custom one: inputs and targets fit the model."""
    for index, datum in enumerate(take(_DATA, data, "data")):
        check_model_input(datum.model_input, limits, what=f"datum {index}: model_input")
        for name, tensor in datum.loss_fn_inputs.items():  # a dictionary, so it may have changed since Datum(...)
            if type(tensor) is not TensorData:
                raise InvalidRequest(
                    f"datum {index}: loss_fn_inputs[{name!r}] must be a TensorData; Datum(...) makes one of what it is "
                    f"given, but this was set later: {shown(tensor)}"
                )
        if "target_tokens" not in datum.loss_fn_inputs:
            raise InvalidRequest(f"datum {index} lacks target_tokens: it has {sorted(datum.loss_fn_inputs)}")
        target = datum.loss_fn_inputs["target_tokens"]
        if target.dtype != "int64":
            raise InvalidRequest(f"datum {index}: target_tokens must be int64: {target.dtype}")
        _check_length(index, "target_tokens", target, datum)
        check_token_ids(target.array, limits, what=f"datum {index}: target_tokens")


def check_model_input(model_input: ModelInput, limits: ModelLimits, *, what: str) -> None:
    for chunk in model_input.chunks:
        if isinstance(chunk, ImageChunk):
            raise InvalidRequest(f"{what} has an image, but {limits.name} reads text only: {chunk.format}")
    length = model_input.length
    if length == 0:
        raise InvalidRequest(f"{what} is empty; it needs at least one token")
    if length > limits.context_length:
        raise InvalidRequest(
            f"{what} has {length} tokens; the context of {limits.name} is {limits.context_length}: "
            f"leave out {length - limits.context_length}"
        )
    tokens = model_input.to_ints()
    ids = np.asarray(tokens)
    check_token_ids(ids, limits, what=what)
    for position in np.flatnonzero(ids < 2):  # where a True or False would be, which numpy takes for 1 and 0
        if is_a(tokens[position], bool):
            raise InvalidRequest(f"{what}: token ids must be integers; at position {position} is: {tokens[position]}")


def check_token_ids(tokens: np.ndarray, limits: ModelLimits, *, what: str) -> None:
    bad = np.flatnonzero((tokens < 0) | (tokens >= limits.vocab_size))
    if bad.size:
        raise InvalidRequest(
            f"{what}: token id {int(tokens.flat[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
            f"{limits.name}, 0..{limits.vocab_size - 1}; make ids with that model's tokenizer"
        )


def _check_prompt_targets(targets: TensorData, prompt: ModelInput, limits: ModelLimits) -> None:
    """Token ids that are to be scored at each position of a prompt but the first."""
    what, num_rows = "target_prompt_logprobs", prompt.length - 1
    if targets.dtype != "int64" or targets.array.ndim != 2 or targets.shape[0] != num_rows:
        raise InvalidRequest(
            f"{what} must be int64 of shape ({num_rows}, K), for row i names what is scored in place of the prompt's "
            f"token i + 1; it is {targets.dtype} of shape {tuple(targets.shape)}: {shown(targets)}"
        )
    if targets.shape[1] > limits.vocab_size or not (targets.array != -1).any():
        raise InvalidRequest(
            f"{what} must name a token, and {limits.vocab_size} for each position at most; -1 names none: "
            f"{shown(targets)}"
        )
    check_token_ids(np.where(targets.array == -1, 0, targets.array), limits, what=what)


def _check_length(index: int, name: str, tensor: TensorData, datum: Datum) -> None:
    length = datum.model_input.length
    if tensor.array.ndim not in (1, 2) or tensor.array.shape[0] != length or tensor.array.size == 0:
        raise InvalidRequest(
            f"datum {index}: {name} has shape {tuple(tensor.shape)}; model_input has {length} tokens; both must agree, "
            f"and (N, K) needs a K of at least 1"
        )


def _check_input(index: int, name: str, datum: Datum) -> None:
    tensor, target = datum.loss_fn_inputs[name], datum.loss_fn_inputs["target_tokens"]
    if tensor.shape != target.shape:
        raise InvalidRequest(
            f"datum {index}: {name} has shape {tuple(tensor.shape)}, target_tokens {tuple(target.shape)}; "
            f"model_input has {datum.model_input.length} tokens and all must agree"
        )
    if name == "target_tokens":
        return
    if tensor.dtype != "float32":
        raise InvalidRequest(f"datum {index}: {name} must be float32; convert it first: {tensor.dtype}")
    bad = np.flatnonzero(~np.isfinite(tensor.array))
    if bad.size:
        raise InvalidRequest(
            f"datum {index}: {name} is {tensor.array.flat[bad[0]]} at position {int(bad[0])}; it must be finite"
        )
    if name == "sequence_ratio_mask" and not np.isin(tensor.array, (0, 1)).all():
        raise InvalidRequest(f"datum {index}: sequence_ratio_mask must hold 0 and 1 only")


def the_one_of(optim_params: AdamParams | None, adam_params: AdamParams | None) -> AdamParams:
    """What an optim_step was given, under either of its names."""
    params = optim_params if adam_params is None else adam_params
    if params is None or (optim_params is not None and adam_params is not None):
        given = "neither is given" if params is None else "both are given"
        raise InvalidRequest(f"pass optim_params, AdamParams(...), or adam_params, its older name: {given}")
    return params


def check_step(gradients: object | None, failure: BaseException | None) -> None:
    """What an optim_step steps with: gradients, and no forward_backward that failed since the last step, for then they
    are part of what was asked for."""
    if failure is not None:
        raise InvalidRequest(
            "a forward_backward before it failed, so its gradients are dropped; begin the step anew with a "
            f"forward_backward: {failure}"
        ) from failure
    if gradients is None:
        raise InvalidRequest("there is no gradient; call forward_backward before optim_step")


def _check_stop(params: SamplingParams, limits: ModelLimits, get_tokenizer: Callable[[], object]) -> None:
    """A stop string needs a tokenizer, a stop token its place in the vocabulary."""
    stop = () if params.stop is None else params.stop
    ids = [item for item in stop if isinstance(item, int)]
    if len(ids) < len(stop):
        try:
            get_tokenizer()
        except InvalidRequest as error:
            raise InvalidRequest(f"SamplingParams.stop has strings, but {error}") from error
    check_token_ids(np.array(ids, np.int64), limits, what="SamplingParams.stop")


def check_sample(
    prompt: ModelInput,
    params: SamplingParams,
    limits: ModelLimits,
    get_tokenizer: Callable[[], object],
    *,
    topk_prompt_logprobs: int,
    topk_sample_logprobs: int,
    target_prompt_logprobs: TensorData | None,
) -> None:
    """What is to be sampled, and scored with it, is for this model."""
    check_model_input(prompt, limits, what="prompt")
    take(Whole(0, limits.vocab_size), topk_prompt_logprobs, "topk_prompt_logprobs")
    take(Whole(0, limits.vocab_size), topk_sample_logprobs, "topk_sample_logprobs")
    if target_prompt_logprobs is not None:
        _check_prompt_targets(target_prompt_logprobs, prompt, limits)
    _check_stop(params, limits, get_tokenizer)


def completed(params: SamplingParams, prompt: ModelInput, limits: ModelLimits) -> SamplingParams:
    """Params with a seed and a max_tokens that fits the context and, where it was left out, the memory."""
    room = limits.context_length - prompt.length
    what = f"the prompt has {prompt.length} tokens and max_tokens is {params.max_tokens}"
    fitting = fitting_memory(what, prompt.length + (params.max_tokens or 1), limits)
    max_tokens = min(room, fitting - prompt.length) if params.max_tokens is None else params.max_tokens
    if max_tokens > room or room == 0:
        remedy = f"lower max_tokens to {room}" if room else "shorten the prompt"
        raise InvalidRequest(
            f"{what}; together they exceed the context of {limits.name}, {limits.context_length}; {remedy}"
        )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return replace(params, max_tokens=max_tokens, seed=seed)


def fitting_memory(what: str, num_tokens: int, limits: ModelLimits) -> int:
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

"""The catalogue of wrong input: for every argument of a verb, option of a provider and field of a value, what it may
not be. `test_wrong_input.py` holds it against the signatures and tries each."""

from pathlib import Path
from typing import Any

import numpy as np
from examples import TOKENS, datum

from stovetop import types
from stovetop.types import AdamParams, EncodedTextChunk, ModelInput, SamplingParams, TensorData

NAN, INF = float("nan"), float("inf")
PROMPT = ModelInput.from_ints(TOKENS[:4])

NO_INTEGER = [None, "2", 2.0, 2.5, True, np.float32(2), [2], 2**70]
NO_NUMBER = [None, "1e-4", True, NAN, INF, [0.5], 10**400, 1j]
NO_TEXT = [None, 5, b"text", ["text"], "\ud800"]
NO_FLAG = [None, 1, 0, "no", 0.0]
NO_PATH = [5, b"path", Path("folder"), "", "a\0b", "x" * 300]
NO_MODEL = [5, b"model", "", "a\0b", "x" * 300, "~nobody-of-this-name/model"]
NO_METADATA = [5, "who", [("who", "me")], {"who": 5}, {5: "me"}, {"who": None}, {"who": {"a": "b"}}]
NO_DATA = [None, "data", 5, [], datum(), (datum() for _ in range(2)), [datum(), None], [datum(), {"x": 1}], {}]
NO_LOSS = [None, 5, ["ppo"], "crossentropy", ""]
NO_CONFIG = ["ppo", 5, [1], {"temperature": "1"}, {"temperature": NAN}, {"temperature": True}, {5: 1.0}, {"beta": 1.0}]
NO_NAME = [None, 5, b"name", Path("name"), "", "../up", "a/b", "x" * 240, "with space"]
NO_TTL = ["3600", -1, 0, 2.5, True]
NO_PRELOAD = [None, 1, "tiny", [5], True]  # the last: without models, of which there may be any
NO_TOKEN = ["token", 5]
NO_LAST_N = [-1, 2.5, "2", True]


async def asynchronous(data: Any, logprobs: Any) -> Any:
    return logprobs[0].sum(), {}


def without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


VERBS: dict[str, list[Any]] = {
    "sample.prompt": [
        None,
        "text",
        TOKENS,
        5,
        [[1, 2]],
        ModelInput.empty(),
        ModelInput.from_ints([10**6]),
        ModelInput.from_ints([-1]),
        ModelInput.from_ints([3, True]),
        ModelInput.from_ints([1] * 100_000),
    ],
    "sample.num_samples": [None, "2", 2.5, 2.0, True, 0, -1, 1e9, 10**9, np.float64(2)],
    "sample.sampling_params": [
        None,
        {"max_tokens": 5},
        5,
        SamplingParams(max_tokens=10**6),
        SamplingParams(stop=[10**6]),
        SamplingParams(stop=[np.int64(10**6)]),
    ],
    "sample.include_prompt_logprobs": NO_FLAG,
    "sample.topk_prompt_logprobs": [None, "2", 2.5, True, -1, 10**6],
    "sample.topk_sample_logprobs": [None, "2", 2.5, True, -1, 10**6],
    "sample.target_prompt_logprobs": [5, [1], TensorData([1], "int64")],
    "sample.prompt_alt_tokens_k": [None, 1, "2"],
    "sample.prompt_logprobs_last_n": NO_LAST_N,
    "compute_logprobs.prompt": [None, "text", TOKENS, ModelInput.empty(), ModelInput.from_ints([10**6])],
    "compute_logprobs.prompt_logprobs_last_n": NO_LAST_N,
    "spoil.reason": [None, 5, b"why"],
    "save.folder": [None, 5, b"folder", "", "a\0b", "x" * 300, ["folder"]],
    "forward.data": NO_DATA,
    "forward.loss_fn": NO_LOSS,
    "forward.loss_fn_config": NO_CONFIG,
    "forward_backward.data": NO_DATA,
    "forward_backward.loss_fn": NO_LOSS,
    "forward_backward.loss_fn_config": NO_CONFIG,
    "forward_backward_custom.data": NO_DATA,
    "forward_backward_custom.loss_fn": [None, "ppo", 5, lambda: None, lambda data: None, asynchronous],
    "forward_backward_custom.loss_type_input": ["logits", 5],
    "optim_step.optim_params": [5, 1e-4, "adam", {"learning_rate": 1e-3}, AdamParams],
    "optim_step.adam_params": [5, {"learning_rate": 1e-3}, AdamParams()],
    "save_state.name": NO_NAME,
    "save_state.ttl_seconds": NO_TTL,
    "save_state.overwrite": NO_FLAG,
    "save_state.user_metadata": NO_METADATA,
    "save_weights_for_sampler.name": NO_NAME,
    "save_weights_for_sampler.ttl_seconds": NO_TTL,
    "save_weights_for_sampler.user_metadata": NO_METADATA,
    "load_state.path": [None, *NO_PATH],
    "load_state.weights_access_token": NO_TOKEN,
    "load_state_with_optimizer.path": [None, *NO_PATH],
    "load_state_with_optimizer.weights_access_token": NO_TOKEN,
    "save_weights_and_get_sampling_client.name": without_none(NO_NAME),
    "save_weights_and_get_sampling_client.retry_config": [5, {}],
    "save_weights_and_get_sampling_client.record_stability_info": [None, 1, True],
    "save_weights_and_get_sampling_client.kind": [None, "inflight", 5],
    "training.create_sampling_client.model_path": [None, *NO_PATH],
    "training.create_sampling_client.retry_config": [5, {}],
    "training.create_sampling_client.record_stability_info": [None, 1, True],
    "create_lora_training_client.base_model": [None, *NO_MODEL],
    "create_lora_training_client.rank": [*NO_INTEGER, 0, -1, 10**12],
    "create_lora_training_client.seed": [1.5, -1, 2**70, "3", True],
    "create_lora_training_client.train_mlp": NO_FLAG,
    "create_lora_training_client.train_attn": NO_FLAG,
    "create_lora_training_client.train_unembed": NO_FLAG,
    "create_lora_training_client.user_metadata": NO_METADATA,
    "create_lora_training_client.model_id": without_none(NO_NAME),
    "create_lora_training_client.optimizer": ["adamw", {"type": "adamw"}],
    "create_training_client_from_state.path": [None, *NO_PATH],
    "create_training_client_from_state.base_model": NO_MODEL,
    "create_training_client_from_state.user_metadata": NO_METADATA,
    "create_training_client_from_state.weights_access_token": NO_TOKEN,
    "create_training_client_from_state.model_id": without_none(NO_NAME),
    "create_training_client_from_state.optimizer": ["adamw", {"type": "adamw"}],
    "create_training_client_from_state_with_optimizer.path": [None, *NO_PATH],
    "create_training_client_from_state_with_optimizer.base_model": NO_MODEL,
    "create_training_client_from_state_with_optimizer.user_metadata": NO_METADATA,
    "create_training_client_from_state_with_optimizer.weights_access_token": NO_TOKEN,
    "create_training_client_from_state_with_optimizer.model_id": without_none(NO_NAME),
    "create_sampling_client.model_path": NO_PATH,
    "create_sampling_client.base_model": NO_MODEL,
    "create_sampling_client.retry_config": [5, {}],
    "create_sampling_client.record_stability_info": [None, 1, True],
    "at.storage": [None, 5, b"folder", "", "a\0b", ["folder"]],
    "listening.listener": [None, 5, "print", lambda: None],
    "close.status": [None, "done", 5],
    "close.detail": [5, b"why"],
}

REST: dict[str, list[Any]] = {
    "get_training_run.training_run_id": NO_TEXT,
    "get_training_run.access_scope": [None, "all", 5],
    "get_training_run_by_tinker_path.tinker_path": [None, *NO_PATH],
    "get_training_run_by_tinker_path.access_scope": [None, "all", 5],
    "get_weights_info_by_tinker_path.tinker_path": [None, *NO_PATH],
    "list_training_runs.limit": [*NO_INTEGER, -1],
    "list_training_runs.offset": [*NO_INTEGER, -1],
    "list_training_runs.access_scope": [None, "all", 5],
    "list_training_runs.project_id": without_none(NO_TEXT),
    "list_checkpoints.training_run_id": NO_TEXT,
    "list_user_checkpoints.limit": [*NO_INTEGER, -1],
    "list_user_checkpoints.offset": [*NO_INTEGER, -1],
    "delete_checkpoint.training_run_id": [*NO_TEXT, *NO_PATH],
    "delete_checkpoint.checkpoint_id": [*NO_TEXT, *NO_PATH],
    "delete_checkpoint_from_tinker_path.tinker_path": [None, *NO_PATH],
}

OPTIONS: dict[str, list[Any]] = {  # of ServiceClient(...) and of each provider
    "base_url": [5, ["local"], {"who": "me"}, "recroding", "localhost:1", "ftp://localhost:1", ""],
    "api_key": without_none(NO_TEXT),
    "user_metadata": NO_METADATA,
    "project_id": without_none(NO_TEXT),
    "display_name": without_none(NO_TEXT),
    "default_headers_overrides": [5, "who", {"X-Key": "value"}],
    "storage": [5, b"folder", "", "a\0b", ["folder"]],
    "local.device": [None, 5, "gpu", "cuda:", "CPU", ""],
    "local.dtype": [None, "float16", "float64", np.float32, 32],
    "local.deterministic": [1, "yes"],
    "local.threads": [0, -1, 2.0, "2", "all", True, 10**6],
    "local.max_tokens_per_pass": [*NO_INTEGER, 0, -1],
    "local.micro_batch_invariant": NO_FLAG,
    "local.recompute": [1, "no"],
    "local.max_adapter_bytes": [-1, 2.5, "1GB", True],
    "local.max_kv_bytes": [-1, 0, 2.5, "1GB", True],
    "local.max_queued_calls": [*NO_INTEGER, 0, -1],
    "local.max_queued_tokens": [*NO_INTEGER, 0, -1],
    "local.untried": [5, "captured_decoding", ["captured"], [1], ["captured_decoding"]],  # the last: on a CPU
    "local.models": [5, "smollm2", ["smollm2"], {5: "smollm2"}, {"": "smollm2"}, {"a": 5}, {"a": "no-such-folder"}],
    "local.preload": NO_PRELOAD,
    "local.download": [5, "hub", lambda: None],
    "recording.seed": [*NO_INTEGER, -1],
    "recording.max_queued_calls": [*NO_INTEGER, 0, -1],
    "recording.max_queued_tokens": [*NO_INTEGER, 0, -1],
    "recording.latency_s": [None, "1", -1.0, NAN, INF, True, lambda: 1.0],
    "recording.faults": [None, 5, "raises", [5], [None], [ValueError("x")]],
    "recording.models": ["tiny", 5, [5], [None], {"tiny": 1}],
    "recording.preload": NO_PRELOAD,
}
OPTIONS_THAT_TAKE_ANYTHING = {
    "disk": "a Protocol of four functions, for tests: one that lacks a function fails when it is needed",
}

VALUES: dict[str, list[Any]] = {
    "EncodedTextChunk.tokens": [None, 5, "text", [1.5], ["a"], [True], [None], [[1]], {1, 2}, np.array([0.5]), 1.0],
    "EncodedTextChunk.type": [None, 5, "image"],
    "ImageChunk.data": [None, "bytes", 5, [1], np.zeros(2, np.uint8)],
    "ImageChunk.format": [None, "gif", 5, "PNG"],
    "ImageChunk.expected_tokens": [-1, 2.5, "2", True],
    "ImageChunk.type": [None, "encoded_text"],
    "ModelInput.chunks": [None, 5, "text", TOKENS, [None], EncodedTextChunk([1]), [[EncodedTextChunk([1])]]],
    "TensorData.data": [None, 5, "text", ["a"], [[1], [2, 3]], {1, 2}, {"a": 1}, [None], [1j], [2**70], [True, False]],
    "TensorData.dtype": [None, "float64", np.float32, 5, ["int64"]],
    "TensorData.shape": [5, "2", [2.0], [-1], [2, 2], [True], [[1]], 2.0, [3] + [1] * 70],
    "Datum.model_input": [None, TOKENS, "text", 5, EncodedTextChunk([1])],
    "Datum.loss_fn_inputs": [
        5,
        "weights",
        [1.0],
        {"weights": None},
        {"weights": "abc"},
        {"weights": 5},
        {"weights": ["a"]},
        {"target_tokens": [1.5]},
        {5: [1.0]},
        {5: TensorData([1.0], "float32")},
        {"weights": {1.0}},
        {"weights": np.array([True])},
    ],
    "Datum.model_input_spans": [5, [None], "spans"],
    "Datum.loss_fn_input_spans": [5, [None], "spans"],
    "AdamParams.learning_rate": [*NO_NUMBER, -1e-4],
    "AdamParams.beta1": [*NO_NUMBER, -0.1, 1.0],
    "AdamParams.beta2": [*NO_NUMBER, -0.1, 1, 1.5],
    "AdamParams.eps": [*NO_NUMBER, 0.0, -1e-8],
    "AdamParams.weight_decay": [*NO_NUMBER, -0.1],
    "AdamParams.grad_clip_norm": [*NO_NUMBER, -1.0],
    "LoraConfig.rank": [*NO_INTEGER, 0, -1, 10**12],
    "LoraConfig.seed": [1.5, "1", True, -1, 2**70],
    "LoraConfig.train_unembed": NO_FLAG,
    "LoraConfig.train_mlp": NO_FLAG,
    "LoraConfig.train_attn": NO_FLAG,
    "LoraConfig.alpha": [*NO_NUMBER, 0.0, -1.0],
    "SamplingParams.max_tokens": [2.5, 2.0, "2", True, 0, -1, 2**70],
    "SamplingParams.seed": [1.5, "1", True, -1, 2**70],
    "SamplingParams.stop": [
        5,
        1.5,
        True,
        b"x",
        "",
        [""],
        [1.5],
        [None],
        [b"x"],
        [["x"]],
        ["x", 1],
        [True],
        [-1],
        {"x"},
        {"x": 1},
        np.array([0.5]),
        "\ud800",
        ["\ud800"],
        [2**70],
    ],
    "SamplingParams.temperature": [*NO_NUMBER, -1.0, 1e-40, 1e30],
    "SamplingParams.top_k": [*NO_INTEGER, 0, -2],
    "SamplingParams.top_p": [*NO_NUMBER, 0.0, 1.1, -0.1],
    "ModelLimits.name": NO_TEXT,
    "ModelLimits.vocab_size": [*NO_INTEGER, 0],
    "ModelLimits.context_length": [*NO_INTEGER, 0],
    "ModelLimits.longest_sequence": [*without_none(NO_INTEGER), 0],
    "Raises.verb": [None, "forwards"],
    "Raises.nth": [*NO_INTEGER, 0],
    "Raises.error": [None, "error", ValueError],
    "NonFiniteGradient.nth": [*NO_INTEGER, 0],
    "NonFiniteGradient.verb": [None, "optim_step"],
    "Span.sequence_id": [*NO_TEXT, ""],
    "Span.offset": [*NO_INTEGER, -1],
    "Span.length": [*NO_INTEGER, -1],
    **{
        f"{loss}.{name}": [*NO_NUMBER, -0.5]
        for loss in ("PPO", "CISPO", "GSPO")
        for name in ("clip_low_threshold", "clip_high_threshold")
    },
    **{
        f"{loss}.temperature": [*NO_NUMBER, 0.0, -1.0, 1e-40]
        for loss in ("ImportanceSampling", "PPO", "CISPO", "DRO", "GSPO")
    },
    "DRO.beta": [*NO_NUMBER, -0.1],
}

# Results are made by providers, also by ones in tests of users: what they may hold goes by type.
BY_ANNOTATION: dict[str, list[Any]] = {
    "str": NO_TEXT,
    "int": NO_INTEGER,
    "bool": NO_FLAG,
    "list": [5, "text", [object()]],
    "dict": [5, "text", {5: 1.0}],
    "other": [5, "value", object()],
}
VALID: dict[str, Any] = {
    "EncodedTextChunk": {"tokens": [1]},
    "ImageChunk": {"data": b"", "format": "png"},
    "TensorData": {"data": [1, 2, 3], "dtype": "float32"},
    "Datum": {"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": TOKENS[1:5]}},
    "ModelLimits": {"name": "tiny", "vocab_size": 10, "context_length": 8},
    "Raises": {"verb": "forward", "nth": 1, "error": ValueError("x")},
    "NonFiniteGradient": {"nth": 1},
    "PromptProvenanceSpan": {"sequence_id": "a", "length": 1},
    "SampledProvenanceSpan": {"sequence_id": "a", "length": 1},
}
COVERED = [types.PromptProvenanceSpan(sequence_id="a", length=4)]
VALID["Datum"] |= {"model_input_spans": COVERED, "loss_fn_input_spans": COVERED}

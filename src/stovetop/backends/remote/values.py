# pyright: basic
"""Our values as the SDK's, and back. Both have the same names and fields.

Shapes: `D` datums.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import tinker
from tinker import types as sdk

from stovetop.types import (
    AdamParams,
    Checkpoint,
    CheckpointsListResponse,
    Cursor,
    Datum,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    ModelInput,
    PromptProvenanceSpan,
    ProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SupportedModel,
    TensorData,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)


def sdk_input(model_input: ModelInput) -> tinker.ModelInput:
    """The tokens; text alone is sent."""
    return tinker.ModelInput.from_ints(list(model_input.to_ints()))


def sdk_tensor(tensor: TensorData) -> tinker.TensorData:
    """A dense one."""
    return tinker.TensorData(data=tensor.array, dtype=tensor.dtype, shape=tensor.shape)


def sdk_datum(datum: Datum) -> tinker.Datum:
    """With its spans, where it has some."""
    return tinker.Datum(
        model_input=sdk_input(datum.model_input),
        loss_fn_inputs={name: sdk_tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        model_input_spans=_spans(datum.model_input_spans),
        loss_fn_input_spans=_spans(datum.loss_fn_input_spans),
    )


def with_weights(datum: Datum, weights: np.ndarray) -> tinker.Datum:
    """The targets of a datum for cross-entropy with other weights."""
    target = datum.loss_fn_inputs["target_tokens"]
    return sdk_datum(
        Datum(
            datum.model_input,
            {"target_tokens": target, "weights": TensorData(weights, "float32")},
            datum.model_input_spans,
            datum.loss_fn_input_spans,
        )
    )


def sdk_step(params: AdamParams) -> tinker.AdamParams:
    """What AdamW steps with."""
    return tinker.AdamParams(**asdict(params))


def sdk_sampling(params: SamplingParams) -> tinker.SamplingParams:
    """How to draw."""
    return tinker.SamplingParams(**asdict(params))


def output_of(output: sdk.ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Of a forward or a forward_backward."""
    outputs_D = [
        {name: TensorData.from_numpy(np.asarray(tensor.to_numpy())) for name, tensor in each.items()}
        for each in output.loss_fn_outputs
    ]
    return ForwardBackwardOutput(output.loss_fn_output_type, outputs_D, dict(output.metrics))


def samples_of(response: sdk.SampleResponse) -> SampleResponse:
    """Of a sample."""
    sequences = [
        SampledSequence(each.stop_reason, each.tokens, each.logprobs, each.sequence_id, each.topk_logprobs)
        for each in response.sequences
    ]
    named = response.target_prompt_logprobs
    return SampleResponse(
        sequences,
        response.prompt_logprobs,
        response.topk_prompt_logprobs,
        response.prompt_cache_hit_tokens,
        None if named is None else TensorData.from_numpy(np.asarray(named.to_numpy())),
    )


def capabilities_of(response: sdk.GetServerCapabilitiesResponse) -> GetServerCapabilitiesResponse:
    """The models of a server."""
    return GetServerCapabilitiesResponse(
        [
            SupportedModel(each.model_name, each.max_context_length, each.trainable, each.sampleable)
            for each in response.supported_models
        ]
    )


def checkpoints_of(response: sdk.CheckpointsListResponse) -> CheckpointsListResponse:
    """A part of a list of checkpoints."""
    return CheckpointsListResponse(
        [_checkpoint(each) for each in response.checkpoints],
        None if response.cursor is None else _cursor(response.cursor),
    )


def runs_of(response: sdk.TrainingRunsResponse) -> TrainingRunsResponse:
    """A part of a list of runs."""
    return TrainingRunsResponse([run_of(each) for each in response.training_runs], _cursor(response.cursor))


def run_of(run: tinker.TrainingRun) -> TrainingRun:
    """One run."""
    last, last_sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return TrainingRun(
        training_run_id=run.training_run_id,
        base_model=run.base_model,
        model_owner=run.model_owner,
        is_lora=run.is_lora,
        last_request_time=run.last_request_time,
        corrupted=run.corrupted,
        lora_rank=run.lora_rank,
        last_checkpoint=None if last is None else _checkpoint(last),
        last_sampler_checkpoint=None if last_sampler is None else _checkpoint(last_sampler),
        user_metadata=run.user_metadata,
    )


def weights_info_of(info: sdk.WeightsInfoResponse) -> WeightsInfoResponse:
    """Of which kind weights are."""
    return WeightsInfoResponse(
        info.base_model,
        info.is_lora,
        lora_rank=info.lora_rank,
        train_unembed=info.train_unembed,
        train_mlp=info.train_mlp,
        train_attn=info.train_attn,
    )


def _checkpoint(saved: tinker.Checkpoint) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=saved.checkpoint_id,
        checkpoint_type=saved.checkpoint_type,
        time=saved.time,
        tinker_path=saved.tinker_path,
        size_bytes=saved.size_bytes,
        public=saved.public,
        user_metadata=saved.user_metadata,
        expires_at=saved.expires_at,
    )


def _cursor(cursor: sdk.Cursor) -> Cursor:
    return Cursor(cursor.offset, cursor.limit, cursor.total_count)


def _spans(spans: Sequence[ProvenanceSpan] | None) -> Any:
    if spans is None:
        return None
    return [_span(span) for span in spans]


def _span(span: ProvenanceSpan) -> Any:
    match span:
        case PromptProvenanceSpan():
            return tinker.PromptProvenanceSpan(**asdict(span))
        case SampledProvenanceSpan():
            return tinker.SampledProvenanceSpan(**asdict(span))

# pyright: basic
"""Between the bytes of protobuf messages (`wire.py`) and our values. Nothing here waits or does I/O: two million tokens
take a second or two, so it runs in worker threads.

What can be read is not yet what a model can do: that is refused by the client's own checks. A message whose envelope is
good and whose data are not is an `InvalidRequest` too, and belongs into the future (`program.py`).

Shapes: `D` datums, `T` tokens of a prompt, `K` alternatives per position.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from stovetop.errors import InvalidRequest
from stovetop.losses import SPOIL
from stovetop.server import bodies, wire
from stovetop.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampleResponse,
    TensorData,
)

MAX_VALUES = 2**27  # of one tensor, when a sparse one is filled up: half a GB of float32
NO_LOGPROB = -99999.0  # of a cell without a token, as the SDK reads it

_NUMPY = {
    wire.DTYPES["DTYPE_FLOAT32"]: np.dtype("<f4"),
    wire.DTYPES["DTYPE_INT64"]: np.dtype("<i8"),
}
_NUMBER_OF = {"float32": wire.DTYPES["DTYPE_FLOAT32"], "int64": wire.DTYPES["DTYPE_INT64"]}
_STOP_REASON = {"stop": wire.STOP_REASONS["STOP_REASON_STOP"], "length": wire.STOP_REASONS["STOP_REASON_LENGTH"]}


# ---- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Whose turn a forward_backward is. `message` holds the rest."""

    model_id: str
    seq_id: int
    message: Any

    def canonical(self) -> bytes:
        """The same bytes for the same request, in whatever order a map was written."""
        return self.message.SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward:
    """What a training client is to be asked."""

    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float] | None
    forward_only: bool


def read_envelope(body: bytes) -> Envelope:
    """Refuses what is no such message, and one that names no model or no place in its program."""
    try:
        message = wire.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(
            f"the body of forward_backward must be a protobuf ForwardBackwardRequest, as the SDK sends it since 0.25: "
            f"{len(body)} bytes"
        ) from error
    if not message.model_id:
        raise InvalidRequest("model_id of the ForwardBackwardRequest is empty; pass that of a training client")
    if message.seq_id < 1:
        raise InvalidRequest(f"seq_id of the ForwardBackwardRequest counts a model's requests from 1: {message.seq_id}")
    return Envelope(message.model_id, message.seq_id, message)


def read_forward_backward(envelope: Envelope) -> ForwardBackward:
    """The data, checked as far as every model could."""
    message = envelope.message
    if message.loss_fn == SPOIL:
        raise InvalidRequest(message.loss_fn_config_v2["reason"].text)
    data = [_datum(index, each) for index, each in enumerate(message.data)]
    return ForwardBackward(data, message.loss_fn, _loss_config(message), message.forward_only)


def _loss_config(message: Any) -> dict[str, float] | None:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config) or None
    config: dict[str, float] = {}
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequest(f"loss_fn_config[{key!r}] must be a number: {value.text!r}")
        config[key] = value.number
    return config


def _datum(index: int, message: Any) -> Datum:
    try:
        return Datum(
            ModelInput([_chunk(each) for each in message.model_input]),
            {name: _tensor(f"loss_fn_inputs[{name!r}]", tensor) for name, tensor in message.loss_fn_inputs.items()},
            _spans(message.model_input_spans),
            _spans(message.loss_fn_input_spans),
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"datum {index}: {error}") from error


def _chunk(message: Any) -> EncodedTextChunk | ImageChunk:
    match message.WhichOneof("chunk"):
        case "encoded_text":
            return EncodedTextChunk(_array("tokens", message.encoded_text.tokens, np.dtype("<i4")).tolist())
        case "image":
            image = message.image
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            return ImageChunk(image.data, image.format, expected)
        case kind:
            raise InvalidRequest(f"a chunk must be encoded_text or an image; this server reads no other: {kind}")


def _tensor(what: str, message: Any) -> TensorData:
    dtype = _NUMPY.get(message.dtype)
    if dtype is None:
        raise InvalidRequest(f"{what} must be FLOAT32 or INT64 (DType 1 or 2): {message.dtype}")
    shape = tuple(message.shape)
    if min(shape, default=0) < 0 or math.prod(shape) > MAX_VALUES:
        raise InvalidRequest(
            f"{what} may have {MAX_VALUES} values at most, and no negative axis; its shape is: {shape}"
        )
    match message.WhichOneof("encoding"):
        case "dense":
            values = _array(what, message.dense, dtype)
        case "sparse_csr":
            csr, index = message.sparse_csr, np.dtype("<i8")
            rows = _array(f"{what}: crow_indices", csr.crow_indices, index)
            columns = _array(f"{what}: col_indices", csr.col_indices, index)
            return TensorData.adopt(_filled_up(what, _array(what, csr.values, dtype), rows, columns, shape))
        case _:
            values = np.zeros(0, dtype)
    if values.size != math.prod(shape):
        raise InvalidRequest(f"{what} has {values.size} values, which do not fill its shape: {shape}")
    return TensorData.adopt(values.reshape(shape).astype(dtype.newbyteorder("="), copy=False))


def _filled_up(
    what: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], others: int = 0
) -> np.ndarray:
    """A sparse matrix (CSR) as a dense one: cells that are not listed are `others`."""
    if len(shape) != 2:
        raise InvalidRequest(f"{what} is sparse, so it must have two axes; its shape is: {shape}")
    counts = np.diff(rows)
    are_rows = rows.size == shape[0] + 1 and rows[0] == 0 and rows[-1] == values.size and (counts >= 0).all()
    if not are_rows or columns.size != values.size:
        raise InvalidRequest(f"{what}: the indices are not those of a sparse matrix with {values.size} values: {shape}")
    if values.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise InvalidRequest(f"{what}: col_indices must be in 0..{shape[1] - 1}")
    dense = np.full(shape, others, values.dtype.newbyteorder("="))
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def read_targets(targets: bodies.PromptTargets) -> TensorData:
    """Token ids to be scored, -1 where none is named."""
    what, shape = "target_prompt_logprobs", (targets.shape[0], targets.shape[1])
    if math.prod(shape) > MAX_VALUES:
        raise InvalidRequest(f"{what} may have {MAX_VALUES} cells at most; its shape is: {shape}")
    values = _int64(what, targets.data)
    if targets.sparse_crow_indices is not None and targets.sparse_col_indices is not None:
        rows, columns = _int64(what, targets.sparse_crow_indices), _int64(what, targets.sparse_col_indices)
        return TensorData.adopt(_filled_up(what, values, rows, columns, shape, others=-1))
    if values.size != math.prod(shape):
        raise InvalidRequest(f"{what} has {values.size} values, which do not fill its shape: {shape}")
    return TensorData.adopt(values.reshape(shape))


def _int64(what: str, values: Sequence[int]) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise InvalidRequest(f"{what} has a number that no token and no index has") from error


def _array(what: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{what} must be a multiple of {dtype.itemsize} bytes: {len(data)}")
    return np.frombuffer(data, dtype)


def _spans(messages: Any) -> list[PromptProvenanceSpan | SampledProvenanceSpan] | None:
    spans: list[PromptProvenanceSpan | SampledProvenanceSpan] = []
    for message in messages:
        kind = message.WhichOneof("span")
        if kind is None:
            raise InvalidRequest("a provenance span must say whether it is of a prompt or sampled")
        span = getattr(message, kind)
        make = PromptProvenanceSpan if kind == "prompt_tokens" else SampledProvenanceSpan
        spans.append(make(sequence_id=span.sequence_id, offset=span.offset, length=span.length))
    return spans or None


# ---- results -------------------------------------------------------------------------------------------------------


def write_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """A ForwardBackwardOutput message. Datums whose outputs have the same fields and trailing shapes share a record."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for fields, outputs_D in groupby(output.loss_fn_outputs, _fields):
        _write_record(message.loss_fn_outputs.add(), fields, list(outputs_D))
    return message.SerializeToString()


def _fields(output: Mapping[str, TensorData]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, tensor.dtype, tensor.array.shape[1:]) for name, tensor in sorted(output.items())]


def _write_record(
    record: Any, fields: list[tuple[str, str, tuple[int, ...]]], outputs_D: list[Mapping[str, TensorData]]
) -> None:
    record.num_datums = len(outputs_D)
    for name, dtype, trailing in fields:
        arrays = [np.ascontiguousarray(output[name].array) for output in outputs_D]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        batched = record.fields[name]
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = offsets.tobytes()
        batched.dtype = _NUMBER_OF[dtype]
        batched.trailing_shape.extend(trailing)


def write_sample(response: SampleResponse, targets: bodies.PromptTargets | None = None) -> bytes:
    """A SampleResponse message. The ids of its sequences were told when it was submitted. `targets` were asked for:
    what is told of them lies as they do."""
    message = wire.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        written = message.sequences.add(stop_reason=_STOP_REASON[sequence.stop_reason])
        written.tokens = np.asarray(sequence.tokens, "<i4").tobytes()
        if sequence.logprobs is not None:
            written.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
        if sequence.topk_logprobs is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk_logprobs)
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _filled(response.prompt_logprobs).tobytes()
    if response.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None and targets is not None:
        _write_targets(message.target_prompt_logprobs, response.target_prompt_logprobs.array, targets)
    return message.SerializeToString()


def _filled(logprobs_T: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if each is None else each for each in logprobs_T], "<f4")


def _write_targets(message: Any, logprobs_TK: np.ndarray, targets: bodies.PromptTargets) -> None:
    message.dtype = _NUMBER_OF["float32"]
    message.shape.extend(targets.shape)
    if targets.sparse_crow_indices is None or targets.sparse_col_indices is None:
        message.dense = logprobs_TK.astype("<f4").tobytes()
        return
    rows, columns = np.array(targets.sparse_crow_indices, "<i8"), np.array(targets.sparse_col_indices, "<i8")
    listed = logprobs_TK[np.repeat(np.arange(targets.shape[0]), np.diff(rows)), columns]
    csr = message.sparse_csr
    csr.values, csr.crow_indices, csr.col_indices = listed.astype("<f4").tobytes(), rows.tobytes(), columns.tobytes()


def _write_topk(message: Any, rows_T: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    message.length, message.k = len(rows_T), max((len(row) for row in rows_T if row), default=0)
    tokens_TK = np.zeros((message.length, message.k), "<i4")
    logprobs_TK = np.full((message.length, message.k), NO_LOGPROB, "<f4")
    for index, row in enumerate(rows_T):
        for column, (token, logprob) in enumerate(row or ()):
            tokens_TK[index, column], logprobs_TK[index, column] = token, logprob
    message.token_ids, message.logprobs = tokens_TK.tobytes(), logprobs_TK.tobytes()


# ---- results as JSON, for clients that do not ask for protobuf -------------------------------------------------------


def forward_backward_as_json(data: bytes) -> dict[str, Any]:
    """What a stored ForwardBackwardOutput message holds."""
    message = wire.ForwardBackwardOutput.FromString(data)
    outputs = [output for record in message.loss_fn_outputs for output in _read_record(record)]
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": finite(message.metrics),
    }


def _read_record(record: Any) -> Iterator[dict[str, Any]]:
    names = {number: name for name, number in _NUMBER_OF.items()}
    columns: dict[str, list[dict[str, Any]]] = {}
    for name, batched in record.fields.items():
        offsets = np.frombuffer(batched.offsets, "<i8")
        trailing = list(batched.trailing_shape)
        columns[name] = [
            _as_json(np.frombuffer(batched.data[start:end], _NUMPY[batched.dtype]), names[batched.dtype], trailing)
            for start, end in pairwise(offsets)
        ]
    return ({name: column[index] for name, column in columns.items()} for index in range(record.num_datums))


def _as_json(values: np.ndarray, dtype: str, trailing: list[int]) -> dict[str, Any]:
    shape = [values.size // math.prod(trailing), *trailing]
    return {"data": values.tolist(), "dtype": dtype, "shape": shape}


def sample_as_json(data: bytes) -> dict[str, Any]:
    """What a stored SampleResponse message holds."""
    message = wire.SampleResponse.FromString(data)
    reasons = {number: reason for reason, number in _STOP_REASON.items()}
    sequences = [
        {
            "stop_reason": reasons[sequence.stop_reason],
            "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist() if sequence.HasField("logprobs") else None,
            "topk_logprobs": _topk_as_json(sequence.topk_sampled_logprobs)
            if sequence.HasField("topk_sampled_logprobs")
            else None,
        }
        for sequence in message.sequences
    ]
    prompt = np.frombuffer(message.prompt_logprobs, "<f4").tolist() if message.HasField("prompt_logprobs") else None
    return {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": None if prompt is None else [None if math.isnan(each) else each for each in prompt],
        "topk_prompt_logprobs": _topk_as_json(message.topk_prompt_logprobs)
        if message.HasField("topk_prompt_logprobs")
        else None,
    }


def _topk_as_json(topk: Any) -> list[list[tuple[int, float]] | None]:
    tokens_TK = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k)
    logprobs_TK = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k)
    rows: list[list[tuple[int, float]]] = [
        [(token, logprob) for token, logprob in zip(*pair, strict=True) if logprob != np.float32(NO_LOGPROB)]
        for pair in zip(tokens_TK.tolist(), logprobs_TK.tolist(), strict=True)
    ]
    return [row or None for row in rows]


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no number that is not finite, and the SDK reads none: those are left out. `skipped_nonfinite` tells."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}

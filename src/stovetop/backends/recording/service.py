"""A deterministic fake of the whole service, for tests: yours too. It is a real backend with a tiny model behind it.

    with recording.open_service(tmp_path) as service:
        client = service.create_lora_training_client("any/name").result()
        train(client)  # the loss really falls
        assert [call.verb for call in service.calls][1:] == ["forward_backward", "optim_step"]

The model is a bigram table over bytes (`bigram.py`): all losses, AdamW, sampling, save and load are exact, no torch is
loaded, and a step takes a few milliseconds. An adapter is a whole table, so rank and targets are only kept.
Slowness and failure are arguments: `latency_s`, `faults`, `disk`.
"""

import hashlib
import heapq
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, assert_never, get_args

import numpy as np
from safetensors.numpy import load, save

from stovetop.arguments import Preload, Storage, UserMetadata
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.opened_base import NamedModels, to_preload
from stovetop.backends.queues import USUAL_BOUNDS, QueueBounds
from stovetop.backends.recording import bigram
from stovetop.backends.recording.bigram import Floats, Moments, Table
from stovetop.backends.recording.byte_tokenizer import SPECIAL_TOKENS, ByteTokenizer
from stovetop.backends.saved_runs import RunLabels
from stovetop.checks import check, checked_as
from stovetop.durable import LOCAL_DISK, Disk, read_folder, read_manifest, write_folder
from stovetop.engine import ops
from stovetop.engine.counts import Counts
from stovetop.errors import Cancelled, InvalidRequest, UnknownName
from stovetop.input_checks import ModelLimits, check_step
from stovetop.losses import Loss, temperature_of
from stovetop.rules import AnyOf, Anything, Function, Instance, ListOf, Text, Whole, number
from stovetop.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    Seed,
    TensorData,
)

CONTEXT_LENGTH = 8192

Verb = Literal[
    "create_lora_training_client",
    "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer",
    "create_sampling_client",
    "forward",
    "forward_backward",
    "forward_backward_custom",
    "optim_step",
    "save_state",
    "save_weights_for_sampler",
    "save_weights_and_get_sampling_client",
    "load_state",
    "load_state_with_optimizer",
    "sample",
    "compute_logprobs",
    "save",
]
Latency = float | Callable[[Verb], float]  # seconds a call, or seconds by verb


@dataclass(frozen=True, slots=True)
class Raises:
    """The `nth` call of a verb, counted from 1 over all clients of a base model, does nothing but fail with `error`."""

    verb: Annotated[Verb, Text("the name of a verb")]
    nth: Annotated[int, Whole(1)]
    error: Exception

    def __post_init__(self) -> None:
        check(self)
        if self.verb not in get_args(Verb):
            raise UnknownName("verb", self.verb, get_args(Verb))


@dataclass(frozen=True, slots=True)
class NonFiniteGradient:
    """The `nth` forward_backward leaves a gradient of NaN."""

    nth: Annotated[int, Whole(1)]
    verb: Literal["forward_backward", "forward_backward_custom"] = "forward_backward"

    def __post_init__(self) -> None:
        check(self)


Fault = Raises | NonFiniteGradient


@checked_as("ServiceClient")
def open_service(
    storage: Storage | None = None,
    *,
    seed: Seed = 0,
    latency_s: Annotated[Latency, AnyOf((number(at_least=0, at_most=3600), Function(1, "(verb) -> seconds")))] = 0.0,
    faults: Annotated[Sequence[Fault], ListOf(Instance((Raises, NonFiniteGradient)))] = (),
    disk: Annotated[Disk, Anything()] = LOCAL_DISK,
    max_queued_calls: Annotated[int, Whole(1)] = USUAL_BOUNDS.max_calls,
    max_queued_tokens: Annotated[int, Whole(1)] = USUAL_BOUNDS.max_tokens,
    models: Sequence[str] | Mapping[str, Storage] | None = None,
    preload: Preload = False,
    user_metadata: UserMetadata | None = None,
    project_id: str | None = None,
    display_name: str | None = None,
) -> InProcessServiceClient:
    """A service whose `calls` lists what was asked of its clients, in order.

    storage    where checkpoints go; None: a new folder in the system's temporary one, made by the first save
    seed       of the base models; each name has a table of its own
    latency_s  how long a call takes. Calls of one training client queue up, samples overlap
    faults     what goes wrong; each happens once
    disk       the checkpoints' file operations; `failing_disk.FailingDisk` has some that fail
    max_queued_calls, max_queued_tokens
               that may wait of one client, tokens to be computed and drawn: one call more is refused with QueueFull
    models     the names of the base models there are; None: every name is one. A dictionary, as the embedded backend
               takes it, is as good: its values are not read
    preload    as the embedded backend takes it
    user_metadata, project_id, display_name
               go into every checkpoint
    """

    def open_engine(name: str) -> ops.Engine:
        return RecordingEngine(name, seed, latency_s, faults, disk)

    labels = RunLabels(user_metadata or {}, display_name, project_id)
    if storage is None:
        storage = Path(tempfile.gettempdir()) / f"stovetop-recording-{uuid.uuid4().hex[:12]}"
    named = NamedModels(None if models is None else list(models))
    return InProcessServiceClient.over(
        open_engine,
        Path(storage),
        models=named,
        labels=labels,
        preload=to_preload(preload, models),
        bounds=QueueBounds(max_queued_calls, max_queued_tokens),
        record=True,
    )


# ---- the engine ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Adapter:
    """What one training client owns. The arrays are never changed in place, so freezing is keeping a reference."""

    config: LoraConfig
    delta_VV: Table
    moments: Moments
    gradient_VV: Floats | None = None  # None: no forward_backward since the last optim_step
    failure: Exception | None = None  # of a forward_backward since the last optim_step


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """What a custom loss is computed from, until it is known what became of the loss."""

    data: Sequence[Datum]
    scored_D: list[bigram.Scored]
    fault: "Fault | None"


@dataclass(frozen=True, slots=True, eq=False)
class _Frozen:
    """An adapter's weights at one moment."""

    config: LoraConfig
    delta_VV: Table


@dataclass(frozen=True, slots=True, order=True)
class _Queued:
    due_s: float
    number: float
    ticket: ops.Ticket
    fault: Fault | None


class RecordingEngine:
    """See `ops.Engine`. An op runs when its latency has passed; those of one adapter one after the other."""

    def __init__(self, name: str, seed: int, latency_s: Latency, faults: Sequence[Fault], disk: Disk) -> None:
        self._tokenizer = ByteTokenizer()
        self.counts = Counts()  # a fake computes nothing that would be worth it
        self._base_VV = _base_table(name, seed, len(self._tokenizer))
        limits = ModelLimits(name, len(self._tokenizer), CONTEXT_LENGTH)
        self.description = ops.Description(limits, hashlib.sha256(self._base_VV.tobytes()).hexdigest(), name)
        self.adapters: dict[ops.AdapterId, Adapter] = {}
        self._frozen: dict[ops.WeightsId, _Frozen] = {}
        self._scored: dict[ops.ScoreId, _Scored] = {}
        self._held: dict[ops.AdapterId, list[_Queued]] = {}  # what waits for what became of a custom loss
        self._at_gate: dict[str, list[_Queued]] = {}  # what waits for the disk, by lane
        self._may_begin: Callable[[ops.Ticket], bool] = lambda ticket: True
        self._busy_until_s: dict[ops.AdapterId, float] = {}
        self._answers: list[ops.Finished] = []
        self._latency_s = latency_s
        self._faults = faults
        self._disk = disk
        self._queue: list[_Queued] = []  # a heap: what is due first
        self._count = Counter[Verb]()  # of calls by verb
        self._submitted = 0

    def set_gate(self, may_begin: Callable[[ops.Ticket], bool]) -> None:
        self._may_begin = may_begin

    def submit(self, op: ops.Op) -> ops.Ticket:
        """Queues an op and records it as a call. It is done when its latency has passed and those before it are
        done."""
        self._submitted += 1
        ticket, verb, fault = ops.Ticket(self._submitted, op), verb_of(op), None
        if verb is not None:
            self._count[verb] += 1
            nth = self._count[verb]
            fault = next((fault for fault in self._faults if fault.verb == verb and fault.nth == nth), None)
        try:
            queued = _Queued(self._due_s(op, verb), ticket.number, ticket, fault)
        except Exception as error:  # of a function that the user gave as `latency_s`
            self._answers.append(ops.Finished(ticket, error=error))
            return ticket
        if isinstance(op, ops.LossAnswer) and op.scored is not None:
            queued = self._before_what_waits(op, queued)
        heapq.heappush(self._queue, queued)
        return ticket

    def _before_what_waits(self, op: ops.LossAnswer, queued: "_Queued") -> "_Queued":
        """An answer to a `Score` comes directly behind it; where that is done, at once."""
        for other in self._queue:
            if isinstance(other.ticket.op, ops.Score) and other.ticket.op.scored == op.scored:
                return replace(queued, due_s=other.due_s, number=other.number + 0.5)
        if op.adapter in self._held:
            for waiting in self._held.pop(op.adapter):
                heapq.heappush(self._queue, waiting)
            return replace(queued, due_s=0.0, number=-queued.number)
        return queued

    def cancel(self, ticket: ops.Ticket) -> None:
        for queue in (self._queue, *self._held.values(), *self._at_gate.values()):
            if any(queued.ticket is ticket for queued in queue):
                queue[:] = [queued for queued in queue if queued.ticket is not ticket]
                heapq.heapify(queue)
                self._answers.append(ops.Finished(ticket, error=Cancelled()))
        self._at_gate = {lane: waiting for lane, waiting in self._at_gate.items() if waiting}

    def step(self) -> list[ops.Finished]:
        """Runs the next op that is due, or waits a millisecond at most, so that new ones are seen."""
        if self._answers:
            answers, self._answers = self._answers, []
            return answers
        for lane in self._let_in():
            for queued in self._at_gate.pop(lane):
                heapq.heappush(self._queue, queued)
        if not self._queue:
            return []
        wait_s = self._queue[0].due_s - time.monotonic()
        if wait_s > 0:
            time.sleep(min(wait_s, 0.001))
            return []
        queued = heapq.heappop(self._queue)
        op = queued.ticket.op
        if isinstance(op, ops.AdapterOp) and op.adapter in self._held:
            self._held[op.adapter].append(queued)
            return []
        if self._waits_at_gate(queued):
            return []
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # an infinite loss is reported, and its step skipped
                return [ops.Finished(queued.ticket, result=self._run_faulty(op, queued.fault))]
        except Exception as error:  # it belongs to the caller of this op
            if isinstance(op, ops.ForwardBackward | ops.Score | ops.BackwardFrom) and op.adapter in self.adapters:
                adapter = self.adapters[op.adapter]
                adapter.failure = adapter.failure or error
            return [ops.Finished(queued.ticket, error=error)]

    @property
    def idle(self) -> bool:
        return not self._queue and not self._answers and not self._let_in()

    def _let_in(self) -> list[str]:
        """Lanes whose first op may begin by now."""
        return [lane for lane, waiting in self._at_gate.items() if self._may_begin(waiting[0].ticket)]

    def _waits_at_gate(self, queued: _Queued) -> bool:
        op = queued.ticket.op
        lane = ops.lane_of(op) if isinstance(op, ops.OrderedOp) else op.weights or ""
        if lane in self._at_gate:
            self._at_gate[lane].append(queued)
            return True
        if isinstance(op, ops.SaveAdapter | ops.LoadingOp) and not self._may_begin(queued.ticket):
            self._at_gate[lane] = [queued]
            return True
        return False

    def get_tokenizer(self) -> ByteTokenizer:
        """The byte tokenizer, whatever the model's name."""
        return self._tokenizer

    def _due_s(self, op: ops.Op, verb: Verb | None) -> float:
        latency_s = 0.0 if verb is None else self._latency_s(verb) if callable(self._latency_s) else self._latency_s
        if isinstance(op, ops.DropWeights):  # after all that samples from them
            return max((queued.due_s for queued in self._queue), default=0.0)
        if not isinstance(op, ops.AdapterOp):
            return time.monotonic() + latency_s
        due_s = max(self._busy_until_s.get(op.adapter, 0.0), time.monotonic()) + latency_s
        self._busy_until_s[op.adapter] = due_s
        return due_s

    def _run_faulty(self, op: ops.Op, fault: Fault | None) -> ops.Result:
        match fault:
            case Raises():
                raise fault.error
            case NonFiniteGradient() if isinstance(op, ops.ForwardBackward):
                output = self._run(op, fault)
                self._spoil_gradient(op.adapter)
                return output
            case _:
                return self._run(op, fault)

    def _run(self, op: ops.Op, fault: Fault | None) -> ops.Result:
        match op:
            case ops.CreateAdapter():
                self.adapters[op.adapter] = self._new_adapter(op.config)
            case ops.LoadAdapter():
                adapter = self._new_adapter(LoraConfig(**read_manifest(op.path)["lora"]))
                self._restore(adapter, op.path, op.with_optimizer)
                self.adapters[op.adapter] = adapter
            case ops.RestoreAdapter():
                self._restore(self._adapter(op.adapter), op.path, op.with_optimizer)
            case ops.SaveAdapter():
                adapter = self._adapter(op.adapter)
                moments = adapter.moments if op.with_optimizer else None
                return self._snapshot(op, adapter.config, adapter.delta_VV, moments, overwrite=op.overwrite)
            case ops.SaveWeights():
                weights = self._weights(op.weights)
                return self._snapshot(op, weights.config, weights.delta_VV, None, overwrite=False)
            case ops.Forward():
                return self._forward(self._adapter(op.adapter).delta_VV, op.data, op.loss)[0]
            case ops.ForwardBackward():
                adapter = self._adapter(op.adapter)
                output, gradient_VV = self._forward(adapter.delta_VV, op.data, op.loss)
                _accumulate(adapter, gradient_VV)
                return output
            case ops.Score():
                return self._score(op, fault)
            case ops.BackwardFrom():
                self._backward_from(op)
            case ops.TakeBack():
                self._scored.pop(op.scored, None)
            case ops.Spoil():
                if op.scored is not None:
                    self._scored.pop(op.scored, None)
                adapter = self._adapter(op.adapter)
                adapter.failure = adapter.failure or InvalidRequest(op.reason)
            case ops.OptimStep():
                return _optim_step(self._adapter(op.adapter), op.params)
            case ops.Freeze():
                adapter = self._adapter(op.adapter)
                self._frozen[op.weights] = _Frozen(adapter.config, adapter.delta_VV)
            case ops.LoadWeights():
                config = LoraConfig(**read_manifest(op.path)["lora"])
                self._frozen[op.weights] = _Frozen(config, load(read_folder(op.path)["adapter.safetensors"])["delta"])
            case ops.DropAdapter():
                del self.adapters[op.adapter]
            case ops.DropWeights():
                del self._frozen[op.weights]
            case ops.Sample():
                return self._sample(op)
            case ops.ComputeLogprobs():
                return _prompt_logprobs(self._table_of(op), op.prompt)
            case _:
                assert_never(op)
        return None

    def _adapter(self, name: ops.AdapterId) -> Adapter:
        if name not in self.adapters:
            raise InvalidRequest(f"there is no adapter of this name: it could not be made, or was dropped: {name!r}")
        return self.adapters[name]

    def _weights(self, name: ops.WeightsId) -> "_Frozen":
        if name not in self._frozen:
            raise InvalidRequest(f"there are no weights of this name, or no more: {name!r}")
        return self._frozen[name]

    # -- training --

    def _forward(self, delta_VV: Table, data: Sequence[Datum], loss: Loss) -> tuple[ForwardBackwardOutput, Floats]:
        table_VV, temperature = self._table(delta_VV), temperature_of(loss)
        gradient_VV = np.zeros(table_VV.shape)
        logprobs_D: list[Floats] = []
        total = 0.0
        for datum in data:
            scored = bigram.score(table_VV, datum, temperature)
            inputs = {name: tensor.array.astype(np.float64) for name, tensor in datum.loss_fn_inputs.items()}
            value, slope = bigram.loss_and_slope(loss, scored.logprobs, inputs)
            gradient_VV += bigram.gradient(scored, datum, slope, temperature)
            logprobs_D.append(scored.logprobs)
            total += value
        return _output(logprobs_D, {"loss:sum": total}), gradient_VV

    def _score(self, op: ops.Score, fault: Fault | None) -> ForwardBackwardOutput:
        table_VV = self._table(self._adapter(op.adapter).delta_VV)
        scored_D = [bigram.score(table_VV, datum) for datum in op.data]
        self._scored[op.scored] = _Scored(op.data, scored_D, fault)
        if not self._answer_waits(op.scored):
            self._held[op.adapter] = []
        return _output([scored.logprobs for scored in scored_D], {})

    def _answer_waits(self, scored: ops.ScoreId) -> bool:
        """What became of the loss is known already: the ops are done once more from a record."""
        waiting = [queued.ticket.op for queued in self._queue]
        return any(isinstance(op, ops.LossAnswer) and op.scored == scored for op in waiting)

    def _backward_from(self, op: ops.BackwardFrom) -> None:
        scored = self._scored.pop(op.scored)
        gradient_VV = np.zeros(self._base_VV.shape)
        for datum, own, slope in zip(scored.data, scored.scored_D, op.gradients, strict=True):
            gradient_VV += bigram.gradient(own, datum, slope.array.astype(np.float64))
        _accumulate(self._adapter(op.adapter), gradient_VV)
        if isinstance(scored.fault, NonFiniteGradient):
            self._spoil_gradient(op.adapter)

    def _spoil_gradient(self, name: ops.AdapterId) -> None:
        adapter = self._adapter(name)
        assert adapter.gradient_VV is not None, "it was just added"
        adapter.gradient_VV = adapter.gradient_VV * np.nan

    # -- state --

    def _new_adapter(self, config: LoraConfig) -> Adapter:
        zeros_VV = np.zeros_like(self._base_VV)
        return Adapter(config, zeros_VV, Moments(0, zeros_VV, zeros_VV))

    def _snapshot(
        self, op: ops.SavingOp, config: LoraConfig, delta_VV: Table, moments: Moments | None, *, overwrite: bool
    ) -> ops.Snapshot:
        """Arrays are never changed in place, so it holds them as they are."""

        def write() -> None:
            files = {"adapter.safetensors": save({"delta": delta_VV})}
            if moments is not None:
                files["optimizer.safetensors"] = save(
                    {"step": np.array([moments.step]), "mean": moments.mean_VV, "square": moments.square_VV}
                )
            meta = {**op.meta, "lora": asdict(config), "with_optimizer": moments is not None}
            write_folder(op.path, files, meta, overwrite=overwrite, disk=self._disk)

        return ops.Snapshot(write)

    def _restore(self, adapter: Adapter, path: Path, with_optimizer: bool) -> None:
        """All of it or, when the folder is torn, nothing."""
        files = read_folder(path)
        moments = self._new_adapter(adapter.config).moments
        if with_optimizer:
            saved = load(files["optimizer.safetensors"])
            moments = Moments(int(saved["step"][0]), saved["mean"], saved["square"])
        adapter.delta_VV = load(files["adapter.safetensors"])["delta"]
        adapter.moments = moments
        adapter.gradient_VV, adapter.failure = None, None

    # -- sampling --

    def _table(self, delta_VV: Table) -> Table:
        return self._base_VV + delta_VV

    def _table_of(self, op: ops.SamplingOp) -> Table:
        return self._base_VV if op.weights is None else self._table(self._weights(op.weights).delta_VV)

    def _sample(self, op: ops.Sample) -> SampleResponse:
        table_VV, topk = self._table_of(op), op.topk_prompt_logprobs
        sequences = bigram.draw(table_VV, op.prompt.to_ints(), op.num_samples, op.params, self._tokenizer)
        if op.topk_sample_logprobs > 0:
            sequences = [_with_top(table_VV, op, sequence) for sequence in sequences]
        return SampleResponse(
            sequences,
            _prompt_logprobs(table_VV, op.prompt) if op.include_prompt_logprobs else None,
            [None, *(_top(row_V, topk) for row_V in _following(table_VV, op.prompt))] if topk > 0 else None,
            target_prompt_logprobs=None
            if op.target_prompt_logprobs is None
            else _named_logprobs(table_VV, op.prompt, op.target_prompt_logprobs),
        )


def verb_of(op: ops.Op) -> Verb | None:
    """The client's verb that an op comes from; None where it is a part of one."""
    match op:
        case ops.CreateAdapter():
            return "create_lora_training_client"
        case ops.LoadAdapter():
            if op.with_optimizer:
                return "create_training_client_from_state_with_optimizer"
            return "create_training_client_from_state"
        case ops.Forward():
            return "forward"
        case ops.ForwardBackward():
            return "forward_backward"
        case ops.Score():
            return "forward_backward_custom"
        case ops.BackwardFrom() | ops.Spoil() | ops.TakeBack() | ops.DropAdapter() | ops.DropWeights():
            return None
        case ops.OptimStep():
            return "optim_step"
        case ops.SaveAdapter():
            return "save_state" if op.with_optimizer else "save_weights_for_sampler"
        case ops.RestoreAdapter():
            return "load_state_with_optimizer" if op.with_optimizer else "load_state"
        case ops.Freeze():
            return "save_weights_and_get_sampling_client"
        case ops.LoadWeights():
            return "create_sampling_client"
        case ops.SaveWeights():
            return "save"
        case ops.Sample():
            return "sample"
        case ops.ComputeLogprobs():
            return "compute_logprobs"
        case _:
            assert_never(op)


def _base_table(name: str, seed: int, vocab_size: int) -> Table:
    """Logits of a model that writes printable characters and ends a turn after some forty tokens. Control tokens that
    ChatML has not are as good as never written, until it is trained to."""
    generator = np.random.default_rng([seed, *name.encode()])
    num_chatml = SPECIAL_TOKENS["<|im_end|>"] + 1  # bytes and the tokens of ChatML
    table_VV = np.full((vocab_size, vocab_size), -8.0)
    table_VV[:num_chatml, :num_chatml] = generator.normal(size=(num_chatml, num_chatml))
    table_VV[num_chatml:, :num_chatml] = generator.normal(size=(vocab_size - num_chatml, num_chatml))
    table_VV[:, ord(" ") : ord("~") + 1] += 3.0
    table_VV[:, SPECIAL_TOKENS["<|im_end|>"]] += 4.0
    return table_VV.astype(np.float32)


def _accumulate(adapter: Adapter, gradient_VV: Floats) -> None:
    adapter.gradient_VV = gradient_VV if adapter.gradient_VV is None else adapter.gradient_VV + gradient_VV


def _optim_step(adapter: Adapter, params: AdamParams) -> OptimStepResponse:
    """Gradients are dropped whatever happens."""
    gradient_VV, failure = adapter.gradient_VV, adapter.failure
    adapter.gradient_VV, adapter.failure = None, None
    check_step(gradient_VV, failure)
    assert gradient_VV is not None, "check_step has refused that"
    adapter.delta_VV, adapter.moments, metrics = bigram.adamw(adapter.delta_VV, adapter.moments, gradient_VV, params)
    return OptimStepResponse(metrics)


def _output(logprobs_D: list[Floats], metrics: dict[str, float]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput("logprobs", [{"logprobs": TensorData.from_numpy(p)} for p in logprobs_D], metrics)


def _following(table_VV: Table, prompt: ModelInput) -> Table:
    """Log-probabilities, at temperature 1, of what may follow each token but the last."""
    return bigram.log_softmax(table_VV[prompt.to_ints()[:-1]]).astype(np.float32)


def _prompt_logprobs(table_VV: Table, prompt: ModelInput) -> list[float | None]:
    rows_NV = _following(table_VV, prompt)
    return [None, *(float(row_V[token]) for row_V, token in zip(rows_NV, prompt.to_ints()[1:], strict=True))]


def _named_logprobs(table_VV: Table, prompt: ModelInput, targets: TensorData) -> TensorData:
    targets_TK = targets.array.astype(np.int64)
    rows_TV = _following(table_VV, prompt)
    logprobs_TK = np.take_along_axis(rows_TV, np.maximum(targets_TK, 0), axis=1)
    return TensorData.from_numpy(np.where(targets_TK == -1, np.float32(0), logprobs_TK))


def _with_top(table_VV: Table, op: ops.Sample, sequence: SampledSequence) -> SampledSequence:
    before = [op.prompt.to_ints()[-1], *sequence.tokens[:-1]]
    rows_TV = bigram.log_softmax(table_VV[before], op.params.temperature or 1.0).astype(np.float32)
    return replace(sequence, topk_logprobs=[_top(row_V, op.topk_sample_logprobs) for row_V in rows_TV])


def _top(logprobs_V: Table, count: int) -> list[tuple[int, float]]:
    ranked = np.argsort(-logprobs_V, kind="stable")[:count]
    return [(int(token), float(logprobs_V[token])) for token in ranked]

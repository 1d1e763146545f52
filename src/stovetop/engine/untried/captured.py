# pyright: basic
"""Passes of decoding as recordings: on CUDA a pass over few rows takes longer to launch, kernel by kernel, than to
compute; a recording of it is launched at once.

A recording reads its inputs from tensors of its own and repeats the same work on the same addresses. So there is one
for each size of pass, rounded up so that few sizes come about, and it is dropped when the cache or the stack of
adapters moves. Each is compared with an ordinary pass when it is made; if one cannot be made or differs, the log says
so, and every pass is an ordinary one from then on.

Shapes: `S` rows of a pass, `K` adapters, `M` rows of one of them, at most; `E` hidden size.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stovetop.engine.kernels.attention_plans import CachedAttention
from stovetop.engine.kernels.row_groups import RowGroups
from stovetop.engine.lora.routing import StackRows
from stovetop.engine.model import exactness
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoding import Step, decoded

log = logging.getLogger(__name__)

MAX_RECORDINGS = 64
MIN_KEYS = 64
TOLERANCE = 0.1  # between recorded and ordinary hidden states, relative to their norm: another shape rounds otherwise


class Recorder(Protocol):
    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Records what `run` does. Returns what repeats it, and the tensor in which the result then is."""
        ...


class CudaGraphs:
    """Recordings in one pool of memory, for no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):
            outer, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            self._stream.wait_stream(outer)
            with torch.cuda.stream(self._stream):
                run()  # libraries set themselves up on their first call, and no recording allows that
                torch.cuda.synchronize()
                # not `torch.cuda.graph`, which gives all free memory back to the system first
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = run()
                finally:
                    graph.capture_end()
            outer.wait_stream(self._stream)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, out


def never_waits(model: BaseModel) -> bool:
    """Whether its passes never look at what they computed, for which the processor would have to wait, and which no
    recording can do: experts look at the choice of the router, some rotary embeddings at the positions."""
    experts = any(
        getattr(model.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    rotaries = exactness.rotaries(model.trunk)
    return not experts and all(getattr(rotary, "rope_type", None) in exactness.ROPE_TYPES for rotary in rotaries)


def on_cuda(model: BaseModel) -> "CapturedDecoding | None":
    """With CUDA's graphs; None for a model on another device, or one whose passes no recording can do."""
    if model.device.type != "cuda" or not never_waits(model):
        return None
    return CapturedDecoding(model, CudaGraphs(model.device))


class _Size(NamedTuple):
    """What a recording fits."""

    num_rows: int
    num_keys: int
    cache_version: int
    stack_version: int  # 0: no adapters
    has_one: bool  # one adapter has all rows
    rows_shape: tuple[int, int]  # K and M


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a recording reads."""

    tokens_S: Tensor
    positions_S: Tensor
    places_S: Tensor
    parts: list[StackRows]

    def fill(self, step: Step) -> None:
        """Rows beyond those of the step write into slots that are not in use, and belong to no adapter."""
        for target_S, values in (
            (self.tokens_S, step.tokens_S),
            (self.positions_S, step.positions_S),
            (self.places_S, step.places_S),
        ):
            target_S.copy_(torch.tensor(values + [0] * (len(target_S) - len(values))))
        for part, own in zip(self.parts, step.parts, strict=True):
            assert isinstance(own, StackRows), "see _is_recordable"
            _fill_groups(part.groups, own.groups)


class _Recording(NamedTuple):
    inputs: _Inputs
    replay: Callable[[], None]
    hidden_SE: Tensor


class CapturedDecoding:
    """Does what `decoding.decoded` does."""

    def __init__(self, model: BaseModel, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder
        self._recordings: OrderedDict[_Size, _Recording] = OrderedDict()
        self._met: set[_Size] = set()  # once: a size that does not come again is not worth a recording
        self.works = True

    def __call__(self, step: Step) -> Tensor:
        if not self.works or step.prefixes is not None or not _is_recordable(step):
            return decoded(self._model, step)
        size = self._size(step)
        if size is None:
            return decoded(self._model, step)
        recording = self._recordings.get(size)
        if recording is None:
            return self._first(step, size)
        self._recordings.move_to_end(size)
        recording.inputs.fill(step)
        recording.replay()
        return recording.hidden_SE[: len(step.tokens_S)].clone()

    def _size(self, step: Step) -> _Size | None:
        """None if a pass of it would take more of the cache than there may be."""
        num_rows, num_keys = rounded_up(len(step.tokens_S)), max(MIN_KEYS, rounded_up(step.num_keys))
        if step.cache.max_tokens is not None and num_rows * num_keys > step.cache.max_tokens:
            return None
        step.cache.reserve(num_rows, num_keys)
        step.cache.settle()
        if not step.parts:
            return _Size(num_rows, num_keys, step.cache.version, 0, False, (0, 0))
        (part,) = step.parts
        assert isinstance(part, StackRows), "see _is_recordable"
        num_adapters, most = part.groups.rows_KM.shape
        shape = (num_adapters, rounded_up(most))
        return _Size(num_rows, num_keys, step.cache.version, part.stack.version, part.groups.is_one, shape)

    def _first(self, step: Step, size: _Size) -> Tensor:
        """Of its size: an ordinary pass, whose result counts, and when the size comes again, a recording for others."""
        hidden_SE = decoded(self._model, step)
        if size not in self._met or not hidden_SE.isfinite().all():
            versions = (size.cache_version, size.stack_version)
            self._met = {met for met in self._met if (met.cache_version, met.stack_version) == versions} | {size}
            return hidden_SE
        try:
            recording = self._recorded(step, size)
            recording.hidden_SE.fill_(torch.nan)  # what recording has left there is no result of it
            recording.replay()
        except RuntimeError as error:
            self._give_up(f"a pass cannot be recorded: {error}")
            return hidden_SE
        error = (recording.hidden_SE[: len(hidden_SE)] - hidden_SE).float().norm() / hidden_SE.float().norm()
        if not error <= TOLERANCE:
            self._give_up(f"a recorded pass differs from an ordinary one by {error:.2g} of its norm")
            return hidden_SE
        self._recordings = OrderedDict(
            (size, known) for size, known in self._recordings.items() if _is_current(size, known, step)
        )
        self._recordings[size] = recording
        if len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return hidden_SE

    def _recorded(self, step: Step, size: _Size) -> _Recording:
        inputs = _inputs(step, size, self._model.device)
        inputs.fill(step)  # before anything runs on them: a pass writes to the cache

        def run() -> Tensor:
            plan = CachedAttention(step.cache, self._model.arithmetic, inputs.places_S, size.num_keys)
            return self._model.hidden_states_of(inputs.tokens_S, inputs.positions_S, plan, inputs.parts)

        return _Recording(inputs, *self._recorder(run))

    def _give_up(self, why: str) -> None:
        log.warning("decoding goes on without recordings: %s", why)
        self.works = False
        self._recordings.clear()


def rounded_up(count: int) -> int:
    """To a number of at most three binary digits before its zeros, so at most by a quarter."""
    multiple = 1 << max(0, count.bit_length() - 3)
    return -(-count // multiple) * multiple


def _is_recordable(step: Step) -> bool:
    """Adapters in a stack stay where they are; others would be read from the addresses of this pass."""
    return len(step.parts) <= 1 and all(isinstance(part, StackRows) for part in step.parts)


def _is_current(size: _Size, recording: _Recording, step: Step) -> bool:
    """Whether it reads from where things are now."""
    moved = any(part.stack.version != size.stack_version for part in recording.inputs.parts)
    return size.cache_version == step.cache.version and not moved


def _inputs(step: Step, size: _Size, device: torch.device) -> _Inputs:
    tokens_S, positions_S, places_S = torch.zeros(3, size.num_rows, dtype=torch.int64, device=device)
    stacks = [part.stack for part in step.parts if isinstance(part, StackRows)]
    return _Inputs(tokens_S, positions_S, places_S, [StackRows(stack, _groups(size, device)) for stack in stacks])


def _groups(size: _Size, device: torch.device) -> RowGroups:
    all_S = torch.arange(size.num_rows, device=device)
    if size.has_one:  # the padding rows belong to it too; they are not read
        return RowGroups(all_S[None], all_S, None, is_dense=True)
    return RowGroups(torch.zeros(size.rows_shape, dtype=torch.int64, device=device), all_S, all_S >= 0)


def _fill_groups(groups: RowGroups, own: RowGroups) -> None:
    if groups.without_N is None:
        return
    own_most, most = own.rows_KM.shape[1], groups.rows_KM.shape[1]
    groups.rows_KM.zero_()
    groups.rows_KM[:, :own_most] = own.rows_KM
    groups.place_N.zero_()
    groups.place_N[: own.num_rows] = own.place_N + own.place_N // own_most * (most - own_most)
    groups.without_N.fill_(True)
    groups.without_N[: own.num_rows] = False if own.without_N is None else own.without_N

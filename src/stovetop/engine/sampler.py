# pyright: basic
"""Computed prompts to tokens. Newcomers join a running batch, whoever is finished leaves it at once.

A step computes pieces of the prompts that wait (`prompts.py`), draws one token for every running sequence and lets in
as many new ones as there is room. Memory is bounded by `MAX_CACHED_TOKENS`, slots times positions of the longest
sequence that may come of them (room that slots and prefixes once had is kept, up to that much each): what does not
fit waits its turn and never fails; a sequence that exceeds the bound on its own runs alone. Sequences sit in the
first slots of the cache, so the pass over them reads a view; a slot that ends is filled with the last one. Samples of
one prompt share what is cached of it (`shared_prefix.py`).

Shapes: `S` running sequences, `V` vocabulary, `E` hidden size.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import torch

from stovetop.engine.captured import CapturedDecoding, CudaGraphs, Recorder, never_waits
from stovetop.engine.decoding import Step, decoded
from stovetop.engine.drawing import draw
from stovetop.engine.kv_cache import BLOCK, KVCache
from stovetop.engine.lora import AdapterWeights
from stovetop.engine.machine import available_bytes
from stovetop.engine.model import BaseModel
from stovetop.engine.ops import Finished, Sample, Ticket
from stovetop.engine.packing import Segment
from stovetop.engine.prompts import Prompt, Prompts
from stovetop.engine.routing import Parts, Stack, rows_by_owner, stacked_rows
from stovetop.engine.shared_prefix import MIN_PREFIX_TOKENS, Prefix, SharedPrefixes
from stovetop.engine.stops import Stops, stops_of
from stovetop.types import SampledSequence, SampleResponse, SamplingParams

MAX_RUNNING = 512  # sequences
MAX_CACHED_TOKENS = 2**18  # slots times positions
KEPT_SHARE = 0.2  # of the available memory, that an idle cache may have besides


@dataclass(slots=True, eq=False)
class _Request:
    """A prompt that is computed, and its samples."""

    prompt: Prompt
    params: SamplingParams
    stops: Stops
    done: list[SampledSequence | None]
    num_started: int = 0

    @property
    def num_left(self) -> int:
        return len(self.done) - self.num_started

    def answer(self) -> Finished:
        prompt = self.prompt
        sequences = [sequence for sequence in self.done if sequence is not None]
        response = SampleResponse(
            sequences,
            prompt.logprobs if prompt.wants_logprobs else None,
            prompt.top_logprobs if prompt.num_top else None,
            prompt.num_reused,
        )
        return Finished(prompt.ticket, response)


@dataclass(slots=True, eq=False)
class _Running:
    """One sequence being drawn, from a stream of random numbers of its own."""

    request: _Request
    index: int  # among the samples of its request
    uniform: np.random.Generator
    prefix: Prefix | None  # what the slot does not hold, for it is shared
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The position in the sequence at which its slot begins."""
        return 0 if self.prefix is None else self.prefix.length

    @property
    def position(self) -> int:
        """Of the token drawn last, which is all that is not cached yet."""
        return len(self.request.prompt.tokens) + len(self.tokens) - 1

    @property
    def most_cached(self) -> int:
        """Positions that its slot may come to take."""
        return len(self.request.prompt.tokens) - self.start + (self.request.params.max_tokens or 0)

    def ended(self) -> bool:
        return len(self.tokens) == self.request.params.max_tokens or self.request.stops.hit(self.tokens)


class Sampler:
    """Running and waiting samples of one base model, over all adapters."""

    def __init__(self, model: BaseModel, recorder: Recorder | None = None) -> None:
        """`recorder` is what passes are recorded with, where launching them is slow: on CUDA."""
        if recorder is None and model.device.type == "cuda" and never_waits(model):
            recorder = CudaGraphs(model.device)
        self._model = model
        self._captured = None if recorder is None else CapturedDecoding(model, recorder)
        self._stack = Stack(model.weight_VE.dtype)
        self._prompts = Prompts(model, self._stack)
        most = MAX_CACHED_TOKENS + MAX_RUNNING * BLOCK  # slots are rounded up to whole blocks
        self._cache = KVCache(model.num_layers, most, doubling=recorder is not None)
        self._prefixes = SharedPrefixes(model.num_layers, MAX_CACHED_TOKENS)
        self._ready: deque[_Request] = deque()  # computed, with samples that have no room yet
        self._running: list[_Running] = []  # in the order of their slots
        self._finished: list[Finished] = []  # in this step

    def add(self, ticket: Ticket) -> None:
        self._prompts.add(ticket)

    @property
    def idle(self) -> bool:
        return self._prompts.idle and not self._ready and not self._running

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self._running:
            self._draw_next()
        held = {id(request.prompt.cache): len(request.prompt.tokens) for request in self._ready}
        running = [w for sequence in self._running if (w := sequence.request.prompt.weights) is not None]
        for prompt in self._prompts.step(sum(held.values()), running):
            self._finished += self._computed(prompt)
        self._let_in()
        if not self._running and not self._keeps_cache:
            self._cache.clear()
            self._stack.clear()
        return self.take_finished()

    @property
    def _records(self) -> bool:
        return self._captured is not None and self._captured.works

    @property
    def _keeps_cache(self) -> bool:
        """For recordings, which would be lost with what they read, and if it leaves the others room."""
        return self._records and self._cache.num_bytes <= KEPT_SHARE * available_bytes(self._model.device)

    def take_finished(self) -> list[Finished]:
        """What ended; after a step that raised, what had ended before."""
        finished, self._finished = self._finished, []
        return finished

    def weights_in_use(self) -> list[AdapterWeights]:
        """Those of everything that waits or runs."""
        prompts = [*self._prompts.waiting, *(request.prompt for request in self._requests())]
        return [prompt.weights for prompt in prompts if prompt.weights is not None]

    def drop_all(self) -> list[Ticket]:
        """Forgets everything that goes on; its tickets."""
        computed = [request.prompt.ticket for request in self._requests() if None in request.done]
        tickets = dict.fromkeys([*self._prompts.drop_all(), *computed])
        self._ready.clear()
        self._running.clear()
        self._cache.clear()
        self._prefixes.clear()
        self._stack.clear()
        return list(tickets)

    def _requests(self) -> list[_Request]:
        """Those whose prompts are computed."""
        return [*self._ready, *(sequence.request for sequence in self._running)]

    def _computed(self, prompt: Prompt) -> list[Finished]:
        """A prompt is ready to be continued, or, if only its logprobs were asked for, it is done."""
        if not isinstance(prompt.op, Sample):
            return [Finished(prompt.ticket, prompt.logprobs)]
        try:
            stops = stops_of(prompt.op.params, self._model.stop_tokens, self._model.tokenizer)
        except Exception as error:  # the request's own
            return [Finished(prompt.ticket, error=error)]
        self._ready.append(_Request(prompt, prompt.op.params, stops, [None] * prompt.op.num_samples))
        return []

    def _let_in(self) -> None:
        """Starts samples while there is room, oldest request first, and draws the first token of each."""
        first = len(self._running)
        together = Counter[int]()
        for request in self._ready:
            together[id(request.prompt.cache)] += request.num_left
        while self._ready and self._start_next(together):
            pass
        newcomers = self._running[first:]
        if not newcomers:
            return
        self._fill_slots(newcomers, first)
        last_hidden = [sequence.request.prompt.last_hidden_E for sequence in newcomers]
        hidden_SE = torch.stack([hidden for hidden in last_hidden if hidden is not None])
        # not the stack: it is that of all who run, and would take the newcomers for all
        self._extend(newcomers, hidden_SE, rows_by_owner(*_one_row_each(newcomers), self._model.device))

    def _start_next(self, together: Counter[int]) -> bool:
        """Whether there was room for one more sample of the first request. `together` are the samples to come by the
        prompt that they go on from."""
        request = self._ready[0]
        cache, shared = request.prompt.cache, self._num_shared(request.prompt)
        is_shared = shared > 0 and (together[id(cache)] > 1 or self._prefixes.find(cache) is not None)
        is_shared = is_shared and self._prefixes.would_balance(cache)
        length = len(request.prompt.tokens) - (shared if is_shared else 0) + (request.params.max_tokens or 0)
        if not self._has_room(length, self._prefixes.num_tokens(cache, shared) if is_shared else None):
            return False
        stream = np.random.default_rng([request.params.seed or 0, request.num_started])
        prefix = self._prefixes.join(cache, shared) if is_shared else None
        self._running.append(_Running(request, request.num_started, stream, prefix))
        request.num_started += 1
        if request.num_left == 0:
            self._ready.popleft()
        return True

    def _num_shared(self, prompt: Prompt) -> int:
        """How much of a prompt its samples can share: as much as attention reads in whole blocks."""
        if self._records or not self._model.attends_plainly:  # a recorded pass has slots only
            return 0
        length = len(prompt.tokens) - len(prompt.tokens) % self._model.arithmetic.key_multiple
        return length if length >= MIN_PREFIX_TOKENS else 0

    def _has_room(self, num_positions: int, prefix_tokens: int | None) -> bool:
        """For one more sample, whose slot may come to take so many positions. `prefix_tokens` is what all prefixes take
        with it, if that is more than now."""
        if not self._running:
            return True
        count = len(self._running) + 1
        longest = max(num_positions, *(sequence.most_cached for sequence in self._running))
        shared = self._prefixes.num_tokens() if prefix_tokens is None else prefix_tokens
        return count <= MAX_RUNNING and count * longest + shared <= MAX_CACHED_TOKENS

    def _fill_slots(self, newcomers: list[_Running], first: int) -> None:
        """What is computed of their prompts, and not shared, goes into their slots."""
        self._cache.reserve(
            len(self._running), max(sequence.position - sequence.start for sequence in self._running) + 2
        )
        alike: dict[tuple[int, int], list[int]] = {}
        for slot, sequence in enumerate(newcomers, start=first):
            alike.setdefault((id(sequence.request.prompt.cache), sequence.start), []).append(slot)
        for (_, start), slots in alike.items():
            prompt = self._running[slots[0]].request.prompt
            self._cache.copy_from(prompt.cache, 0, slots, len(prompt.tokens) - start, start=start)
        for sequence in newcomers:
            if sequence.request.num_left == 0:
                sequence.request.prompt.forget_cache()

    def _draw_next(self) -> None:
        """One pass over the running sequences: each one's last token goes in, its next is drawn."""
        slots = self._in_order()
        sequences = [self._running[slot] for slot in slots]
        step = Step(
            self._cache,
            [sequence.tokens[-1] for sequence in sequences],
            [sequence.position for sequence in sequences],
            [sequence.position - sequence.start for sequence in sequences],
            self._parts(sequences),
            self._prefixes.of([sequence.prefix for sequence in self._running], self._model.device),
            None if slots == sorted(slots) else slots,
        )
        hidden_SE = decoded(self._model, step) if self._captured is None else self._captured(step)
        self._extend(sequences, hidden_SE, step.parts)

    def _in_order(self) -> list[int]:
        """The slots, in the order in which a pass has their rows: rows of one adapter side by side, where a batched
        product then need not gather them."""
        owners, _ = _one_row_each(self._running)
        num_rows = set(Counter(map(id, owners)).values())
        if self._records or not self._model.arithmetic.can_stack or None in owners or len(num_rows) > 1:
            return list(range(len(owners)))
        return self._stack.in_order(owners)

    def _extend(self, sequences: list[_Running], hidden_SE: torch.Tensor, parts: Parts) -> None:
        """Draws a token for each sequence from its hidden state; removes those that end with it."""
        head = self._model.head(parts)
        params = [sequence.request.params for sequence in sequences]
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=hidden_SE.device)  # noqa: E731
        drawn = draw(
            head.outputs(hidden_SE),
            column([p.temperature for p in params], torch.float32),
            column([p.top_k for p in params], torch.int64),
            column([p.top_p for p in params], torch.float32),
            column([sequence.uniform.random() for sequence in sequences], torch.float64),
            head.logits_of,
        )
        for sequence, token, logprob in zip(sequences, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        self._leave([sequence for sequence in sequences if sequence.ended()])

    def _parts(self, sequences: list[_Running]) -> Parts:
        """Which row belongs to which adapter, when all running sequences have one."""
        owners, singles = _one_row_each(sequences)
        if self._model.arithmetic.can_stack:
            stacked = stacked_rows(owners, singles, self._model.device, self._stack)
            if stacked is not None:
                return [stacked]
        return rows_by_owner(owners, singles, self._model.device)

    def _leave(self, ended: list[_Running]) -> None:
        """Takes finished sequences out of the batch, with the answers of the requests of which they were the last."""
        for sequence in ended:
            request = sequence.request
            reason = "stop" if request.stops.hit(sequence.tokens) else "length"
            name = f"{request.prompt.ticket.number}:{sequence.index}"
            request.done[sequence.index] = SampledSequence(reason, sequence.tokens, sequence.logprobs, name)
            if None not in request.done:
                self._finished.append(request.answer())
            if sequence.prefix is not None:
                self._prefixes.leave(sequence.prefix)
        gone = set(map(id, ended))
        is_left = [id(sequence) not in gone for sequence in self._running]
        num_left = sum(is_left)
        holes = [slot for slot in range(num_left) if not is_left[slot]]
        movers = [slot for slot in range(num_left, len(is_left)) if is_left[slot]]
        for hole, slot in zip(holes, movers, strict=True):
            moved = self._running[slot]
            self._cache.copy_from(self._cache, slot, [hole], moved.position - moved.start)
            self._running[hole] = moved
        del self._running[num_left:]


def _one_row_each(sequences: list[_Running]) -> tuple[list[AdapterWeights | None], list[Segment]]:
    """Whose each row of a pass is that has one row for each of these, in their order."""
    owners = [sequence.request.prompt.weights for sequence in sequences]
    return owners, [Segment(row, 1) for row in range(len(sequences))]

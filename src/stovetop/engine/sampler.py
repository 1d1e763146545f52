# pyright: basic
"""Prompts to tokens and logprobs. Newcomers join a running batch, whoever is finished leaves it at once.

`step` takes in what is waiting (each prompt computed once, whatever the number of its samples) and then draws one
token for every running sequence. `compute_logprobs` is a prompt that is computed and not continued. Sequences sit in
the first slots of the cache, so the pass over them reads a view; a slot that ends is filled with the last one.

Shapes: `S` running sequences, `N` packed prompt tokens, `V` vocabulary.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stovetop.engine.attention import CachedAttention, CacheWrite, PackedAttention
from stovetop.engine.drawing import draw
from stovetop.engine.kv_cache import KVCache
from stovetop.engine.logprobs import pair_logprobs, top_logprobs
from stovetop.engine.lora import AdapterWeights, Rows
from stovetop.engine.model import BaseModel
from stovetop.engine.ops import ComputeLogprobs, Finished, Sample, Ticket
from stovetop.engine.packing import Pack, Segment, pack
from stovetop.engine.stops import Stops, stops_of
from stovetop.types import SampledSequence, SampleResponse, SamplingParams

MAX_RUNNING = 512  # sequences in the batch; others wait
MAX_PROMPT_TOKENS = 4096  # taken in by one step; a single longer prompt is taken in alone


@dataclass(slots=True, eq=False)
class _Running:
    """One sequence being drawn."""

    request: "_Request"
    index: int  # among the samples of its request
    stops: Stops
    uniform: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Positions of the cache that hold it: all but the token drawn last."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def ended(self) -> bool:
        return len(self.tokens) == self.request.params.max_tokens or self.stops.hit(self.tokens)


@dataclass(slots=True, eq=False)
class _Request:
    """A sampling ticket and what is known of its answer."""

    ticket: Ticket
    op: Sample | ComputeLogprobs
    prompt: list[int]
    prompt_logprobs: list[float | None] | None = None
    top_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    done: list[SampledSequence | None] = field(default_factory=list)

    @property
    def weights(self) -> AdapterWeights | None:
        return self.op.weights

    @property
    def num_samples(self) -> int:
        return self.op.num_samples if isinstance(self.op, Sample) else 0

    @property
    def params(self) -> SamplingParams:
        assert isinstance(self.op, Sample), "only a request that draws has sampling params"
        return self.op.params

    def answer(self) -> Finished:
        if isinstance(self.op, ComputeLogprobs):
            return Finished(self.ticket, self.prompt_logprobs)
        sequences = [sequence for sequence in self.done if sequence is not None]
        return Finished(self.ticket, SampleResponse(sequences, self.prompt_logprobs, self.top_prompt_logprobs))


class Sampler:
    """Running and waiting samples of one base model, over all adapters."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model
        self._cache = KVCache(model.num_layers)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Running] = []  # in the order of their slots

    def add(self, ticket: Ticket) -> None:
        assert isinstance(ticket.op, Sample | ComputeLogprobs), "the scheduler sends only these"
        self._waiting.append(_Request(ticket, ticket.op, ticket.op.prompt.to_ints()))

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Takes in newcomers, then draws a token for everybody else."""
        running = len(self._running)
        finished = self._take_in(self._newcomers())
        if running:
            finished += self._draw_next(running)
        if not self._running:
            self._cache.clear()
        return finished

    def drop_all(self) -> list[Ticket]:
        """Forgets everything; the tickets it held."""
        tickets = dict.fromkeys([*(r.ticket for r in self._waiting), *(s.request.ticket for s in self._running)])
        self._waiting.clear()
        self._running.clear()
        self._cache.clear()
        return list(tickets)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def _newcomers(self) -> list[_Request]:
        """The first of those waiting, as far as there is room."""
        taken: list[_Request] = []
        room, tokens = MAX_RUNNING - len(self._running), 0
        while self._waiting:
            request = self._waiting[0]
            fits = request.num_samples <= room and tokens + len(request.prompt) <= MAX_PROMPT_TOKENS
            alone = not taken and not self._running  # a request larger than any batch still gets its turn
            if not fits and not alone:
                break
            taken.append(self._waiting.popleft())
            room, tokens = room - request.num_samples, tokens + len(request.prompt)
        return taken

    def _take_in(self, requests: list[_Request]) -> list[Finished]:
        """Computes prompts in one pass, starts their samples and draws the first token of each."""
        if not requests:
            return []
        packed = pack([request.prompt for request in requests], share_prefixes=False)
        first_slots = self._slots_for(requests)
        plan = PackedAttention(
            packed, self._model.arithmetic, self._model.device, self._cache_write(packed, requests, first_slots)
        )
        hidden_NE = self._model.hidden_states(packed, plan, self._parts([r.weights for r in requests], packed.leaves))
        for index, request in enumerate(requests):
            self._score_prompt(request, hidden_NE[packed.rows_of(index)])
        started = [request for request in requests if request.num_samples]
        for request, slot in zip(requests, first_slots, strict=True):
            if request.num_samples > 1:
                self._cache.copy(slot, list(range(slot + 1, slot + request.num_samples)), len(request.prompt))
            self._running += self._start(request)
        finished = [request.answer() for request in requests if not request.num_samples]
        if started:
            last_rows = [packed.rows_of(i)[-1] for i, r in enumerate(requests) for _ in range(r.num_samples)]
            newcomers = self._running[-len(last_rows) :]
            finished += self._extend(newcomers, hidden_NE[last_rows])
        return finished

    def _slots_for(self, requests: list[_Request]) -> list[int]:
        """The first slot of each request, behind those in use; makes room in the cache."""
        slots, free = [], len(self._running)
        for request in requests:
            slots.append(free)
            free += request.num_samples
        prompts = [len(request.prompt) for request in requests if request.num_samples]
        if prompts:
            self._cache.reserve(free, max(prompts) + 1)
        return slots

    def _cache_write(self, packed: Pack, requests: list[_Request], first_slots: list[int]) -> CacheWrite | None:
        rows, slots, positions = [], [], []
        for index, (request, slot) in enumerate(zip(requests, first_slots, strict=True)):
            if request.num_samples:
                rows += packed.rows_of(index)
                slots += [slot] * len(request.prompt)
                positions += range(len(request.prompt))
        if not rows:
            return None
        return CacheWrite(self._cache, *(torch.tensor(x, device=self._model.device) for x in (rows, slots, positions)))

    def _score_prompt(self, request: _Request, hidden_TE: torch.Tensor) -> None:
        """Logprobs of the prompt's own tokens, where they are asked for. The first has none."""
        op = request.op
        head = self._model.head(request.weights)
        if isinstance(op, ComputeLogprobs) or op.include_prompt_logprobs:
            targets = torch.tensor(request.prompt[1:], dtype=torch.int64, device=hidden_TE.device)
            logprobs = pair_logprobs(head, hidden_TE, torch.arange(len(targets), device=hidden_TE.device), targets)
            request.prompt_logprobs = [None, *logprobs.tolist()]
        if isinstance(op, Sample) and op.topk_prompt_logprobs:
            tokens_TK, logprobs_TK = top_logprobs(head, hidden_TE[:-1], op.topk_prompt_logprobs)
            rows = zip(tokens_TK.tolist(), logprobs_TK.tolist(), strict=True)
            request.top_prompt_logprobs = [None, *(list(zip(*row, strict=True)) for row in rows)]

    def _start(self, request: _Request) -> list[_Running]:
        """Its samples. Each draws from a stream of its own, made from the seed and its number."""
        if not request.num_samples:
            return []
        request.done = [None] * request.num_samples
        params = request.params
        stops = stops_of(params, self._model.stop_tokens, self._model.tokenizer)
        streams = [np.random.default_rng([params.seed or 0, index]) for index in range(request.num_samples)]
        return [_Running(request, index, stops, stream) for index, stream in enumerate(streams)]

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _draw_next(self, count: int) -> list[Finished]:
        """One pass over the first `count` running sequences: each one's last token goes in, its next is drawn."""
        sequences = self._running[:count]
        positions = [sequence.num_cached for sequence in sequences]
        self._cache.reserve(count, max(positions) + 1)
        singles = [Segment(row, 1) for row in range(count)]
        step = Pack([sequence.tokens[-1] for sequence in sequences], positions, singles, singles)
        plan = CachedAttention(self._cache, self._model.arithmetic, torch.tensor(positions, device=self._model.device))
        hidden_SE = self._model.hidden_states(step, plan, self._parts([s.request.weights for s in sequences], singles))
        return self._extend(sequences, hidden_SE)

    def _extend(self, sequences: list[_Running], hidden_SE: torch.Tensor) -> list[Finished]:
        """Draws a token for each sequence from its hidden state; removes those that end with it."""
        logits_SV = self._logits(sequences, hidden_SE)
        params = [sequence.request.params for sequence in sequences]
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=logits_SV.device)  # noqa: E731
        drawn = draw(
            logits_SV,
            column([p.temperature for p in params], torch.float32),
            column([p.top_k for p in params], torch.int64),
            column([p.top_p for p in params], torch.float32),
            column([sequence.uniform.random() for sequence in sequences], torch.float64),
        )
        for sequence, token, logprob in zip(sequences, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
        return [answer for sequence in sequences if sequence.ended() for answer in self._leave(sequence)]

    def _logits(self, sequences: list[_Running], hidden_SE: torch.Tensor) -> torch.Tensor:
        """(S, V). Adapters that train the head act on their own rows only."""
        by_weights: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            by_weights.setdefault(id(sequence.request.weights), []).append(row)
        if len(by_weights) == 1:
            return self._model.head(sequences[0].request.weights).logits(hidden_SE)
        logits_SV = torch.empty(len(sequences), self._model.limits.vocab_size, device=hidden_SE.device)
        for rows in by_weights.values():
            logits_SV[rows] = self._model.head(sequences[rows[0]].request.weights).logits(hidden_SE[rows])
        return logits_SV

    def _leave(self, sequence: _Running) -> list[Finished]:
        """Takes a finished sequence out of the batch; the answer if it was the last of its request."""
        slot, last = self._running.index(sequence), len(self._running) - 1
        if slot != last:
            moved = self._running[last]
            self._cache.copy(last, [slot], moved.num_cached)
            self._running[slot] = moved
        self._running.pop()
        request = sequence.request
        reason = "stop" if sequence.stops.hit(sequence.tokens) else "length"
        name = f"{request.ticket.number}:{sequence.index}"
        request.done[sequence.index] = SampledSequence(reason, sequence.tokens, sequence.logprobs, name)
        return [request.answer()] if None not in request.done else []

    def _parts(self, weights: Sequence[AdapterWeights | None], segments: Sequence[Segment]) -> list[Rows]:
        """Which rows each adapter acts on, where segment i belongs to `weights[i]`."""
        owners = {id(owner): owner for owner in weights}
        if len(owners) == 1:
            return [] if weights[0] is None else [Rows(weights[0])]
        rows: dict[int, list[int]] = {}
        for owner, segment in zip(weights, segments, strict=True):
            rows.setdefault(id(owner), []).extend(segment.rows)
        device = self._model.device
        return [Rows(w, torch.tensor(rows[key], device=device)) for key, w in owners.items() if w is not None]

# pyright: basic
"""Computed prompts to tokens. New sequences join a running batch; a sequence that has ended leaves it at once.

A step computes pieces of the prompts that wait (`prompts.py`), draws one token for every running sequence and admits
new ones while there is room. Sequences sit in the first slots of the cache, so the pass over them reads a view; a
slot that ends is filled with the last one. Samples of one prompt share what is cached of it (`shared_prefix.py`).

Memory is bounded (`kv_memory.py`) and claimed as sequences grow, not for all that may come of them. Where it runs out,
the caches of prompts that are not continued yet are freed, then the sequences that were admitted last are preempted:
what they drew is kept, its keys and values are computed again when there is room, and they go on. After that nothing is
admitted until a sequence has ended, so that the same ones are not preempted again and again. A sequence that does not
fit beside others runs alone, and one that would not fit even then is refused.

Shapes: `S` running sequences, `V` vocabulary, `E` hidden size.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from stovetop.engine.kernels.kv_cache import BLOCK, KVCache
from stovetop.engine.kernels.shared_prefix import MIN_PREFIX_TOKENS, Prefix, SharedPrefixes
from stovetop.engine.lora.routing import Parts, Stack, rows_by_owner, stacked_rows
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.decoding import Step, decoded
from stovetop.engine.ops import ComputeLogprobs, Finished, Sample, Ticket
from stovetop.engine.sampling.drawing import draw
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.kv_memory import KVMemory, Size
from stovetop.engine.sampling.prompts import Prompt, Prompts, Room, not_finite
from stovetop.engine.sampling.samples import Request, Running, Start, one_row_each
from stovetop.engine.sampling.stops import stops_of
from stovetop.errors import InvalidRequest

MAX_RUNNING = 512  # sequences
HELD_TOKENS, HELD_SHARE = 2**16, 0.25  # positions, and of those there are, for prompts that cannot be continued yet
KEPT_SHARE = 0.2  # of the available memory, that an idle cache may have besides


class RecordedDecoding(Protocol):
    """Does what `decoding.decoded` does, by repeating recorded passes: `untried/captured.py` has one."""

    works: bool  # False: a pass could not be recorded, so every pass is an ordinary one

    def __call__(self, step: Step) -> torch.Tensor: ...


RecordDecoding = Callable[[BaseModel], RecordedDecoding | None]  # None where passes of a model cannot be recorded


class Sampler:
    """Running and waiting samples of one base model, over all adapters."""

    def __init__(self, model: BaseModel, budget: KVBudget, record_decoding: RecordDecoding | None = None) -> None:
        """`record_decoding` gives what passes are recorded with, where launching them is slow."""
        self._model = model
        self._recorded = None if record_decoding is None else record_decoding(model)
        self._stack = Stack(model.weight_VE.dtype)
        self._prompts = Prompts(model, self._stack)
        self._cache = KVCache(model.num_layers, doubling=self._recorded is not None)
        self._prefixes = SharedPrefixes(model.num_layers)
        self._ready: deque[Start] = deque()  # computed, with samples that have no room yet
        self._running: list[Running] = []  # in the order of their slots
        self._num_filled = 0  # of the running, whose slots have what is computed of them
        self._sources: list[Prompt] = []  # which the slots of the others are to be filled from
        self._again: dict[int, Start] = {}  # whose prompts wait to be computed again, by id of the prompt
        self._is_full = False  # memory ran out, and no sequence has ended since
        self._numbers = itertools.count()
        self._finished: list[Finished] = []  # in this step
        self._budget = budget
        self._memory = KVMemory(
            budget.num_positions, self._cache, self._prefixes, self._prompts, self._ready, self._sources
        )

    def add(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        """`weights` are those that the op names."""
        match ticket.op:
            case Sample(prompt=prompt, params=params):
                length = prompt.length + (params.max_tokens or 0)
            case ComputeLogprobs(prompt=prompt):
                length = prompt.length
            case _:
                raise AssertionError("the scheduler sends only these")
        if length > self._budget.longest_sequence:
            self._finished.append(Finished(ticket, error=InvalidRequest(self._budget.too_long(length))))
        else:
            self._prompts.add(ticket, weights)

    @property
    def idle(self) -> bool:
        return self._prompts.idle and not self._ready and not self._running and not self._finished

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        if self._running:
            self._make_room()
            self._draw_next()
        running = [w for sequence in self._running if (w := sequence.request.prompt.weights) is not None]
        if not self._prompts.idle:
            for prompt in self._prompts.step(self._room_for_prompts(), running):
                self._computed(prompt)
        self._admit()
        if not self._running and not self._keeps_cache:
            self._cache.clear()
            self._stack.clear()
        return self.take_finished()

    @property
    def _records(self) -> bool:
        return self._recorded is not None and self._recorded.works

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
        self._sources.clear()
        self._again.clear()
        self._num_filled, self._is_full = 0, False
        self._cache.clear()
        self._prefixes.clear()
        self._stack.clear()
        return list(tickets)

    def _requests(self) -> list[Request]:
        """Those whose prompts are computed."""
        return [*(start.request for start in self._ready), *(sequence.request for sequence in self._running)]

    def _computed(self, prompt: Prompt) -> None:
        """A prompt is ready to be continued, or, if only its logprobs were asked for, it is done."""
        start = self._again.pop(id(prompt), None)
        if start is not None:
            self._ready.append(start)
            return
        try:
            prompt.check_finite()
            if isinstance(prompt.op, Sample):
                stops = stops_of(prompt.op.params, self._model.stop_tokens, self._model.tokenizer)
                request = Request(prompt, prompt.op.params, stops, [None] * prompt.op.num_samples)
                self._ready.append(Start(request, prompt))
            else:
                self._finished.append(Finished(prompt.ticket, prompt.logprobs))
        except Exception as error:  # the request's own
            self._finished.append(Finished(prompt.ticket, error=error))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _in_use(self) -> Size:
        filled = self._running[: self._num_filled]
        return Size(len(filled), max((sequence.num_places for sequence in filled), default=0))

    def _room_for_prompts(self) -> Room:
        """What the running samples leave, with a block more for each of them."""
        limit = self._memory.limit
        grown = Size(len(self._running), max((sequence.grown for sequence in self._running), default=0))
        left = limit - grown.num_tokens - self._prefixes.num_tokens() - self._memory.prompt_positions
        ahead = self._memory.held_positions + self._prompts.begun_positions_of_samples
        most_ahead = min(HELD_TOKENS, int(HELD_SHARE * limit))
        make = lambda num_positions: self._memory.make(num_positions, self._in_use())  # noqa: E731
        return Room(0 if self._is_full else left, self._prompts.begun_positions, ahead, most_ahead, make)

    def _make_room(self) -> None:
        """For the next token of every running sequence."""
        while not self._memory.reserve(self._in_use()):
            if self._prompts.drop_begun():
                pass
            elif self._ready:
                self._compute_again(self._ready.pop())
            else:
                assert len(self._running) > 1, "a sequence alone has room: see `add`"
                self._preempt(max(self._running, key=lambda sequence: sequence.number))
            self._is_full = True
        self._memory.bound()

    def _preempt(self, sequence: Running) -> None:
        """Its slot is freed, and it goes on when its prompt and what it has drawn are computed again."""
        self._remove([sequence])
        request = sequence.request
        known = request.prompt
        prompt = Prompt(known.ticket, known.op, known.weights, [*known.tokens, *sequence.tokens], KVCache(0))
        self._compute_again(Start(request, prompt, sequence))

    def _compute_again(self, start: Start) -> None:
        self._again[id(start.prompt)] = start
        self._prompts.add_again(start.prompt)

    # ---- running sequences -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts samples while there is room, oldest request first, and draws the next token of each."""
        if self._is_full or not self._ready:
            return
        first = len(self._running)
        together = Counter[int]()
        for start in self._ready:
            together[id(start.prompt.cache)] += start.num_left
        longest = max((sequence.grown for sequence in self._running), default=0)
        prompt_positions = self._memory.prompt_positions
        while self._ready and self._start_next(together, longest, prompt_positions):
            longest = max(longest, self._running[-1].grown)
        newcomers, sources = self._running[first:], list(self._sources)
        if not newcomers:
            return
        self._fill_slots(newcomers, first)
        last_hidden = [prompt.last_hidden_E for prompt in sources]
        hidden_SE = torch.stack([hidden for hidden in last_hidden if hidden is not None])
        # not the stack: it is that of all running sequences, and would take the newcomers for all
        self._extend(newcomers, hidden_SE, rows_by_owner(*one_row_each(newcomers), self._model.device))

    def _start_next(self, together: Counter[int], longest: int, prompt_positions: int) -> bool:
        """Whether there was room for one more sample of the first prompt. `together` are the samples to come by the
        cache that they go on from, `longest` is the longest slot of those that run, and `prompt_positions` are the
        positions that prompts have."""
        start = self._ready[0]
        cache = start.prompt.cache
        prefix, shared = self._shared(start, together)
        is_new = shared > 0 and prefix is None
        places, most = (length - shared for length in (len(start.prompt.tokens) + 1, start.most_positions))
        longest = max(longest, min(places + BLOCK, most) if self._running else places)
        size = Size(len(self._running) + 1, longest)
        prefixes = self._prefixes.num_tokens(cache, shared) if is_new else self._prefixes.num_tokens()
        fits = size.num_tokens + prefixes + prompt_positions <= self._memory.limit
        if not self._running and not fits:
            self._start_alone()
        elif fits and size.num_slots <= MAX_RUNNING:
            if is_new:
                self._memory.make(prefixes - self._prefixes.num_allocated, self._in_use())
                prefix = self._prefixes.join(cache, shared)
            elif prefix is not None:
                self._prefixes.rejoin(prefix)
            self._begin(start, prefix)
        else:
            return False
        return True

    def _begin(self, start: Start, prefix: Prefix | None) -> None:
        """The next sample of the first that is ready. What it goes on from is in its slot after `_fill_slots`."""
        request, sequence = start.request, start.returning
        if sequence is None:
            stream = np.random.default_rng([request.params.seed or 0, request.num_started])
            sequence = Running(request, request.num_started, next(self._numbers), stream, prefix)
            request.num_started += 1
        sequence.prefix = prefix
        self._running.append(sequence)
        self._sources.append(start.prompt)
        if start.returning is not None or request.num_left == 0:
            self._ready.popleft()

    def _start_alone(self) -> None:
        """Nothing runs, and there is no room for the first that is ready beside the caches of other prompts: these are
        freed. Where there is none beside its own prompt, the prompt's cache becomes its slot."""
        start = self._ready.popleft()
        while self._ready:
            self._compute_again(self._ready.pop())
        while self._prompts.drop_begun() or self._prompts.drop_kept():
            pass
        self._ready.append(start)
        self._begin(start, None)
        if Size(1, len(start.prompt.tokens) + 1).num_tokens + start.prompt.cache.num_tokens > self._memory.limit:
            self._cache.take_over(start.prompt.cache)
            if self._ready:
                self._sources[-1] = replace(start.prompt)
                self._compute_again(self._ready.pop())

    def _shared(self, start: Start, together: Counter[int]) -> tuple[Prefix | None, int]:
        """What a sample can share of its prompt, and how much: a prefix that is there, or None and a length for one
        that is worth it, or None and 0."""
        if start.returning is not None:
            prefix = start.returning.prefix
            return (prefix, prefix.length) if prefix is not None and self._prefixes.has(prefix) else (None, 0)
        cache, length = start.prompt.cache, self._num_shared(start.prompt)
        prefix = self._prefixes.find(cache)
        if length == 0 or (together[id(cache)] <= 1 and prefix is None) or not self._prefixes.would_balance(prefix):
            return None, 0
        return prefix, length

    def _num_shared(self, prompt: Prompt) -> int:
        """How much of a prompt its samples can share: as much as attention reads in whole blocks."""
        if self._records or not self._model.attends_plainly:  # a recorded pass has slots only
            return 0
        length = len(prompt.tokens) - len(prompt.tokens) % self._model.arithmetic.key_multiple
        return length if length >= MIN_PREFIX_TOKENS else 0

    def _fill_slots(self, newcomers: list[Running], first: int) -> None:
        """What is computed of their prompts, and not shared, goes into their slots."""
        longest = max(sequence.num_places for sequence in self._running) + 1
        has_room = self._memory.reserve(Size(len(self._running), longest))
        assert has_room, "a sequence begins where there is room"
        alike: dict[tuple[int, int], list[int]] = {}
        for slot, (sequence, prompt) in enumerate(zip(newcomers, self._sources, strict=True), start=first):
            if prompt.cache.num_slots > 0:  # otherwise it became the slot
                alike.setdefault((id(prompt.cache), sequence.start), []).append(slot)
        for (_, start), slots in alike.items():
            prompt = self._sources[slots[0] - first]
            self._cache.copy_from(prompt.cache, 0, slots, len(prompt.tokens) - start, start=start)
        still_ready = {id(start.prompt) for start in self._ready}
        for prompt in self._sources:
            if id(prompt) not in still_ready:
                prompt.forget_cache()
        self._sources.clear()
        self._num_filled = len(self._running)

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
        hidden_SE = decoded(self._model, step) if self._recorded is None else self._recorded(step)
        self._extend(sequences, hidden_SE, step.parts)

    def _in_order(self) -> list[int]:
        """The slots, in the order in which a pass has their rows: rows of one adapter side by side, where a batched
        product then need not gather them."""
        owners, _ = one_row_each(self._running)
        num_rows = set(Counter(map(id, owners)).values())
        if self._records or not self._model.arithmetic.can_stack or None in owners or len(num_rows) > 1:
            return list(range(len(owners)))
        return self._stack.in_order(owners)

    def _extend(self, sequences: list[Running], hidden_SE: torch.Tensor, parts: Parts) -> None:
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
        failed: dict[int, Request] = {}
        for sequence, token, logprob in zip(sequences, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if not math.isfinite(logprob):
                failed[id(sequence.request)] = sequence.request
        for request in failed.values():
            self._fail(request)
        self._leave([each for each in sequences if id(each.request) not in failed and each.ended()])

    def _fail(self, request: Request) -> None:
        """All samples of one whose logits are no numbers."""
        self._finished.append(Finished(request.prompt.ticket, error=not_finite(request.prompt.weights)))
        for start in [start for start in self._ready if start.request is request]:
            self._ready.remove(start)
        for start in [start for start in self._again.values() if start.request is request]:
            del self._again[id(start.prompt)]
            self._prompts.remove(start.prompt)
        self._remove([sequence for sequence in self._running if sequence.request is request])

    def _parts(self, sequences: list[Running]) -> Parts:
        """Which row belongs to which adapter, when all running sequences have one."""
        owners, singles = one_row_each(sequences)
        if self._model.arithmetic.can_stack:
            stacked = stacked_rows(owners, singles, self._model.device, self._stack)
            if stacked is not None:
                return [stacked]
        return rows_by_owner(owners, singles, self._model.device)

    def _leave(self, ended: list[Running]) -> None:
        """Takes finished sequences out of the batch, with the answers of the requests of which they were the last."""
        for sequence in ended:
            request = sequence.request
            request.done[sequence.index] = sequence.result()
            if None not in request.done:
                self._finished.append(request.answer())
        self._remove(ended)

    def _remove(self, sequences: list[Running]) -> None:
        """Out of the batch."""
        for sequence in sequences:
            if sequence.prefix is not None:
                self._prefixes.leave(sequence.prefix)
        gone = set(map(id, sequences))
        is_left = [id(sequence) not in gone for sequence in self._running]
        num_left = sum(is_left)
        holes = [slot for slot in range(num_left) if not is_left[slot]]
        movers = [slot for slot in range(num_left, len(is_left)) if is_left[slot]]
        for hole, slot in zip(holes, movers, strict=True):
            moved = self._running[slot]
            self._cache.copy_from(self._cache, slot, [hole], moved.position - moved.start)
            self._running[hole] = moved
        del self._running[num_left:]
        self._num_filled, self._is_full = len(self._running), False

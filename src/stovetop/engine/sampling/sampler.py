# pyright: basic
"""Computed prompts to tokens. New sequences join a running batch; a sequence that has ended leaves it at once.

A step computes pieces of the prompts that wait (`prompts.py`), draws one token for every running sequence (`batch.py`)
and admits new ones while there is room.

Memory is bounded (`kv_memory.py`) and claimed as sequences grow, not for all that may come of them. Where it runs out,
the caches of prompts that are not continued yet are freed, then the sequences that were admitted last are preempted:
what they drew is kept, its keys and values are computed again when there is room, and they go on. After that nothing is
admitted until a sequence has ended, so that the same ones are not preempted again and again. A sequence that does not
fit beside others runs alone, and one that would not fit even then is refused.

A failure belongs to the request that caused it. Passes find out in halves which one that is; what
raises elsewhere, where memory is shared out, leaves the tables that a step works with in doubt. Then all requests start
over from what was drawn of them, as after a preemption, one half of them before the other: so the request that cannot
be served ends up alone, or they are few enough for the memory that there is.
"""

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from stovetop.engine.containment import Contained
from stovetop.engine.kernels.kv_cache import BLOCK, KVCache
from stovetop.engine.kernels.shared_prefix import Prefix, SharedPrefixes
from stovetop.engine.lora.routing import Stack
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.ops import ComputeLogprobs, Finished, Sample, Ticket
from stovetop.engine.sampling.batch import Batch, RecordDecoding
from stovetop.engine.sampling.halves import Failed, each, is_out_of_memory
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.kv_memory import KVMemory, Size
from stovetop.engine.sampling.not_finite import Culprits, NotFinite
from stovetop.engine.sampling.open_requests import OpenRequests, Ready
from stovetop.engine.sampling.prompt import Prompt
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.samples import Request, Running, Start
from stovetop.engine.sampling.stops import stops_of
from stovetop.engine.sampling.waiting import Room
from stovetop.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_RUNNING = 512  # sequences
HELD_TOKENS, HELD_SHARE = 2**16, 0.25  # positions, and of those there are, for prompts that cannot be continued yet


class Sampler:
    """Running and waiting samples of one base model, over all adapters."""

    def __init__(self, model: BaseModel, budget: KVBudget, record_decoding: RecordDecoding | None = None) -> None:
        """`record_decoding` gives what passes are recorded with, where launching them is slow."""
        self._model = model
        self._budget = budget
        recorded = None if record_decoding is None else record_decoding(model)
        self._stack = Stack(model.weight_VE.dtype)
        self._cache = KVCache(model.num_layers, doubling=recorded is not None)
        self._prefixes = SharedPrefixes(model.num_layers)
        self._batch = Batch(model, self._stack, self._cache, self._prefixes, recorded)
        self._running = self._batch.running
        self._prompts = Prompts(model, self._stack)
        self._ready = Ready()
        self._again: dict[int, Start] = {}  # whose prompts wait to be computed again, by id of the prompt
        self._memory = KVMemory(
            budget.num_positions, self._cache, self._prefixes, self._prompts, self._ready, self._batch.sources
        )
        self._is_full = False  # memory ran out, and no sequence has ended since
        self._numbers = itertools.count()
        self._open = OpenRequests()
        self._culprits = Culprits(model)
        self._later: deque[list[Request]] = deque()  # that begin when those before them are answered, see `_recover`
        self._finished: list[Finished] = []  # in this step

    def add(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        """`weights` are those that the op names."""
        for failed in each([ticket], lambda _: self._take_in(ticket, weights)):
            self._open.close(ticket)
            self._finished.append(Finished(ticket, error=failed.error))

    def _take_in(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        assert isinstance(ticket.op, Sample | ComputeLogprobs), "the scheduler sends only these"
        most_drawn = (ticket.op.params.max_tokens or 0) if isinstance(ticket.op, Sample) else 0
        length = ticket.op.prompt.length + most_drawn
        if length > self._budget.longest_sequence:
            raise InvalidRequest(self._budget.too_long(length))
        cache = KVCache(self._model.num_layers)
        request = Request.of(Prompt(ticket, ticket.op, weights, ticket.op.prompt.to_ints(), cache))
        self._open.add(request)
        if self._later:
            self._later[-1].append(request)
        else:
            self._prompts.add(request.prompt)

    @property
    def idle(self) -> bool:
        return len(self._open) == 0 and not self._finished

    def step(self) -> list[Finished]:
        """At most one token for every running sample. Raises nothing but KeyboardInterrupt and what is derived from it,
        after which there is `tickets` to tell what was not answered."""
        with Contained() as outcome, torch.inference_mode():
            self._step()
        if outcome.error is not None:  # it belongs to one of the requests
            self._recover(outcome.error)
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def cancel(self, ticket: Ticket) -> bool:
        """Forgets a request, wherever it is, and frees its memory; the others are not touched. False for one that was
        answered, or is not known: a ticket that was cancelled is not answered."""
        request = None
        with Contained() as outcome:
            request = self._open.close(ticket)
            if request is not None:
                self._take_out(request)
        if outcome.error is not None:  # what is left of it goes with the tables
            request = self._open.close(ticket) if request is None else request
            for other in self._start_over():
                self._enqueue(other)
        return request is not None

    @property
    def tickets(self) -> list[Ticket]:
        """Of the requests whose answer no step has returned."""
        return [*self._open.tickets, *(finished.ticket for finished in self._finished)]

    def weights_in_use(self) -> list[AdapterWeights]:
        """Those of everything that waits or runs, each once."""
        return self._open.weights

    def _step(self) -> None:
        if self._later and len(self._open) == sum(map(len, self._later)):
            for request in self._later.popleft():
                self._enqueue(request)
        if self._running:
            self._make_room()
            self._settle(list(self._running), self._batch.draw_next())
        running = [w for sequence in self._running if (w := sequence.request.prompt.weights) is not None]
        if not self._prompts.idle:
            done, failed = self._prompts.step(self._room_for_prompts(), running)
            failed += each(done, self._computed)
            for prompt, error in [(one.item, one.error) for one in failed]:
                self._fail(prompt.ticket, error)
        self._admit()
        self._batch.rest()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _computed(self, prompt: Prompt) -> None:
        """A prompt is ready to be continued, or, if only its logprobs were asked for, it is done."""
        start = self._again.pop(id(prompt), None)
        request = self._open.get(prompt.ticket)
        assert request is not None, "its prompt is gone when a request is"
        if start is None:
            start = Start(request, prompt)
            prompt.check_finite()
            if isinstance(prompt.op, Sample):
                request.stops = stops_of(prompt.op.params, self._model.stop_tokens, self._model.tokenizer)
                request.stream(0)  # a seed that is none shows here
            request.is_computed = True
        if request.is_complete:
            self._answer(request.answer())
        else:
            self._ready.append(start)

    def _settle(self, drew: Sequence[Running], failed: list[Failed[Running]]) -> None:
        """After a token was drawn for each of these, but for those that failed: who has ended leaves, and with the last
        sample of a request it is answered."""
        lost = {id(one.item) for one in failed}
        failed += each([sequence for sequence in drew if id(sequence) not in lost], self._end_if_done)
        self._remove([sequence for sequence in drew if sequence.index not in sequence.request.begun])
        for sequence, error in [(one.item, one.error) for one in failed]:
            self._fail(sequence.request.prompt.ticket, error)

    def _end_if_done(self, sequence: Running) -> None:
        request = sequence.request
        if sequence.ended():
            self._ready.charge(request.prompt.op, len(sequence.tokens))
            request.done[sequence.index] = sequence.result()
            del request.begun[sequence.index]
            if request.is_complete:
                self._answer(request.answer())

    def _answer(self, finished: Finished) -> None:
        """Once."""
        if self._open.close(finished.ticket) is not None:
            self._finished.append(finished)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        request = self._open.get(ticket)
        if request is not None:  # it may have several samples that failed
            if isinstance(error, NotFinite):
                error = self._culprits.error(error, request.prompt.weights)
            self._answer(Finished(ticket, error=error))
            self._take_out(request)

    def _take_out(self, request: Request) -> None:
        """All that there is of it."""
        for start in [start for start in self._ready if start.request is request]:
            self._ready.remove(start)
        for start in [start for start in self._again.values() if start.request is request]:
            del self._again[id(start.prompt)]
            self._prompts.remove(start.prompt)
        self._prompts.remove(request.prompt)
        self._remove([sequence for sequence in self._running if sequence.request is request])
        request.begun.clear()
        for group in self._later:
            group[:] = [other for other in group if other is not request]

    def _remove(self, sequences: Sequence[Running]) -> None:
        """Out of the batch."""
        if sequences:
            self._batch.remove(sequences)
            self._is_full = False

    # ---- an error that no request owns -------------------------------------------------------------------------------

    def _recover(self, error: BaseException) -> None:
        """All start over, the first half of those that were at work before the second, which comes when they are
        answered. One alone fails."""
        log.warning("a step of sampling failed; its requests start over, in halves: %r", error)
        group = self._start_over()
        half = len(group) // 2
        first, later = group[:half], group[half:]
        if len(group) == 1:
            (request,), later = group, []
            if is_out_of_memory(error) and not request.is_last_try:  # the memory of the others is free now
                request.is_last_try, first = True, group
            else:
                self._answer(Finished(request.prompt.ticket, error=error))
        if later:
            self._later.appendleft(later)
        for request in first:
            self._enqueue(request)

    def _start_over(self) -> list[Request]:
        """Empties the tables that a step works with, and returns the requests that are to enter them again."""
        waiting = {id(request) for group in self._later for request in group}
        self._prompts.clear()
        self._batch.clear()
        self._ready.clear()
        self._again.clear()
        self._is_full = False
        return [request for request in self._open if id(request) not in waiting]

    def _enqueue(self, request: Request) -> None:
        """From what is known of it: its samples that have begun, then its prompt for those that have not."""
        failed = each(list(request.begun.values()), self._end_unless_settled)
        if failed:
            self._fail(request.prompt.ticket, failed[0].error)
        elif request.is_complete:
            self._answer(request.answer())
        elif request.is_computed:
            for sequence in request.begun.values():
                self._prompts.add(self._again_from(_returning(sequence)))
            if request.num_left > 0:
                self._prompts.add(self._again_from(Start(request, request.prompt)))
        else:
            request.prompt.start_over(self._model.num_layers)
            self._prompts.add(request.prompt)

    def _end_unless_settled(self, sequence: Running) -> None:
        """One for which a token was drawn before the step failed, which may have been its last."""
        if sequence.tokens:
            self._end_if_done(sequence)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _room_for_prompts(self) -> Room:
        """What the running samples leave, with a block more for each of them."""
        limit = self._memory.limit
        grown = Size(len(self._running), self._batch.longest_grown)
        left = limit - grown.num_tokens - self._prefixes.num_tokens() - self._memory.prompt_positions
        ahead = self._memory.held_positions + self._prompts.begun_positions_of_samples
        most_ahead = min(HELD_TOKENS, int(HELD_SHARE * limit))
        make = lambda num_positions: self._memory.make(num_positions, self._batch.in_use)  # noqa: E731
        return Room(0 if self._is_full else left, self._prompts.begun_positions, ahead, most_ahead, make)

    def _make_room(self) -> None:
        """For the next token of every running sequence."""
        while not self._memory.reserve(self._batch.in_use):
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
        self._compute_again(_returning(sequence))

    def _compute_again(self, start: Start) -> None:
        self._prompts.add_first(self._again_from(start))

    def _again_from(self, start: Start) -> Prompt:
        """Its prompt, whose memory is freed now."""
        self._again[id(start.prompt)] = start
        start.prompt.is_again = True
        start.prompt.start_over(self._model.num_layers)
        return start.prompt

    # ---- admission ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts samples while there is room, queues in turn, and draws the next token of each."""
        if self._is_full or not self._ready:
            return
        first = len(self._running)
        longest, prompt_positions = self._batch.longest_grown, self._memory.prompt_positions
        while self._ready and self._start_next(longest, prompt_positions):
            longest = max(longest, self._running[-1].grown)
        newcomers, sources = self._running[first:], list(self._batch.sources)
        if newcomers:
            has_room = self._memory.reserve(Size(len(self._running), max(s.num_places for s in self._running) + 1))
            assert has_room, "a sequence begins where there is room"
            hidden = self._batch.fill_slots(first)
            for start in sources:
                if start not in self._ready:
                    start.prompt.forget_cache()
            self._settle(newcomers, self._batch.draw_first(first, hidden))

    def _start_next(self, longest: int, prompt_positions: int) -> bool:
        """Whether there was room for one more sample of the first prompt. `longest` is the longest slot of those that
        run, and `prompt_positions` are the positions that prompts have."""
        start = self._ready.first
        cache = start.prompt.cache
        prefix, shared = self._batch.shared(start, self._ready.num_together(cache))
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
                self._memory.make(prefixes - self._prefixes.num_allocated, self._batch.in_use)
                prefix = self._prefixes.join(cache, shared)
            elif prefix is not None:
                self._prefixes.rejoin(prefix)
            self._begin(start, prefix)
        else:
            return False
        return True

    def _begin(self, start: Start, prefix: Prefix | None) -> None:
        """The next sample of the first that is ready."""
        request, sequence = start.request, start.returning
        self._ready.take(start)
        if sequence is None:
            index = request.num_started
            sequence = Running(request, index, next(self._numbers), request.stream(index), prefix)
            request.begun[index] = sequence
            request.num_started += 1
        sequence.prefix = prefix
        self._batch.join(sequence, start)
        if start.returning is None and request.num_left > 0:
            self._ready.put_first(start)

    def _start_alone(self) -> None:
        """Nothing runs, and there is no room for the first that is ready beside the caches of other prompts: these are
        freed. Where there is none beside its own prompt, the prompt's cache becomes its slot."""
        start = self._ready.first
        while len(self._ready) > 1:
            self._compute_again(self._ready.pop())
        while self._prompts.drop_begun() or self._prompts.drop_kept():
            pass
        self._begin(start, None)
        if Size(1, len(start.prompt.tokens) + 1).num_tokens + start.prompt.cache.num_tokens > self._memory.limit:
            self._cache.take_over(start.prompt.cache)
            if self._ready:
                self._batch.sources[-1] = replace(start, prompt=replace(start.prompt))
                self._compute_again(self._ready.pop())


def _returning(sequence: Running) -> Start:
    """What a sequence goes on from that has no slot any more."""
    known = sequence.request.prompt
    prompt = Prompt(known.ticket, known.op, known.weights, [*known.tokens, *sequence.tokens], KVCache(0))
    return Start(sequence.request, prompt, sequence)

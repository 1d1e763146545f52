# pyright: basic
"""Requests to tokens. New sequences join a running batch; a sequence that has ended leaves it at once.

A step draws one token for every running sequence (`batch.py`), computes chunks of the prompts that wait (`prompts.py`)
and admits new sequences while there is room (`admission.py`).

A failure belongs to the request that caused it. Passes find out in halves which one that is; what raises elsewhere,
where memory is shared out, leaves the tables that a step works with in doubt. Then all requests start over from what
was drawn of them, as after a preemption, one half of them before the other: so the request that cannot be served ends
up alone, or they are few enough for the memory that there is.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from stovetop.engine.containment import Contained
from stovetop.engine.lora.routing import Stack
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.ops import Finished, SamplingOp, Ticket
from stovetop.engine.sampling.admission import Admission
from stovetop.engine.sampling.batch import Batch, RecordDecoding
from stovetop.engine.sampling.halves import Failed, each, is_out_of_memory
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.not_finite import Culprits, NotFinite
from stovetop.engine.sampling.prompts import Prompts
from stovetop.engine.sampling.request import Prompt, Request, Running
from stovetop.engine.sampling.stops import stops_of
from stovetop.errors import InvalidRequest

log = logging.getLogger(__name__)


class Sampler:
    """Running and waiting samples of one base model, over all adapters."""

    def __init__(self, model: BaseModel, budget: KVBudget, record_decoding: RecordDecoding | None = None) -> None:
        """`record_decoding` gives what passes are recorded with, where launching them is slow."""
        self._model = model
        self._budget = budget
        stack = Stack(model.dtype)
        self._batch = Batch(model, stack, None if record_decoding is None else record_decoding(model))
        self._prompts = Prompts(model, stack)
        self._admission = Admission(self._batch, self._prompts, budget.num_positions)
        self._open: dict[Ticket, Request] = {}  # that are not answered yet, in the order in which they came
        self._culprits = Culprits(model)
        self._later: deque[list[Request]] = deque()  # that begin when those before them are answered, see `_recover`
        self._finished: list[Finished] = []  # in this step

    def add(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        """`weights` are those that the op names."""
        for failed in each([ticket], lambda _: self._take_in(ticket, weights)):
            self._open.pop(ticket, None)
            self._finished.append(Finished(ticket, error=failed.error))

    def _take_in(self, ticket: Ticket, weights: AdapterWeights | None) -> None:
        assert isinstance(ticket.op, SamplingOp), "the engine sends no others"
        request = Request(ticket, ticket.op, weights)
        if request.most_positions > self._budget.longest_sequence:
            raise InvalidRequest(self._budget.too_long(request.most_positions))
        self._open[ticket] = request
        if self._later:
            self._later[-1].append(request)
        else:
            self._prompts.add(request.prompt)

    @property
    def idle(self) -> bool:
        return not self._open and not self._finished

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
            request = self._open.pop(ticket, None)
            if request is not None:
                self._take_out(request)
        if outcome.error is not None:  # what is left of it goes with the tables
            for other in self._start_over():
                self._enqueue(other)
        return request is not None

    @property
    def tickets(self) -> list[Ticket]:
        """Of the requests whose answer no step has returned."""
        return [*self._open, *(finished.ticket for finished in self._finished)]

    def weights_in_use(self) -> Iterator[AdapterWeights]:
        """Those of everything that waits or runs."""
        return (request.weights for request in self._open.values() if request.weights is not None)

    def _step(self) -> None:
        if self._later and len(self._open) == sum(map(len, self._later)):
            for request in self._later.popleft():
                self._enqueue(request)
        if self._batch.running:
            self._admission.make_room()
            self._settle(list(self._batch.running), self._batch.draw_next())
        if not self._prompts.idle:
            running = [w for sequence in self._batch.running if (w := sequence.request.weights) is not None]
            done, failed = self._prompts.step(self._admission.room_for_prompts(), running)
            for one in failed + each(done, self._computed):
                self._fail(one.item.request, one.error)
        newcomers = self._admission.admit()
        if newcomers:
            self._settle([sequence for sequence, _ in newcomers], self._batch.draw_first(newcomers))
        self._batch.rest()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _computed(self, prompt: Prompt) -> None:
        """A prompt is ready to be continued, or, if only its logprobs were asked for, it is done."""
        request = prompt.request
        if not request.is_computed:
            request.check_finite()
            if request.wants_samples:
                request.stops = stops_of(request.params, self._model.stop_tokens, self._model.tokenizer)
                request.stream(0)  # a seed that is none shows here
            request.is_computed = True
        if request.is_complete:
            self._answer(request.answer())
        else:
            self._admission.ready.append(prompt)

    def _settle(self, drew: Sequence[Running], failed: list[Failed[Running]]) -> None:
        """After a token was drawn for each of these, but for those that failed: who has ended leaves, and with the last
        sample of a request it is answered."""
        lost = {id(one.item) for one in failed}
        failed += each([sequence for sequence in drew if id(sequence) not in lost], self._end_if_done)
        self._admission.remove([sequence for sequence in drew if sequence.index not in sequence.request.begun])
        for one in failed:
            self._fail(one.item.request, one.error)

    def _end_if_done(self, sequence: Running) -> None:
        request = sequence.request
        if sequence.ended():
            self._admission.ready.charge(request, len(sequence.tokens))
            request.done[sequence.index] = sequence.result()
            del request.begun[sequence.index]
            if request.is_complete:
                self._answer(request.answer())

    def _answer(self, finished: Finished) -> None:
        """Once."""
        if self._open.pop(finished.ticket, None) is not None:
            self._finished.append(finished)

    def _fail(self, request: Request, error: BaseException) -> None:
        if request.ticket in self._open:  # it may have several samples that failed
            if isinstance(error, NotFinite):
                error = self._culprits.error(error, request.weights)
            self._answer(Finished(request.ticket, error=error))
            self._take_out(request)

    def _take_out(self, request: Request) -> None:
        """All that there is of it."""
        returning = [sequence.source for sequence in request.begun.values() if sequence.source is not None]
        for prompt in (request.prompt, *returning):
            self._prompts.remove(prompt)
            self._admission.ready.remove(prompt)
        self._admission.remove([sequence for sequence in self._batch.running if sequence.request is request])
        request.begun.clear()
        for group in self._later:
            group[:] = [other for other in group if other is not request]

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
                self._answer(Finished(request.ticket, error=error))
        if later:
            self._later.appendleft(later)
        for request in first:
            self._enqueue(request)

    def _start_over(self) -> list[Request]:
        """Empties the tables that a step works with, and returns the requests that are to enter them again."""
        waiting = {id(request) for group in self._later for request in group}
        self._prompts.clear()
        self._admission.clear()
        return [request for request in self._open.values() if id(request) not in waiting]

    def _enqueue(self, request: Request) -> None:
        """From what is known of it: its samples that have begun, then its prompt for those that have not."""
        failed = each(list(request.begun.values()), self._end_unless_settled)
        if failed:
            self._fail(request, failed[0].error)
        elif request.is_complete:
            self._answer(request.answer())
        else:
            for sequence in request.begun.values():
                self._prompts.add(sequence.without_slot())
            if request.num_left > 0 or not request.is_computed:
                request.prompt.start_over()
                self._prompts.add(request.prompt)

    def _end_unless_settled(self, sequence: Running) -> None:
        """One for which a token was drawn before the step failed, which may have been its last."""
        if sequence.tokens:
            self._end_if_done(sequence)

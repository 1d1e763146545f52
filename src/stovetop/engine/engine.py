# pyright: basic
"""The engine: accepts ops as tickets and works them off, step by step. Synchronous; one thread submits and steps.

    submit(op) -> Ticket        step() -> what ended: a turn of training, a token for every running sample

One base model, frozen and shared; any number of adapters on it. What an op does to an adapter is in `training/`, how
samples are drawn in `sampling/`, what runs when in `scheduler.py`.

A failure belongs to the ticket that caused it, whatever it is: only KeyboardInterrupt, and what is derived from it,
ends the work from outside. What is raised outside of the work on a ticket is a fault of ours. Either leaves `step`, and
the engine is not to be used any more.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir

from stovetop.durable import LOCAL_DISK, Disk
from stovetop.engine import ops
from stovetop.engine.adapters import Adapters
from stovetop.engine.containment import Contained
from stovetop.engine.counts import Counts
from stovetop.engine.lora.weights import AdapterWeights
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.recompute import is_needed, recomputing
from stovetop.engine.residency import Residency
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.sampler import RecordDecoding, Sampler
from stovetop.engine.scheduler import Scheduler
from stovetop.engine.threads import Threads
from stovetop.engine.training.trainer import MicroBatch, Task, Trainer
from stovetop.errors import Cancelled, InvalidRequest
from stovetop.tokenizing import Tokenizer

log = logging.getLogger(__name__)

SHARE_OF_ADAPTERS = 0.5  # of the memory that is available when the model is loaded


class Engine:
    """See `ops.Engine`."""

    def __init__(
        self,
        model: BaseModel,
        *,
        max_tokens_per_pass: int = 4096,
        micro_batch_invariant: bool = False,
        recompute: bool | None = None,
        max_adapter_bytes: int | None = None,
        max_kv_bytes: int | None = None,
        idle_folder: Path | None = None,
        disk: Disk = LOCAL_DISK,
        record_decoding: RecordDecoding | None = None,
        threads: Threads | None = None,
    ) -> None:
        if recompute or (recompute is None and is_needed(model, max_tokens_per_pass)):
            model = recomputing(model)
        self._model = model
        self._trainer = Trainer(model, 1 if micro_batch_invariant else max_tokens_per_pass)
        budget = KVBudget.of(model, max_kv_bytes)
        self._sampler = Sampler(model, budget, record_decoding)
        self._scheduler = Scheduler(max_tokens_per_pass, share_passes=model.arithmetic.can_stack)
        limit = (
            int(SHARE_OF_ADAPTERS * available_bytes(model.device)) if max_adapter_bytes is None else max_adapter_bytes
        )
        self._threads = threads
        self.counts = Counts()
        self._residency = Residency(model.device, limit, idle_folder or Path(gettempdir()), self.counts)
        self.adapters = Adapters(model, self._trainer, self._residency, disk)
        self._numbers = itertools.count(1)
        self._work: dict[ops.Ticket, _Work] = {}  # of ordered ops
        self._for_weights: dict[ops.WeightsId, list[ops.Ticket]] = {}  # what waits for weights in the making
        self._answers: list[ops.Finished] = []  # to be returned by the next step
        self.description = ops.Description(
            replace(model.limits, longest_sequence=budget.longest_sequence),
            model.fingerprint,
            model.tokenizer_place,
            model.untrainable,
        )

    def get_tokenizer(self) -> Tokenizer:
        if self._model.tokenizer is None:
            name = self.description.limits.name
            raise InvalidRequest(f"base model {name!r} has no tokenizer in its folder; pass token ids")
        return self._model.tokenizer

    def set_gate(self, may_begin: Callable[[ops.Ticket], bool]) -> None:
        self._scheduler.may_begin = may_begin

    def submit(self, op: ops.Op) -> ops.Ticket:
        ticket = ops.Ticket(next(self._numbers), op)
        match op:
            case ops.Sample() | ops.ComputeLogprobs() | ops.SaveWeights() | ops.DropWeights():
                in_making = None if op.weights is None else self._for_weights.get(op.weights)
                if in_making is None:
                    self._with_weights(ticket)
                else:
                    in_making.append(ticket)
            case _:
                work = self._cut(op)
                self._scheduler.add(ticket, [each.num_tokens for each in work.micro_batches])
                self._work[ticket] = work
                if isinstance(op, ops.Freeze | ops.LoadWeights):
                    self._for_weights.setdefault(op.weights, [])
        return ticket

    def _cut(self, op: ops.OrderedOp) -> "_Work":
        with Contained() as outcome:
            return _Work(self.adapters.micro_batches(op))
        return _Work([], outcome.error)

    def cancel(self, ticket: ops.Ticket) -> None:
        for waiting in self._for_weights.values():
            if ticket in waiting:
                waiting.remove(ticket)
                return self._answer(ticket, Cancelled())
        if self._scheduler.cancel(ticket) or self._sampler.cancel(ticket):
            self._answer(ticket, Cancelled())
        return None

    def step(self) -> list[ops.Finished]:
        turn = self._scheduler.next_turn()
        self._run(turn)
        if not self._sampler.idle:
            began_s = time.perf_counter()
            self._answers += self._sampler.step()
            self.counts.sampling_s += time.perf_counter() - began_s
            self.counts.num_sampling_steps += 1
        self._residency.tidy(in_use=self._sampler.weights_in_use())
        if self._threads is not None:
            self._threads.look()
        answers, self._answers = self._answers, []
        return answers

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and self._sampler.idle and not self._answers

    # ---- training ----------------------------------------------------------------------------------------------------

    def _run(self, turn: list[ops.Ticket]) -> None:
        """Ops of one kind, each of another adapter. What is raised is the failure of the ticket that it was done
        for."""
        tasks = {ticket: task for ticket in turn if (task := self._begin(ticket)) is not None}
        if tasks:
            self._run_pass(list(tasks.values()))
        for ticket, task in tasks.items():
            if task.is_done:
                self._end_task(ticket, task)

    def _run_pass(self, tasks: list[Task]) -> None:
        began_s, num_tokens = time.perf_counter(), sum(task.micro_batches[0].num_tokens for task in tasks)
        with Contained() as outcome, self._threads_kept():
            self._trainer.run_pass(tasks, self.adapters.forget_graphs)
        self.counts.training_s += time.perf_counter() - began_s
        self.counts.num_training_passes += 1
        self.counts.num_trained_tokens += num_tokens
        if outcome.error is not None:  # a fault of ours, which leaves in doubt how far each of them is
            for task in tasks:
                task.error = outcome.error

    def _threads_kept(self) -> AbstractContextManager[None]:
        """In the deterministic mode, of which the products on the way back round otherwise on another number of
        threads."""
        is_deterministic = not self._model.arithmetic.can_stack
        return self._threads.kept() if self._threads is not None and is_deterministic else nullcontext()

    def _begin(self, ticket: ops.Ticket) -> Task | None:
        """What a pass is to be done for. An op that needs none is done here."""
        op, work = ticket.op, self._work[ticket]
        assert isinstance(op, ops.OrderedOp), "the scheduler has no others"
        result: ops.Result = None
        with Contained() as outcome:
            if work.error is not None:
                raise work.error
            self.adapters.use(op)
            if isinstance(op, ops.PassesOp):
                work.task = work.task or self.adapters.task(op, work.micro_batches)
                return work.task
            result = self.adapters.do(op)
        self._answer(ticket, outcome.error, result)
        if outcome.error is None:
            self._count_new(op)
        return None

    def _count_new(self, op: ops.OrderedOp) -> None:
        """What an op has made counts from now on. The op is done, even where that fails."""
        with Contained() as outcome:
            self.adapters.note_new(op)
        if outcome.error is not None:
            log.error("an adapter does not count until it is used again", exc_info=outcome.error)

    def _end_task(self, ticket: ops.Ticket, task: Task) -> None:
        op = ticket.op
        result: ops.Result = None
        with Contained() as outcome:
            output = task.output()
            if isinstance(op, ops.Score):
                self.adapters.scored(op, task)
                self._scheduler.hold(op.adapter, op.scored)
            result = None if isinstance(op, ops.BackwardFrom) else output
        self._answer(ticket, outcome.error, result)

    def _answer(self, ticket: ops.Ticket, error: BaseException | None, result: ops.Result = None) -> None:
        """The end of a ticket."""
        op = ticket.op
        self._answers.append(ops.Finished(ticket, result, error))
        self._work.pop(ticket, None)
        if error is not None:
            self._scheduler.end(ticket)
            self.adapters.failed(op, error)
        match op:
            case ops.Freeze() | ops.LoadWeights():
                for waiting in self._for_weights.pop(op.weights, ()):
                    self._with_weights(waiting, error)
            case ops.BackwardFrom() | ops.Spoil() | ops.TakeBack():
                self.adapters.forget_scored(op.scored)
            case _:
                pass

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def _with_weights(self, ticket: ops.Ticket, error: BaseException | None = None) -> None:
        """What is done as soon as the weights are there that it names; `error` is why they could not be made."""
        op, made = ticket.op, self.adapters.weights
        assert isinstance(op, ops.WeightsOp), "no other op waits for weights"
        if op.weights is not None and op.weights not in made:
            missing = "there are no weights of this name, or no more"
            failure = InvalidRequest(
                f"{missing if error is None else f'they could not be made: {error}'}: {op.weights!r}"
            )
            failure.__cause__ = error
            return self._answer(ticket, failure)
        match op:
            case ops.SaveWeights():
                self._save_weights(ticket, op)
            case ops.DropWeights():
                del made[op.weights]
                self._answer(ticket, None)
            case ops.Sample() | ops.ComputeLogprobs():
                self._sample(ticket, None if op.weights is None else made[op.weights])
        return None

    def _save_weights(self, ticket: ops.Ticket, op: ops.SaveWeights) -> None:
        snapshot = None
        with Contained() as outcome:
            snapshot = self.adapters.snapshot_of_weights(op)
        self._answer(ticket, outcome.error, snapshot)

    def _sample(self, ticket: ops.Ticket, weights: AdapterWeights | None) -> None:
        with Contained() as outcome:
            if weights is not None:
                self._residency.use([weights])
            self._sampler.add(ticket, weights)
        if outcome.error is not None:
            self._sampler.cancel(ticket)  # it may have it already
            self._answer(ticket, outcome.error)


@dataclass(slots=True, eq=False)
class _Work:
    """The passes that an op needs, if any."""

    micro_batches: Sequence[MicroBatch]
    error: BaseException | None = None  # why its data cannot be cut; told in its turn, after those before it
    task: Task | None = None  # once it has begun

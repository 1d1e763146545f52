# pyright: basic
"""The engine: accepts ops as tickets and works them off, step by step. Synchronous; one thread submits and steps.

    submit(op) -> Ticket        step() -> what ended: schedule, run, post-process

One base model, frozen and shared; any number of adapters on it. What an op does to an adapter is in `training/`, how
samples are drawn in `sampling/`, what runs when in `scheduler.py`.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, assert_never

from stovetop.client import Tokenizer
from stovetop.durable import LOCAL_DISK, Disk
from stovetop.engine import ops
from stovetop.engine.files.adapter_files import SavedAdapter, check_fits, read_adapter, write_adapter
from stovetop.engine.lora.weights import AdapterWeights, chosen, initial_weights
from stovetop.engine.machine import available_bytes
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.model.recompute import is_needed, recompute_layers
from stovetop.engine.residency import Holder, Residency
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.sampler import RecordDecoding, Sampler
from stovetop.engine.scheduler import Scheduler
from stovetop.engine.training.adapter import Adapter
from stovetop.engine.training.trainer import Job, Trainer
from stovetop.errors import InvalidRequest
from stovetop.input_checks import ModelLimits
from stovetop.types import LoraConfig

BYTES_OF_FACTOR = 16  # of each number: weight, gradient and two moments, in float32
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
    ) -> None:
        self._model = model
        if recompute or (recompute is None and is_needed(model, max_tokens_per_pass)):
            recompute_layers(model.layers.layers)
        self._trainer = Trainer(model, 1 if micro_batch_invariant else max_tokens_per_pass)
        self._budget = KVBudget.of(model, max_kv_bytes)
        self._sampler = Sampler(model, self._budget, record_decoding)
        self._scheduler = Scheduler(max_tokens_per_pass, share_passes=model.arithmetic.can_stack)
        limit = (
            int(SHARE_OF_ADAPTERS * available_bytes(model.device)) if max_adapter_bytes is None else max_adapter_bytes
        )
        self._residency = Residency(model.device, limit, idle_folder or Path(gettempdir()))
        self._numbers = itertools.count(1)
        self._disk = disk

    def check_lora(self, config: LoraConfig) -> None:
        """Refuses targets that the model lacks, and a rank whose adapter could never be in memory."""
        targets = chosen(config, self._model.targets, self._model.untrainable)
        bytes_a_rank = BYTES_OF_FACTOR * sum(target.num_inputs + target.num_outputs for target in targets)
        available = available_bytes(self._model.device)
        if config.rank * bytes_a_rank > available:
            raise InvalidRequest(
                f"rank must be at most {available // bytes_a_rank}: each rank of an adapter of this model takes "
                f"{bytes_a_rank:,} bytes, with gradient and optimizer, and {available:,} are available: {config.rank}"
            )

    def submit(self, op: ops.Op) -> ops.Ticket:
        ticket = ops.Ticket(next(self._numbers), op)
        self._scheduler.add(ticket)
        return ticket

    def step(self) -> list[ops.Finished]:
        tickets, newcomers = self._scheduler.next_in_order(), self._scheduler.take_sampling()
        self._residency.use(_holders_of(ticket.op for ticket in (*tickets, *newcomers)))
        finished = self._run(tickets)
        for ticket in newcomers:
            self._sampler.add(ticket, ticket.op.weights)
        finished += self._sampler.step()
        self._residency.use(_holders_of(done for each in finished for done in (each.ticket.op, each.result)))
        self._residency.tidy(in_use=self._sampler.weights_in_use())
        return finished

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and self._sampler.idle

    @property
    def limits(self) -> ModelLimits:
        return replace(self._model.limits, longest_sequence=self._budget.longest_sequence)

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    def get_tokenizer(self) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidRequest(f"base model {self.limits.name!r} has no tokenizer in its folder; pass token ids")
        return self._model.tokenizer

    def _run(self, tickets: list[ops.Ticket]) -> list[ops.Finished]:
        """Tickets that may run together: their ops are of one kind, each of another adapter."""
        jobs = [
            Job(ticket.op.adapter, ticket.op.data, ticket.op.loss)
            for ticket in tickets
            if isinstance(ticket.op, ops.Forward | ops.ForwardBackward)
        ]
        if not jobs:
            return [self._run_alone(ticket) for ticket in tickets]
        backward = isinstance(tickets[0].op, ops.ForwardBackward)
        results = self._trainer.forward_backward(jobs) if backward else self._trainer.forward(jobs)
        return [_finished(ticket, result) for ticket, result in zip(tickets, results, strict=True)]

    def _run_alone(self, ticket: ops.Ticket) -> ops.Finished:
        try:
            return ops.Finished(ticket, self._do(ticket.op))
        except Exception as error:  # the ticket's own failure: it goes to whoever holds its future
            return ops.Finished(ticket, error=error)

    def _do(self, op: ops.Op) -> Any:
        match op:
            case ops.CreateAdapter(config):
                targets = chosen(config, self._model.targets, self._model.untrainable)
                return Adapter(initial_weights(config, targets, self._model.device))
            case ops.LoadAdapter(path, with_optimizer):
                saved = self._read(path, with_optimizer)
                return Adapter(saved.weights, saved.moments)
            case ops.ForwardBackwardCustom(adapter, data, loss_fn):
                return self._trainer.forward_backward_custom(adapter, data, loss_fn)
            case ops.OptimStep(adapter, params):
                return adapter.optim_step(params)
            case ops.SaveAdapter(adapter, path, meta, with_optimizer, overwrite):
                moments = adapter.moments if with_optimizer else None
                return write_adapter(path, adapter.weights, moments, meta, overwrite=overwrite, disk=self._disk)
            case ops.RestoreAdapter(adapter, path, with_optimizer):
                saved = self._read(path, with_optimizer)
                return adapter.restore(saved.weights, saved.moments)
            case ops.Freeze(adapter):
                return adapter.weights
            case ops.LoadWeights(path):
                return self._read(path, with_optimizer=False).weights
            case ops.Sample() | ops.ComputeLogprobs() | ops.Forward() | ops.ForwardBackward():
                raise AssertionError("these run in company: sampling in the sampler, passes in the trainer")
            case _:
                assert_never(op)

    def _read(self, path: Path, with_optimizer: bool) -> SavedAdapter:
        saved = read_adapter(path, with_optimizer=with_optimizer, device=self._model.device)
        check_fits(saved, self._model.targets, self._model.weight_VE, path)
        return saved


def _holders_of(things: Iterable[Any]) -> list[Holder]:
    """The values with tensors that ops and their results have to do with."""
    holders: list[Holder] = []
    for thing in things:
        match thing:
            case ops.Sample() | ops.ComputeLogprobs():
                holders += [] if thing.weights is None else [thing.weights]
            case AdapterWeights():
                holders.append(thing)
            case Adapter():
                holders += [thing.weights, thing.moments]
            case _ if isinstance(thing, ops.AdapterOp):
                holders += [thing.adapter.weights, thing.adapter.moments]
            case _:  # answers, and ops that make something new
                pass
    return holders


def _finished(ticket: ops.Ticket, result: Any) -> ops.Finished:
    return ops.Finished(ticket, error=result) if isinstance(result, Exception) else ops.Finished(ticket, result)

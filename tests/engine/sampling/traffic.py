"""Random requests for one sampler, and what each of them gives alone; and faults, raised at calls that a test names."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.lora.weights import AdapterWeights, initial_weights
from stovetop.engine.sampling.kv_budget import KVBudget
from stovetop.engine.sampling.sampler import Sampler
from stovetop.types import LoraConfig, ModelInput, SampleResponse, SamplingParams

PREFIX = tiny.tokens(70, 1000)  # long enough to be shared between samples
LENGTHS = [1, 5, 12, 40, 71]
TIGHT = 4 * 128  # positions for all keys and values: about three sequences at a time, and then some are preempted


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request, and which weights it wants."""

    op: ops.Sample | ops.ComputeLogprobs
    adapter: int | None

    @property
    def weights(self) -> AdapterWeights | None:
        return None if self.adapter is None else adapter(self.adapter)


@functools.cache
def adapter(seed: int) -> AdapterWeights:
    model = tiny.base_model()
    first = initial_weights(LoraConfig(rank=4, seed=seed), model.targets, model.device)
    return tiny.with_nonzero_b(first, seed)


def asked(prompt: list[int], n: int = 1, max_tokens: int = 6, adapter: int | None = None, **params: Any) -> Asked:
    wanted = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, "stop": []} | params)
    return Asked(ops.Sample(None, ModelInput.from_ints(prompt), n, wanted, False, 0), adapter)


def scored(prompt: list[int], adapter: int | None = None) -> Asked:
    return Asked(ops.ComputeLogprobs(None, ModelInput.from_ints(prompt)), adapter)


def random_requests(seed: int, count: int) -> list[Asked]:
    """Some of which begin alike, or are the same; with tokens and strings that end them."""
    chosen, requests = random.Random(seed), []
    for number in range(count):
        owner = chosen.choice([None, 0, 1])
        prompt = tiny.tokens(chosen.choice(LENGTHS), number % 5, PREFIX if chosen.random() < 0.5 else None)
        if chosen.random() < 0.2:
            requests.append(scored(prompt, owner))
        else:
            stop = chosen.choice([[], [], ["a"], list(range(0, 512, 30))])
            more = {"seed": number, "stop": stop, "temperature": chosen.choice([0.0, 0.7, 1.0])}
            requests.append(asked(prompt, chosen.randint(1, 3), chosen.choice([1, 4, 12]), owner, **more))
    return requests


def sampler(positions: int = TIGHT) -> Sampler:
    model = tiny.base_model()
    return Sampler(model, KVBudget.of(model, tiny.kv_bytes(positions)))


def plain(result: object) -> object:
    """What of a result can be compared: everything but names, and how much was taken over from others."""
    if isinstance(result, SampleResponse):
        return [(s.tokens, s.logprobs, s.stop_reason) for s in result.sequences]
    return result


@dataclass(slots=True)
class Traffic:
    """Requests of one sampler, and how they were answered."""

    sampler: Sampler
    tickets: list[ops.Ticket] = field(default_factory=list)
    answers: dict[ops.Ticket, ops.Finished] = field(default_factory=dict)

    def ask(self, wanted: Asked) -> ops.Ticket:
        ticket = ops.Ticket(len(self.tickets), wanted.op)
        self.tickets.append(ticket)
        self.sampler.add(ticket, wanted.weights)
        return ticket

    def step(self) -> list[ops.Ticket]:
        finished = self.sampler.step()
        for done in finished:
            assert done.ticket not in self.answers, "a ticket is answered once"
            self.answers[done.ticket] = done
        return [done.ticket for done in finished]

    def run(self, most_steps: int = 3000) -> "Traffic":
        for _ in range(most_steps):
            if self.sampler.idle:
                return self
            self.step()
        raise AssertionError("it goes on for ever")

    @property
    def errors(self) -> dict[ops.Ticket, BaseException]:
        return {ticket: done.error for ticket, done in self.answers.items() if done.error is not None}


def together(requests: list[Asked], positions: int = TIGHT, seed: int = 0) -> Traffic:
    """All of them, coming at random steps."""
    traffic, chosen = Traffic(sampler(positions)), random.Random(seed)
    for wanted in requests:
        traffic.ask(wanted)
        for _ in range(chosen.choice([0, 0, 1, 3])):
            traffic.step()
    return traffic.run()


def alone(wanted: Asked) -> object:
    """What it gives when nothing else is there, with memory for all of it."""
    traffic = Traffic(sampler(4096))
    ticket = traffic.ask(wanted)
    return plain(traffic.run().answers[ticket].result)


@functools.cache
def expected(seed: int, count: int) -> list[object]:
    return [alone(wanted) for wanted in random_requests(seed, count)]


def inside(sampler: Sampler) -> Any:
    """What no caller can see: memory, and who runs."""
    return sampler


def nothing_is_left(sampler: Sampler) -> bool:
    """But for prompts that are kept for others."""
    own = inside(sampler)
    memory = own._admission.memory.allocated - sum(cache.num_tokens for cache in own._prompts.prefix_cache.caches)
    waits_or_runs = own._batch.running or own._admission.ready or not own._prompts.idle
    return memory == 0 and not waits_or_runs and not list(sampler.weights_in_use())


def fail_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Callable[..., bool], error: BaseException
) -> None:
    """`owner.name` raises instead of doing what it does, whenever it is called with what `is_bad`."""
    original = getattr(owner, name)

    def maybe(*arguments: Any, **named: Any) -> Any:
        if is_bad(*arguments, **named):
            raise error
        return original(*arguments, **named)

    patch.setattr(owner, name, maybe)


def at_call(number: int) -> Callable[..., bool]:
    """Only the call of this number, counted from 0."""
    calls = iter(range(number + 1))
    return lambda *_, **__: next(calls, None) == number


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("no memory for a test")

"""Many adapters at once: what one computes never depends on the others."""

import random
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch

from engine import tiny
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.lora.routing import Stack
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.engine.sampling import batch
from stovetop.engine.training.adapter import Adapter
from stovetop.errors import InvalidRequest
from stovetop.losses import PPO, CrossEntropy, ImportanceSampling, Loss
from stovetop.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams

LORA = [
    LoraConfig(rank=2, seed=1),
    LoraConfig(rank=8, seed=2, train_mlp=False),
    LoraConfig(rank=5, seed=3, train_unembed=False),
    LoraConfig(rank=3, seed=4, train_attn=False),
]
STEP = AdamParams(learning_rate=1e-2, eps=1e-8)


# ---- random programs -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Client:
    """One adapter's program, made beforehand, and what came of it."""

    program: list[str]
    seed: int
    adapter: Adapter
    results: list[Any] = field(default_factory=list)
    waiting: list[ops.Ticket] = field(default_factory=list)
    num_asked: int = 0

    def next_op(self) -> ops.Op:
        number = self.num_asked
        self.num_asked += 1
        sequence = tiny.tokens(6 + 7 * (number % 5), 1000 * self.seed + number)
        match self.program[number]:
            case "forward_backward":
                return ops.ForwardBackward(self.adapter, [tiny.rl_datum(sequence, number)], ImportanceSampling())
            case "forward":
                return ops.Forward(self.adapter, [tiny.datum(sequence)], CrossEntropy())
            case "optim_step":
                return ops.OptimStep(self.adapter, STEP)
            case _:
                params = SamplingParams(1 + number % 6, number, [], [0.6, 1.0][number % 2])
                return ops.Sample(tiny.named(self.adapter.weights), ModelInput.from_ints(sequence), 2, params, False, 0)


def program(seed: int, length: int) -> list[str]:
    """Verbs in an order that a client may call them in: no optim_step without a gradient."""
    chosen, verbs, has_gradient = random.Random(seed), [], False
    while len(verbs) < length:
        verb = chosen.choice(["forward_backward", "forward_backward", "forward", "optim_step", "sample"])
        if verb != "optim_step" or has_gradient:
            verbs.append(verb)
            has_gradient = verb == "forward_backward" or (has_gradient and verb != "optim_step")
    return verbs


def clients(engine: Engine, length: int) -> list[Client]:
    return [Client(program(seed, length), seed, tiny.create(engine, lora)) for seed, lora in enumerate(LORA)]


def plain(result: Any) -> Any:
    """What of a result can be compared: everything but names."""
    if isinstance(result, SampleResponse):
        return [(s.tokens, s.logprobs, s.stop_reason) for s in result.sequences]
    return result


def drive(engine: Engine, running: list[Client], chosen: random.Random) -> None:
    """Submits ops of clients picked at random, with any number of steps between, until every program is through. A
    sample is asked for when its client's earlier ops are done, since it needs their weights."""
    by_ticket: dict[ops.Ticket, tuple[Client, int]] = {}

    def step() -> None:
        for done in engine.step():
            assert done.error is None
            client, number = by_ticket[done.ticket]
            client.waiting.remove(done.ticket)
            client.results.append((number, plain(done.result)))

    while unfinished := [client for client in running if client.num_asked < len(client.program)]:
        client = chosen.choice(unfinished)
        while client.program[client.num_asked] == "sample" and client.waiting:
            step()
        ticket = tiny.submit(engine, client.next_op())
        client.waiting.append(ticket)
        by_ticket[ticket] = (client, client.num_asked)
        for _ in range(chosen.choice([0, 0, 1, 2])):
            step()
    while not engine.idle:
        step()


@pytest.mark.slow
def test_200_random_ops_over_four_adapters_give_the_bits_of_lonely_runs() -> None:
    together, chosen = tiny.engine(), random.Random(0)
    mixed = clients(together, length=50)
    drive(together, mixed, chosen)
    for index, client in enumerate(mixed):
        alone = tiny.engine()
        lonely = clients(alone, length=50)[index]
        drive(alone, [lonely], random.Random(1))
        assert sorted(client.results) == sorted(lonely.results)
        for name, tensor in lonely.adapter.weights.tensors.items():
            assert torch.equal(client.adapter.weights.tensors[name], tensor)


# ---- one pass for several adapters -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast() -> BaseModel:
    return adopt(tiny.llama(), "fast", fingerprint="", deterministic=False)


LOSSES: list[Loss] = [CrossEntropy(), ImportanceSampling(temperature=0.7), PPO(), CrossEntropy()]


def data_of(index: int) -> list[Datum]:
    shared = tiny.tokens(12, 7)  # a prefix that all adapters' data share, and must not share between them
    sequences = [tiny.tokens(5 + 3 * index + number, 10 * index + number, shared) for number in range(2)]
    if isinstance(LOSSES[index], CrossEntropy):
        return [tiny.datum(sequence) for sequence in sequences]
    return [tiny.rl_datum(sequence, index) for sequence in sequences]


def test_adapters_that_train_in_one_pass_get_what_each_gets_alone(
    fast: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(fast)
    adapters = [tiny.trained_adapter(engine, seed, **vars_of(lora)) for seed, lora in enumerate(LORA)]
    passes: list[int] = []
    original = BaseModel.hidden_states

    def counted(self: BaseModel, packed: Any, *rest: Any) -> Any:
        passes.append(packed.num_tokens)
        return original(self, packed, *rest)

    monkeypatch.setattr(BaseModel, "hidden_states", counted)
    jobs = [ops.ForwardBackward(a, data_of(index), LOSSES[index]) for index, a in enumerate(adapters)]
    tickets = [tiny.submit(engine, job) for job in jobs]
    outputs = {done.ticket: done.result for done in engine.step()}
    assert len(passes) == 1
    together = [adapter.gradients for adapter in adapters]
    for index, (ticket, adapter) in enumerate(zip(tickets, adapters, strict=True)):
        adapter.gradients = None
        alone = tiny.run(engine, jobs[index])
        assert outputs[ticket].metrics == pytest.approx(alone.metrics, rel=1e-4)
        gradients = together[index]
        assert gradients is not None
        assert adapter.gradients is not None
        assert gradients.keys() == adapter.gradients.keys()
        for name, gradient in adapter.gradients.items():
            rounding = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(gradients[name], gradient, atol=rounding, rtol=1e-4)


def vars_of(lora: LoraConfig) -> dict[str, Any]:
    return {"rank": lora.rank, "train_mlp": lora.train_mlp, "train_attn": lora.train_attn} | {
        "train_unembed": lora.train_unembed
    }


def test_one_that_fails_in_a_shared_pass_fails_alone(fast: BaseModel) -> None:
    engine = Engine(fast)
    good, bad = (tiny.trained_adapter(engine, seed) for seed in range(2))
    broken = tiny.rl_datum(tiny.tokens(9, 0), 0)
    del broken.loss_fn_inputs["advantages"]
    tickets = [
        tiny.submit(engine, ops.ForwardBackward(bad, [broken], ImportanceSampling())),
        tiny.submit(engine, ops.ForwardBackward(good, [tiny.datum(tiny.tokens(9, 1))], CrossEntropy())),
    ]
    done = {finished.ticket: finished for finished in engine.step()}
    assert isinstance(done[tickets[0]].error, KeyError)
    assert done[tickets[1]].error is None
    assert good.gradients is not None
    with pytest.raises(InvalidRequest, match="a forward_backward before it failed"):
        tiny.run(engine, ops.OptimStep(bad, STEP))


def test_in_the_deterministic_mode_a_pass_holds_one_adapter() -> None:
    engine = tiny.engine()
    adapters = [tiny.trained_adapter(engine, seed) for seed in range(2)]
    for adapter in adapters:
        tiny.submit(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(9, 0))], CrossEntropy()))
    assert [len(engine.step()) for _ in range(2)] == [1, 1]


def test_who_joins_a_running_batch_costs_only_the_copy_of_his_own_adapter(
    fast: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copies = Engine(fast), []
    first, second = (tiny.trained_adapter(engine, seed).weights for seed in range(2))
    for name in ("_start_over", "_fill"):
        original = getattr(Stack, name)
        monkeypatch.setattr(Stack, name, lambda *args, made=original: (copies.append(args), made(*args)))
    for number, weights in enumerate([first, second, second, first, second]):
        params = SamplingParams(30, number, [])
        tiny.submit(
            engine, ops.Sample(tiny.named(weights), ModelInput.from_ints(tiny.tokens(5, number)), 1, params, False, 0)
        )
        for _ in range(3):
            engine.step()
    assert len(copies) == 2
    while not engine.idle:
        engine.step()


def test_samples_of_many_adapters_in_any_order_are_those_of_each_alone(
    fast: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are shared and prompts that are not; as many rows of each adapter, which a pass has side by side,
    and, once the shorter samples have left, not as many."""
    engine, orders = Engine(fast), []
    original = batch.decoded
    monkeypatch.setattr(batch, "decoded", lambda model, step: (orders.append(step.slots_S), original(model, step))[1])
    adapters = [tiny.trained_adapter(engine, seed, rank=4).weights for seed in range(4)]
    prompts = [ModelInput.from_ints(tiny.tokens(length, length)) for length in (70, 9)]
    asked = [
        ops.Sample(tiny.named(weights), prompt, 2, SamplingParams(5 + index + 4 * number, 0, [], 0.0), False, 0)
        for number, prompt in enumerate(prompts)
        for index, weights in enumerate(adapters)
    ]
    tickets = [tiny.submit(engine, op) for op in asked]
    together = {}
    while not engine.idle:
        together |= {done.ticket: done.result for done in engine.step()}
    assert {order is None for order in orders} == {True, False}
    for ticket, op in zip(tickets, asked, strict=True):
        for ours, alone in zip(together[ticket].sequences, tiny.run(engine, op).sequences, strict=True):
            assert ours.tokens == alone.tokens
            assert ours.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


# ---- time and memory -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_500_steps_of_training_and_sampling_do_not_grow_in_memory() -> None:
    """Resident memory after 100 steps and after 500; what would be kept of every step is larger than the slack."""
    engine = tiny.engine()
    adapter = tiny.create(engine, LoraConfig(rank=64, seed=0))
    process, resident = psutil.Process(), []
    for step in range(500):
        tiny.submit(engine, ops.ForwardBackward(adapter, [tiny.datum(tiny.tokens(12, step))], CrossEntropy()))
        tiny.submit(engine, ops.OptimStep(adapter, STEP))
        tiny.freeze(engine, adapter)
        params = SamplingParams(2, step, [])
        tiny.run(
            engine,
            ops.Sample(tiny.named(adapter.weights), ModelInput.from_ints(tiny.tokens(5, step)), 1, params, False, 0),
        )
        if step in (99, 499):
            resident.append(process.memory_info().rss)
    kept = sum(tensor.numel() * 4 for tensor in adapter.weights.tensors.values())
    assert resident[1] - resident[0] < 400 * kept / 4

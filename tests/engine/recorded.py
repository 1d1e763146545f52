"""A run of several clients whose ops are recorded, and the same ops done again. As a program: does those of a file."""

import dataclasses
import hashlib
import json
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import tiny
from stovetop.backends.custom_loss import CustomLosses
from stovetop.backends.engine_thread import EngineThread
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.losses import CrossEntropy, ImportanceSampling
from stovetop.types import LoraConfig, ModelInput, SamplingParams, TensorData

META = {"base_model": "tiny", "fingerprint": "tiny", "user_metadata": {}}
NOT_COMPARED = {"sequence_id", "prompt_cache_hit_tokens", "seconds"}  # names, and what is shared with others
TOKENS_A_PASS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What came of a run, as digests."""

    answers: list[str]  # of each op, in the order of submission
    adapters: dict[str, str]  # at the end: weights, moments, gradients


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Record:
    ops: list[ops.Op]
    found: Found


def digest(value: Any) -> str:
    return hashlib.sha256(repr(_encoded(value)).encode()).hexdigest()


def _encoded(value: Any) -> object:
    """All of its bits."""
    match value:
        case torch.Tensor():
            return _encoded(value.detach().numpy())
        case np.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case float():
            return value.hex()
        case str() | int() | None | Path():
            return str(value)
        case BaseException():
            return type(value).__name__, str(value)
        case Mapping():
            return sorted((str(name), _encoded(each)) for name, each in value.items())
        case Sequence():
            return [_encoded(each) for each in value]
        case _:
            names = [field.name for field in dataclasses.fields(value) if field.name not in NOT_COMPARED]
            return type(value).__name__, [(name, _encoded(getattr(value, name))) for name in names]


class Recorder:
    """An engine that writes down what it is asked for and what it answers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.description = engine.description
        self.set_gate = engine.set_gate
        self.cancel = engine.cancel
        self.get_tokenizer = engine.get_tokenizer
        self.tickets: list[ops.Ticket] = []
        self.answers: dict[ops.Ticket, str] = {}

    @property
    def idle(self) -> bool:
        return self.engine.idle

    def submit(self, op: ops.Op) -> ops.Ticket:
        self.tickets.append(self.engine.submit(op))
        return self.tickets[-1]

    def step(self) -> list[ops.Finished]:
        finished = self.engine.step()
        for done in finished:
            assert done.ticket not in self.answers, "a ticket is answered once"
            result = "a snapshot" if isinstance(done.result, ops.Snapshot) else done.result
            self.answers[done.ticket] = digest(done.error or result)
        return finished

    def found(self) -> Found:
        adapters = {
            name: digest([adapter.weights.tensors, adapter.moments, adapter.gradients or {}])
            for name, adapter in self.engine.adapters.by_id.items()
        }
        return Found([self.answers[ticket] for ticket in self.tickets], adapters)


def engine() -> Engine:
    return tiny.engine(max_tokens_per_pass=TOKENS_A_PASS)


# ---- the run ---------------------------------------------------------------------------------------------------------


def record(folder: Path) -> Record:
    recorders: list[Recorder] = []

    def open_engine() -> Recorder:
        recorders.append(Recorder(engine()))
        return recorders[0]

    saved = _saved(folder / "saved")
    thread = EngineThread(open_engine, "recorded")
    clients = [threading.Thread(target=_client, args=(thread, number, saved, folder)) for number in range(3)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(100)
    thread.finish().result(30)
    (recorder,) = recorders
    return Record([ticket.op for ticket in recorder.tickets], recorder.found())


def _saved(path: Path) -> Path:
    own = engine()
    adapter = tiny.trained_adapter(own, 9, rank=2)
    tiny.run(own, ops.SaveAdapter(adapter, path, META, True, False))
    return path


def _client(thread: EngineThread, number: int, saved: Path, folder: Path) -> None:
    """Loads or creates, trains with built-in and custom losses, freezes and samples, saves, restores; with pauses."""
    chosen, name = random.Random(number), ops.AdapterId(f"client {number}")
    losses = CustomLosses(thread, name)

    def call(op: ops.Op) -> Any:
        time.sleep(chosen.choice([0.0, 0.0, 0.002]))
        return thread.call(type(op).__name__, op)

    made = (
        ops.LoadAdapter(name, saved, True) if number == 2 else ops.CreateAdapter(name, LoraConfig(rank=2, seed=number))
    )
    waiting = [call(made)]
    for turn in range(3):
        data = [tiny.rl_datum(tiny.tokens(7 + index, 100 * number + 10 * turn + index), index) for index in range(4)]
        waiting.append(call(ops.ForwardBackward(name, data, ImportanceSampling(temperature=0.9))))
        if turn == 1:
            waiting.append(losses.run("forward_backward_custom", data[:2], _squared))
        waiting.append(call(ops.OptimStep(name, tiny.SGD)))
        weights = ops.WeightsId(f"{name} at {turn}")
        waiting.append(call(ops.Freeze(name, weights)))
        prompt = ModelInput.from_ints(tiny.tokens(5 + 3 * turn, number))
        waiting.append(call(ops.Sample(weights, prompt, 2, SamplingParams(6, turn, []), True, 2)))
        waiting.append(call(ops.ComputeLogprobs(weights, prompt)))
        waiting.append(call(ops.DropWeights(weights)))
        if turn == 1 and number == 0:
            waiting.append(call(ops.RestoreAdapter(name, saved, False)))
    waiting.append(call(ops.SaveAdapter(name, folder / f"state {number}", META, True, True)))
    loaded = ops.WeightsId(f"loaded by {number}")
    waiting.append(call(ops.LoadWeights(loaded, saved)))
    waiting.append(
        call(ops.Sample(loaded, ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(5, number, []), False, 0))
    )
    for future in waiting:
        future.result(60)


def _squared(data: Any, logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum(((own + 1.0) ** 2).sum() for own in logprobs)
    assert isinstance(loss, torch.Tensor)
    return loss, {"parts": float(len(logprobs))}


# ---- the same again --------------------------------------------------------------------------------------------------


def again(given: Sequence[ops.Op], *, at_once: bool) -> Found:
    """`at_once`: all are there before the first step. Else each comes when nothing is left to do."""
    recorder = Recorder(engine())
    for op in given:
        recorder.submit(op)
        while not at_once and not recorder.idle:
            recorder.step()
    while not recorder.idle:
        recorder.step()
    return recorder.found()


def one_of_each(folder: Path) -> list[ops.Op]:
    adapter, weights, scored = ops.AdapterId("a"), ops.WeightsId("w"), ops.ScoreId("s")
    data = [tiny.rl_datum(tiny.tokens(7, 1), 1)]
    params = SamplingParams(3, 1, ["stop"])
    prompt = ModelInput.from_ints([1, 2, 3])
    make: list[Callable[[], ops.Op]] = [
        lambda: ops.CreateAdapter(adapter, LoraConfig(rank=2, seed=1), queue="owner"),
        lambda: ops.LoadAdapter(adapter, folder, True),
        lambda: ops.Forward(adapter, data, CrossEntropy()),
        lambda: ops.ForwardBackward(adapter, data, ImportanceSampling()),
        lambda: ops.Score(adapter, data, scored),
        lambda: ops.BackwardFrom(adapter, scored, [TensorData.from_torch(torch.ones(6))]),
        lambda: ops.Spoil(adapter, "reason", scored),
        lambda: ops.TakeBack(adapter, scored),
        lambda: ops.OptimStep(adapter, tiny.SGD),
        lambda: ops.SaveAdapter(adapter, folder, META, True, False),
        lambda: ops.RestoreAdapter(adapter, folder, True),
        lambda: ops.DropAdapter(adapter),
        lambda: ops.Freeze(adapter, weights),
        lambda: ops.LoadWeights(weights, folder),
        lambda: ops.DropWeights(weights),
        lambda: ops.Sample(weights, prompt, 2, params, True, 2),
        lambda: ops.ComputeLogprobs(None, prompt),
        lambda: ops.SaveWeights(weights, folder, META),
    ]
    made = [each() for each in make]
    assert {type(op) for op in made} == set(ops.Op.__args__)
    return made


if __name__ == "__main__":
    _, given, found = sys.argv
    recorded_ops = pickle.loads(Path(given).read_bytes())
    both = [dataclasses.asdict(again(recorded_ops, at_once=at_once)) for at_once in (True, False)]
    Path(found).write_text(json.dumps(both))

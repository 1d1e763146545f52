"""A run of all ops on one engine's thread, in which an exception is raised at any one call within the package that the
threads of the engine make. The calls are found by watching a run, not by a list."""

import functools
import gc
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import stovetop
from engine import tiny
from stovetop.backends.engine_thread import EngineThread
from stovetop.engine import ops
from stovetop.engine.engine import Engine
from stovetop.engine.model.adopting import adopt
from stovetop.engine.model.base_model import BaseModel
from stovetop.futures import APIFuture, when_done
from stovetop.losses import CrossEntropy
from stovetop.types import Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams, TensorData


@functools.cache
def model() -> BaseModel:
    """Small, for it is run some hundred times."""
    llama = tiny.llama(num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2)
    return adopt(llama, "tiny", fingerprint="tiny", tokenizer=tiny.tokenizer())


PACKAGE = str(Path(stovetop.__file__).parent)
BEGINNINGS = ("/threading.py", "/concurrent/futures/_base.py")  # of a thread, and of a callback of a future
TOKENS_A_PASS = 24
ADAPTERS = [ops.AdapterId(name) for name in "ABCD"]
META = {"base_model": "tiny", "fingerprint": "tiny", "user_metadata": {}}


class Place(NamedTuple):
    """A call of one function from one line."""

    caller: CodeType
    line: int
    called: CodeType

    def __str__(self) -> str:
        short = self.caller.co_filename.removeprefix(PACKAGE)
        return f"{short}:{self.line} {self.caller.co_name} -> {self.called.co_name}"


@dataclass(slots=True)
class Watch:
    """Sees the calls of the threads of an engine, and raises `error` at the first one from `target`."""

    target: Place | None = None
    error: type[BaseException] = Exception
    places: dict[Place, None] = field(default_factory=dict)  # in the order in which they were first met
    num_calls: int = 0
    has_raised: bool = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if caller.f_code.co_filename.endswith(BEGINNINGS):
            return
        place = Place(caller.f_code, caller.f_lineno, frame.f_code)
        self.num_calls += 1
        self.places[place] = None
        if place == self.target and not self.has_raised:
            self.has_raised = True
            raise self.error("injected")


class Asked(NamedTuple):
    owner: str  # an adapter, or weights
    op: ops.Op
    future: APIFuture[Any]


@dataclass(slots=True)
class Outcome:
    asked: list[Asked]
    answers: list[tuple[object, BaseException | None]]
    num_answers: list[int]  # of each future
    adapters: dict[str, list[torch.Tensor]]  # weights and moments at the end
    num_steps: dict[str, int | None]  # of the optimizer; None where its moments are lost
    failed: BaseException | None
    watch: Watch

    def changed(self, other: "Outcome") -> set[str]:
        """Whose answers or tensors are not those of the other run."""
        pairs = zip(self.asked, self.answers, other.answers, strict=True)
        answers = {asked.owner for asked, mine, its in pairs if _told(mine) != _told(its)}
        names = self.adapters.keys() | other.adapters.keys()
        return answers | {name for name in names if not _same(self.adapters.get(name), other.adapters.get(name))}


def _told(answer: tuple[object, BaseException | None]) -> object:
    result, error = answer
    return (result, None if error is None else (type(error), str(error)))


def _same(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    return one is not None and other is not None and all(map(torch.equal, one, other))


def data(seed: int, count: int = 3) -> list[Datum]:
    return [tiny.datum(tiny.tokens(9 + index, 10 * seed + index)) for index in range(count)]


def sample(weights: str | None, seed: int, max_tokens: int = 4, num_samples: int = 2) -> ops.Sample:
    prompt, params = ModelInput.from_ints(tiny.tokens(5, seed)), SamplingParams(max_tokens, seed, [])
    return ops.Sample(None if weights is None else ops.WeightsId(weights), prompt, num_samples, params, True, 2)


def program(saved: Path, folder: Path) -> list[tuple[str, ops.Op]]:
    """All ops; what comes of them is the same at any time. Who they are for, and the op."""
    a, b, c, d = ADAPTERS
    given, loss = data(1), CrossEntropy()
    slopes = [TensorData.from_torch(torch.full((datum.model_input.length,), -0.1)) for datum in given]
    scored, spoiled = ops.ScoreId("scored"), ops.ScoreId("spoiled")
    w = ops.WeightsId
    lora = LoraConfig(rank=2, seed=1)
    return [
        (a, ops.CreateAdapter(a, lora)),
        (a, ops.ForwardBackward(a, given, loss)),
        (a, ops.OptimStep(a, tiny.SGD)),
        (a, ops.Freeze(a, w("A1"))),
        (a, sample("A1", 1)),
        (a, ops.Score(a, given[:1], scored)),
        (a, ops.OptimStep(a, tiny.SGD)),
        (a, ops.BackwardFrom(a, scored, slopes[:1])),
        (a, ops.SaveAdapter(a, folder / "A", META, True, False)),
        (a, ops.Forward(a, given, loss)),
        (b, ops.CreateAdapter(b, lora)),
        (b, ops.Score(b, given, spoiled)),
        (b, ops.Spoil(b, "refused", spoiled)),
        (b, ops.OptimStep(b, tiny.SGD)),
        (b, ops.ForwardBackward(b, data(2), loss)),
        (b, ops.OptimStep(b, tiny.SGD)),
        (b, ops.RestoreAdapter(b, saved, True)),
        (b, ops.ForwardBackward(b, data(3), loss)),
        (b, ops.OptimStep(b, tiny.SGD)),
        (c, ops.LoadAdapter(c, saved, True)),
        (c, ops.ForwardBackward(c, data(4), loss)),
        (c, ops.OptimStep(c, tiny.SGD)),
        (c, ops.Freeze(c, w("C1"))),
        (c, ops.ComputeLogprobs(w("C1"), ModelInput.from_ints(tiny.tokens(6, 6)))),
        (c, ops.DropWeights(w("C1"))),
        (c, ops.DropAdapter(c)),
        (d, ops.CreateAdapter(d, lora)),
        (d, ops.ForwardBackward(d, data(5), loss)),  # to be cancelled
        (d, ops.Forward(d, data(6, 1), loss)),
        (d, ops.Score(d, data(7, 1), ops.ScoreId("taken back"))),
        (d, ops.TakeBack(d, ops.ScoreId("taken back"))),
        ("W", ops.LoadWeights(w("W"), saved)),
        ("W", sample("W", 2)),
        ("W", ops.SaveWeights(w("W"), folder / "W", META)),
        ("base", sample(None, 3)),
        ("long", sample(None, 4, max_tokens=200, num_samples=1)),  # to be stopped
    ]


TO_CANCEL, TO_STOP, BEFORE_STOP = 27, -1, 2  # places in it: the last is done before a sample is stopped


class Counted:
    """How often a future is answered."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, _: "Future[Any]") -> None:
        self.num += 1


def saved_state(folder: Path) -> Path:
    """A trained adapter, for ops that load."""
    engine, name = Engine(model()), ops.AdapterId("saved")
    path = folder / "saved"
    for op in (
        ops.CreateAdapter(name, LoraConfig(rank=2, seed=1)),
        ops.ForwardBackward(name, data(0), CrossEntropy()),
        ops.OptimStep(name, tiny.SGD),
        ops.SaveAdapter(name, path, META, True, False),
    ):
        tiny.run(engine, op)
    return path


def run(saved: Path, folder: Path, target: Place | None = None, error: type[BaseException] = Exception) -> Outcome:
    """The whole program, all of which is there before the first step; an answer takes ten seconds at most."""
    watch, may_open = Watch(target, error), threading.Event()
    engines: list[Engine] = []

    def open_engine() -> Engine:
        idle = folder / "idle"
        engines.append(Engine(model(), max_tokens_per_pass=TOKENS_A_PASS, max_adapter_bytes=0, idle_folder=idle))
        may_open.wait(30)
        sys.setprofile(watch)
        return engines[0]

    gc.collect()  # what other tests have left would end within this one, and be seen
    threading.setprofile(None)
    thread = EngineThread(open_engine, "under test")
    threading.setprofile(watch)  # of the thread that writes, which starts with the first save
    asked = [Asked(owner, op, thread.call(type(op).__name__, op, plain)) for owner, op in program(saved, folder)]
    counts = [Counted() for _ in asked]
    for each, count in zip(asked, counts, strict=True):
        when_done(each.future.future(), count)
    asked[TO_CANCEL].future.cancel()
    when_done(asked[BEFORE_STOP].future.future(), lambda _: asked[TO_STOP].future.cancel())
    may_open.set()
    answers = [_answer(each.future) for each in asked]
    thread.finish().result(30)
    threading.setprofile(None)
    (engine,) = engines
    by_id = {} if thread.failed is not None else engine.adapters.by_id
    return Outcome(
        asked,
        answers,
        [count.num for count in counts],
        {name: tensors(adapter) for name, adapter in by_id.items()},
        {name: None if _is_lost(adapter) else adapter.moments.step for name, adapter in by_id.items()},
        thread.failed,
        watch,
    )


def tensors(adapter: Any) -> list[torch.Tensor]:
    held = [adapter.weights.tensors, adapter.moments.mean, adapter.moments.square, adapter.gradients or {}]
    return [tensor for each in held for _, tensor in sorted(each.items())]


def _is_lost(adapter: Any) -> bool:
    return adapter._lost is not None


def _answer(future: APIFuture[Any]) -> tuple[object, BaseException | None]:
    error = future.future().exception(10)
    return (None, error) if error is not None else (future.result(), None)


def plain(result: Any) -> object:
    """What can be compared: all but names, and how much was taken over from others."""
    if isinstance(result, SampleResponse):
        drawn = [(s.tokens, s.logprobs, s.stop_reason) for s in result.sequences]
        return drawn, result.prompt_logprobs, result.topk_prompt_logprobs
    return result

"""How long saving one client's state holds up the others.

    python benchmarks/saving.py [--rounds 5] [--threads 1] [--rank 32] [--tokens 96] [--model smollm2]

One client of SmolLM2 saves its state, weights and optimizer, while a sample of another client runs. Each step of the
engine is timed from outside; a step draws one token of the sample. Printed are the medians over the rounds.

    save step        the step that takes the save, less what a step that only draws a token takes
    longest step     the longest of those while the sample runs, with a save and without
    sample           its time from call to answer, with a save and without
    step after       of the optimizer, right after a save: with a save that is still being written, and without
    save             from the call to the answer: the folder is whole and synced
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import stovetop as st
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.backends.local_models import LocalModels
from stovetop.backends.saved_runs import RunLabels
from stovetop.client import SamplingClient, TrainingClient
from stovetop.engine.engine import Engine
from stovetop.engine.machine import keep_freed_memory
from stovetop.engine.model.loading import load_model
from stovetop.futures import when_done
from stovetop.model_store import find_model

STEP = st.AdamParams(learning_rate=1e-4)


class Timed:
    """An engine whose steps are timed: the seconds of each, and the names of the ops that ended in it."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[float, set[str]]] = []
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *arguments: Any) -> Any:
        start_s = time.perf_counter()
        finished = self._engine.step(*arguments)
        self.steps.append((time.perf_counter() - start_s, {type(each.ticket.op).__name__ for each in finished}))
        return finished


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[tuple[InProcessServiceClient, list[Timed]]]:
    """A service, and its engine once a model was asked for."""
    folder = find_model(arguments.model) or Path(arguments.model)
    engines: list[Timed] = []

    def open_engine(name: str) -> Any:
        keep_freed_memory()
        engines.append(Timed(Engine(load_model(folder, name, device="cpu", dtype="float32"))))
        return engines[0]

    with tempfile.TemporaryDirectory(dir=arguments.storage) as storage:
        models = LocalModels({"m": folder}, download=None)
        with InProcessServiceClient.over(open_engine, Path(storage), models=models, labels=RunLabels()) as service:
            yield service, engines


def datum(tokens: list[int]) -> st.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return st.Datum(st.ModelInput.from_ints(tokens[:-1]), inputs)


def train(client: TrainingClient) -> None:
    client.forward_backward([datum(list(range(20)))], "cross_entropy").result()
    client.optim_step(STEP).result()


def sample_beside(
    engine: Timed, sampler: SamplingClient, num_tokens: int, client: TrainingClient, name: str | None
) -> dict[str, float]:
    """A sample alone (no `name`), or with a save that is asked for when a few of its tokens are drawn."""
    engine.steps.clear()
    params, start_s = st.SamplingParams(max_tokens=num_tokens, stop=[], seed=1), time.perf_counter()
    sampling = sampler.sample(st.ModelInput.from_ints([1, 2, 3]), 1, params)
    saved_s, saving = 0.0, None
    while name is not None and len(engine.steps) < num_tokens // 8:
        time.sleep(0.001)
    if name is not None:
        asked_s, saving = time.perf_counter(), client.save_state(name)
        when_done(saving.future(), lambda _: saved.append(time.perf_counter() - asked_s))
    saved: list[float] = []
    sampling.result()
    sample_s = time.perf_counter() - start_s
    if saving is not None:
        saving.result()
        saved_s = saved[0]
    steps = list(engine.steps)
    typical_s = statistics.median(seconds for seconds, _ in steps)
    saves = [seconds for seconds, ops in steps if "SaveAdapter" in ops]
    return {
        "sample": sample_s,
        "longest step": max(seconds for seconds, _ in steps),
    } | ({} if name is None else {"save step": max(0.0, sum(saves) - typical_s * len(saves)), "save": saved_s})


def step_after(engine: Timed, client: TrainingClient, name: str | None) -> float:
    """Seconds of an optimizer's step, right behind a save that was not waited for if there is a `name`."""
    client.forward_backward([datum(list(range(20)))], "cross_entropy").result()
    engine.steps.clear()
    saving = [] if name is None else [client.save_state(name)]
    client.optim_step(STEP).result()
    seconds = [seconds for seconds, ops in engine.steps if "OptimStep" in ops]
    for each in saving:
        each.result()
    return seconds[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--storage", default=None, help="a folder on the disk that is to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seen: defaultdict[str, list[float]] = defaultdict(list)
    with opened(arguments) as (service, engines):
        client = service.create_lora_training_client("m", rank=arguments.rank, seed=0).result()
        sampler = service.create_lora_training_client("m", rank=arguments.rank, seed=1).result()
        sampler = sampler.save_weights_and_get_sampling_client().result()
        engine = engines[0]
        train(client)
        sample_beside(engine, sampler, 8, client, None)
        for number in range(arguments.rounds):
            for what, name in (("alone", None), ("beside a save", f"s{number}")):
                for measure, seconds in sample_beside(engine, sampler, arguments.tokens, client, name).items():
                    seen[f"{measure}, {what}"].append(seconds)
            for what, name in (("alone", None), ("behind a save", f"t{number}")):
                seen[f"optimizer's step, {what}"].append(step_after(engine, client, name))
    print(f"{arguments.model}, rank {arguments.rank}, {arguments.threads} threads, {arguments.rounds} rounds")
    for measure, values in seen.items():
        print(f"{measure:40} {statistics.median(values):8.3f} s   worst {max(values):.3f}")


if __name__ == "__main__":
    main()

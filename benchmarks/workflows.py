"""What workflows bring and cost, on this machine.

    python benchmarks/workflows.py                         # about 20 minutes on two cores
    python benchmarks/workflows.py --quick                 # one small round, 3 minutes
    python benchmarks/workflows.py --only overlap ready    # those without a model: the recording backend, that waits

    overlap       a step of each workflow, where sampling and training take a fixed time, against what stations that
                  overlap can take at best: max(the longest station, the sum of all / (depth + 1)), plus the CPU time of
                  a step without those times
    ready         steps of READY against steps in exact order, both one step off-policy, where episodes have heavy tails
    runner        the time of a step whose stages do nothing, against a step of reinforcement learning of the model
    asynchronous  tokens per second of that, one step off-policy against on-policy: trainer and sampler share the cores
    rl, sl        a step of the flat loop rl_loop, sl_loop, against one of the same workflow, rl_basic, sl_basic
    rl_cpu, sl_cpu  the same on the recording backend, by CPU time

Each measurement is a process of its own. Sides take turns, the one that begins changes from round to round, and the
median of the rounds counts. A ratio says how well the workflow does: above 1 it is faster than what it is held against.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compare import Row, printed_numbers, shown, table_of
from compare_work import Numbers
from rich.console import Console

import stovetop
from stovetop.backends import recording
from stovetop.client import ServiceClient
from stovetop.datasets import load_rows
from stovetop.kitchen import Loop, Positions, RunConfig, Station, Workflow, stage
from stovetop.kitchen.workflows import READY, REINFORCEMENT, STREAMING
from stovetop.recipes import dpo, rl_basic, rl_loop, sl_basic, sl_loop
from stovetop.runs import load, open_run
from stovetop.tracking.events import METRICS, Event


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done. The first `warm` steps of a run are not counted."""

    rounds: int
    wait_s: float  # of a call of the recording backend
    warm: int
    steps: int  # on the recording backend, where calls take time
    cpu_steps: int  # where they take none
    model_steps: int
    max_tokens: int  # of an answer of the model


SIZES = {
    "full": Size(rounds=5, wait_s=0.1, warm=3, steps=18, cpu_steps=100, model_steps=6, max_tokens=16),
    "quick": Size(rounds=1, wait_s=0.1, warm=3, steps=12, cpu_steps=40, model_steps=3, max_tokens=8),
    "smoke": Size(rounds=1, wait_s=0.004, warm=1, steps=2, cpu_steps=6, model_steps=1, max_tokens=2),
}


@dataclass(frozen=True, slots=True)
class Setting:
    size: Size
    model: str
    threads: int
    round: int


# ---- taking time -----------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """By one step, in the mean."""

    seconds: float
    cpu_s: float


class Clock:
    """A sink that notes when each row of metrics comes."""

    def __init__(self) -> None:
        self.rows: list[Taken] = []

    def receive(self, event: Event) -> None:
        if event.name == METRICS:
            self.rows.append(Taken(time.perf_counter(), time.process_time()))

    def sync(self) -> None: ...
    def close(self) -> None: ...
    def get_logger_url(self) -> None: ...

    def taken(self, warm: int) -> Taken:
        """From the last of the warm steps on."""
        first, last, num_steps = self.rows[warm - 1], self.rows[-1], len(self.rows) - warm
        return Taken((last.seconds - first.seconds) / num_steps, (last.cpu_s - first.cpu_s) / num_steps)


def steps_of(workflow: Workflow, config: RunConfig, service: ServiceClient, warm: int) -> Taken:
    clock = Clock()
    with open_run(config.log_path, config, console=False, sinks=[clock]) as run:
        asyncio.run(workflow.run(config, service=service, run=run))
    return clock.taken(warm)


def recorded(workflow: Workflow, config: "Make", latency_s: Callable[[str], float], warm: int) -> tuple[Taken, int]:
    """On the recording backend; and how many samples a step asks for."""
    with tempfile.TemporaryDirectory() as folder:
        made = config(f"{folder}/run")
        with recording.open_service(made.log_path, latency_s=latency_s) as service:
            taken = steps_of(workflow, made, service, warm)
            num_samples = sum(call.verb == "sample" for call in service.calls)
    return taken, num_samples


Make = Callable[[str], RunConfig]  # the config of a run in this folder


# ---- overlap ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A workflow whose calls take a fixed time, and what one of its steps takes at best."""

    workflow: Workflow
    config: Make
    latency_s: Mapping[str, float]
    best_s: float


def best_s(*stations_s: float, depth: int, together_s: float = 0.0) -> float:
    """Of a line with these serial stations, and one that serves items together."""
    return max(*stations_s, (sum(stations_s) + together_s) / (depth + 1))


def overlap(setting: Setting) -> Numbers:
    """What a step takes over what it takes at best and in CPU time."""
    numbers: Numbers = {}
    for name, case in cases(setting.size).items():
        still, num_samples = recorded(case.workflow, case.config, lambda verb: 0.0, setting.size.warm)
        per_step = num_samples // (setting.size.warm + setting.size.steps)
        latency = by_verb(case.latency_s, per_step)
        taken, _ = recorded(case.workflow, case.config, latency, setting.size.warm)
        numbers[name] = (case.best_s + still.cpu_s) / taken.seconds
        numbers[f"{name}, seconds"] = taken.seconds
    return numbers


def by_verb(latency_s: Mapping[str, float], samples_per_step: int) -> Callable[[str], float]:
    """The second half of the samples of each step may take another time."""
    asked = count()

    def latency(verb: str) -> float:
        late = verb == "sample" and 2 * (next(asked) % samples_per_step) >= samples_per_step
        return latency_s.get("late sample" if late else verb, latency_s.get(verb, 0.0))

    return latency


def cases(size: Size) -> dict[str, Case]:
    wait_s = size.wait_s
    training = {"sample": 2 * wait_s, "forward_backward": wait_s}
    found = {
        f"rl, depth {depth}": Case(
            REINFORCEMENT, rl_config(size, depth), training, best_s(wait_s, depth=depth, together_s=2 * wait_s)
        )
        for depth in (0, 1, 2)
    }
    scored = {"compute_logprobs": wait_s, "forward_backward_custom": wait_s}
    found["dpo"] = Case(dpo.WORKFLOW, dpo_config(size), scored, best_s(wait_s, wait_s, depth=1))

    @stage
    async def prepare(step: int) -> None:
        """Takes its time, as reading and tokenizing may."""
        await asyncio.sleep(0.8 * wait_s)

    prepared = sl_basic.WORKFLOW.insert_before("get_batch", prepare)
    found["supervised"] = Case(
        prepared, sl_config(size), {"forward_backward": wait_s}, best_s(0.8 * wait_s, wait_s, depth=1)
    )
    streamed = {"sample": wait_s, "late sample": 2 * wait_s, "forward_backward": wait_s}
    found["streaming"] = Case(STREAMING, rl_config(size, 0, StreamingConfig), streamed, 3 * wait_s)
    return found


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(rl_basic.Config):
    num_minibatches: int = 2


def rl_config(size: Size, depth: int, kind: type[rl_basic.Config] = rl_basic.Config) -> Make:
    batch = {"groups_per_batch": 4, "group_size": 4, "max_tokens": 4}
    return config_of(kind, size, dataset="sample:arithmetic", max_steps_off_policy=depth, **batch)


def dpo_config(size: Size) -> Make:
    return config_of(dpo.Config, size, dataset="sample:hhh", batch_size=4)


def sl_config(size: Size) -> Make:
    return config_of(sl_basic.Config, size, dataset="sample:chats", batch_size=4)


def config_of(kind: Callable[..., RunConfig], size: Size, **fields: Any) -> Make:
    return lambda log_path: kind(
        log_path=log_path,
        test_size=0,
        model_name="any/model",
        lora_rank=4,
        num_epochs=1000,
        max_steps=size.warm + size.steps,
        save_every=0,
        **fields,
    )


# ---- groups that are ready first -------------------------------------------------------------------------------------


def exact_order(setting: Setting) -> Numbers:
    return heavy_tailed(setting, REINFORCEMENT)


def ready_first(setting: Setting) -> Numbers:
    return heavy_tailed(setting, READY)


def heavy_tailed(setting: Setting, workflow: Workflow) -> Numbers:
    """Seconds a step, where each sample takes a time that is Pareto distributed with the exponent 1.3."""
    size, rng = setting.size, np.random.default_rng(setting.round)

    def latency(verb: str) -> float:
        training_s = size.wait_s if verb == "forward_backward" else 0.0
        return 0.5 * size.wait_s * (1 + rng.pareto(1.3)) if verb == "sample" else training_s

    taken, _ = recorded(workflow, rl_config(size, 1), latency, size.warm)
    return {"seconds": taken.seconds}


# ---- workflows and flat loops ----------------------------------------------------------------------------------------

Train = Callable[[Any, ServiceClient], Coroutine[Any, Any, None]]


def rl_flat(log_path: str, steps: int, **fields: Any) -> rl_loop.Config:
    return rl_loop.Config(**rl_fields(log_path, steps) | fields)


def rl_kitchen(log_path: str, steps: int, **fields: Any) -> rl_basic.Config:
    return rl_basic.Config(answers="exact", **rl_fields(log_path, steps) | fields)


def rl_fields(log_path: str, steps: int) -> dict[str, Any]:
    batch = {"groups_per_batch": 4, "group_size": 4, "max_tokens": 16, "remove_constant_reward_groups": False}
    return {"dataset": "sample:arithmetic", **batch, "max_steps": steps, "num_epochs": steps, **fields_of(log_path)}


def sl_flat(log_path: str, steps: int, **fields: Any) -> sl_loop.Config:
    return sl_loop.Config(**sl_fields(log_path, steps) | fields)


def sl_kitchen(log_path: str, steps: int, **fields: Any) -> sl_basic.Config:
    return sl_basic.Config(**sl_fields(log_path, steps) | fields)


def sl_fields(log_path: str, steps: int) -> dict[str, Any]:
    """At least so many steps: an epoch is a pass over 24 chats."""
    num_epochs = math.ceil(steps / 6)
    fields = {"dataset": "sample:chats", "batch_size": 4, "max_length": None, "num_epochs": num_epochs}
    return fields | fields_of(log_path)


def fields_of(log_path: str) -> dict[str, Any]:
    return {"log_path": log_path, "lora_rank": 8, "test_size": 0, "eval_every": 0, "save_every": 0}


SIDES: dict[str, tuple[Train, Callable[..., Any]]] = {
    "rl loop": (rl_loop.train, rl_flat),
    "rl workflow": (rl_basic.train, rl_kitchen),
    "sl loop": (sl_loop.train, sl_flat),
    "sl workflow": (sl_basic.train, sl_kitchen),
}


def model_step(side: str, setting: Setting, **fields: Any) -> Numbers:
    """Seconds of a step of the model, and the tokens that it samples a second if it does."""
    train, config = SIDES[side]
    size = setting.size
    with tempfile.TemporaryDirectory() as folder:
        made = config(f"{folder}/run", size.warm + size.model_steps, model_name=setting.model, **fields)
        with stovetop.ServiceClient(storage=made.log_path, threads=setting.threads) as service:
            asyncio.run(train(made, service))
        record = load(made.log_path)
    times = [event.time for event in record.events if event.name in ("rl.step", "training.step")]
    seconds = times[-1] - times[size.warm - 1]
    sampled = [row.get("env/all/total_ac_tokens", 0.0) for row in record.metrics]
    return {
        "seconds": seconds / (len(times) - size.warm),
        "tokens_per_s": sum(sampled[size.warm : len(times)]) / seconds,
    }


def cpu_step(side: str, setting: Setting) -> Numbers:
    """Of a step on the recording backend: what a long run takes more than a short one, which warms up too."""
    train, config = SIDES[side]
    fields_in = many_chats if side.startswith("sl") else many_problems

    def cpu_s(num_steps: int) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            made = config(f"{folder}/run", num_steps, model_name="any/model", **fields_in(Path(folder)))
            began_s = time.process_time()
            with recording.open_service(made.log_path) as service:
                asyncio.run(train(made, service))
            return time.process_time() - began_s, len(load(made.log_path).metrics)

    cpu_s(2)
    (short_s, few), (long_s, many) = cpu_s(2), cpu_s(2 + setting.size.cpu_steps)
    return {"cpu_s": (long_s - short_s) / (many - few)}


def many_chats(folder: Path) -> dict[str, Any]:
    """As many as sl_basic takes in a step by default, ten steps an epoch: a step of four is too small to be one."""
    rows = load_rows("sample:chats")
    batch_size = 128
    lines = (json.dumps(rows[index % len(rows)]) + "\n" for index in range(10 * batch_size))
    (folder / "chats.jsonl").write_text("".join(lines))
    return {"dataset": str(folder / "chats.jsonl"), "batch_size": batch_size}


def many_problems(folder: Path) -> dict[str, Any]:
    """As many as rl_loop takes in a step by default."""
    return {"groups_per_batch": 8, "group_size": 8}


def runner(setting: Setting) -> Numbers:
    """Seconds of a step of as many stages as reinforcement learning has, which do nothing, and its share of a step of
    the model."""

    @stage
    async def nothing(step: int) -> None:
        """Nothing."""

    @stage(writes="positions")
    def plan(num_steps: int) -> Positions:
        """As many steps."""
        return Positions(num_steps, num_steps)

    num_stages = sum(place.phase == "loop" for place in REINFORCEMENT.stages)
    idle = Workflow(
        "idle", plan, Loop("positions", Station(*(nothing.using(f"nothing_{n}") for n in range(num_stages))))
    )
    with tempfile.TemporaryDirectory() as folder:
        config = IdleConfig(log_path=f"{folder}/run", num_steps=setting.size.cpu_steps)
        with open_run(config.log_path, config, console=False) as run:
            began_s = time.perf_counter()
            asyncio.run(idle.run(config, run=run))
            seconds = (time.perf_counter() - began_s) / setting.size.cpu_steps
    return {"seconds": seconds, "share": seconds / model_step("rl workflow", setting)["seconds"]}


@dataclass(frozen=True, kw_only=True)
class IdleConfig(RunConfig):
    num_steps: int


# ---- all of them -----------------------------------------------------------------------------------------------------

MEASURES: dict[str, dict[str, Callable[[Setting], Numbers]]] = {
    "overlap": {"lines": overlap},
    "ready": {"exact": exact_order, "ready": ready_first},
    "runner": {"idle": runner},
    "asynchronous": {
        "on-policy": lambda setting: model_step("rl workflow", setting),
        "off-policy": lambda setting: model_step("rl workflow", setting, max_steps_off_policy=1),
    },
    **{
        kind: {
            "loop": lambda setting, kind=kind: model_step(f"{kind} loop", setting),
            "workflow": lambda setting, kind=kind: model_step(f"{kind} workflow", setting),
        }
        for kind in ("rl", "sl")
    },
    **{
        f"{kind}_cpu": {
            "loop": lambda setting, kind=kind: cpu_step(f"{kind} loop", setting),
            "workflow": lambda setting, kind=kind: cpu_step(f"{kind} workflow", setting),
        }
        for kind in ("rl", "sl")
    },
}


def run_all(options: argparse.Namespace, console: Console) -> dict[tuple[str, str], Numbers]:
    """Medians, by measure and side."""
    found: dict[tuple[str, str], list[Numbers]] = {}
    for turn in range(options.rounds or SIZES[options.size].rounds):
        for measure in options.only:
            for side in list(MEASURES[measure])[:: 1 if turn % 2 == 0 else -1]:
                words = [f"--{name}={getattr(options, name)}" for name in ("size", "model", "threads")]
                words += ["--measure", measure, "--side", side, "--round", str(turn)]
                numbers = printed_numbers(Path(__file__).resolve(), words, options.threads)
                found.setdefault((measure, side), []).append(numbers)
                console.print(f"round {turn + 1}, {measure}, {side}: {shown(numbers)}", highlight=False)
    return {
        key: {name: statistics.median(one[name] for one in runs) for name in runs[0]} for key, runs in found.items()
    }


def rows_of(medians: Mapping[tuple[str, str], Numbers]) -> list[Row]:
    rows: list[Row] = []

    def at_least(key: str, meaning: str, value: float, target: float) -> None:
        rows.append(Row(key, meaning, value, f"at least {target:g}", value >= target))

    def ratio(measure: str, over: str, under: str, number: str) -> float:
        return medians[measure, over][number] / medians[measure, under][number]

    for name, value in medians.get(("overlap", "lines"), {}).items():
        if not name.endswith("seconds"):
            at_least(f"overlap {name}", f"overlap, {name}: a step at best, against one that was taken", value, 1 / 1.1)
    if ("ready", "exact") in medians:
        at_least(
            "ready", "groups as they are ready, against exact order", ratio("ready", "exact", "ready", "seconds"), 1.2
        )
    if ("runner", "idle") in medians:
        share = medians["runner", "idle"]["share"]
        rows.append(Row("runner", "the runner, of a step of the model", share, "at most 0.01", share <= 0.01))
    if ("asynchronous", "on-policy") in medians:
        brought = ratio("asynchronous", "off-policy", "on-policy", "tokens_per_s")
        rows.append(Row("asynchronous", "tokens per second, one step off-policy, against on-policy", brought, "", None))
    for kind in ("rl", "sl"):
        if (kind, "loop") in medians:
            meaning = f"{kind}_basic, against {kind}_loop"
            at_least(kind, f"{meaning}: the model", ratio(kind, "loop", "workflow", "seconds"), 0.95)
        if (f"{kind}_cpu", "loop") in medians:
            meaning = f"{kind}_basic, against {kind}_loop: CPU time, recording"
            at_least(f"{kind}_cpu", meaning, ratio(f"{kind}_cpu", "loop", "workflow", "cpu_s"), 0.98)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--rounds", type=int, help="how often each is measured; the median counts")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="one small round")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--side", help="with --measure: do only this, here, and print its numbers")
    parser.add_argument("--measure", choices=MEASURES)
    parser.add_argument("--round", type=int, default=0)
    options = parser.parse_args()
    if options.side:
        setting = Setting(SIZES[options.size], options.model, options.threads, options.round)
        print(json.dumps(MEASURES[options.measure][options.side](setting)))
        return
    console = Console(width=120)
    medians = run_all(options, console)
    rows = rows_of(medians)
    console.print(table_of(rows))
    if options.json:
        details = {f"{measure} {side}": numbers for (measure, side), numbers in medians.items()}
        options.json.write_text(json.dumps({**{row.key: row.value for row in rows}, "details": details}, indent=1))


if __name__ == "__main__":
    main()

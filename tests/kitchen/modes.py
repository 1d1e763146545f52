"""The workflows and the ways to run them that tests interrupt, and what of two runs must be equal."""

import asyncio
import contextlib
import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kitchen.copies import Copier
from kitchen.stages.configs import (
    DistillationConfig,
    KLConfig,
    OffPolicyConfig,
    PairwiseConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    StreamingConfig,
    SupervisedConfig,
    TopKConfig,
    write_chats,
    write_comparisons,
    write_problems,
)
from kitchen.test_supervised import rows, weights
from stovetop.backends import recording
from stovetop.backends.recording import Fault, Verb
from stovetop.checkpoints import CheckpointRecord, load_checkpoints_file
from stovetop.client import ServiceClient
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import (
    DISTILLATION,
    KL_REINFORCEMENT,
    OFF_POLICY_DISTILLATION,
    PAIRWISE_REINFORCEMENT,
    PPO,
    PREFERENCE,
    REINFORCEMENT,
    REWARD_MODEL,
    STREAMING,
    SUPERVISED,
    TOPK_DISTILLATION,
)
from stovetop.recipes import dpo
from stovetop.retention import paths_of
from stovetop.runs import load, open_run
from stovetop.tracking.events import Sink

ONCE_A_STEP = {
    "training.step", "dpo.step", "rl.step", "distillation.step", "training.epoch", "training.checkpoint",
    "eval.complete",
}  # fmt: skip
LATENCY_S: dict[Verb, float] = {"forward_backward": 0.001, "save_state": 0.003, "sample": 0.001, "optim_step": 0.0005}

Config = (
    SupervisedConfig
    | PreferenceConfig
    | RewardModelConfig
    | RLConfig
    | DistillationConfig
    | OffPolicyConfig
    | TopKConfig
    | dpo.Config
)


class Outcome(NamedTuple):
    """All of a run that a kill must not change."""

    rows: list[dict[str, float]]  # without the clock
    checkpoints: list[dict[str, Any]]  # with the names of what they refer to
    kept: list[str]  # the names of those that are not deleted
    events: Counter[tuple[str, int | None]]  # of those that happen once a step
    weights: dict[str, bytes]  # and the optimizer's moments
    rollouts: dict[str, str]  # files of rows and their digests


def outcome(log_path: str) -> Outcome:
    events = Counter((event.name, event.step) for event in load(log_path).events if event.name in ONCE_A_STEP)
    records = load_checkpoints_file(log_path)
    kept = [record.name for record in records if all(Path(path).is_dir() for path in paths_of(record))]
    found = [_without_folders(record) for record in records]
    files = sorted(Path(log_path).glob("rollouts/*"))
    rollouts = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return Outcome(rows(log_path), found, kept, events, weights(log_path), rollouts)


def _without_folders(record: CheckpointRecord) -> dict[str, Any]:
    """A resumed run has its own client, and saves into the folder of that."""
    row = record.to_dict()
    for name in ("state_path", "sampler_path", "reference_path"):
        if name in row:
            row[name] = Path(str(row[name])).name
    return row | {"policy_paths": [Path(path).name for path in record.policy_paths]}


def random_latency(seed: int) -> Callable[[Verb], float]:
    """Each call takes a time of its own, so that who is first differs from run to run."""
    generator = random.Random(seed)
    return lambda verb: generator.uniform(0, 2 * LATENCY_S.get(verb, 0.0))


class Opens(Protocol):
    """Opens a service that saves into the run's folder."""

    def __call__(
        self, config: Config, *, seed: int, faults: Sequence[Fault]
    ) -> contextlib.AbstractContextManager[ServiceClient]: ...


def open_recording(
    config: Config, *, seed: int, faults: Sequence[Fault]
) -> contextlib.AbstractContextManager[ServiceClient]:
    return recording.open_service(config.log_path, latency_s=random_latency(seed), faults=faults)


@dataclass(frozen=True)
class Mode:
    """A workflow, its config, and where it runs."""

    workflow: Workflow
    config: Callable[[Path], Config]
    open_service: Opens = open_recording

    def train(
        self,
        config: Config,
        *,
        workflow: Workflow | None = None,
        sinks: Sequence[Sink] = (),
        faults: Sequence[Fault] = (),
        after_s: float | None = None,
        seed: int = 0,
    ) -> None:
        """To its end, or cancelled after so many seconds."""
        with (
            self.open_service(config, seed=seed, faults=faults) as service,
            open_run(config.log_path, config, console=False, sinks=sinks) as run,
        ):

            async def main() -> None:
                this = asyncio.current_task()
                assert this is not None
                this.set_name(THE_RUN)
                async with asyncio.timeout(after_s):
                    await (workflow or self.workflow).run(config, service=service, run=run)

            asyncio.run(main())


THE_RUN = "the run"


def cancel_the_run() -> None:
    """What Ctrl-C does, from within a stage."""
    for task in asyncio.all_tasks():
        if task.get_name() == THE_RUN:
            task.cancel()


# ---- kills -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """A run that nothing stopped, and its copies."""

    mode: Mode
    config: Config
    copies: list[Path]

    @cached_property
    def outcome(self) -> Outcome:
        return outcome(self.config.log_path)

    def resumed(self, copy: Path, seed: int = 0) -> Outcome:
        """What comes of a copy that goes on where it lies."""
        config = replace(self.config, log_path=str(copy))
        self.mode.train(config, seed=seed)
        return outcome(config.log_path)

    def assert_same_after(self, copy: Path, seed: int = 0) -> None:
        """Then the copy goes: all of a mode are half a gigabyte."""
        assert self.resumed(copy, seed) == self.outcome
        shutil.rmtree(copy)


def kill_at_boundaries(
    mode: Mode, folder: Path, after: str | None = None, wanted: Callable[[int], bool] = lambda number: True
) -> Killed:
    """Of all stages, or at the end of one of them; of those boundaries that are wanted, by number."""
    config = mode.config(folder)
    copier = Copier(Path(config.log_path), after, wanted)
    mode.train(config, sinks=[copier])
    whole = Path(config.log_path).rename(folder / "whole")
    return Killed(mode, replace(config, log_path=str(whole)), copier.all_copies())


# ---- configs ---------------------------------------------------------------------------------------------------------


def supervised(folder: Path) -> SupervisedConfig:
    return SupervisedConfig(dataset=write_chats(folder / "rows"), log_path=str(folder / "run"), eval_every=2)


def supervised_often_saved(folder: Path) -> SupervisedConfig:
    """Of its checkpoints the last two stay, and the best."""
    return replace(supervised(folder), eval_every=1, save_every=1, keep_checkpoints="2 lowest:test/nll")


def preference(folder: Path) -> PreferenceConfig:
    return PreferenceConfig(dataset=write_comparisons(folder / "rows"), log_path=str(folder / "run"))


def measured_preference(folder: Path) -> dpo.Config:
    dataset = write_comparisons(folder / "rows")
    return dpo.Config(
        dataset=dataset, log_path=str(folder / "run"), model_name="any/model", test_size=2, batch_size=2, num_epochs=2,
        learning_rate=0.05, lora_rank=4, eval_every=2, save_every=3,
    )  # fmt: skip


def reward_model(folder: Path) -> RewardModelConfig:
    return RewardModelConfig(dataset=write_comparisons(folder / "rows"), log_path=str(folder / "run"))


def pairwise(folder: Path) -> PairwiseConfig:
    """Judged by a model as it is, which finds all answers alike: what counts is whether they end as they should."""
    dataset, log_path = write_comparisons(folder / "rows"), str(folder / "run")
    return PairwiseConfig(dataset=dataset, log_path=log_path, max_steps_off_policy=1)


def reinforcement(depth: int, **changed: Any) -> Callable[[Path], RLConfig]:
    def config(folder: Path) -> RLConfig:
        dataset = write_problems(folder / "rows")
        return RLConfig(dataset=dataset, log_path=str(folder / "run"), max_steps_off_policy=depth, **changed)

    return config


def with_penalty(folder: Path) -> KLConfig:
    """Dropped groups, two updates a step, and an evaluation that is due where a checkpoint is."""
    dataset, log_path = write_problems(folder / "rows"), str(folder / "run")
    return KLConfig(
        dataset=dataset, log_path=log_path, max_steps_off_policy=1, num_substeps=2, eval_every=1,
        remove_constant_reward_groups=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RLConfig):
    """What PPO reads too."""

    ppo_epochs: int = 2


def ppo(folder: Path) -> PPOConfig:
    return PPOConfig(dataset=write_problems(folder / "rows"), log_path=str(folder / "run"), max_steps_off_policy=1)


def streaming(folder: Path) -> StreamingConfig:
    return StreamingConfig(dataset=write_problems(folder / "rows"), log_path=str(folder / "run"), save_every=3)


def distillation(depth: int, **changed: Any) -> Callable[[Path], DistillationConfig]:
    def config(folder: Path) -> DistillationConfig:
        dataset, log_path = write_problems(folder / "rows"), str(folder / "run")
        return DistillationConfig(dataset=dataset, log_path=log_path, max_steps_off_policy=depth, **changed)

    return config


def off_policy(folder: Path) -> OffPolicyConfig:
    return OffPolicyConfig(dataset=write_problems(folder / "rows"), log_path=str(folder / "run"))


def topk(folder: Path) -> TopKConfig:
    return TopKConfig(dataset=write_chats(folder / "rows"), log_path=str(folder / "run"))


MODES = {
    "supervised": Mode(SUPERVISED, supervised),
    "supervised, often saved": Mode(SUPERVISED, supervised_often_saved),
    "preference": Mode(PREFERENCE, preference),
    "measured preference": Mode(dpo.WORKFLOW, measured_preference),
    "reward model": Mode(REWARD_MODEL, reward_model),
    "pairwise, one step ahead": Mode(PAIRWISE_REINFORCEMENT, pairwise),
    "reinforcement": Mode(REINFORCEMENT, reinforcement(0, remove_constant_reward_groups=True)),
    "one step ahead": Mode(REINFORCEMENT, reinforcement(1)),
    "two steps ahead": Mode(REINFORCEMENT, reinforcement(2, save_every=3, eval_every=2)),
    "two steps ahead, often saved": Mode(REINFORCEMENT, reinforcement(2, save_every=1, keep_checkpoints="1")),
    "penalty, substeps": Mode(KL_REINFORCEMENT, with_penalty),
    "ppo": Mode(PPO, ppo),
    "streaming": Mode(STREAMING, streaming),
    "distillation": Mode(DISTILLATION, distillation(0)),
    "distillation, two steps ahead": Mode(DISTILLATION, distillation(2, num_substeps=2)),
    "off-policy distillation": Mode(OFF_POLICY_DISTILLATION, off_policy),
    "top-k distillation": Mode(TOPK_DISTILLATION, topk),
}

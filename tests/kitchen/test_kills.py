"""A run that is killed anywhere is, once it goes on, the run that would have been.

A kill is simulated by a copy of the run's folder, with all that was saved in it, at a boundary of a stage: while the
engine's thread goes on writing. Each copy goes on where it lies, after the original is gone. `make test` tries a
twentieth of the boundaries, .ci/run all of them.
"""

import asyncio
import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kitchen.stages.configs import (
    DistillationConfig,
    KLConfig,
    OffPolicyConfig,
    PreferenceConfig,
    RLConfig,
    StreamingConfig,
    SupervisedConfig,
    write_chats,
    write_comparisons,
    write_problems,
)
from kitchen.test_supervised import checkpoints, rows, weights
from stovetop.backends import recording
from stovetop.kitchen.workflow import Workflow
from stovetop.kitchen.workflows import (
    DISTILLATION,
    KL_REINFORCEMENT,
    OFF_POLICY_DISTILLATION,
    PREFERENCE,
    REINFORCEMENT,
    STREAMING,
    SUPERVISED,
)
from stovetop.runs import load, open_run
from stovetop.tracking.events import Event, Recorder

NUM_PARTS = 60
ONCE_A_STEP = {
    "training.step", "dpo.step", "rl.step", "distillation.step", "training.epoch", "training.checkpoint",
    "eval.complete",
}  # fmt: skip
LATENCY_S = {"forward_backward": 0.001, "save_state": 0.003, "sample": 0.001}

Config = SupervisedConfig | PreferenceConfig | RLConfig | DistillationConfig | OffPolicyConfig


class Copier(Recorder):
    """Copies the run at the boundaries of its stages."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run
        self.copies: list[Path] = []

    def receive(self, event: Event) -> None:
        if event.name in ("stage.start", "stage.stop"):
            copy = self.run.with_name(f"{self.run.name}-killed-{len(self.copies)}")
            shutil.copytree(self.run, copy, copy_function=_copy_if_there, ignore=shutil.ignore_patterns(".lock"))
            self.copies.append(copy)


def _copy_if_there(source: str, target: str) -> None:
    """A file may be renamed, or a folder cleared, while it is copied."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class Mode:
    """A workflow and its config."""

    workflow: Workflow
    config: Callable[[Path], Config]

    def train(self, config: Config, copier: Copier | None = None, *, after_s: float | None = None) -> None:
        """To its end, or cancelled after so many seconds."""
        sinks = [copier] if copier else []
        with (
            recording.open_service(config.log_path, latency_s=lambda verb: LATENCY_S.get(verb, 0.0)) as service,
            open_run(config.log_path, config, console=False, sinks=sinks) as run,
        ):

            async def main() -> None:
                async with asyncio.timeout(after_s):
                    await self.workflow.run(config, service=service, run=run)

            asyncio.run(main())


def supervised(folder: Path) -> SupervisedConfig:
    return SupervisedConfig(dataset=write_chats(folder / "rows"), log_path=str(folder / "run"), eval_every=2)


def preference(folder: Path) -> PreferenceConfig:
    return PreferenceConfig(dataset=write_comparisons(folder / "rows"), log_path=str(folder / "run"))


def reinforcement(depth: int, **changed: Any) -> Callable[[Path], RLConfig]:
    def config(folder: Path) -> RLConfig:
        dataset = write_problems(folder / "rows")
        return RLConfig(dataset=dataset, log_path=str(folder / "run"), max_steps_off_policy=depth, **changed)

    return config


def with_penalty(folder: Path) -> KLConfig:
    """Dropped groups, two updates a step, and an evaluation that is due where a checkpoint is."""
    dataset, log_path = write_problems(folder / "rows"), str(folder / "run")
    return KLConfig(
        dataset=dataset, log_path=log_path, max_steps_off_policy=1, num_substeps=2, remove_constant_reward_groups=True
    )


def streaming(folder: Path) -> StreamingConfig:
    return StreamingConfig(dataset=write_problems(folder / "rows"), log_path=str(folder / "run"))


def distillation(folder: Path) -> DistillationConfig:
    dataset, log_path = write_problems(folder / "rows"), str(folder / "run")
    return DistillationConfig(dataset=dataset, log_path=log_path, max_steps_off_policy=1, num_substeps=2)


def off_policy(folder: Path) -> OffPolicyConfig:
    return OffPolicyConfig(dataset=write_problems(folder / "rows"), log_path=str(folder / "run"))


MODES = {
    "supervised": Mode(SUPERVISED, supervised),
    "preference": Mode(PREFERENCE, preference),
    "reinforcement": Mode(REINFORCEMENT, reinforcement(0, remove_constant_reward_groups=True)),
    "one step ahead": Mode(REINFORCEMENT, reinforcement(1)),
    "two steps ahead": Mode(REINFORCEMENT, reinforcement(2, save_every=3, eval_every=3)),
    "penalty, substeps": Mode(KL_REINFORCEMENT, with_penalty),
    "streaming": Mode(STREAMING, streaming),
    "distillation": Mode(DISTILLATION, distillation),
    "off-policy distillation": Mode(OFF_POLICY_DISTILLATION, off_policy),
}


@dataclass(frozen=True)
class Killed:
    """A run that nothing stopped, and its copies."""

    mode: Mode
    whole: Config
    copies: list[Path]


@pytest.fixture(scope="module", params=MODES)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    mode = MODES[request.param]
    config = mode.config(folder)
    copier = Copier(Path(config.log_path))
    mode.train(config, copier)
    whole = Path(config.log_path).rename(folder / "whole")
    return Killed(mode, replace(config, log_path=str(whole)), copier.copies)


def once_a_step(log_path: str) -> Counter[tuple[str, int | None]]:
    return Counter((event.name, event.step) for event in load(log_path).events if event.name in ONCE_A_STEP)


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part % 20 == 7 else [pytest.mark.slow]) for part in range(NUM_PARTS)]
)
def test_a_run_that_is_killed_at_the_boundary_of_a_stage_is_the_run_that_would_have_been(
    killed: Killed, part: int
) -> None:
    for copy in killed.copies[part::NUM_PARTS]:
        killed.mode.train(replace(killed.whole, log_path=str(copy)))
        assert rows(str(copy)) == rows(killed.whole.log_path)
        assert weights(str(copy)) == weights(killed.whole.log_path)
        assert checkpoints(str(copy)) == checkpoints(killed.whole.log_path)
        assert once_a_step(str(copy)) == once_a_step(killed.whole.log_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_run_that_is_cancelled_at_any_moment_is_the_run_that_would_have_been(mode: Mode, tmp_path: Path) -> None:
    """Again and again, each time a little later, until it is done."""
    whole, config = mode.config(tmp_path), mode.config(tmp_path)
    whole = replace(whole, log_path=str(tmp_path / "whole"))
    mode.train(whole)
    generator = random.Random(7)
    for after_s in (generator.uniform(0.02, 0.12), generator.uniform(0.05, 0.2)):
        with contextlib.suppress(TimeoutError):
            mode.train(config, after_s=after_s)
    mode.train(config)
    assert rows(config.log_path) == rows(whole.log_path)
    assert weights(config.log_path) == weights(whole.log_path)
    assert checkpoints(config.log_path) == checkpoints(whole.log_path)
    assert once_a_step(config.log_path) == once_a_step(whole.log_path)

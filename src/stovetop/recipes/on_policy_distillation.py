"""On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student answers, its teacher scores every token,
and the student learns to write what its teacher would. No answer is ever shown or graded. The workflow DISTILLATION;
with `mode=off_policy` OFF_POLICY_DISTILLATION, where the teacher answers and the student learns that.

    stovetop run on_policy_distillation          Qwen3 8B and its base model from the hub, prompts of DeepMath
    stovetop run on_policy_distillation:small    without a network: a teacher that first learns to write kitchen tickets

With `teacher_dataset` the teacher is trained first, in a phase of its own, unless `teacher_checkpoint_path` has it.
Student and teacher must have one tokenizer and one renderer: `renderer_name=qwen3` asks both as chat models.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal

from stovetop.client import ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen import Finished, Phase, run_phases
from stovetop.kitchen.phases import config_from, plan_phases
from stovetop.kitchen.stages.distillation import build_distillation_dataset, make_teacher_completer
from stovetop.kitchen.workflows import DISTILLATION, OFF_POLICY_DISTILLATION
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import check_training
from stovetop.recipes.settings import check_weights
from stovetop.recipes.students import (
    DistillationConfig,
    ScoredConfig,
    StudentConfig,
    check_phase,
    teacher_phase,
)
from stovetop.tasks import prompts
from stovetop.tracking.configs import MAY_CHANGE

Mode = Literal["on_policy", "off_policy"]
RUNS = "runs/on_policy_distillation"


@dataclass(frozen=True, kw_only=True)
class Config(DistillationConfig):
    log_path: str = field(default=RUNS, metadata=MAY_CHANGE)
    mode: Mode = "on_policy"  # who writes what is learnt from: the student, or the teacher


# ---- phases ----------------------------------------------------------------------------------------------------------


ON_POLICY = DISTILLATION.replace("load_prompts", prompts.load_named_prompts)
OFF_POLICY = (
    OFF_POLICY_DISTILLATION.replace("load_prompts", prompts.load_named_prompts)
    .replace(
        "make_teacher_completer",
        make_teacher_completer.using("make_teacher_completer", teacher_temperature="temperature"),
    )
    .replace(
        "build_distillation_dataset",
        build_distillation_dataset.using("build_distillation_dataset", batch_size="groups_per_batch"),
    )
)


def teacher(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """A teacher that there is not yet learns from chats."""
    return teacher_phase(config, config.teacher_model_name, config.teacher_dataset, config.teacher_checkpoint_path)


def on_policy(config: Config, done: Mapping[str, Finished]) -> ScoredConfig | None:
    """The student answers."""
    path = _teacher_path(config, done)
    return config_from(config, ScoredConfig, teacher_checkpoint_path=path) if config.mode == "on_policy" else None


def off_policy(config: Config, done: Mapping[str, Finished]) -> StudentConfig | None:
    """Its teacher answers."""
    path = _teacher_path(config, done)
    return config_from(config, StudentConfig, teacher_checkpoint_path=path) if config.mode == "off_policy" else None


def _teacher_path(config: Config, done: Mapping[str, Finished]) -> str | None:
    return done["teacher"].sampler_path if "teacher" in done else config.teacher_checkpoint_path


COLUMNS = ("teacher_kl", "test/teacher_kl", "optim/lr", "optim/entropy", "lag", "time/step")
PHASES = (
    Phase("teacher", sl_basic.WORKFLOW, teacher, columns=sl_basic.COLUMNS),
    Phase("on_policy", ON_POLICY, on_policy, columns=COLUMNS),
    Phase("off_policy", OFF_POLICY, off_policy, columns=("train_mean_nll", "test/teacher_kl", "time/step")),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    checkpoint = config.teacher_checkpoint_path
    check_training(
        config,
        lambda: _check_mode(config),
        *(partial(check_phase, each.config, config.behavior_if_exists) for each in plan_phases(PHASES, config)),
        lambda: check_weights(config.base_url, config.teacher_model_name, teacher_checkpoint_path=checkpoint),
    )


def _check_mode(config: Config) -> None:
    default = ScoredConfig(log_path=config.log_path)
    own = {each.name for each in fields(ScoredConfig)} - {each.name for each in fields(StudentConfig)}
    own -= {"centres_teacher_kl"}  # which the preset sets for both modes
    in_vain = sorted(name for name in own if getattr(config, name) != getattr(default, name))
    if config.mode == "off_policy" and in_vain:
        raise InvalidRequest(
            f"with mode=off_policy no answer of the student is trained on; leave these at their defaults: {in_vain}"
        )


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


PRESETS = {
    # Each chat has two examples, so that the student's first answers have some tokens that its teacher would write too.
    "small": Config(
        model_name="smollm2",
        teacher_model_name="smollm2",
        dtype="bfloat16",
        log_path="runs/on_policy_distillation_small",
        dataset="sample:tickets",
        teacher_dataset="sample:tickets",
        test_size=32,
        teacher_learning_rate=1e-3,
        teacher_batch_size=8,
        groups_per_batch=4,
        max_tokens=12,
        learning_rate=1e-3,
        centres_teacher_kl=True,
        max_steps=10,
        lora_rank=16,
        train_unembed=False,
        eval_every=5,
    )
}


if __name__ == "__main__":
    asyncio.run(main(Config()))

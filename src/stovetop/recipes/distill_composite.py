"""On-policy distillation from several teachers at once: each data set of prompts has a teacher of its own, every batch
has its share of each set, and an answer is scored by the teacher of its set. `on_policy_distillation` has one teacher,
and says how one learns from it.

    stovetop run distill_composite          a student of 9B, teachers of 27B and 397B, prompts of two kinds
    stovetop run distill_composite:small    without a network: one teacher learns to sort, one to write kitchen tickets

The distances to the teachers are `teacher_kl/dataset_0` and `teacher_kl/dataset_1`. With `teacher_dataset` and
`second_teacher_dataset` the teachers are trained first, in phases of their own. For more than two, STUDENT
takes a third as it does the second.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from stovetop.client import ServiceClient
from stovetop.distillation.datasets import DistillationDatasetConfig
from stovetop.errors import InvalidRequest
from stovetop.kitchen import Finished, Phase, run_phases, stage
from stovetop.kitchen.phases import config_from, plan_phases
from stovetop.kitchen.stages.distillation import choose_sources, choose_teacher
from stovetop.kitchen.workflows import DISTILLATION
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import check_policy_loss_config, check_training
from stovetop.recipes.settings import Positive, check_weights
from stovetop.recipes.students import DistillationConfig, ScoredConfig, check_phase, teacher_phase
from stovetop.tasks.prompts import load_named_prompts
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class StudentConfig(ScoredConfig):
    """What the student's phase reads."""

    model_name: str = "Qwen/Qwen3.5-9B"
    teacher_model_name: str = "Qwen/Qwen3.6-27B"
    groups_per_batch: Positive = 512
    second_dataset: str = "tulu3"  # as dataset
    second_teacher_model_name: str = "Qwen/Qwen3.5-397B-A17B"  # as teacher_model_name, of the second data set
    second_teacher_checkpoint_path: str | None = None  # as teacher_checkpoint_path, of the second teacher
    second_groups_per_batch: Positive = 512  # prompts of the second data set that are in a step too


@dataclass(frozen=True, kw_only=True)
class Config(StudentConfig, DistillationConfig):
    log_path: str = field(default="runs/distill_composite", metadata=MAY_CHANGE)
    second_teacher_dataset: str | None = None  # as teacher_dataset, of the second teacher

    def __post_init__(self) -> None:
        check_policy_loss_config(self)
        if self.dataset == self.second_dataset:
            raise InvalidRequest(f"second_dataset must be another data set than dataset: {self.dataset!r}")


# ---- teachers --------------------------------------------------------------------------------------------------------


def first_teacher(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """Where it is not there yet."""
    return teacher_phase(config, config.teacher_model_name, config.teacher_dataset, config.teacher_checkpoint_path)


def second_teacher(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """Likewise."""
    path = config.second_teacher_checkpoint_path
    return teacher_phase(config, config.second_teacher_model_name, config.second_teacher_dataset, path)


# ---- the student -----------------------------------------------------------------------------------------------------


@stage(writes="sources")
def join_sources(
    first_source: list[DistillationDatasetConfig], second_source: list[DistillationDatasetConfig]
) -> list[DistillationDatasetConfig]:
    """Each data set with its teacher and its share of a batch."""
    return [*first_source, *second_source]


load_second_prompts = load_named_prompts.using(
    "load_second_prompts", dataset="second_dataset", prompts="second_prompts"
)
choose_second_teacher = choose_teacher.using(
    "choose_second_teacher",
    teacher_model_name="second_teacher_model_name",
    teacher_checkpoint_path="second_teacher_checkpoint_path",
    teacher_config="second_teacher_config",
)
choose_first_source = choose_sources.using("choose_first_source", prompts_name="dataset", sources="first_source")
choose_second_source = choose_sources.using(
    "choose_second_source",
    prompts="second_prompts",
    prompts_name="second_dataset",
    teacher_config="second_teacher_config",
    groups_per_batch="second_groups_per_batch",
    sources="second_source",
)
STUDENT = (
    DISTILLATION.replace("load_prompts", load_named_prompts, load_second_prompts)
    .insert_after("choose_teacher", choose_second_teacher)
    .replace("choose_sources", choose_first_source, choose_second_source, join_sources)
    .named("composite_distillation")
)


def student(config: Config, done: Mapping[str, Finished]) -> StudentConfig:
    """Learns from both."""
    first, second = (done[name].sampler_path if name in done else None for name in ("first_teacher", "second_teacher"))
    return config_from(
        config,
        StudentConfig,
        teacher_checkpoint_path=first or config.teacher_checkpoint_path,
        second_teacher_checkpoint_path=second or config.second_teacher_checkpoint_path,
    )


COLUMNS = ("teacher_kl/dataset_0", "teacher_kl/dataset_1", "test/teacher_kl", "optim/lr", "lag", "time/step")
PHASES = (
    Phase("first_teacher", sl_basic.WORKFLOW, first_teacher, columns=sl_basic.COLUMNS),
    Phase("second_teacher", sl_basic.WORKFLOW, second_teacher, columns=sl_basic.COLUMNS),
    Phase("student", STUDENT, student, columns=COLUMNS),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    *teachers, own = (planned.config for planned in plan_phases(PHASES, config))
    assert isinstance(own, StudentConfig)
    second = replace(own, dataset=own.second_dataset, groups_per_batch=own.second_groups_per_batch)
    first_path, second_path = config.teacher_checkpoint_path, config.second_teacher_checkpoint_path
    check_training(
        config,
        *(partial(check_phase, each, config.behavior_if_exists) for each in (*teachers, own, second)),
        lambda: check_weights(config.base_url, own.teacher_model_name, teacher_checkpoint_path=first_path),
        lambda: check_weights(
            config.base_url, own.second_teacher_model_name, second_teacher_checkpoint_path=second_path
        ),
    )


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


COOKBOOK_NAMES = {
    "deepmath_teacher_model": "teacher_model_name",
    "deepmath_teacher_checkpoint": "teacher_checkpoint_path",
    "deepmath_groups_per_batch": "groups_per_batch",
    "tulu3_teacher_model": "second_teacher_model_name",
    "tulu3_teacher_checkpoint": "second_teacher_checkpoint_path",
    "tulu3_groups_per_batch": "second_groups_per_batch",
}
PRESETS = {
    # Tickets are learnt in a few steps; sorting, of which a right answer is rarer, has the larger share.
    "small": Config(
        model_name="smollm2",
        teacher_model_name="smollm2",
        dtype="bfloat16",
        log_path="runs/distill_composite_small",
        dataset="sample:tickets",
        teacher_dataset="sample:tickets",
        groups_per_batch=2,
        second_dataset="sample:sorting",
        second_teacher_model_name="smollm2",
        second_teacher_dataset="sample:sorting",
        second_groups_per_batch=5,
        test_size=32,
        teacher_learning_rate=1e-3,
        teacher_batch_size=8,
        max_tokens=12,
        learning_rate=1e-3,
        centres_teacher_kl=True,
        max_steps=16,
        lora_rank=16,
        train_unembed=False,
        eval_every=8,
    )
}


if __name__ == "__main__":
    asyncio.run(main(Config()))

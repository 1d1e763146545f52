"""On-policy distillation from several teachers at once: each data set of prompts has a teacher of its own, every batch
has its share of each set, and an answer is scored by the teacher of its set. `on_policy_distillation` has one teacher,
and says how one learns from it.

    stovetop run distill_composite          a student of 9B, teachers of 27B and 397B, prompts of two kinds
    stovetop run distill_composite:small    without a network: one teacher learns to sort, one to write kitchen tickets

The distances to the teachers are `teacher_kl/dataset_0` and `teacher_kl/dataset_1`. With `teacher_dataset` and
`second_teacher_dataset` the teachers are trained first, in phases of their own. For more than two, `choose_two_sources`
is the stage to replace.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import stovetop
from stovetop.checks import check_all
from stovetop.datasets import Split
from stovetop.distillation.datasets import DistillationDatasetConfig
from stovetop.distillation.teachers import TeacherConfig
from stovetop.errors import InvalidRequest
from stovetop.kitchen import Finished, Phase, run_phases, stage
from stovetop.kitchen.phases import config_from
from stovetop.kitchen.stages.distillation import PromptBatching, source_of
from stovetop.kitchen.workflows import DISTILLATION
from stovetop.recipes import sl_basic
from stovetop.recipes.settings import Positive, check_rate, check_weights
from stovetop.recipes.students import (
    DistillationConfig,
    ScoredConfig,
    check_config,
    check_prompts,
    check_teacher_phase,
    teacher_phase,
)
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.runs import Run
from stovetop.tasks import prompts
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class StudentConfig(ScoredConfig):
    """What the student's phase reads."""

    model_name: str = "Qwen/Qwen3.5-9B"  # a folder, a fetched model, or a name on the hub
    teacher_model_name: str = "Qwen/Qwen3.6-27B"  # the teacher, likewise
    groups_per_batch: Positive = 512  # prompts a step; the last step of an epoch may have fewer
    second_dataset: str = "tulu3"  # as dataset
    second_teacher_model_name: str = "Qwen/Qwen3.5-397B-A17B"  # as teacher_model_name, of the second data set
    second_teacher_checkpoint_path: str | None = None  # as teacher_checkpoint_path, of the second teacher
    second_groups_per_batch: Positive = 512  # prompts of the second data set that are in a step too


@dataclass(frozen=True, kw_only=True)
class Config(StudentConfig, DistillationConfig):
    log_path: str = field(default="runs/distill_composite", metadata=MAY_CHANGE)  # the run directory; again: it goes on
    second_teacher_dataset: str | None = None  # as teacher_dataset, of the second teacher

    def __post_init__(self) -> None:
        check_config(self)
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


@stage(writes="prompt_sets")
def load_two_datasets(
    dataset: str, second_dataset: str, run: Run, test_size: int = 0, seed: int = 0
) -> dict[str, Split[list[Message]]]:
    """The prompts of each to train on, and those held out."""
    sets: dict[str, Split[list[Message]]] = {}
    for name in (dataset, second_dataset):
        loaded = prompts.load(name, None, test_size, seed, run.revisions)
        run.record_data(name, loaded)
        sets[name] = Split(loaded.train, loaded.test)
    return sets


@stage(writes="teacher_configs")
def choose_two_teachers(
    teacher_model_name: str,
    second_teacher_model_name: str,
    teacher_checkpoint_path: str | None,
    second_teacher_checkpoint_path: str | None,
) -> tuple[TeacherConfig, ...]:
    """Each a base model as it is, or a saved checkpoint of it."""
    return (
        TeacherConfig(base_model=teacher_model_name, load_checkpoint_path=teacher_checkpoint_path),
        TeacherConfig(base_model=second_teacher_model_name, load_checkpoint_path=second_teacher_checkpoint_path),
    )


@stage(writes="sources")
def choose_two_sources(
    prompt_sets: dict[str, Split[list[Message]]],
    teacher_configs: tuple[TeacherConfig, ...],
    groups_per_batch: int,
    second_groups_per_batch: int,
    renderer: Renderer,
    prompt_batching: PromptBatching,
) -> list[DistillationDatasetConfig]:
    """Each data set with its teacher and its share of a batch."""
    shares = (groups_per_batch, second_groups_per_batch)
    return [
        source_of(split, teacher, share, renderer, prompt_batching, dataset_name=name)
        for (name, split), teacher, share in zip(prompt_sets.items(), teacher_configs, shares, strict=True)
    ]


STUDENT = (
    DISTILLATION.replace("load_prompts", load_two_datasets)
    .replace("choose_teacher", choose_two_teachers)
    .replace("choose_sources", choose_two_sources)
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


COLUMNS = (
    "teacher_kl/dataset_0",
    "teacher_kl/dataset_1",
    "test/teacher_kl",
    "optim/lr",
    "optim/entropy",
    "lag",
    "time/step",
)
PHASES = (
    Phase("first_teacher", sl_basic.WORKFLOW, first_teacher, columns=sl_basic.COLUMNS),
    Phase("second_teacher", sl_basic.WORKFLOW, second_teacher, columns=sl_basic.COLUMNS),
    Phase("student", STUDENT, student, columns=COLUMNS),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    first, second = config.teacher_checkpoint_path, config.second_teacher_checkpoint_path
    check_all(
        lambda: check_prompts(config, config.dataset, config.groups_per_batch),
        lambda: check_prompts(config, config.second_dataset, config.second_groups_per_batch),
        lambda: check_weights(config.base_url, config.model_name, config.load_checkpoint_path),
        lambda: check_weights(config.base_url, config.teacher_model_name, teacher_checkpoint_path=first),
        lambda: check_weights(config.base_url, config.second_teacher_model_name, second_teacher_checkpoint_path=second),
        lambda: check_teacher_phase(first_teacher(config, {})),
        lambda: check_teacher_phase(second_teacher(config, {})),
        lambda: check_rate(config.learning_rate, config.model_name),
    )


async def main(config: Config) -> None:
    options = config.engine_options()
    await run_phases(PHASES, config, lambda folder: stovetop.ServiceClient(config.base_url, storage=folder, **options))


PRESETS = {
    "small": Config(
        model_name="smollm2",
        teacher_model_name="smollm2",
        log_path="runs/distill_composite_small",
        dataset="sample:tickets",
        teacher_dataset="sample:tickets",
        groups_per_batch=3,
        second_dataset="sample:sorting",
        second_teacher_model_name="smollm2",
        second_teacher_dataset="sample:sorting",
        second_groups_per_batch=3,
        test_size=32,
        teacher_learning_rate=5e-4,
        teacher_batch_size=32,
        max_tokens=10,
        learning_rate=1e-3,
        centres_teacher_kl=True,
        num_epochs=2,
        max_steps=24,
        lora_rank=16,
        train_unembed=False,
        eval_every=10,
    )
}


if __name__ == "__main__":
    asyncio.run(main(Config()))

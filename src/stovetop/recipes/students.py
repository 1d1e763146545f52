"""What the recipes of distillation share: the fields of their configs, and how a teacher is trained that there is not
yet."""

from dataclasses import dataclass, replace
from typing import Annotated

from stovetop.checks import check_all
from stovetop.data_record import check_data, revisions_in
from stovetop.kitchen import RunConfig
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import PolicyLossConfig, TrainingConfig
from stovetop.recipes.settings import (
    Count,
    LearningRate,
    Positive,
    Temperature,
    check_num_steps,
)
from stovetop.renderers.base import TrainOnWhat
from stovetop.rules import number
from stovetop.run_folder import BehaviorIfExists
from stovetop.tasks import prompts
from stovetop.types import Rank


@dataclass(frozen=True, kw_only=True)
class StudentConfig(TrainingConfig):
    """That of a student, whoever writes what it learns from."""

    dataset: str = "deepmath"  # prompts: deepmath, tulu3; FILE.jsonl with "question" or "messages"; sample:NAME
    test_size: Count = 64  # prompts held out of a data set; 0: none
    model_name: str = "Qwen/Qwen3-8B-Base"
    teacher_model_name: str = "Qwen/Qwen3-8B"  # the teacher, likewise
    teacher_checkpoint_path: str | None = None  # weights of the teacher; None: the model as it is, or as it is trained
    groups_per_batch: Positive = 1024  # prompts a step; the last step of an epoch may have fewer
    max_prompt_tokens: Positive | None = 1024  # of a prompt's last message, which loses what is over
    max_tokens: Positive = 4096  # of an answer
    temperature: Temperature = 1.0  # of the answers
    learning_rate: LearningRate = 1e-4
    lr_schedule: LRSchedule = "constant"
    lora_rank: Rank = 128


@dataclass(frozen=True, kw_only=True)
class ScoredConfig(StudentConfig, PolicyLossConfig):
    """That of a student whose own answers are scored."""

    group_size: Positive = 4  # answers to each prompt
    kl_penalty_coef: Annotated[float, number(above=0)] = 1.0  # of the distance to the teacher, in the advantages
    kl_discount_factor: Annotated[float, number(at_least=0, at_most=1)] = 0.0  # above 0: a token counts later ones too
    centres_teacher_kl: bool = False  # subtracts the mean distance of a batch: the same gradient, with less noise


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(ScoredConfig):
    """That of the whole, with what a teacher learns first."""

    teacher_dataset: str | None = None  # chats that the teacher learns first; None: it is there
    teacher_learning_rate: LearningRate = 2e-4  # of that, at the first step
    teacher_num_epochs: Positive = 1  # of that
    teacher_batch_size: Positive = 128  # of that, in chats


def teacher_phase(
    config: DistillationConfig, model_name: str, dataset: str | None, checkpoint_path: str | None
) -> sl_basic.Config | None:
    """For the `config_of` of a phase: a teacher that there is not yet learns the last answers of chats, of which the
    run's `test_size` are held out; those of its student's prompts, where these are of the same data set."""
    if dataset is None or checkpoint_path is not None:
        return None
    return sl_basic.Config(
        dataset=dataset,
        test_size=config.test_size,
        model_name=model_name,
        renderer_name=config.renderer_name,
        train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        learning_rate=config.teacher_learning_rate,
        num_epochs=config.teacher_num_epochs,
        batch_size=config.teacher_batch_size,
        lora_rank=config.lora_rank,
        train_unembed=config.train_unembed,
        seed=config.seed,
        eval_every=config.eval_every,
        save_every=config.save_every,
    )


def check_phase(own: RunConfig | None, behavior_if_exists: BehaviorIfExists) -> None:
    """Refuses what can be known to be wrong with the phase of a teacher or with the prompts of a student, where it is
    run: what cannot be had or has changed, and a warm-up that is longer than the run."""
    if isinstance(own, sl_basic.Config):
        sl_basic.check(replace(own, behavior_if_exists=behavior_if_exists))
    elif isinstance(own, StudentConfig):
        loaded = prompts.load(own.dataset, None, own.test_size, own.seed, revisions_in(own.log_path))
        num = len(loaded.train)
        check_all(
            lambda: check_data(own.log_path, own.dataset, loaded.sources, behavior_if_exists),
            lambda: check_num_steps(num, own.groups_per_batch, own.num_epochs, own.max_steps, own.warmup_steps),
        )

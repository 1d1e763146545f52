"""Prompt distillation (Askell et al. 2021, arXiv:2112.00861): a model learns to do without a long prompt what it does
with it. Two phases: the model answers texts with the prompt; then SUPERVISED trains it on the texts and those answers
alone. The published task is to say in which language a text is, by a page of rules.

    stovetop run prompt_distillation          the published texts, in a file, and a model from the hub
    stovetop run prompt_distillation:small    without a network

`run_training=False` ends when the answers are there, in RUN/1_answers/chats.jsonl; the same command without it goes on.
`file_path=chats.jsonl` trains on answers that were made before.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from stovetop.checks import check_all, collecting
from stovetop.client import ServiceClient
from stovetop.data_record import record_data, refuse_changes, revisions_in
from stovetop.datasets import split_rows
from stovetop.distillation.prompted import compile_answer_pattern
from stovetop.kitchen import Finished, Phase, Workflow, run_phases, stage
from stovetop.kitchen.phases import config_from, plan_phases
from stovetop.kitchen.stages.prompted import (
    CHATS_FILE,
    init_prompted_teacher,
    make_agreement_evaluators,
    write_answers,
)
from stovetop.lr_schedules import LRSchedule
from stovetop.recipes import sl_basic
from stovetop.recipes.configs import ModelConfig, TrainingConfig, check_model_config, check_training
from stovetop.recipes.settings import Count, LearningRate, Positive, check_num_steps, check_weights
from stovetop.renderers.base import TrainOnWhat
from stovetop.renderers.messages import Message
from stovetop.rules import Whole, number
from stovetop.runs import Run
from stovetop.tasks import languages
from stovetop.tracking.configs import HOW_LONG, MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(ModelConfig):
    """What the first phase has, and the whole too."""

    dataset: str = "multilingual.txt"  # texts: FILE.txt, one a line; FILE.jsonl with "text", sample:multilingual
    prompt: str = "rules"  # rules, examples, FILE.txt or FILE.jsonl (a chat): {text} is where the text goes
    answer_pattern: str = languages.ANSWER_PATTERN  # its first group is learnt; what does not match is left out
    model_name: str = "Qwen/Qwen3.6-35B-A3B"
    teacher_checkpoint_path: str | None = None  # weights that answer with the prompt; None: the model as it is
    max_tokens: Positive = 1000  # of an answer
    temperature: Annotated[float, number(at_least=0)] = 0.15  # of the answers


@dataclass(frozen=True, kw_only=True)
class Config(AnswersConfig, TrainingConfig):
    log_path: str = field(default="runs/prompt_distillation", metadata=MAY_CHANGE)
    file_path: str | None = None  # chats to train on that were made before; None: made now
    run_training: bool = field(default=True, metadata=MAY_CHANGE)  # False: only the answers are made
    test_size: Count = 64  # texts held out; 0: none
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES  # which messages
    max_length: Annotated[int, Whole(2)] | None = 32768  # tokens of a chat; what is over is cut off
    learning_rate: LearningRate = 1e-4
    lr_schedule: LRSchedule = "linear"
    num_epochs: Positive = field(default=4, metadata=HOW_LONG)
    batch_size: Positive = 128  # chats a step; the last step of an epoch may have fewer
    eval_every: Count = field(default=5, metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        check_all(lambda: check_model_config(self), lambda: compile_answer_pattern(self.answer_pattern))


# ---- with the prompt -------------------------------------------------------------------------------------------------


@stage(writes="texts")
def load_texts(dataset: str, run: Run, seed: int = 0) -> list[str]:
    """The texts to answer, each once: what is held out is not trained on too."""
    loaded = languages.load_texts(dataset, seed, run.revisions)
    run.record_data(dataset, loaded)
    return list(dict.fromkeys(loaded.train))


@stage(writes="instruction")
def load_prompt(prompt: str, run: Run) -> list[Message]:
    """The long prompt. The run keeps which bytes it was, as of what it trains on."""
    sources = languages.sources_of_prompt(prompt)
    if sources:  # a prompt of the package is in no file
        record_data(run.path, f"prompt {prompt}", sources)
    return languages.load_prompt(prompt)


def answers(config: Config, done: Mapping[str, Finished]) -> AnswersConfig | None:
    """Answers with the prompt, where there is no file of them."""
    return None if config.file_path is not None else config_from(config, AnswersConfig)


# ---- without it ------------------------------------------------------------------------------------------------------


def student(config: Config, done: Mapping[str, Finished]) -> sl_basic.Config | None:
    """Learns the answers."""
    if not config.run_training:
        return None
    return config_from(config, sl_basic.Config, dataset=config.file_path or done["answers"].file)


PHASES = (
    Phase(
        "answers",
        Workflow("answers", load_texts, load_prompt, init_prompted_teacher, write_answers),
        answers,
        file=CHATS_FILE,
    ),
    Phase(
        "student",
        sl_basic.WORKFLOW.replace("make_evaluators", make_agreement_evaluators),
        student,
        columns=("learning_rate", "train_mean_nll", "test/nll", "agreement/env/all/correct", "grad_norm", "time/step"),
    ),
)


def check(config: Config) -> None:
    """Refuses what can be known to be wrong without a model and without writing anything."""
    teacher = config.teacher_checkpoint_path
    check_training(
        config,
        lambda: check_texts(config),
        lambda: check_weights(config.base_url, config.model_name, teacher_checkpoint_path=teacher),
    )


def check_texts(config: Config) -> None:
    """Refuses texts, a prompt or chats that cannot be had or have changed, and a test set that leaves nothing to train
    on."""
    with_prompt, without = plan_phases(PHASES, config)
    with collecting() as problem:
        if with_prompt.config is not None:
            with problem:
                languages.load_prompt(config.prompt)
                if with_prompt.is_complete:
                    sources = languages.sources_of_prompt(config.prompt)
                    refuse_changes(with_prompt.folder, f"prompt {config.prompt}", sources)
            with problem:
                texts = languages.load_texts(config.dataset, config.seed, revisions_in(with_prompt.folder))
                if with_prompt.is_complete:
                    with problem:
                        refuse_changes(with_prompt.folder, config.dataset, texts.sources)
                split = split_rows(list(dict.fromkeys(texts.train)), config.test_size if config.run_training else 0)
                num = len(split.train)
                check_num_steps(num, config.batch_size, config.num_epochs, config.max_steps, config.warmup_steps)
        if isinstance(without.config, sl_basic.Config) and (with_prompt.config is None or with_prompt.is_complete):
            with problem:
                sl_basic.check_chats(replace(without.config, behavior_if_exists=config.behavior_if_exists))


async def main(config: Config) -> None:
    with config.open_service() as service:
        await train(config, service)


async def train(config: Config, service: ServiceClient) -> None:
    await run_phases(PHASES, config, service.at)


PRESETS = {
    "small": Config(
        model_name="smollm2",
        log_path="runs/prompt_distillation_small",
        dataset="sample:multilingual",
        prompt="examples",
        answer_pattern=r"^\s*(\w+)",
        max_tokens=4,
        test_size=25,
        learning_rate=1e-3,
        num_epochs=3,
        batch_size=8,
        lora_rank=16,
        eval_every=9,
    )
}  # five languages, which the model tells apart by one example of each, and without them answers at length


if __name__ == "__main__":
    asyncio.run(main(Config()))

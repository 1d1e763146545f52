"""Configs of the workflows, as recipes have them, and data to run them on."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from stovetop.kitchen import RunConfig
from stovetop.lr_schedules import LRSchedule
from stovetop.renderers.base import TrainOnWhat


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(RunConfig):
    """Every field that a stage of SUPERVISED reads."""

    dataset: str
    test_dataset: str | None = None
    test_size: int = 2
    model_name: str = "any/model"
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    max_length: int | None = None
    learning_rate: float = 0.5
    lr_schedule: LRSchedule = "linear"
    warmup_steps: int = 0
    num_epochs: int = 2
    batch_size: int = 2
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    eval_every: int = 3
    save_every: int = 3


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(RunConfig):
    """Every field that a stage of PREFERENCE reads."""

    dataset: str
    test_dataset: str | None = None
    test_size: int = 2
    model_name: str = "any/model"
    load_checkpoint_path: str | None = None
    reference_model_name: str | None = None
    renderer_name: str | None = None
    max_length: int | None = None
    learning_rate: float = 0.05
    lr_schedule: LRSchedule = "linear"
    warmup_steps: int = 0
    num_epochs: int = 2
    max_steps: int | None = None
    batch_size: int = 2
    dpo_beta: float = 0.1
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    save_every: int = 3


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(RunConfig):
    """Every field that a stage of REWARD_MODEL reads."""

    dataset: str
    test_dataset: str | None = None
    test_size: int = 3
    model_name: str = "any/judge"
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None
    max_length: int | None = None
    learning_rate: float = 0.5
    lr_schedule: LRSchedule = "linear"
    warmup_steps: int = 0
    num_epochs: int = 2
    max_steps: int | None = None
    batch_size: int = 2
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    eval_every: int = 3
    save_every: int = 3


@dataclass(frozen=True, kw_only=True)
class RLConfig(RunConfig):
    """Every field that a stage of REINFORCEMENT reads, but for those of its variants."""

    dataset: str
    test_dataset: str | None = None
    test_size: int = 3
    model_name: str = "any/model"
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None
    groups_per_batch: int = 3
    group_size: int = 6
    max_tokens: int = 3
    temperature: float = 0.7
    learning_rate: float = 0.5
    lr_schedule: LRSchedule = "constant"
    warmup_steps: int = 0
    num_epochs: int = 2
    max_steps: int | None = None
    max_steps_off_policy: int = 0
    loss_fn: str = "importance_sampling"
    loss_fn_config: dict[str, float] = field(default_factory=dict[str, float])
    remove_constant_reward_groups: bool = False
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    eval_every: int = 2
    save_every: int = 2


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(RLConfig):
    """What STREAMING reads too."""

    num_minibatches: int = 2


@dataclass(frozen=True, kw_only=True)
class KLConfig(RLConfig):
    """What a penalty, and several updates a step, read too."""

    reference_model_name: str | None = None
    kl_penalty_coef: float = 0.1
    kl_discount_factor: float = 0.0
    num_substeps: int = 1


@dataclass(frozen=True, kw_only=True)
class PairwiseConfig(RLConfig):
    """What PAIRWISE_REINFORCEMENT reads too."""

    rm_weights_path: str | None = None
    rm_model_name: str | None = None
    rm_renderer_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(RunConfig):
    """Every field that a stage of DISTILLATION reads."""

    dataset: str
    teacher_model_name: str = "any/teacher"
    teacher_checkpoint_path: str | None = None
    test_size: int = 3
    model_name: str = "any/model"
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None
    groups_per_batch: int = 3
    group_size: int = 2
    max_prompt_tokens: int | None = None
    max_tokens: int = 3
    temperature: float = 1.0
    kl_penalty_coef: float = 1.0
    kl_discount_factor: float = 0.0
    centres_teacher_kl: bool = False
    learning_rate: float = 0.5
    lr_schedule: LRSchedule = "constant"
    warmup_steps: int = 0
    num_epochs: int = 2
    max_steps: int | None = None
    max_steps_off_policy: int = 0
    loss_fn: str = "importance_sampling"
    loss_fn_config: dict[str, float] = field(default_factory=dict[str, float])
    num_substeps: int = 1
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    eval_every: int = 2
    save_every: int = 2


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(RunConfig):
    """Every field that a stage of OFF_POLICY_DISTILLATION reads."""

    dataset: str
    teacher_model_name: str = "any/teacher"
    teacher_checkpoint_path: str | None = None
    teacher_temperature: float = 0.7
    max_tokens: int = 3
    test_size: int = 2
    model_name: str = "any/model"
    load_checkpoint_path: str | None = None
    renderer_name: str | None = None
    max_length: int | None = None
    learning_rate: float = 0.5
    lr_schedule: LRSchedule = "linear"
    warmup_steps: int = 0
    num_epochs: int = 2
    max_steps: int | None = None
    batch_size: int = 2
    lora_rank: int = 4
    train_unembed: bool = True
    seed: int = 0
    eval_every: int = 2
    save_every: int = 3


@dataclass(frozen=True, kw_only=True)
class TopKConfig(RunConfig):
    """What differs of TOPK_DISTILLATION."""

    dataset: str
    teacher_model_name: str = "any/teacher"
    num_teacher_targets: int = 5
    test_size: int = 2
    model_name: str = "any/model"
    learning_rate: float = 0.5
    num_epochs: int = 2
    batch_size: int = 2
    lora_rank: int = 4
    seed: int = 0
    eval_every: int = 2
    save_every: int = 3


def write_problems(file: Path) -> str:
    """The answers are one letter, so that a bigram model finds them now and then and can learn them."""
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "e"}) + "\n" for i in range(12)))
    return str(file)


ANSWERS = ["yes", "sure", "of course", "gladly", "why not", "here you are", "with pleasure", "as you like", "indeed"]


def write_comparisons(file: Path) -> str:
    """Separable: the better answers are in small letters, the worse in capitals."""
    rows = [{"prompt": f"q{i}", "chosen": text, "rejected": text.upper()} for i, text in enumerate(ANSWERS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_chats(file: Path, num: int = 10) -> str:
    chats = [
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "abc" * (1 + i % 3)}] for i in range(num)
    ]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(file)

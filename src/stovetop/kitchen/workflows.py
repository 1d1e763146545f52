"""The workflows of the product, as values. Which stages they have, and in which order, is all that is said here."""

from dataclasses import fields
from typing import TYPE_CHECKING

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen.edits import as_ppo, as_ready, as_streaming, with_kl_penalty
from stovetop.kitchen.nodes import Loop, Station, When
from stovetop.kitchen.stages.distillation import (
    assemble_distillation_batch,
    build_distillation_dataset,
    build_prompt_dataset,
    choose_prompt_batching,
    choose_sources,
    choose_teacher,
    distillation_forward_backward,
    get_distillation_batch,
    hold_out_prompts,
    incorporate_teacher_kl,
    init_teacher,
    init_teachers,
    load_prompts,
    log_distillation_metrics,
    log_on_policy_metrics,
    make_teacher_completer,
    make_teacher_evaluator,
    make_teacher_evaluators,
    teacher_inference,
    teacher_topk,
)
from stovetop.kitchen.stages.evaluation import evaluate, evaluate_at_end, evaluates, evaluates_at_end
from stovetop.kitchen.stages.policies import freeze_policy, initial_policies
from stovetop.kitchen.stages.preference import (
    await_dpo,
    build_preference_dataset,
    compute_reference_logprobs,
    dpo_forward_backward,
    get_preference_batch,
    init_reference,
    load_comparisons,
    log_dpo_metrics,
    make_preference_loss,
)
from stovetop.kitchen.stages.reward_model import (
    build_comparison_dataset,
    build_preference_groups,
    init_comparison_renderer,
    init_preference_model,
    make_judge_evaluators,
    make_win_rate_evaluators,
)
from stovetop.kitchen.stages.rl import (
    assemble_rl_batch,
    batch_problems,
    build_env_group,
    compute_advantages,
    limit_prompts,
    load_problems,
    log_rl_metrics,
    make_policy_loss,
    make_rl_evaluators,
    train_step,
)
from stovetop.kitchen.stages.sampling import choose_sampling, do_rollout, keep_rollouts, open_rollout_record
from stovetop.kitchen.stages.session import (
    choose_adapter,
    init_renderer,
    init_session,
    is_unfinished,
    plan_steps,
    register_model,
    save_final_weights,
)
from stovetop.kitchen.stages.steps import (
    await_forward_backward,
    await_optim_step,
    delete_old_checkpoints,
    delete_old_checkpoints_at_end,
    ends_epoch,
    enters_epoch,
    log_epoch_metrics,
    log_step,
    make_optimizer,
    optim_step,
    record_checkpoint,
    save_checkpoint,
    saves,
    schedule,
    set_epoch,
)
from stovetop.kitchen.stages.supervised import (
    build_supervised_dataset,
    forward_backward,
    get_batch,
    load_dataset,
    log_step_metrics,
    make_batches,
    make_evaluators,
)
from stovetop.kitchen.workflow import Workflow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Chats in, a model that answers like them out. `recipes/sl_loop.py` shows the same as one flat loop.
SUPERVISED = Workflow(
    "supervised",
    load_dataset,
    choose_adapter,
    init_session,
    init_renderer,
    build_supervised_dataset,
    make_batches,
    make_evaluators,
    plan_steps,
    make_optimizer,
    Loop(
        "positions",
        Station(
            get_batch,
            When(evaluates, evaluate),
            schedule,
            forward_backward,
            optim_step,
            When(saves, save_checkpoint),
        ),
        Station(
            await_forward_backward,
            await_optim_step,
            log_step_metrics,
            log_step,
            When(ends_epoch, log_epoch_metrics),
            When(saves, record_checkpoint, delete_old_checkpoints),
        ),
        depth=1,
    ),
    When(evaluates_at_end, evaluate_at_end),
    When(is_unfinished, save_final_weights),
    register_model,
    delete_old_checkpoints_at_end,
)


# Comparisons in, a model that prefers as they do out.
PREFERENCE = Workflow(
    "preference",
    load_comparisons,
    choose_adapter,
    init_session,
    init_reference,
    init_renderer,
    build_preference_dataset,
    plan_steps,
    make_optimizer,
    make_preference_loss,
    Loop(
        "positions",
        Station(
            When(enters_epoch, set_epoch.using("set_epoch", data="preference_dataset")),
            get_preference_batch,
            compute_reference_logprobs,
            schedule,
            dpo_forward_backward,
            optim_step,
            When(saves, save_checkpoint),
        ),
        Station(
            await_dpo,
            await_optim_step,
            log_dpo_metrics,
            log_step,
            When(ends_epoch, log_epoch_metrics),
            When(saves, record_checkpoint, delete_old_checkpoints),
        ),
        depth=1,
    ),
    When(is_unfinished, save_final_weights),
    register_model,
    delete_old_checkpoints_at_end,
)

# Comparisons in, a preference model out: one that is shown two answers and says which is better. What trains it is
# SUPERVISED, on data of one trained token each.
REWARD_MODEL = (
    SUPERVISED.replace("load_dataset", load_comparisons)
    .replace("build_supervised_dataset", init_comparison_renderer, build_comparison_dataset)
    .replace("make_evaluators", make_judge_evaluators)
    .named("reward_model")
)


# Problems in, a model that solves more of them out. `recipes/rl_loop.py` shows the same as one flat loop, on-policy.
# The config field `max_steps_off_policy` says how many steps sampling may be ahead of training.
REINFORCEMENT = Workflow(
    "reinforcement",
    load_problems,
    choose_adapter,
    init_session,
    init_renderer,
    limit_prompts,
    build_env_group,
    batch_problems,
    open_rollout_record,
    make_rl_evaluators,
    plan_steps,
    make_optimizer,
    make_policy_loss,
    choose_sampling,
    initial_policies,
    Loop(
        "positions",
        Station(do_rollout, compute_advantages, assemble_rl_batch, together=True),
        Station(
            When(evaluates, evaluate),
            schedule,
            train_step,
            When(saves, save_checkpoint),
            freeze_policy,
            log_rl_metrics,
            keep_rollouts,
            log_step,
            When(ends_epoch, log_epoch_metrics),
            When(saves, record_checkpoint, delete_old_checkpoints),
        ),
        depth="max_steps_off_policy",
        carry={"policy": "policies"},
    ),
    When(evaluates_at_end, evaluate_at_end),
    When(is_unfinished, save_final_weights),
    register_model,
    delete_old_checkpoints_at_end,
)

# Edits of it, which recipes make of their own workflows too: see `edits`.
PPO = as_ppo(REINFORCEMENT)
STREAMING = as_streaming(REINFORCEMENT)
READY = as_ready(REINFORCEMENT)
KL_REINFORCEMENT = with_kl_penalty(REINFORCEMENT)

# The reward of an answer is how often a preference model prefers it to the others of its group.
PAIRWISE_REINFORCEMENT = (
    REINFORCEMENT.replace("load_problems", load_comparisons)
    .insert_after("init_renderer", init_preference_model)
    .replace("build_env_group", build_preference_groups)
    .replace("make_rl_evaluators", make_win_rate_evaluators)
    .named("pairwise_reinforcement")
)


# ---- learning from a teacher -----------------------------------------------------------------------------------------

# On-policy: prompts in, a student that answers as its teacher would out. The student writes, the teacher scores every
# token. For several datasets, each with a teacher of its own, use `load_prompts`, `choose_teacher` and `choose_sources`
# once for each.
DISTILLATION = Workflow(
    "distillation",
    load_prompts,
    choose_adapter,
    init_session,
    init_renderer,
    choose_teacher,
    choose_prompt_batching,
    choose_sources,
    init_teachers,
    build_prompt_dataset,
    open_rollout_record,
    make_teacher_evaluators,
    plan_steps,
    make_optimizer,
    make_policy_loss,
    choose_sampling,
    initial_policies,
    Loop(
        "positions",
        Station(do_rollout, assemble_distillation_batch, incorporate_teacher_kl, together=True),
        Station(
            When(evaluates, evaluate),
            schedule,
            train_step,
            When(saves, save_checkpoint),
            freeze_policy,
            log_on_policy_metrics,
            keep_rollouts,
            log_step,
            When(ends_epoch, log_epoch_metrics),
            When(saves, record_checkpoint, delete_old_checkpoints),
        ),
        depth="max_steps_off_policy",
        carry={"policy": "policies"},
    ),
    When(evaluates_at_end, evaluate_at_end),
    When(is_unfinished, save_final_weights),
    register_model,
    delete_old_checkpoints_at_end,
)

# Off-policy: the teacher answers the prompts, and the student learns the answers.
OFF_POLICY_DISTILLATION = Workflow(
    "off_policy_distillation",
    load_prompts,
    choose_adapter,
    init_session,
    init_renderer,
    choose_teacher,
    init_teacher,
    make_teacher_completer,
    build_distillation_dataset,
    hold_out_prompts,
    make_teacher_evaluator,
    plan_steps,
    make_optimizer,
    Loop(
        "positions",
        Station(get_distillation_batch, teacher_inference, together=True),
        Station(
            When(evaluates, evaluate),
            schedule,
            distillation_forward_backward,
            optim_step,
            When(saves, save_checkpoint),
        ),
        Station(
            await_forward_backward,
            await_optim_step,
            log_distillation_metrics,
            log_step,
            When(ends_epoch, log_epoch_metrics),
            When(saves, record_checkpoint, delete_old_checkpoints),
        ),
        depth=2,
    ),
    When(evaluates_at_end, evaluate_at_end),
    When(is_unfinished, save_final_weights),
    register_model,
    delete_old_checkpoints_at_end,
)

# Off-policy, on texts that there are: the student learns which tokens its teacher finds likeliest at every position.
TOPK_DISTILLATION = (
    OFF_POLICY_DISTILLATION.replace("load_prompts", load_dataset)
    .remove("make_teacher_completer")
    .replace("build_distillation_dataset", build_supervised_dataset, make_batches)
    .remove("hold_out_prompts")
    .replace("make_teacher_evaluator", make_evaluators)
    .replace("get_distillation_batch", get_batch)
    .replace("teacher_inference", teacher_topk)
    .named("topk_distillation")
)


# ---- reinforcement learning as calls ---------------------------------------------------------------------------------


async def do_sync_training(config: "DataclassInstance", **ports: object) -> dict[str, object]:
    """REINFORCEMENT on-policy: each batch is sampled with the weights that it trains. The config has
    `max_steps_off_policy` 0; ports and what is returned are those of `Workflow.run`."""
    return await REINFORCEMENT.run(_at_depth(config, ahead=False), **ports)


async def do_sync_training_with_stream_minibatch(config: "DataclassInstance", **ports: object) -> dict[str, object]:
    """STREAMING: likewise, with minibatches that are trained on as they come."""
    return await STREAMING.run(_at_depth(config, ahead=False), **ports)


async def do_async_training(config: "DataclassInstance", **ports: object) -> dict[str, object]:
    """REINFORCEMENT with sampling ahead of training by the config's `max_steps_off_policy`, 1 or more."""
    return await REINFORCEMENT.run(_at_depth(config, ahead=True), **ports)


def _at_depth(config: "DataclassInstance", *, ahead: bool) -> "DataclassInstance":
    depth = next((getattr(config, each.name) for each in fields(config) if each.name == "max_steps_off_policy"), 0)
    if (depth > 0) != ahead:
        wanted = "1 or more, or use do_sync_training" if ahead else "0, or use do_async_training"
        raise InvalidRequest(f"max_steps_off_policy must be {wanted}: {depth}")
    return config


# ---- all of them -----------------------------------------------------------------------------------------------------


def list_workflows() -> dict[str, Workflow]:
    """All of them, by name."""
    workflows = (SUPERVISED, PREFERENCE, REWARD_MODEL)
    reinforcements = (REINFORCEMENT, PPO, STREAMING, READY, KL_REINFORCEMENT, PAIRWISE_REINFORCEMENT)
    distillations = (DISTILLATION, OFF_POLICY_DISTILLATION, TOPK_DISTILLATION)
    return {workflow.name: workflow for workflow in (*workflows, *reinforcements, *distillations)}


def get_workflow(name: str) -> Workflow:
    """The one of this name."""
    workflows = list_workflows()
    if name not in workflows:
        raise UnknownName("workflow", name, workflows)
    return workflows[name]

"""Edits of reinforcement learning as functions: each takes REINFORCEMENT, or the workflow of a recipe that is made of
it, and returns it changed. What they have made of REINFORCEMENT itself is in `workflows`.

    WORKFLOW = as_ready(rl_basic.WORKFLOW)
"""

from stovetop.kitchen.nodes import placed
from stovetop.kitchen.stages.preference import init_reference
from stovetop.kitchen.stages.rl import kl_penalty, make_ppo_loss, ppo_update
from stovetop.kitchen.stages.rollout_pool import publish_policy, rollout_pool, take_ready
from stovetop.kitchen.stages.streaming import choose_streaming, get_minibatches, log_episodes, stream_step
from stovetop.kitchen.workflow import Workflow


def as_ppo(workflow: Workflow) -> Workflow:
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347): `ppo_epochs` updates on each batch, with
    limits to the ratios, instead of one with the loss that the config names."""
    return workflow.replace("make_policy_loss", make_ppo_loss).replace("train_step", ppo_update).named("ppo")


def as_streaming(workflow: Workflow) -> Workflow:
    """Each batch in `num_minibatches`, which are played at once and trained on as they come; on-policy."""
    return (
        workflow.remove("do_rollout")
        .remove("compute_advantages")
        .remove("assemble_rl_batch")
        .insert_after("choose_sampling", choose_streaming)
        .replace("train_step", get_minibatches, stream_step, log_episodes)
        .named("streaming")
    )


def as_ready(workflow: Workflow) -> Workflow:
    """Each batch is what is ready first, up to `max_steps_off_policy` steps ahead of training: for episodes of which
    some take much longer than others. What stands behind `do_rollout` comes along. A resumed run trains on every group
    once, with other numbers than an uninterrupted one."""
    workflow = workflow.replace("do_rollout", take_ready)
    assert workflow.loop is not None  # do_rollout was in it
    [taken] = [
        station.nodes
        for station in workflow.loop.stations
        if any(place.stage.name == take_ready.name for place in placed(station.nodes))
    ]
    for place in placed(taken):
        workflow = workflow.remove(place.stage.name)
    return (
        workflow.replace("initial_policies", rollout_pool)
        .insert_before("schedule", *taken)
        .replace("freeze_policy", publish_policy)
        .at_depth(0, carry={})
        .named("ready")
    )


def with_kl_penalty(workflow: Workflow) -> Workflow:
    """A penalty of `kl_penalty_coef` on the distance to the weights that the run began with, or to
    `reference_model_name`."""
    return (
        workflow.insert_after("init_session", init_reference)
        .insert_after("assemble_rl_batch", kl_penalty)
        .named("kl_reinforcement")
    )

"""Numbers that describe a batch: how far sampler and trainer are apart, and how the episodes went. Functions return
metrics; nothing here logs them.

Shape suffixes: `P` problems, `G` members of a group, `D` datums, `N` positions of one datum, `A` action tokens of all.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stovetop.errors import InvalidRequest
from stovetop.rl.advantages import Floats
from stovetop.rl.data_processing import all_same
from stovetop.rl.rollouts import Rollouts
from stovetop.rl.types import Trajectory, TrajectoryGroup
from stovetop.types import Datum, TensorData

GOOD_REWARD = 0.5  # a trajectory of at least this total reward counts as good

_NO_GROUP = "there is no group to describe: groups_P is empty"


def compute_kl_sample_train(data_D: Sequence[Datum], training_logprobs_D: Sequence[TensorData]) -> dict[str, float]:
    """The gap between the sampler's logprobs q and the trainer's p of the same action tokens, and the entropy.

    `optim/kl_sample_train_v1` is the mean of q - p, `_v2` half the mean of (q - p)²: two estimates of KL(q‖p), the
    first without bias, the second with less noise (Schulman 2020, "Approximating KL divergence"). `optim/entropy` is
    the mean of -q. Means are over all action tokens of the batch; without any there is nothing to report: {}.
    """
    sampled_A, trained_A = _action_logprobs(data_D, training_logprobs_D)
    if not sampled_A.size:
        return {}
    gap_A = sampled_A - trained_A
    return {
        "optim/kl_sample_train_v1": float(gap_A.mean()),
        "optim/kl_sample_train_v2": float((gap_A**2).mean() / 2),
        "optim/entropy": float(-sampled_A.mean()),
    }


def compute_clip_fraction(
    data_D: Sequence[Datum],
    training_logprobs_D: Sequence[TensorData],
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> dict[str, float]:
    """`optim/clip_fraction`: the share of action tokens whose ratio exp(p - q) is outside the thresholds of a clipped
    loss, whatever their advantages. The defaults are those of "ppo". Without any action token: {}."""
    sampled_A, trained_A = _action_logprobs(data_D, training_logprobs_D)
    if not sampled_A.size:
        return {}
    ratio_A = np.exp(trained_A - sampled_A)
    return {"optim/clip_fraction": float(((ratio_A < clip_low_threshold) | (ratio_A > clip_high_threshold)).mean())}


class _ActionLogprobs(NamedTuple):
    sampled_A: Floats
    trained_A: Floats


def _action_logprobs(data_D: Sequence[Datum], training_logprobs_D: Sequence[TensorData]) -> _ActionLogprobs:
    sampled, trained = [np.zeros(0)], [np.zeros(0)]
    for datum, training_logprobs in zip(data_D, training_logprobs_D, strict=True):
        is_action_N = datum.loss_fn_inputs["mask"].array.astype(bool)
        sampled.append(datum.loss_fn_inputs["logprobs"].array[is_action_N].astype(np.float64))
        trained.append(training_logprobs.array[is_action_N].astype(np.float64))
    return _ActionLogprobs(np.concatenate(sampled), np.concatenate(trained))


def compute_update_metrics(data_D: Sequence[Datum], training_logprobs_D: Sequence[TensorData]) -> dict[str, float]:
    """`compute_kl_sample_train` and `compute_clip_fraction`."""
    return compute_kl_sample_train(data_D, training_logprobs_D) | compute_clip_fraction(data_D, training_logprobs_D)


def compute_sampling_client_metrics(
    sampling_steps_P: Sequence[int], sampling_times_s_P: Sequence[float]
) -> dict[str, float]:
    """Of the groups of a batch: the step whose weights sampled each, and how long that took."""
    if not sampling_steps_P:
        return {}
    return {
        f"{name}_{word}": float(summary(values))
        for name, values in (("sampling_client/step", sampling_steps_P), ("time/sampling_time", sampling_times_s_P))
        for word, summary in (("max", np.max), ("min", np.min), ("mean", np.mean))
    }


RL_STEP_FIELDS = {
    "reward_mean": "env/all/reward/total",
    "reward_std": "env/all/reward/std",
    "policy_loss": "loss:sum",
    "kl_div": "optim/kl_sample_train_v1",
    "entropy": "optim/entropy",
    "clip_fraction": "optim/clip_fraction",
}
"""What the fields of the event rl.step are called among the metrics of a step."""


def rl_step_fields(metrics: Mapping[str, float]) -> dict[str, float]:
    """The fields of the event rl.step, those that there are."""
    return {field: metrics[name] for field, name in RL_STEP_FIELDS.items() if name in metrics}


def compute_rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """How the episodes of a batch went: `compute_trajectory_metrics`, and what failed."""
    tags_P = [builder.logging_tags() for builder, _ in rollouts.owned_groups_P]
    groups_P = [group for _, group in rollouts.owned_groups_P]
    return rollouts.error_metrics() | compute_trajectory_metrics(groups_P, tags_P)


def compute_trajectory_metrics(
    groups_P: Sequence[TrajectoryGroup], tags_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """How the episodes went: `env/all/...` over all groups and, when tags tell groups apart, `env/<tag>/...` over those
    that carry the tag."""
    by_tag: dict[str, list[TrajectoryGroup]] = {}
    for group, tags in zip(groups_P, tags_P, strict=True):
        for tag in dict.fromkeys(tags):
            by_tag.setdefault(tag, []).append(group)
    if "all" in by_tag:
        raise InvalidRequest("a tag must not be named 'all': env/all/ is where the metrics of all groups stand")
    if all(len(groups) == len(groups_P) for groups in by_tag.values()):
        by_tag = {}
    return {
        f"env/{tag}/{name}": value
        for tag, groups in {"all": groups_P, **by_tag}.items()
        for name, value in _group_metrics(groups).items()
    }


def dict_mean(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each key over the dicts that have it."""
    values: dict[str, list[float]] = {}
    for each in dicts:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}


def _group_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """An environment's own metrics are averaged over the turns, or trajectories, that report them."""
    if not groups_P:
        raise InvalidRequest(_NO_GROUP)
    trajectories_PG = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    turns = [transition for trajectory in trajectories_PG for transition in trajectory.transitions]
    num_action_tokens = sum(len(turn.ac.tokens) for turn in turns)
    num_observation_tokens = sum(turn.ob.length for turn in turns)
    rewards_P_G = [group.get_total_rewards() for group in groups_P]
    rewards_PG = [reward for rewards_G in rewards_P_G for reward in rewards_G]
    return {
        **dict_mean([turn.metrics for turn in turns] + [metrics for group in groups_P for metrics in group.metrics_G]),
        "ac_tokens_per_turn": num_action_tokens / len(turns),
        "ob_tokens_per_turn": num_observation_tokens / len(turns),
        "turns_per_episode": len(turns) / len(trajectories_PG),
        "total_episodes": len(trajectories_PG),
        "total_turns": len(turns),
        "total_ac_tokens": num_action_tokens,
        "total_ob_tokens": num_observation_tokens,
        "reward/total": float(np.mean(rewards_PG)),
        "reward/std": float(np.std(rewards_PG)),
        **_by_group(rewards_P_G),
        **_stop_reasons(trajectories_PG),
    }


def _by_group(rewards_P_G: Sequence[Sequence[float]]) -> dict[str, float]:
    """The three fractions sum to 1: only mixed groups, whose rewards differ, have a gradient."""
    constant_P = [rewards_G[0] for rewards_G in rewards_P_G if all_same(rewards_G)]
    num_good = sum(reward >= GOOD_REWARD for reward in constant_P)
    return {
        "by_group/frac_mixed": 1 - len(constant_P) / len(rewards_P_G),
        "by_group/frac_all_good": num_good / len(rewards_P_G),
        "by_group/frac_all_bad": (len(constant_P) - num_good) / len(rewards_P_G),
    }


def _stop_reasons(trajectories_PG: Sequence[Trajectory]) -> dict[str, float]:
    """Which fraction of the episodes ended for which reason. The fractions sum to 1; a reason that is absent has 0."""
    counts = Counter(trajectory.stop_reason for trajectory in trajectories_PG)
    return {f"stop/{reason}": count / len(trajectories_PG) for reason, count in counts.items()}

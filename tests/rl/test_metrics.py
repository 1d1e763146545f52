import math
import statistics

import pytest

from stovetop.errors import InvalidRequest
from stovetop.losses import PPO
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.metrics import (
    compute_clip_fraction,
    compute_kl_sample_train,
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
    dict_mean,
    rl_step_fields,
)
from stovetop.rl.types import Trajectory, TrajectoryGroup, Transition
from stovetop.types import Datum, ModelInput, TensorData

from .scripted import group, says, trajectory


def datum(logprobs: list[float], mask: list[float]) -> Datum:
    return Datum(ModelInput.from_ints(range(len(mask))), {"logprobs": logprobs, "mask": mask})


def trained(*logprobs: float) -> TensorData:
    return TensorData(logprobs, "float32")


def test_kl_and_entropy_have_the_values_computed_by_hand():
    metrics = compute_kl_sample_train([datum([-1.0, -2.0], [1, 1])], [trained(-1.5, -1.0)])
    assert metrics == {
        "optim/kl_sample_train_v1": -0.25,
        "optim/kl_sample_train_v2": 0.3125,
        "optim/entropy": 1.5,
    }


def test_kl_is_a_mean_over_the_action_tokens_of_all_datums():
    data = [datum([0.0, -1.0], [0, 1]), datum([0.0, 0.0, -2.0], [0, 0, 1])]
    metrics = compute_kl_sample_train(data, [trained(-9.0, -1.5), trained(-9.0, -9.0, -1.0)])
    assert metrics["optim/kl_sample_train_v1"] == -0.25
    assert metrics["optim/entropy"] == 1.5


def test_the_same_weights_in_sampler_and_trainer_have_no_gap():
    [sampled] = trajectory_to_data(trajectory(([1, 2], [3]), ([1, 2, 3, 4], [5, 6])), 1.0)
    metrics = compute_kl_sample_train([sampled], [trained(-7.0, -1.0, -7.0, -1.0, -1.0)])
    assert metrics["optim/kl_sample_train_v1"] == metrics["optim/kl_sample_train_v2"] == 0.0


def test_without_action_tokens_there_is_no_kl_to_report():
    assert compute_kl_sample_train([], []) == {}
    assert compute_kl_sample_train([datum([0.0], [0])], [trained(-1.0)]) == {}


def test_training_logprobs_must_match_the_data():
    with pytest.raises(ValueError, match="zip"):
        compute_kl_sample_train([datum([-1.0], [1])], [])
    with pytest.raises(IndexError):
        compute_kl_sample_train([datum([-1.0, -1.0], [1, 1])], [trained(-1.0)])


def test_trajectory_metrics_have_the_values_computed_by_hand():
    two_turns = Trajectory(
        [
            Transition(ModelInput.from_ints([1, 2]), says(3), 0.0, False, {"tool_calls": 2.0}),
            Transition(ModelInput.from_ints([1, 2, 3, 4]), says(5, 6), 1.0, True, {"tool_calls": 0.0, "solved": 1.0}),
        ],
        ModelInput.empty(),
    )
    long_group = TrajectoryGroup([two_turns, trajectory(([1, 2], [3]))], [0.5, 0.0], [{"rank": 1.0}, {"rank": 0.0}])
    metrics = compute_trajectory_metrics([long_group, group(1.0, 1.0), group(0.25, 0.25)], [[], [], []])
    assert metrics == {
        "env/all/ac_tokens_per_turn": pytest.approx(8 / 7),
        "env/all/ob_tokens_per_turn": pytest.approx(16 / 7),
        "env/all/turns_per_episode": pytest.approx(7 / 6),
        "env/all/total_episodes": 6,
        "env/all/total_turns": 7,
        "env/all/total_ac_tokens": 8,
        "env/all/total_ob_tokens": 16,
        "env/all/reward/total": pytest.approx((1.5 + 0 + 1 + 1 + 0.25 + 0.25) / 6),
        "env/all/reward/std": pytest.approx(statistics.pstdev([1.5, 0, 1, 1, 0.25, 0.25])),
        "env/all/by_group/frac_mixed": pytest.approx(1 / 3),
        "env/all/by_group/frac_all_good": pytest.approx(1 / 3),
        "env/all/by_group/frac_all_bad": pytest.approx(1 / 3),
        "env/all/tool_calls": 1.0,
        "env/all/solved": 1.0,
        "env/all/rank": 0.5,
        "env/all/stop/completed": 1.0,
    }


@pytest.mark.parametrize(("reward", "kind"), [(0.49, "bad"), (0.5, "good"), (0.51, "good")])
def test_half_a_reward_is_a_good_one(reward: float, kind: str):
    metrics = compute_trajectory_metrics([group(reward, reward)], [[]])
    assert metrics["env/all/by_group/frac_mixed"] == 0
    assert {name: metrics[f"env/all/by_group/frac_all_{name}"] for name in ("good", "bad")} == {
        "good": float(kind == "good"),
        "bad": float(kind == "bad"),
    }


def test_a_tag_has_the_metrics_of_its_own_groups():
    metrics = compute_trajectory_metrics(
        [group(1, 1), group(0, 0), group(1, 0)], [["math"], ["code"], ["math", "code"]]
    )
    assert metrics["env/all/reward/total"] == 0.5
    assert metrics["env/math/reward/total"] == 0.75
    assert metrics["env/code/reward/total"] == 0.25
    assert metrics["env/math/by_group/frac_all_good"] == 0.5
    assert metrics["env/code/total_episodes"] == 4


def test_a_tag_that_every_group_has_says_nothing_new():
    metrics = compute_trajectory_metrics([group(1), group(0)], [["math"], ["math"]])
    assert {name.split("/")[1] for name in metrics} == {"all"}


def test_a_tag_that_only_some_groups_have_tells_them_apart_even_if_it_is_the_only_one():
    metrics = compute_trajectory_metrics([group(1), group(0)], [["math"], []])
    assert (metrics["env/math/reward/total"], metrics["env/all/reward/total"]) == (1, 0.5)


def test_several_tags_that_every_group_has_say_nothing_new():
    metrics = compute_trajectory_metrics([group(1), group(0)], [["math", "easy"], ["easy", "math"]])
    assert {name.split("/")[1] for name in metrics} == {"all"}


def test_each_group_needs_its_tags():
    with pytest.raises(ValueError, match="zip"):
        compute_trajectory_metrics([group(1), group(0)], [["math"]])


def test_a_tag_cannot_be_called_all():
    with pytest.raises(InvalidRequest, match="'all'"):
        compute_trajectory_metrics([group(1), group(0)], [["all"], []])


def test_no_groups_have_no_metrics():
    with pytest.raises(InvalidRequest, match="no group"):
        compute_trajectory_metrics([], [])


def test_a_mean_over_dicts_counts_only_those_that_have_the_key():
    assert dict_mean([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}
    assert dict_mean([]) == {}


# ---- of a step ---------------------------------------------------------------------------------------------------


def test_the_clip_fraction_has_the_value_computed_by_hand():
    data = [datum([-1.5, -1.0, -0.5, 0.0], [1, 1, 1, 0])]
    logprobs = [trained(-1.0, -2.0, -0.5, -9.0)]  # ratios 1.65, 0.37, 1, and one that is masked
    assert compute_clip_fraction(data, logprobs) == {"optim/clip_fraction": pytest.approx(2 / 3)}
    assert compute_clip_fraction(data, logprobs, 0.0, 1.5) == {"optim/clip_fraction": pytest.approx(1 / 3)}
    assert compute_clip_fraction(data, logprobs, 0.3, 1.7) == {"optim/clip_fraction": 0.0}
    assert compute_clip_fraction([], []) == {}


@pytest.mark.parametrize(("ratio", "clipped"), [(0.79, 1), (0.81, 0), (1.0, 0), (1.19, 0), (1.21, 1)])
def test_what_is_clipped_by_default_is_what_ppo_clips_by_default(ratio: float, clipped: float):
    fraction = compute_clip_fraction([datum([-1.0], [1])], [trained(math.log(ratio) - 1.0)])
    assert fraction == {"optim/clip_fraction": clipped}
    assert (PPO().clip_low_threshold, PPO().clip_high_threshold) == (0.8, 1.2)


def test_sampling_client_metrics_have_the_values_computed_by_hand():
    assert compute_sampling_client_metrics([3, 4, 4], [1.0, 2.0, 6.0]) == {
        "sampling_client/step_max": 4,
        "sampling_client/step_min": 3,
        "sampling_client/step_mean": pytest.approx(11 / 3),
        "time/sampling_time_max": 6,
        "time/sampling_time_min": 1,
        "time/sampling_time_mean": 3,
    }
    assert compute_sampling_client_metrics([], []) == {}


def test_the_event_of_a_step_says_in_its_words_what_the_metrics_say_in_theirs():
    metrics = compute_trajectory_metrics([group(0, 0), group(1, 1)], [[], []])
    metrics |= {"optim/kl_sample_train_v1": 0.25, "optim/entropy": 1.5, "optim/lr": 1.0}
    assert rl_step_fields(metrics) == {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "kl_div": 0.25,
        "entropy": 1.5,
    }

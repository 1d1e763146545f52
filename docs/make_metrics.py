"""Writes docs/metrics.md: every key of metrics.jsonl, what it means and its unit.

    python docs/make_metrics.py

`tests/recipes/test_conformance.py` compares the table with what whole runs of every recipe have written.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from stovetop.rl.metrics import RL_STEP_FIELDS

PAGE = Path(__file__).parent / "metrics.md"

INTRODUCTION = """\
# Metrics

This page is written by `python docs/make_metrics.py`; a test compares it with runs of every recipe.

`metrics.jsonl` has one row a step, and one more behind the last step, which holds evaluations of the final weights alone. The
row of a step has the loss of the weights that the step began with, and so have its evaluations. Names in `<...>` vary.
Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity". From Python: `stovetop.runs.load(RUN).metrics`,
and `.series("train_mean_nll")` for one of them.
"""


class Key(NamedTuple):
    """One metric, or several alike."""

    key: str
    meaning: str
    unit: str


COUNT, SHARE, NATS, SECONDS = "number", "share, 0 to 1", "nats a token", "s"

KEYS: Mapping[str, list[Key]] = {
    "Where the run stands": [
        Key("step", "the row's number; the first is 0", COUNT),
        Key("epoch", "the pass over the data that the step belongs to", COUNT),
        Key("progress", "steps before this one, of all", SHARE),
        Key("progress/batch", "the step, in reinforcement learning", COUNT),
        Key("progress/done_frac", "steps up to and with this one, of all", SHARE),
    ],
    "What was trained on": [
        Key("num_sequences", "data of the step", COUNT),
        Key("num_prompts", "prompts of the step that a teacher answers", COUNT),
        Key("num_tokens", "tokens of these data, prompts included", COUNT),
        Key("num_loss_tokens", "those of them with a weight other than 0", COUNT),
        Key("num_untrainable", "examples left out since nothing in them is trained on", COUNT),
        Key("num_pairs", "pairs of answers in the loss", COUNT),
    ],
    "The loss": [
        Key("train_mean_nll", "Σ weight · (-logprob) / Σ weight over the step's data", NATS),
        Key("loss:sum", "the policy loss, a sum over tokens; of several updates, their sum (PPO: the mean of its passes)", "-"),
        Key("<loss>_loss", "the preference loss of this name (`dpo_loss`, `ipo_loss` ...), the mean over pairs", "-"),
        Key("accuracy", "pairs whose chosen answer has the higher reward of the loss", SHARE),
        Key("margin", "mean of chosen minus rejected reward", "nats, times β"),
        Key("chosen_reward", "mean reward of the chosen answers: β times what the loss compares", "nats, times β"),
        Key("rejected_reward", "likewise of the rejected answers", "nats, times β"),
        Key("teacher_kl", "mean log-probability of the sampled tokens, the student's minus the teacher's", NATS),
        Key("teacher_kl/dataset_<i>", "the same over the prompts of one data set", NATS),
    ],
    "The update": [
        Key("learning_rate", "of the step's update", "-"),
        Key("optim/lr", "the same, in reinforcement learning", "-"),
        Key("optim/num_updates", "updates made in the step", COUNT),
        Key("grad_norm", "Euclidean norm of the gradient over all trained matrices, before clipping", "-"),
        Key("update_norm", "likewise of the change of the weights", "-"),
        Key("skipped_nonfinite", "1 where a number was not finite, so that nothing was changed; of several updates, the share", "0 or 1"),
    ],
    "Sampler and trainer: q and p are their log-probabilities of the same sampled tokens": [
        Key("optim/kl_sample_train_v1", "mean of q - p: an estimate of KL(q‖p) without bias", NATS),
        Key("optim/kl_sample_train_v2", "half the mean of (q - p)²: one with less noise", "nats²"),
        Key("optim/entropy", "mean of -q", NATS),
        Key("optim/clip_fraction", "tokens whose ratio exp(p - q) is outside the thresholds of the clipped loss (0.8 and 1.2, where another loss is used)", SHARE),
        Key("kl_policy_base", "mean of q minus the log-probability under the reference, where a KL penalty is asked for", NATS),
        Key("kl_pre_post_v1", "mean of q minus the log-probability after the update (`compute_post_kl`)", NATS),
        Key("kl_pre_post_v2", "half the mean of its square", "nats²"),
        Key("lag", "updates between the weights that sampled the step and those that were trained", COUNT),
        Key("lag/<max or mean>", "likewise, where each group has its own", COUNT),
        Key("stale_groups", "groups that were too old, and are played again", COUNT),
        Key("sampling_client/step_<max, min or mean>", "of the step's groups: the update whose weights sampled them", COUNT),
        Key("time/sampling_time_<max, min or mean>", "of the step's groups: how long playing them took", SECONDS),
    ],
    "Episodes: `env/all/` over all groups, and `env/<tag>/` where tags tell groups apart": [
        Key("env/<tag>/reward/total", "mean over episodes of the summed rewards of turns and group", "reward"),
        Key("env/<tag>/reward/std", "their standard deviation over all episodes", "reward"),
        Key("env/<tag>/by_group/frac_mixed", "groups whose rewards differ: only these have a gradient", SHARE),
        Key("env/<tag>/by_group/frac_all_good", "groups with one and the same reward of at least 0.5", SHARE),
        Key("env/<tag>/by_group/frac_all_bad", "groups with one and the same reward below 0.5", SHARE),
        Key("env/<tag>/total_episodes", "episodes", COUNT),
        Key("env/<tag>/total_turns", "turns", COUNT),
        Key("env/<tag>/total_ac_tokens", "tokens that the policy sampled", COUNT),
        Key("env/<tag>/total_ob_tokens", "tokens of all observations: each turn's counts whole", COUNT),
        Key("env/<tag>/turns_per_episode", "mean", "turns"),
        Key("env/<tag>/ac_tokens_per_turn", "mean", "tokens"),
        Key("env/<tag>/ob_tokens_per_turn", "mean", "tokens"),
        Key("env/<tag>/stop/<reason>", "episodes that ended for this reason: completed, max_tokens, max_turns, context_overflow, parse_error ...", SHARE),
        Key("env/<tag>/<metric>", "what the environment reports: `correct`, `format` (shares) and its own; mean over the turns or episodes that report it", "the environment's"),
        Key("filter/groups_removed", "groups left out since their rewards are equal", COUNT),
        Key("filter/all_constant", "1 where no group of the step has a gradient", "0 or 1"),
        Key("rollout_errors/<type>", "failures of this type; a retry that helped is counted too", COUNT),
        Key("rollout_errors/total", "all of them", COUNT),
        Key("rollout_errors/rollouts_dropped", "episodes missing from groups that were kept", COUNT),
        Key("rollout_errors/groups_skipped", "groups left out", COUNT),
    ],
    "Evaluation: on data that are not trained on": [
        Key("test/nll", "Σ weight · (-logprob) / Σ weight over all held-out data", NATS),
        Key("test/accuracy", "of a reward model: comparisons judged as labelled. Of pairs: see accuracy", SHARE),
        Key("test/win_rate", "answers that the judge prefers to the other; a tie counts half", SHARE),
        Key("test/no_answer", "verdicts that cannot be read", SHARE),
        Key("test/stderr", "standard error of the win rate", SHARE),
        Key("test/<metric>", "the metric of this name on held-out data: `test/env/all/correct`, `test/margin`, `test/teacher_kl` ...", "as there"),
        Key("agreement/<metric>", "likewise, of answers compared with a teacher's", "as there"),
        Key("inline/<set>/<metric>", "of a public set (`inline_evals`): `pass@1`, `format`, `cut_off` (answers that reached max_tokens) ...", SHARE),
        Key("inline/<set>/<metric>/stderr", "its standard error", SHARE),
    ],
    "Times": [
        Key("time/step", "since the row before: what a step takes where several overlap", SECONDS),
        Key("time/total", "since this step began", SECONDS),
        Key("time/<verb>:total", "of the calls of this verb that were answered since the row before, each from when it was made, so with its time in the queue", SECONDS),
        Key("time/<verb>:<count, mean or max>", "of several calls of the verb: how many, and how long one took", "number; s"),
        Key("time/engine/<training, sampling or waiting>_share", "of the time of the step, where an engine runs in this process: in passes of training, in steps of sampling, without work", SHARE),
        Key("time/engine/tokens_in_per_s", "tokens that the answered calls read", "tokens a second"),
        Key("time/engine/tokens_out_per_s", "tokens that they drew", "tokens a second"),
        Key("time/engine/training_passes", "passes of training", COUNT),
        Key("time/engine/sampling_steps", "steps of sampling: a token for each request that runs", COUNT),
        Key("time/engine/adapters_moved", "adapters moved into or out of memory", COUNT),
        Key("time/engine/cached_share", "of the prompts' tokens: those that earlier prompts had computed", SHARE),
        Key(
            "time/<stage>",
            "in this stage of the step, one before `log_step`, as `stovetop describe` lists them; waiting included. The flat "
            "loops have no stages",
            SECONDS,
        ),
    ],
}  # fmt: skip


def page() -> str:
    """The page as it should be."""
    lines = [INTRODUCTION]
    for title, keys in KEYS.items():
        lines += [f"## {title}\n", "| key | meaning | unit |", "|---|---|---|"]
        lines += [f"| `{each.key}` | {each.meaning} | {each.unit} |" for each in keys]
        lines.append("")
    fields = ", ".join(f"`{field}` is `{key}`" for field, key in RL_STEP_FIELDS.items())
    lines.append(f"In the event `rl.step` some have shorter names: {fields}.\n")
    return "\n".join(lines)


def key_of(metric: str) -> Key | None:
    """The row of the table that a metric belongs to; the most particular one where several fit."""
    found = [key for pattern, key in _patterns() if pattern.fullmatch(metric)]
    return min(found, key=lambda each: (each.key.count("<"), -len(each.key)), default=None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], Key]]:
    return [(_pattern(each.key), each) for keys in KEYS.values() for each in keys]


def _pattern(key: str) -> re.Pattern[str]:
    """`<max or mean>` is one of these; another name is any, and `<metric>` may have slashes."""
    parts = re.split(r"(<[^>]+>)", key)
    return re.compile("".join(_varying(part) if part.startswith("<") else re.escape(part) for part in parts))


def _varying(part: str) -> str:
    words = re.split(r", | or ", part.strip("<>"))
    return f"({'|'.join(words)})" if len(words) > 1 else ".+" if part == "<metric>" else "[^/]+"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

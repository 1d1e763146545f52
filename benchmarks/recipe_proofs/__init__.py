"""What every preset must have learnt on data that it was not trained on: `PROOFS`, by RECIPE:PRESET.

A proof is a function `async def NAME(folder: Path, seed: int) -> dict[str, float]` in a file of this folder, one file a
family. It runs the preset with this seed in this folder, and measures: `before`, `after` and what its thresholds ask
for. Only files that a measurement needs are imported. `measuring.py` has what several of them share.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

Numbers = Mapping[str, float]
Measure = Callable[[Path, int], Coroutine[Any, Any, dict[str, float]]]


class Threshold(NamedTuple):
    """What is asked of the numbers of each seed."""

    says: str
    holds: Callable[[Numbers], bool]


@dataclass(frozen=True)
class Proof:
    """Of one preset."""

    measure: str  # "file:function"
    quantity: str  # what `before` and `after` are
    thresholds: tuple[Threshold, ...]
    minutes: int = 5  # that the run may take on two idle cores; 15 where its phases train a teacher or a judge

    def function(self) -> Measure:
        """What runs the preset and measures."""
        file, _, name = self.measure.partition(":")
        return vars(import_module(f"{__name__}.{file}"))[name]

    def misses(self, numbers: Numbers) -> list[str]:
        """The thresholds that these numbers do not meet."""
        return [threshold.says for threshold in self.thresholds if not threshold.holds(numbers)]


# ---- thresholds ------------------------------------------------------------------------------------------------------


def of_teacher(numbers: Numbers, when: str) -> dict[str, float]:
    """`before/NAME` or `after/NAME`, by the name of the teacher."""
    return {name.removeprefix(f"{when}/"): value for name, value in numbers.items() if name.startswith(f"{when}/")}


LOSS_FALLS = (Threshold("the loss falls by a third or more", lambda of: of["after"] <= of["before"] * 2 / 3),)
SOLVES_MORE = (
    Threshold("accuracy rises by .2 or more", lambda of: of["after"] >= of["before"] + 0.2),
    Threshold(
        "the best constant answer is below the start plus .05", lambda of: of["best_constant"] < of["before"] + 0.05
    ),
)
PROGRAMS_BETTER = (
    Threshold("the share of right programs rises by .2 or more", lambda of: of["after"] >= of["before"] + 0.2),
    Threshold("it ends above the best constant program plus .05", lambda of: of["after"] > of["best_constant"] + 0.05),
)
PLAYS_BETTER = (
    Threshold("mean reward is doubled", lambda of: of["after"] >= 2 * of["before"]),
    Threshold("mean reward rises by .2 or more", lambda of: of["after"] >= of["before"] + 0.2),
    Threshold("fewer turns", lambda of: of["turns_after"] < of["turns_before"]),
)
PREFERS = (
    Threshold("accuracy begins at about .5", lambda of: abs(of["before"] - 0.5) <= 0.1),
    Threshold("accuracy is at least .8", lambda of: of["after"] >= 0.8),
    Threshold("the reference is unchanged to the bit", lambda of: of["reference_unchanged"] == 1),
)
WINS = (
    Threshold("the reward model is right about at least .8", lambda of: of["reward_accuracy_after"] >= 0.8),
    Threshold("the policy wins against the supervised model at least .6", lambda of: of["after"] >= 0.6),
)
AGREES = (
    Threshold("the student agrees on at least .8", lambda of: of["after"] >= 0.8),
    Threshold("the untrained student on at most .5", lambda of: of["before"] <= 0.5),
)
KL_HALVES = (Threshold("KL to the teacher is at most half", lambda of: of["after"] <= of["before"] / 2),)
EACH_KL_HALVES = (
    Threshold("there are several teachers", lambda of: len(of_teacher(of, "after")) > 1),
    Threshold(
        "KL to each teacher is at most half",
        lambda of: all(after <= of[f"before/{name}"] / 2 for name, after in of_teacher(of, "after").items()),
    ),
)

# ---- all of them -----------------------------------------------------------------------------------------------------

PROOFS: dict[str, Proof] = {
    "sl_basic:small": Proof("sl:sl_basic_small", "loss of held-out chats", LOSS_FALLS),
    "chat_sl:small": Proof("sl:chat_sl_small", "loss of held-out chats", LOSS_FALLS),
    "prompt_distillation:small": Proof(
        "sl:prompt_distillation_small", "agreement with the teacher on held-out texts", AGREES, minutes=15
    ),
    "dpo:small": Proof("pref:dpo_small", "accuracy on held-out pairs, a tie counting half", PREFERS),
    "rlhf:small": Proof("pref:rlhf_small", "win rate against the supervised model, by the rule", WINS, minutes=15),
    "on_policy_distillation:small": Proof("distill:on_policy", "KL to the teacher", KL_HALVES, minutes=15),
    "distill_composite:small": Proof("distill:composite", "KL to both teachers", EACH_KL_HALVES, minutes=15),
    "rl_basic:small": Proof("rl:rl_basic_small", "accuracy", SOLVES_MORE),
    "math_rl:small": Proof("rl:math_rl_small", "accuracy", SOLVES_MORE),
    "code_rl:small": Proof("rl:code_rl_small", "share of right programs", PROGRAMS_BETTER, minutes=15),
    "guess_number:small": Proof("rl:guess_number_small", "mean reward", PLAYS_BETTER, minutes=15),
}

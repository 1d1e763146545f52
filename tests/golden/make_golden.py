"""Writes golden.json: numbers that the package has to give, worked out from the formulas of the papers in plain Python.

    python tests/golden/make_golden.py

Nothing of stovetop, numpy or torch is imported here. Each entry has its inputs beside its values, so that
`tests/test_golden.py` can give the same inputs to the package. A formula is written as its paper has it, not as the
package computes it. In the formulas of losses p is the logprob of a token under the weights that are trained, q the one
that it was sampled with, A its advantage.
"""

import json
import math
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "golden.json"
Numbers = list[float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x: float) -> float:
    return math.log(sigmoid(x))


def mean(values: Numbers) -> float:
    return sum(values) / len(values)


def deviation(values: Numbers, freedom: int = 0) -> float:
    return math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - freedom))


def clipped(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


# ---- losses of tokens ------------------------------------------------------------------------------------------------


def losses() -> dict[str, Any]:
    """Sums over tokens."""
    p = [-1.0, -2.0, -0.5, -0.1]
    q = [-1.5, -1.0, -0.5, -0.4]
    advantages = [1.0, 1.0, -1.0, 0.5]
    weights = [1.0, 0.5, -2.0, 0.0]
    ratios = [math.exp(a - b) for a, b in zip(p, q, strict=True)]
    rows = list(zip(p, q, ratios, advantages, strict=True))
    sequence_ratio = math.exp(mean([a - b for a, b in zip(p, q, strict=True)]))
    return {
        "logprobs": p,
        "sampled": q,
        "advantages": advantages,
        "weights": weights,
        # log-likelihood
        "cross_entropy": -sum(w * a for w, a in zip(weights, p, strict=True)),
        # REINFORCE with an importance ratio
        "importance_sampling": -sum(r * adv for _, _, r, adv in rows),
        # Schulman et al. 2017, equation 7
        "ppo": -sum(min(r * adv, clipped(r, 0.8, 1.2) * adv) for _, _, r, adv in rows),
        # MiniMax 2025 (M1), equation 4: the clipped ratio is a constant
        "cispo": -sum(clipped(r, 0.8, 1.2) * a * adv for a, _, r, adv in rows),
        # Richemond et al. 2024, the loss of section 3 without a constant
        "dro": -sum(a * adv - 0.05 / 2 * (a - b) ** 2 for a, b, _, adv in rows),
        # Zheng et al. 2025, equation 5: one ratio for the sequence
        "gspo": -sum(min(sequence_ratio * adv, clipped(sequence_ratio, 0.8, 1.2) * adv) for *_, adv in rows),
    }


# ---- losses of pairs -------------------------------------------------------------------------------------------------


def preferences() -> dict[str, Any]:
    """Means over pairs. Logprobs are summed over an answer; lengths are in tokens."""
    chosen, rejected = [-10.0, -20.0, -6.0], [-12.0, -15.0, -9.0]
    reference_chosen, reference_rejected = [-11.0, -19.0, -6.5], [-11.0, -18.0, -8.0]
    lengths_chosen, lengths_rejected = [8.0, 10.0, 12.0], [10.0, 12.0, 9.0]
    mismatched = [2.0, -1.0, 0.5]
    beta, epsilon, gamma, lam = 0.1, 0.1, 0.5, 0.1
    gained = [c - r for c, r in zip(chosen, reference_chosen, strict=True)]
    lost = [c - r for c, r in zip(rejected, reference_rejected, strict=True)]
    margins = [good - bad for good, bad in zip(gained, lost, strict=True)]
    mean_chosen = [c / n for c, n in zip(chosen, lengths_chosen, strict=True)]
    mean_rejected = [r / n for r, n in zip(rejected, lengths_rejected, strict=True)]
    mean_margins = [
        good / n - bad / m for good, n, bad, m in zip(gained, lengths_chosen, lost, lengths_rejected, strict=True)
    ]
    kl = max(0.0, mean(mismatched))

    def log_odds(logprob: float) -> float:
        return math.log(math.exp(logprob) / (1 - math.exp(logprob)))

    pairs = list(zip(mean_chosen, mean_rejected, strict=True))
    return {
        "chosen": chosen,
        "rejected": rejected,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
        "lengths_chosen": lengths_chosen,
        "lengths_rejected": lengths_rejected,
        "mismatched": mismatched,
        "beta": beta,
        "label_smoothing": epsilon,
        "gamma": gamma,
        "lam": lam,
        # Rafailov et al. 2023, equation 7, and its implicit rewards
        "dpo": mean([-log_sigmoid(beta * m) for m in margins]),
        "accuracy": mean([float(m > 0) for m in margins]),
        "margin": beta * mean(margins),
        "chosen_reward": beta * mean(gained),
        "rejected_reward": beta * mean(lost),
        # Azar et al. 2023, equation 17, of mean logprobs
        "ipo": mean([(m - 1 / (2 * beta)) ** 2 for m in mean_margins]),
        # Zhao et al. 2023
        "hinge": mean([max(0.0, 1 - beta * m) for m in margins]),
        # Chowdhury et al. 2024, equation 12
        "robust": mean(
            [
                (-(1 - epsilon) * log_sigmoid(beta * m) + epsilon * log_sigmoid(-beta * m)) / (1 - 2 * epsilon)
                for m in margins
            ]
        ),
        # Mitchell 2023
        "cdpo": mean([-(1 - epsilon) * log_sigmoid(beta * m) - epsilon * log_sigmoid(-beta * m) for m in margins]),
        # Meng et al. 2024, equation 6
        "simpo": mean([-log_sigmoid(beta * c - beta * r - gamma) for c, r in pairs]),
        # Hong et al. 2024, equations 6 and 7
        "orpo": mean([-c - lam * log_sigmoid(log_odds(c) - log_odds(r)) for c, r in pairs]),
        # Ethayarajh et al. 2024, equation 8, with both weights 1 and the mean of the two answers
        "kto": mean(
            [
                (1 - sigmoid(beta * (good - kl)) + 1 - sigmoid(beta * (kl - bad))) / 2
                for good, bad in zip(gained, lost, strict=True)
            ]
        ),
    }


# ---- advantages ------------------------------------------------------------------------------------------------------


def advantages() -> dict[str, Any]:
    """Of groups of rewards, and of the turns of an episode."""
    groups = [[1.0, 0.0, 0.0, 1.0], [1.0, 3.0, 0.5], [2.0, 2.0]]
    rewards, values = [1.0, 0.0, 1.0], [0.5, 0.25, 0.75]
    gamma, lam = 0.99, 0.95
    # Schulman et al. 2016, equation 16, as the double sum that it abbreviates
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t in range(len(rewards))
    ]
    gae = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    series = [1.0, 2.0, 3.0]
    return {
        "groups": groups,
        "centred": [[reward - mean(group) for reward in group] for group in groups],
        # Shao et al. 2024; where all are equal, zero
        "standardised": [
            [(reward - mean(group)) / deviation(group) if deviation(group) else 0.0 for reward in group]
            for group in groups
        ],
        "standardised_sample": [
            [(reward - mean(group)) / deviation(group, 1) if deviation(group, 1) else 0.0 for reward in group]
            for group in groups
        ],
        # Ahmadian et al. 2024: the mean of the others
        "leave_one_out": [
            [reward - mean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)] for group in groups
        ],
        "rewards": rewards,
        "values": values,
        "gamma": gamma,
        "lambda": lam,
        "gae": gae,
        "returns": [a + v for a, v in zip(gae, values, strict=True)],
        "series": series,
        "discount": 0.5,
        "discounted_future_sum": [
            sum(0.5**k * value for k, value in enumerate(series[t:])) for t in range(len(series))
        ],
    }


# ---- distances of policies -------------------------------------------------------------------------------------------


def distances() -> dict[str, Any]:
    """Of sampled tokens and of whole distributions."""
    sampled = [[0.0, -1.0, -2.0], [0.0, -3.0]]  # the policy's
    other = [[0.0, -1.5, -1.5], [0.0, -2.0]]  # of a reference, a teacher, or the trainer
    mask = [[0, 1, 1], [0, 1]]
    coefficient = 0.5
    tokens = [
        (q, p) for qs, ps, ms in zip(sampled, other, mask, strict=True) for q, p, m in zip(qs, ps, ms, strict=True) if m
    ]
    gaps = [q - p for q, p in tokens]
    centre = mean(gaps)
    # Schulman 2020, "Approximating KL divergence": with r = p(x)/q(x), x from q
    ratios = [math.exp(p - q) for q, p in tokens]
    teacher, student = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]

    def kl(first: Numbers, second: Numbers) -> float:
        return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))

    def jsd(beta: float) -> float:
        """Agarwal et al. 2023, equation 1."""
        mixture = [beta * t + (1 - beta) * s for t, s in zip(teacher, student, strict=True)]
        return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)

    def penalty(centred: bool) -> list[Numbers]:
        return [
            [m * coefficient * ((centre if centred else 0.0) - (q - p)) for q, p, m in zip(qs, ps, ms, strict=True)]
            for qs, ps, ms in zip(sampled, other, mask, strict=True)
        ]

    return {
        "sampled": sampled,
        "other": other,
        "mask": mask,
        "coefficient": coefficient,
        "penalty_centred": penalty(centred=True),
        "penalty_uncentred": penalty(centred=False),
        "mean_difference": centre,
        "k1": mean([-math.log(r) for r in ratios]),
        "k2": mean([math.log(r) ** 2 / 2 for r in ratios]),
        "k3": mean([r - 1 - math.log(r) for r in ratios]),
        "entropy": mean([-q for q, _ in tokens]),
        "clip_fraction": mean([float(not 0.8 <= r <= 1.2) for r in ratios]),
        "teacher": teacher,
        "student": student,
        "forward_kl": kl(teacher, student),
        "reverse_kl": kl(student, teacher),
        "jsd": {str(beta): jsd(beta) for beta in (0.1, 0.5, 0.9)},
    }


# ---- data ------------------------------------------------------------------------------------------------------------


def data() -> dict[str, Any]:
    """Turns of an episode as data, written down by hand: an observation that begins with all before it goes on with
    the datum, another one begins a datum. Position i sees tokens up to i and has token i + 1 as its target."""
    return {
        "turns": [[[1, 2], [3]], [[1, 2, 3, 4], [5, 6]], [[9], [7]]],
        "advantage": 2.0,
        "data": [
            {
                "input": [1, 2, 3, 4, 5],
                "target": [2, 3, 4, 5, 6],
                "advantages": [0, 2, 0, 2, 2],
                "mask": [0, 1, 0, 1, 1],
            },
            {"input": [9], "target": [7], "advantages": [2], "mask": [1]},
        ],
        "split_list": {"5/2": [[1, 2], [3, 4, 5]], "5/3": [[1], [2, 3], [4, 5]]},
        # 2 tokens of nll 1 and 3 beside 6 of .5: the mean over tokens, not over sequences
        "nll": [[1.0, 3.0], [0.5] * 6],
        "mean_nll": (1.0 + 3.0 + 6 * 0.5) / 8,
        # the language of User:/Assistant:, whose tokens are bytes
        "chat": [["user", "Hi"], ["assistant", "Yes."], ["user", "Bye"]],
        "role_colon_prompt": "User: Hi\n\nAssistant: Yes.\n\nUser: Bye\n\nAssistant:",
    }


# ---- rates -----------------------------------------------------------------------------------------------------------


def rates() -> dict[str, Any]:
    """Learning rates, and how often a judge prefers the policy."""
    total = 100
    hidden = {"meta-llama/Llama-3.1-8B": (4096, 0.781), "Qwen/Qwen3-8B": (4096, 0.0775)}
    return {
        "num_steps": total,
        "linear": {str(step): 1 - step / total for step in (0, 25, 50, 99)},
        "cosine": {str(step): (1 + math.cos(math.pi * step / total)) / 2 for step in (0, 25, 50, 99)},
        # the public fit of the Tinker cookbook
        "lora_rate": {name: 5e-5 * 10 * (2000 / size) ** power for name, (size, power) in hidden.items()},
        # a judge from -1 to 1 that sees both orders
        "scores": [[1.0, -1.0], [-1.0, 1.0], [0.5, -0.5]],
        "win_rate": mean([1.0, 0.0, 0.75]),
        "win_rate_stderr": deviation([1.0, 0.0, 0.75]) / math.sqrt(3),
    }


# ---- the file --------------------------------------------------------------------------------------------------------


def golden() -> dict[str, Any]:
    parts = {
        "losses": losses(),
        "preferences": preferences(),
        "advantages": advantages(),
        "distances": distances(),
        "data": data(),
        "rates": rates(),
    }
    return {name: rounded(part) for name, part in parts.items()}


def rounded(value: Any) -> Any:
    """To twelve digits, which are the same on every machine."""
    match value:
        case float():
            return float(f"{value:.12g}")
        case dict():
            return {name: rounded(each) for name, each in value.items()}
        case list():
            return [rounded(each) for each in value]
        case _:
            return value


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(), indent=1) + "\n")

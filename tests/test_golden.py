"""The package against golden/golden.json, whose numbers come from the formulas of the papers: see make_golden.py."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preference.examples import Judge, comparison
from preference.test_evaluator import Says, evaluate
from stovetop import hyperparams
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.distillation.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL, compute_divergence
from stovetop.engine.training.loss_math import loss_sum
from stovetop.losses import CISPO, DRO, GSPO, PPO, CrossEntropy, ImportanceSampling, Loss
from stovetop.lr_schedules import LRSchedule, compute_schedule_lr_multiplier
from stovetop.preference.loss_values import (
    DPO,
    IPO,
    KTO,
    ORPO,
    PREFERENCE_LOSSES,
    ConservativeDPO,
    Hinge,
    PreferenceLoss,
    RobustDPO,
    SimPO,
)
from stovetop.preference.losses import PairLogprobs, Sides, compute_preference_loss
from stovetop.renderers import get_renderer
from stovetop.rl.advantages import (
    CENTRED,
    Estimator,
    LeaveOneOut,
    Standardised,
    compute_advantages,
    compute_gae,
    discounted_future_sum_vectorized,
)
from stovetop.rl.data_processing import trajectory_to_data
from stovetop.rl.kl import estimate_kl, kl_penalty
from stovetop.rl.metrics import compute_clip_fraction, compute_kl_sample_train
from stovetop.rl.steps import split_list
from stovetop.rl.types import Trajectory, TrajectoryGroup, Transition
from stovetop.supervised.nll import compute_mean_nll
from stovetop.types import Datum, ModelInput, TensorData

FOLDER = Path(__file__).parent / "golden"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())


def double(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_file_is_what_its_program_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_golden", FOLDER / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.golden() == GOLDEN, "run: python tests/golden/make_golden.py"
    source = (FOLDER / "make_golden.py").read_text()
    assert "import numpy" not in source
    assert "import torch" not in source
    assert "from stovetop" not in source


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        ImportanceSampling(),
        PPO(),
        CISPO(clip_low_threshold=0.8, clip_high_threshold=1.2),
        DRO(beta=0.05),
        GSPO(),
    ],
    ids=lambda loss: loss.name,
)
def test_losses_of_tokens_are_those_of_the_papers(loss: Loss) -> None:
    numbers = GOLDEN["losses"]
    given = {
        "logprobs": double(numbers["sampled"]),
        "advantages": double(numbers["advantages"]),
        "weights": double(numbers["weights"]),
        "sequence_ratio_mask": double([1.0] * len(numbers["sampled"])),
    }
    assert loss_sum(loss, double(numbers["logprobs"]), given).item() == pytest.approx(numbers[loss.name], rel=1e-10)


PREFERENCES = GOLDEN["preferences"]
OF_PAIRS: list[PreferenceLoss] = [
    DPO(beta=PREFERENCES["beta"]),
    IPO(beta=PREFERENCES["beta"]),
    Hinge(beta=PREFERENCES["beta"]),
    RobustDPO(beta=PREFERENCES["beta"], label_smoothing=PREFERENCES["label_smoothing"]),
    ConservativeDPO(beta=PREFERENCES["beta"], label_smoothing=PREFERENCES["label_smoothing"]),
    SimPO(beta=PREFERENCES["beta"], gamma=PREFERENCES["gamma"]),
    ORPO(lam=PREFERENCES["lam"]),
    KTO(beta=PREFERENCES["beta"]),
]


@pytest.mark.parametrize("loss", OF_PAIRS, ids=lambda loss: loss.name)
def test_losses_of_pairs_are_those_of_the_papers(loss: PreferenceLoss) -> None:
    pairs = PairLogprobs(
        Sides(double(PREFERENCES["chosen"]), double(PREFERENCES["rejected"])),
        Sides(double(PREFERENCES["reference_chosen"]), double(PREFERENCES["reference_rejected"])),
        Sides(double(PREFERENCES["lengths_chosen"]), double(PREFERENCES["lengths_rejected"])),
        double(PREFERENCES["mismatched"]),
    )
    value, metrics = compute_preference_loss(loss, pairs)
    assert value.item() == pytest.approx(PREFERENCES[loss.name], rel=1e-9)
    if isinstance(loss, DPO):
        for name in ("accuracy", "margin", "chosen_reward", "rejected_reward"):
            assert metrics[name] == pytest.approx(PREFERENCES[name], rel=1e-6)


def test_every_loss_has_golden_numbers() -> None:
    assert {loss.name for loss in OF_PAIRS} == set(PREFERENCE_LOSSES)


def groups(rewards_P_G: list[list[float]]) -> list[TrajectoryGroup]:
    turn = Transition(ModelInput.from_ints([1]), TokensWithLogprobs([2], [-1.0], "stop"), 0.0, True)
    episode = Trajectory([turn], ModelInput.from_ints([1, 2]))
    return [TrajectoryGroup([episode] * len(rewards), rewards, [{}] * len(rewards)) for rewards in rewards_P_G]


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("centred", CENTRED),
        ("standardised", Standardised()),
        ("standardised_sample", Standardised("sample")),
        ("leave_one_out", LeaveOneOut()),
    ],
)
def test_advantages_of_groups_are_those_of_the_papers(name: str, estimator: Estimator) -> None:
    numbers = GOLDEN["advantages"]
    found = compute_advantages(groups(numbers["groups"]), estimator)
    assert found == [pytest.approx(group, abs=1e-10) for group in numbers[name]]


def test_advantages_of_turns_are_those_of_the_papers() -> None:
    numbers = GOLDEN["advantages"]
    found = compute_gae(numbers["rewards"], numbers["values"], numbers["gamma"], numbers["lambda"])
    assert found.advantages == pytest.approx(numbers["gae"], rel=1e-10)
    assert found.returns == pytest.approx(numbers["returns"], rel=1e-10)
    summed = discounted_future_sum_vectorized(numbers["series"], numbers["discount"])
    assert summed.tolist() == pytest.approx(numbers["discounted_future_sum"])


def test_distances_of_policies_are_those_of_the_papers() -> None:
    numbers = GOLDEN["distances"]
    gaps_D = [np.subtract(q, p) for q, p in zip(numbers["sampled"], numbers["other"], strict=True)]
    for name, centred in (("penalty_centred", True), ("penalty_uncentred", False)):
        penalty = kl_penalty(gaps_D, numbers["mask"], numbers["coefficient"], centred=centred)
        assert [each.tolist() for each in penalty.advantages_D] == [
            pytest.approx(row, abs=1e-10) for row in numbers[name]
        ]
        assert penalty.mean_difference == pytest.approx(numbers["mean_difference"])
    sampled_A, other_A = (
        [number for row, mask in zip(numbers[name], numbers["mask"], strict=True) for number in np.compress(mask, row)]
        for name in ("sampled", "other")
    )
    assert estimate_kl(sampled_A, other_A) == pytest.approx((numbers["k1"], numbers["k2"], numbers["k3"]))


def test_metrics_of_sampler_and_trainer_are_those_of_the_formulas() -> None:
    numbers = GOLDEN["distances"]
    data_D = [
        Datum(
            ModelInput.from_ints([1] * len(mask)),
            {"target_tokens": [1] * len(mask), "logprobs": np.float32(row), "mask": np.float32(mask)},
        )
        for row, mask in zip(numbers["sampled"], numbers["mask"], strict=True)
    ]
    trained_D = [TensorData(np.float32(row), "float32") for row in numbers["other"]]
    assert compute_kl_sample_train(data_D, trained_D) == pytest.approx(
        {
            "optim/kl_sample_train_v1": numbers["k1"],
            "optim/kl_sample_train_v2": numbers["k2"],
            "optim/entropy": numbers["entropy"],
        }
    )
    assert compute_clip_fraction(data_D, trained_D) == {"optim/clip_fraction": numbers["clip_fraction"]}


def test_divergences_of_distributions_are_those_of_the_papers() -> None:
    numbers = GOLDEN["distances"]
    teacher, student = (torch.tensor([numbers[name]]).log() for name in ("teacher", "student"))
    wanted: list[tuple[Divergence, float]] = [
        (ForwardKL(), numbers["forward_kl"]),
        (ReverseKL(), numbers["reverse_kl"]),
        *((GeneralizedJSD(beta=float(beta)), value) for beta, value in numbers["jsd"].items()),
    ]
    for divergence, value in wanted:
        assert compute_divergence(divergence, teacher, student).item() == pytest.approx(value, abs=1e-6)


def test_turns_become_the_data_that_were_written_down_by_hand() -> None:
    numbers = GOLDEN["data"]
    turns = [
        Transition(ModelInput.from_ints(ob), TokensWithLogprobs(ac, [-1.0] * len(ac), "stop"), 0.0, False)
        for ob, ac in numbers["turns"]
    ]
    found = trajectory_to_data(Trajectory(turns, ModelInput.from_ints([1])), numbers["advantage"])
    assert [
        {
            "input": datum.model_input.to_ints(),
            "target": datum.loss_fn_inputs["target_tokens"].tolist(),
            "advantages": datum.loss_fn_inputs["advantages"].tolist(),
            "mask": datum.loss_fn_inputs["mask"].tolist(),
        }
        for datum in found
    ] == numbers["data"]
    assert [split_list([1, 2, 3, 4, 5], num) for num in (2, 3)] == list(numbers["split_list"].values())


def test_a_mean_of_the_loss_is_one_over_tokens_and_not_over_sequences() -> None:
    numbers = GOLDEN["data"]
    logprobs_D = [TensorData(np.float32(np.negative(nlls)), "float32") for nlls in numbers["nll"]]
    weights_D = [TensorData(np.ones(len(nlls), np.float32), "float32") for nlls in numbers["nll"]]
    assert compute_mean_nll(logprobs_D, weights_D) == pytest.approx(numbers["mean_nll"])


def test_a_chat_is_rendered_to_the_tokens_that_were_written_down_by_hand() -> None:
    numbers = GOLDEN["data"]
    messages = [{"role": role, "content": content} for role, content in numbers["chat"]]
    renderer = get_renderer("role_colon", ByteTokenizer())
    prompt = renderer.build_generation_prompt(messages)  # pyright: ignore[reportArgumentType]  roles are texts in JSON
    assert ByteTokenizer().decode(prompt.to_ints()).removeprefix("<|bos|>") == numbers["role_colon_prompt"]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_are_those_of_the_formulas(schedule: LRSchedule) -> None:
    numbers = GOLDEN["rates"]
    for step, multiplier in numbers[schedule].items():
        found = compute_schedule_lr_multiplier(schedule, int(step), numbers["num_steps"])
        assert found == pytest.approx(multiplier, rel=1e-9)
    for name, rate in numbers["lora_rate"].items():
        assert hyperparams.get_lr(name) == pytest.approx(rate, rel=1e-10)


def test_a_win_rate_has_the_mean_and_the_error_of_the_formulas() -> None:
    numbers = GOLDEN["rates"]
    scores: dict[tuple[str, str], float] = {}
    for index, (first, swapped) in enumerate(numbers["scores"]):
        scores |= {(f"reference {index}", "policy"): first, ("policy", f"reference {index}"): swapped}
    items = [comparison(a=f"reference {index}") for index in range(len(numbers["scores"]))]
    metrics = evaluate(Says("policy"), items, Judge(scores))
    assert metrics == pytest.approx({"win_rate": numbers["win_rate"], "stderr": numbers["win_rate_stderr"]})

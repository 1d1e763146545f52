import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import tiny
from stovetop.distillation.losses import (
    ForwardKL,
    GeneralizedJSD,
    ReverseKL,
    compute_divergence,
    divergence_loss_fn,
)
from stovetop.distillation.off_policy import TopK, mean_topk_kl, topk_cross_entropy_datum, topk_divergence_datum
from stovetop.engine import ops
from stovetop.errors import InvalidRequest
from stovetop.losses import CrossEntropy
from stovetop.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

TEACHER = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
STUDENT = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
ALL = [ForwardKL(), ReverseKL(), *(GeneralizedJSD(beta=beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0))]


# ---- divergences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "value"),
    [
        (ForwardKL(), 0.085123),
        (ReverseKL(), 0.092033),
        (GeneralizedJSD(beta=0.1), 0.0076947),
        (GeneralizedJSD(beta=0.5), 0.0219012),
        (GeneralizedJSD(beta=0.9), 0.0081848),
        (GeneralizedJSD(beta=0.0), 0.085123),
        (GeneralizedJSD(beta=1.0), 0.092033),
    ],
)
def test_divergences_of_two_distributions_of_three_tokens(divergence, value):
    assert compute_divergence(divergence, TEACHER, STUDENT).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("beta", "value"), [(1e-3, 0.085123), (1 - 1e-3, 0.092033)])
def test_the_mixture_tends_to_the_two_kls_when_scaled(beta, value):
    scaled = compute_divergence(GeneralizedJSD(beta=beta), TEACHER, STUDENT).item() / min(beta, 1 - beta)
    assert scaled == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("divergence", ALL, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_no_divergence_is_negative_for_bfloat16_logprobs(divergence, seed):
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(16, 50, generator=generator)
    student = teacher + 0.01 * torch.randn(16, 50, generator=generator)
    rounded = [torch.log_softmax(logits, dim=-1).bfloat16() for logits in (teacher, student)]
    values_N = compute_divergence(divergence, *rounded)
    assert values_N.dtype == torch.float32
    assert (values_N >= 0).all()


@settings(max_examples=30)
@given(st.sampled_from(ALL), st.integers(0, 1000))
def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient(divergence, seed):
    student = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    values_N = compute_divergence(divergence, student.detach(), student)
    values_N.sum().backward()
    assert values_N.abs().max() < 1e-6
    assert student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("divergence", [ForwardKL(), GeneralizedJSD(beta=0.5)], ids=str)
def test_what_a_teacher_excludes_is_no_nan(divergence):
    teacher = torch.tensor([[0.0, -torch.inf, 0.0]])
    student = torch.zeros(1, 3, requires_grad=True)
    value = compute_divergence(divergence, teacher, student).sum()
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(student.grad).all()


def test_a_mixture_has_a_share_between_0_and_1():
    with pytest.raises(
        InvalidRequest, match=r"GeneralizedJSD.beta must be a finite number at least 0 and at most 1: 1.5"
    ):
        GeneralizedJSD(beta=1.5)


# ---- a teacher's likeliest tokens ----------------------------------------------------------------------------


def topk_of(logprobs_NV: np.ndarray, k: int) -> TopK:
    tokens_NK = np.argsort(-logprobs_NV, axis=1)[:, :k]
    return TopK(tokens_NK, np.take_along_axis(logprobs_NV, tokens_NK, axis=1).astype(np.float32))


def test_soft_targets_are_renormalised_and_weighted():
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, 0.5]})
    teacher = TopK(np.array([[7, 8], [3, 4]]), np.log(np.float32([[0.5, 0.1], [0.6, 0.2]])))
    made = topk_cross_entropy_datum(datum, teacher)
    assert made.model_input == datum.model_input
    assert made.loss_fn_inputs["target_tokens"].tolist() == [[7, 8], [3, 4]]
    assert np.allclose(made.loss_fn_inputs["weights"].array, [[0, 0], [0.375, 0.125]])


def test_a_teacher_with_other_positions_is_refused():
    with pytest.raises(InvalidRequest, match="it has 1 rows for 2 positions"):
        topk_cross_entropy_datum(tiny.datum([1, 2, 3]), TopK(np.array([[1]]), np.float32([[0.0]])))


class OnTinyModel:
    """A student and its own distributions, as a teacher of itself."""

    def __init__(self) -> None:
        self.engine = tiny.engine()
        self.adapter = tiny.trained_adapter(self.engine)
        self.datum = tiny.datum(tiny.tokens(12, seed=0))
        vocabulary = np.tile(np.arange(tiny.VOCAB_SIZE), (self.datum.model_input.length, 1))
        everything = Datum(self.datum.model_input, {"target_tokens": vocabulary, "weights": np.zeros(vocabulary.shape)})
        output = tiny.run(self.engine, ops.Forward(self.adapter, [everything], CrossEntropy()))
        self.logprobs_NV = output.loss_fn_outputs[0]["logprobs"].array

    def gradient_norm(self) -> float:
        gradients, self.adapter.gradients = self.adapter.gradients, None
        return float(sum((gradient**2).sum() for gradient in gradients.values()) ** 0.5)

    def cross_entropy(self, teacher: TopK) -> tuple[float, float]:
        """How far off the student is, and the norm of its gradient."""
        data = [topk_cross_entropy_datum(self.datum, teacher)]
        output = tiny.run(self.engine, ops.ForwardBackward(self.adapter, data, CrossEntropy()))
        return mean_topk_kl(output, data), self.gradient_norm()

    def divergence(self, divergence, teacher: TopK) -> tuple[float, float]:
        data = [topk_divergence_datum(self.datum, teacher)]
        output = tiny.run_custom(self.engine, self.adapter, data, divergence_loss_fn(divergence))
        return output.metrics["divergence"], self.gradient_norm()


@pytest.fixture(scope="module")
def student() -> OnTinyModel:
    return OnTinyModel()


def shifted(teacher: TopK) -> TopK:
    return TopK(np.roll(teacher.tokens_NK, 1, axis=0), np.roll(teacher.logprobs_NK, 1, axis=0))


def test_cross_entropy_with_itself_as_teacher_moves_nothing_and_shifted_by_one_it_does(student: OnTinyModel):
    whole = topk_of(student.logprobs_NV, tiny.VOCAB_SIZE)
    kl, gradient_norm = student.cross_entropy(whole)
    assert kl == pytest.approx(0, abs=1e-6)
    assert gradient_norm < 1e-3
    kl, gradient_norm = student.cross_entropy(shifted(whole))
    assert kl > 0.1
    assert gradient_norm > 1


@pytest.mark.parametrize("divergence", [ForwardKL(), ReverseKL(), GeneralizedJSD(beta=0.5)], ids=str)
def test_a_divergence_of_few_tokens_is_zero_with_itself_and_not_shifted_by_one(student: OnTinyModel, divergence):
    few = topk_of(student.logprobs_NV, 5)
    value, gradient_norm = student.divergence(divergence, few)
    assert value == pytest.approx(0, abs=1e-6)
    assert gradient_norm < 1e-3
    value, gradient_norm = student.divergence(divergence, shifted(few))
    assert value > 0.01
    assert gradient_norm > 0.1


def test_probability_outside_the_top_tokens_counts():
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
    teacher = TopK(np.array([[3, 4]]), np.log(np.float32([[0.6, 0.3]])))
    hiding = torch.log(torch.tensor([[0.06, 0.03]]))  # the same proportions, a tenth of the probability
    loss, metrics = divergence_loss_fn(ForwardKL())([topk_divergence_datum(datum, teacher)], [hiding])
    assert loss.item() == pytest.approx(0.9 * np.log(10) + 0.1 * np.log(0.1 / 0.91), rel=1e-5)
    assert metrics["divergence"] == pytest.approx(loss.item())


def test_a_divergence_is_a_sum_over_positions_by_their_weights():
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]})
    teacher = TopK(np.array([[3, 4]] * 3), np.log(np.float32([[0.6, 0.3]] * 3)))
    student = torch.log(torch.tensor([[0.3, 0.6]] * 3))
    one = 0.3 * np.log(2)
    loss, metrics = divergence_loss_fn(ForwardKL())([topk_divergence_datum(datum, teacher)] * 2, [student] * 2)
    assert loss.item() == pytest.approx(2 * 1.5 * one, rel=1e-5)
    assert metrics["divergence"] == pytest.approx(one, rel=1e-5)


def test_distributions_of_other_positions_are_refused_and_never_repeated():
    with pytest.raises(InvalidRequest, match=r"same positions and tokens; shapes: \(\(2, 3\), \(1, 3\)\)"):
        compute_divergence(ForwardKL(), torch.zeros(2, 3), torch.zeros(1, 3))


def test_a_divergence_of_data_without_weight_is_refused():
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [0.0]})
    teacher = TopK(np.array([[3, 4]]), np.log(np.float32([[0.6, 0.3]])))
    with pytest.raises(InvalidRequest, match="none of these 1 datums has a weight"):
        divergence_loss_fn(ForwardKL())([topk_divergence_datum(datum, teacher)], [torch.tensor([[-1.0, -2.0]])])
    with pytest.raises(InvalidRequest, match="none of these 0 datums has a weight"):
        divergence_loss_fn(ForwardKL())([], [])


def test_an_alternative_of_no_weight_counts_nothing_in_the_mean_kl():
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [[2, 3, 4]], "weights": [[0.4, 0.4, 0.0]]})
    output = ForwardBackwardOutput("logprobs", [{"logprobs": TensorData(np.log([[0.1, 0.3, 0.6]]), "float32")}])
    expected = 0.5 * np.log(0.5 / 0.1) + 0.5 * np.log(0.5 / 0.3)
    assert mean_topk_kl(output, [datum]) == pytest.approx(expected, rel=1e-6)


def test_the_mean_kl_of_data_without_weight_is_refused():
    datum = Datum(ModelInput.from_ints([1]), {"target_tokens": [[2, 3]], "weights": TensorData([[0, 0]], "float32")})
    output = ForwardBackwardOutput("logprobs", [{"logprobs": TensorData([[-1.0, -1.0]], "float32")}])
    with pytest.raises(InvalidRequest, match="none of these 1 datums has a weight"):
        mean_topk_kl(output, [datum])


def test_a_jsd_mixes_both_alike_unless_told_otherwise():
    assert GeneralizedJSD() == GeneralizedJSD(beta=0.5)

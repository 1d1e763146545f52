import asyncio
import logging
import math

import pytest

from stovetop.backends.byte_tokenizer import ByteTokenizer
from stovetop.client import TrainingClient
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.supervised.data import conversation_to_datum
from stovetop.supervised.nll import NLLEvaluator, compute_mean_nll
from stovetop.types import TensorData


def tensors(*rows: list[float]) -> list[TensorData]:
    return [TensorData(row, "float32") for row in rows]


def test_the_mean_is_over_tokens_not_over_datums() -> None:
    """Two tokens with NLL 1 and 3, and six with 0.5: the sum is 7 and the mean 7/8, not the mean of the means 1.25."""
    logprobs = tensors([-1, -3], [-0.5] * 6)
    assert compute_mean_nll(logprobs, tensors([1, 1], [1] * 6)) == pytest.approx(0.875)


def test_weights_weigh() -> None:
    assert compute_mean_nll(tensors([-1, -2, -4]), tensors([0, 1, 3])) == pytest.approx((2 + 12) / 4)


def test_a_token_without_weight_may_have_any_logprob() -> None:
    assert compute_mean_nll(tensors([-math.inf, -2]), tensors([0, 1])) == pytest.approx(2)


def test_without_weights_there_is_no_mean(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert math.isnan(compute_mean_nll(tensors([-1.0]), tensors([0.0])))
    assert "these 1 datums sum to zero" in caplog.text


def test_the_evaluator_reports_the_mean_nll_of_a_forward_pass(client: TrainingClient) -> None:
    renderer = ChatTemplateRenderer(ByteTokenizer())
    chat = [Message(role="user", content="q"), Message(role="assistant", content="a")]
    data = [conversation_to_datum(chat, renderer, max_length=None)]
    output = client.forward(data, "cross_entropy").result()
    expected = output.metrics["loss:sum"]  # the weights of one example sum to 1
    assert asyncio.run(NLLEvaluator(data, name="held_out")(client)) == {"held_out/nll": pytest.approx(expected)}

import asyncio
import json
import logging
import math
from pathlib import Path

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import TrainingClient
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.supervised.data import ChatDatasetBuilderCommonConfig, conversation_to_datum
from stovetop.supervised.nll import ConversationFileEvaluatorBuilder, NLLEvaluator, compute_bpb, compute_mean_nll
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


# ---- bits per byte -----------------------------------------------------------------------------------------------


def bpb(text: str, logprobs: list[float], weights: list[float], end: int | None = None) -> float:
    tokens = [*text.encode(), *([] if end is None else [end])]
    return compute_bpb(tensors(logprobs), tensors(weights), [TensorData(tokens, "int64")], ByteTokenizer())


def test_bits_per_byte_are_what_the_text_costs_over_its_length() -> None:
    assert bpb("ab", [-math.log(2), -math.log(8)], [1, 1]) == pytest.approx(2.0)
    assert bpb("雪", [-math.log(2)] * 3, [1, 1, 1]) == pytest.approx(1.0)  # three bytes, one character


def test_special_tokens_and_those_without_weight_count_neither_as_cost_nor_as_length() -> None:
    end = ByteTokenizer().eos_token_id
    assert bpb("ab", [-math.log(2), -9, -9], [1, 0, 1], end) == pytest.approx(1.0)


def test_how_much_a_token_weighs_does_not_change_its_bits() -> None:
    assert bpb("ab", [-1, -3], [0.25, 0.75]) == bpb("ab", [-1, -3], [1, 1])


def test_without_text_there_are_no_bits_per_byte(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert math.isnan(bpb("a", [-1.0], [0.0]))
    assert "no bits per byte" in caplog.text


def test_the_evaluator_of_a_file_counts_each_token_alike(
    tmp_path: Path, client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["a", "longer"]
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}] for answer in answers]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    renderer = ChatTemplateRenderer(ByteTokenizer())
    monkeypatch.setattr(ChatDatasetBuilderCommonConfig, "renderer", lambda self: renderer)
    config = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer="-", renderer_name="-", batch_size=1)
    evaluator = ConversationFileEvaluatorBuilder(common_config=config, file_path=str(path), name="held_out")()
    metrics = asyncio.run(evaluator(client))
    output = client.forward(evaluator.data_D, "cross_entropy").result()
    num_tokens = sum(len(answer) + 1 for answer in answers)  # with the end of the turn
    assert metrics["held_out/nll"] == pytest.approx(output.metrics["loss:sum"] / num_tokens)
    text_nats = -sum(  # after an answer come the end of the turn and a line break
        sum(outputs["logprobs"].data[-len(answer) - 2 : -2])
        for outputs, answer in zip(output.loss_fn_outputs, answers, strict=True)
    )
    assert metrics["held_out/bpb"] == pytest.approx(text_nats / math.log(2) / 7)

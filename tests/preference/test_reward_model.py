import asyncio

import pytest

from stovetop.backends import recording
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.errors import GradeError, UnknownName
from stovetop.preference.comparison_renderer import ComparisonRendererFromChatRenderer
from stovetop.preference.datasets import comparison_to_datum
from stovetop.preference.reward_model import (
    PreferenceModelBuilderFromChatRenderer,
    PreferenceModelFromChatRenderer,
    Verdict,
    checked_score,
)
from stovetop.types import AdamParams

from .examples import RENDERER, Judge, comparison, labeled

JUDGED = ComparisonRendererFromChatRenderer(RENDERER)


async def judge_trained_to_say(service: InProcessServiceClient, label: str) -> PreferenceModelFromChatRenderer:
    trainer = await service.create_lora_training_client("any/name")
    trainer.forward_backward([comparison_to_datum(labeled(label), JUDGED)], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=20.0))
    saved = await trainer.save_weights_for_sampler(label)
    builder = PreferenceModelBuilderFromChatRenderer(
        renderer_name="chat_template", model_name="any/name", rm_weights_path=saved.path
    )
    return await builder(service)


@pytest.mark.parametrize(("label", "score"), [("A", -1.0), ("B", 1.0), ("Tie", 0.0)])
def test_what_a_judge_says_is_its_score(tmp_path, label, score):
    async def run() -> None:
        judge = await judge_trained_to_say(service, label)
        assert await judge.judge(comparison()) is Verdict(label)
        assert await judge(comparison()) == score
        assert judge.metrics() == {"preference_model/num_asked": 2, "preference_model/num_without_answer": 0}

    with recording.open_service(tmp_path) as service:
        asyncio.run(run())
        sampled = [call.arguments["sampling_params"] for call in service.calls if call.verb == "sample"]
    assert {(params.max_tokens, params.temperature) for params in sampled} == {(1, 0.0)}


def test_what_is_no_answer_is_counted_and_favours_nobody(tmp_path):
    async def run() -> None:
        builder = PreferenceModelBuilderFromChatRenderer(renderer_name="chat_template", model_name="any/name")
        judge = await builder(service)
        assert await judge(comparison()) == 0.0
        assert judge.metrics() == {"preference_model/num_asked": 1, "preference_model/num_without_answer": 1}

    with recording.open_service(tmp_path) as service:
        asyncio.run(run())


def test_a_verdict_is_not_a_truth_value():
    with pytest.raises(TypeError, match=r"ask \.is_answer or \.score"):
        bool(Verdict.NONE)


@pytest.mark.parametrize("score", [1.5, -2.0, float("nan")])
def test_a_score_out_of_range_never_becomes_a_reward(score):
    judge = Judge({("first", "second"): score})
    with pytest.raises(GradeError, match="Judge must answer with a number from -1 to 1"):
        asyncio.run(checked_score(judge, comparison()))


def test_an_unknown_renderer_is_named(tmp_path):
    with recording.open_service(tmp_path) as service, pytest.raises(UnknownName, match="renderer 'nope'"):
        asyncio.run(PreferenceModelBuilderFromChatRenderer(renderer_name="nope", model_name="any/name")(service))

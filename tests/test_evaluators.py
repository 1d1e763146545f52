import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.evaluators import compute_classification_metrics, run_evaluators
from stovetop.preference.evaluator import ComparisonPolicyEvaluator
from stovetop.preference.types import Comparison
from stovetop.renderers.messages import Message
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.evaluation import RLTestSetEvaluator
from stovetop.rl.problem_env import answer_builders
from stovetop.supervised.data import conversation_to_datum
from stovetop.supervised.nll import NLLEvaluator


@dataclass
class OfTraining:
    name: str

    async def __call__(self, client: TrainingClient) -> dict[str, float]:
        return {f"{self.name}/rank": float(client.get_info().lora_rank or 0)}


@dataclass
class OfSampling:
    name: str
    seen: list[SamplingClient] = field(default_factory=list[SamplingClient])

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        self.seen.append(client)
        return {f"{self.name}/model_name_length": float(len(client.get_base_model()))}


def test_a_round_reports_what_all_evaluators_report(client: TrainingClient) -> None:
    metrics = asyncio.run(run_evaluators(client, training=[OfTraining("a")], sampling=[OfSampling("b")]))
    assert metrics == {"a/rank": 4.0, "b/model_name_length": float(len("some/model"))}


def test_the_sampling_evaluators_of_a_round_share_one_client(client: TrainingClient) -> None:
    first, second = OfSampling("a"), OfSampling("b")
    asyncio.run(run_evaluators(client, sampling=[first, second]))
    assert first.seen[0] is second.seen[0]


def test_no_sampling_client_is_made_when_nobody_wants_one(tmp_path: Path) -> None:
    with recording.open_service(tmp_path) as service:
        client = service.create_lora_training_client("some/model").result()
        asyncio.run(run_evaluators(client, training=[OfTraining("a")]))
        assert "save_weights_and_get_sampling_client" not in [call.verb for call in service.calls]


def test_one_round_measures_the_likelihood_the_rewards_and_the_preferences(client: TrainingClient) -> None:
    renderer = ChatTemplateRenderer(ByteTokenizer())
    asked = Message(role="user", content="q")
    said = [[Message(role="assistant", content=text)] for text in "ab"]

    async def the_second_is_better(comparison: Comparison) -> float:
        return 1.0 if comparison.completion_A == said[0] else -1.0

    metrics = asyncio.run(
        run_evaluators(
            client,
            training=[NLLEvaluator([conversation_to_datum([asked, *said[0]], renderer, None)])],
            sampling=[
                RLTestSetEvaluator(answer_builders([{"question": "q", "answer": "a"}], renderer, 2), max_tokens=2),
                ComparisonPolicyEvaluator(
                    [Comparison([asked], said[0], said[1])], the_second_is_better, renderer, max_tokens=2, name="wins"
                ),
            ],
        )
    )
    assert metrics["test/nll"] > 0
    assert metrics["test/env/all/total_episodes"] == 2
    assert (metrics["wins/win_rate"], metrics["wins/stderr"]) == (1.0, 0.0)


def test_two_evaluators_with_one_name_are_refused(client: TrainingClient) -> None:
    with pytest.raises(InvalidRequest, match="give one of them another name: a/rank"):
        asyncio.run(run_evaluators(client, training=[OfTraining("a"), OfTraining("a")]))


def test_classification_metrics_have_the_values_computed_by_hand():
    metrics = compute_classification_metrics(["a", "a", "b"], ["a", "b", "b"])
    assert metrics == pytest.approx({"accuracy": 2 / 3, "precision": 0.75, "recall": 0.75, "f1": 2 / 3})
    assert compute_classification_metrics(["a", "b"], ["a", "c"]) == pytest.approx(
        {"accuracy": 0.5, "precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3}
    )


def test_there_must_be_something_to_classify():
    with pytest.raises(InvalidRequest, match="no label"):
        compute_classification_metrics([], [])
    with pytest.raises(ValueError, match="zip"):
        compute_classification_metrics(["a"], [])

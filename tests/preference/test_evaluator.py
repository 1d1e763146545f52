import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture, resolved
from stovetop.preference.evaluator import ComparisonPolicyEvaluator
from stovetop.preference.types import Comparison
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.runs import open_run
from stovetop.tracking.rollout_rows import find_rollouts, read_rollouts
from stovetop.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

from .examples import RENDERER, Judge, comparison, texts


@dataclass(frozen=True)
class NoConfig:
    pass


class Says:
    """A sampling client that always says the same, and keeps how it was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[SamplingParams] = []

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, *_: object
    ) -> APIFuture[SampleResponse]:
        self.asked.append(sampling_params)
        tokens = ByteTokenizer().encode(self.text + "<|im_end|>", add_special_tokens=False)
        return resolved(SampleResponse([SampledSequence("stop", tokens)]))


def evaluate(client: SamplingClient, comparisons: list[Comparison], judge, **options) -> dict[str, float]:
    return asyncio.run(ComparisonPolicyEvaluator(comparisons, judge, RENDERER, **options)(client))


ITEMS = [comparison(a=f"reference {index}") for index in range(3)]
GOLDEN = Judge(
    {
        **{(f"reference {i}", "policy"): score for i, score in enumerate([1, -1, 0.5])},
        **{("policy", f"reference {i}"): score for i, score in enumerate([-1, 1, -0.5])},
    }
)


def test_win_rate_and_standard_error_of_three_items_judged_both_ways():
    metrics = evaluate(Says("policy"), ITEMS, GOLDEN)
    assert metrics == pytest.approx({"win_rate": 0.5833333333, "stderr": 0.2453266907})


def test_asking_one_way_really_asks_once():
    judge = Judge(GOLDEN.scores)
    metrics = evaluate(Says("policy"), ITEMS, judge, both_ways=False)
    assert sorted(judge.asked) == [(f"reference {index}", "policy") for index in range(3)]
    assert metrics["win_rate"] == pytest.approx((1 + 0 + 0.75) / 3)


def test_asking_both_ways_asks_twice():
    judge = Judge(GOLDEN.scores)
    evaluate(Says("policy"), ITEMS[:1], judge)
    assert sorted(judge.asked) == [("policy", "reference 0"), ("reference 0", "policy")]


@pytest.mark.parametrize(("position_bias", "win_rate"), [(1.0, 0.5), (-1.0, 0.5)])
def test_a_judge_that_only_looks_at_positions_favours_nobody(position_bias, win_rate):
    async def biased(one: Comparison) -> float:
        return position_bias

    assert evaluate(Says("policy"), ITEMS, biased) == {"win_rate": win_rate, "stderr": 0.0}


def test_only_the_answer_of_the_policy_is_preprocessed():
    judge = Judge({("reference 0", "POLICY"): 1.0, ("POLICY", "reference 0"): -1.0})
    evaluate(Says("policy"), ITEMS[:1], judge, content_preprocessor=lambda content: content.upper())
    assert len(judge.asked) == 2


def test_an_answer_has_a_thousand_and_twenty_four_tokens_at_temperature_1_unless_told_otherwise():
    policy = Says("policy")
    evaluate(policy, ITEMS[:1], GOLDEN)
    assert [(params.max_tokens, params.temperature) for params in policy.asked] == [(1024, 1.0)]


def test_comparisons_are_evaluated_at_the_same_time():
    now = most = 0

    async def slow(one: Comparison) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return 0.0

    evaluate(Says("policy"), ITEMS, slow)
    assert most == 6


def test_the_policy_is_whoever_is_evaluated(tmp_path):
    async def shorter(one: Comparison) -> float:
        first, second = map(len, texts(one))
        return float(first > second) - float(first < second)

    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="any/name").result()
        metrics = evaluate(client, [comparison(a="x" * 2000)] * 2, shorter, max_tokens=8, name="shorter", seed=0)
    assert metrics == {"shorter/win_rate": 1.0, "shorter/stderr": 0.0}


def test_an_evaluator_without_comparisons_is_refused():
    with pytest.raises(InvalidRequest, match="at least one comparison"):
        ComparisonPolicyEvaluator([], GOLDEN, RENDERER)


def test_answers_are_kept_as_rollouts_beside_what_they_were_compared_with(tmp_path: Path):
    with open_run(tmp_path, NoConfig(), console=False) as run:
        record = RolloutRecord(run, RENDERER)
        metrics = evaluate(Says("policy"), ITEMS, GOLDEN, name="test", record=record)
    rows = read_rollouts(find_rollouts(tmp_path, split="eval_test").rollouts)
    assert [row.reward for row in rows] == [1, 0, 0.75]
    assert sum(row.reward for row in rows) / 3 == pytest.approx(metrics["test/win_rate"])
    assert [row.turns[0]["logs"] for row in rows] == [{"reference": f"reference {index}"} for index in range(3)]
    assert {row.chat[-1]["content"] for row in rows} == {"policy"}
    assert (tmp_path / "iteration_000000" / "eval_test.html").is_file()

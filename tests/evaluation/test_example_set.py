"""How a set is evaluated, on the fake model: what is drawn, what is kept, and what a killed evaluation goes on with."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import SamplingClient, ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.evaluation.estimates import Estimate
from stovetop.evaluation.example_set import (
    Evaluation,
    ExampleSetEvaluator,
    Ratio,
    Reported,
    evaluate,
    mean_scores,
)
from stovetop.evaluation.problems import ProblemSet
from stovetop.evaluation.rows import ExampleRow, RunRows, Sample, open_rows, read_rows
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import answer_builders
from stovetop.runs import Run, open_run
from stovetop.tracking.evaluated import evaluating

RENDERER = ChatTemplateRenderer(ByteTokenizer())
LETTERS = "abcdef"


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="some/model").result()


@dataclass
class Scripted:
    """An ExampleSet whose scores are known: example i is correct in the first `right[i]` of three samples."""

    right: Sequence[int]
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    fails_after: int | None = None
    name: str = "scripted"

    @property
    def ids(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.right))]

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        if self.fails_after is not None and len(self.asked) >= self.fails_after:
            raise RuntimeError("killed")
        self.asked.append((id, seed))
        scores = [{"correct": float(number < self.right[int(id)]), "n": 2.0, "d": 4.0} for number in range(3)]
        return [Sample(each, f"answer {number}") for number, each in enumerate(scores)]

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        return Reported(means=("n",), ratios={"n/d": Ratio("n", "d")}, correct="correct", ks=(1, 2)).metrics(rows)


def run(example_set: Scripted | ProblemSet, client: SamplingClient, **options: object) -> Evaluation:
    return asyncio.run(evaluate(example_set, client, **options))  # pyright: ignore[reportArgumentType]  as given


def test_the_metrics_of_a_policy_whose_score_is_known(sampler: SamplingClient):
    found = run(Scripted(right=[3, 1, 0, 0]), sampler)
    # of three samples: pass@1 is 1, 1/3, 0, 0; pass@2 is 1, 2/3, 0, 0
    assert found.metrics["pass@1"].value == pytest.approx(1 / 3)
    assert found.metrics["pass@2"].value == pytest.approx(5 / 12)
    assert found.metrics["pass@1"].stderr == pytest.approx(((4 / 9 + 0 + 1 / 9 + 1 / 9) / 12) ** 0.5)
    assert found.metrics["n"] == (2.0, 0.0)
    assert found.metrics["n/d"] == (0.5, 0.0)
    assert (found.num_examples, found.num_samples) == (4, 12)


def test_seeds_are_further_samples_of_the_same_examples(sampler: SamplingClient):
    example_set = Scripted(right=[3, 0])
    found = run(example_set, sampler, seeds=(5, 6))
    assert (found.num_examples, found.num_samples) == (2, 12)
    assert found.metrics["pass@1"] == pytest.approx((0.5, 0.5))  # of two examples, not of four
    assert sorted(found.metrics_by_seed) == [5, 6]
    assert sorted(example_set.asked) == [("0", 5), ("0", 6), ("1", 5), ("1", 6)]


def test_an_evaluation_that_ended_early_goes_on_with_the_examples_that_it_has_no_row_of(
    sampler: SamplingClient, tmp_path: Path
):
    settings = {"weights": "some/model"}
    first, whole = Scripted([3, 1, 0, 2], fails_after=2), Scripted([3, 1, 0, 2])
    with pytest.raises(RuntimeError, match="killed"):
        run(first, sampler, file=open_rows(tmp_path, "scripted", settings))
    assert len(read_rows(tmp_path, "scripted")) == 2
    second = Scripted([3, 1, 0, 2])
    found = run(second, sampler, file=open_rows(tmp_path, "scripted", settings))
    assert sorted(first.asked + second.asked) == [("0", 0), ("1", 0), ("2", 0), ("3", 0)]
    assert found == run(whole, sampler)


def test_a_row_that_a_kill_has_cut_off_is_measured_again(sampler: SamplingClient, tmp_path: Path):
    run(Scripted([3, 1]), sampler, file=open_rows(tmp_path, "scripted", {}))
    path = tmp_path / "scripted.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = Scripted([3, 1])
    found = run(again, sampler, file=open_rows(tmp_path, "scripted", {}))
    assert again.asked == [("1", 0)]
    assert found == run(Scripted([3, 1]), sampler)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["0", "1"]


def test_rows_that_were_measured_otherwise_are_not_added_to(tmp_path: Path):
    open_rows(tmp_path, "scripted", {"weights": "a", "temperature": 0.0})
    open_rows(tmp_path, "scripted", {"weights": "a", "temperature": 0.0})
    with pytest.raises(
        InvalidRequest, match=r"temperature was 0\.0 and is 1\.0. Pass the same, or another folder as --out"
    ):
        open_rows(tmp_path, "scripted", {"weights": "a", "temperature": 1.0})


def test_an_evaluation_without_examples_or_with_one_seed_twice_is_refused(sampler: SamplingClient):
    with pytest.raises(InvalidRequest, match="needs an example and a seed"):
        run(Scripted([]), sampler)
    with pytest.raises(InvalidRequest, match=r"seeds: \[1, 1\]"):
        run(Scripted([1]), sampler, seeds=(1, 1))


def letters(names: str = LETTERS, num_samples: int = 3, **options: object) -> ProblemSet:
    rows = [{"question": f"Spell {letter}", "answer": letter} for letter in names]
    groups = answer_builders(rows, RENDERER, num_samples)
    make = partial(ProblemSet, "letters", dict(zip(names, groups, strict=True)), RENDERER.tokenizer)
    return make(**{"max_tokens": 3, "temperature": 1.0, "reported": Reported(correct="correct")} | options)  # pyright: ignore[reportArgumentType]  as given


def test_what_is_drawn_for_an_example_depends_on_the_seed_and_not_on_what_else_is_evaluated(sampler: SamplingClient):
    whole, part = run(letters(), sampler), run(letters("fc"), sampler)
    answers = {row.id: row.samples for row in whole.rows}
    assert {row.id: row.samples for row in part.rows} == {id: answers[id] for id in "fc"}
    assert run(letters(), sampler, seeds=(1,)).rows[0].samples != whole.rows[0].samples
    assert len({sample.answer for sample in answers["a"]}) > 1


def test_the_samples_of_an_example_are_one_request(tmp_path: Path):
    with recording.open_service(tmp_path) as service:
        client = service.create_sampling_client(base_model="some/model").result()
        found = run(letters("ab", num_samples=4), client)
        asked = [call.arguments["num_samples"] for call in service.calls if call.verb == "sample"]
    assert asked == [4, 4]
    [sample, *_] = found.rows[0].samples
    assert {"correct", "format", "reward", "cut_off"} <= sample.scores.keys()
    assert sample.scores["cut_off"] == (sample.stop_reason == "length")


def test_inside_a_recipe_a_set_reports_each_metric_with_its_standard_error(sampler: SamplingClient):
    metrics = asyncio.run(ExampleSetEvaluator(Scripted([3, 0]), name="inline")(sampler))
    assert metrics["inline/scripted/pass@1"] == 0.5
    assert metrics["inline/scripted/pass@1/stderr"] == 0.5
    one = asyncio.run(ExampleSetEvaluator(Scripted([3]))(sampler))
    assert "test/scripted/pass@1/stderr" not in one


@dataclass(frozen=True)
class Config:
    """Of a run."""


def inline(run: Run, example_set: Scripted, **settings: str) -> ExampleSetEvaluator:
    return ExampleSetEvaluator(example_set, name="inline", keeps=RunRows(run, settings))


async def at_step(step: int, evaluator: ExampleSetEvaluator, client: SamplingClient) -> dict[str, float]:
    with evaluating(step):
        return await evaluator(client)


def test_inside_a_recipe_an_interrupted_evaluation_goes_on_by_example_with_the_weights_of_its_step(
    sampler: SamplingClient, tmp_path: Path
):
    killed, again, later = Scripted([3, 1, 0], fails_after=2), Scripted([3, 1, 0]), Scripted([3, 1, 0])
    with open_run(tmp_path / "run", Config(), console=False) as run, pytest.raises(RuntimeError, match="killed"):
        asyncio.run(at_step(4, inline(run, killed), sampler))
    with open_run(tmp_path / "run", Config(), console=False) as run:
        run.start_at(4)
        metrics = asyncio.run(at_step(4, inline(run, again), sampler))
        assert metrics == asyncio.run(ExampleSetEvaluator(Scripted([3, 1, 0]), name="inline")(sampler))
        asyncio.run(at_step(6, inline(run, later), sampler))
    assert sorted(killed.asked + again.asked) == sorted(later.asked) == [("0", 0), ("1", 0), ("2", 0)]
    kept = tmp_path / "run" / "evaluations"
    assert [row.samples[0].answer for row in read_rows(kept / "000006_inline", "scripted")] == ["answer 0"] * 3
    with open_run(tmp_path / "run", Config(), console=False) as run:
        run.start_at(4)  # steps 4 and 5 run again: what was measured after them is not what will be
    assert [folder.name for folder in kept.iterdir()] == ["000004_inline"]


def test_inside_a_recipe_rows_that_were_measured_otherwise_are_replaced(sampler: SamplingClient, tmp_path: Path):
    first, other = Scripted([3, 1]), Scripted([3, 1])
    with open_run(tmp_path / "run", Config(), console=False) as run:
        asyncio.run(inline(run, first, renderer="a")(sampler))
        asyncio.run(inline(run, other, renderer="b")(sampler))
    assert len(other.asked) == 2
    assert len(read_rows(tmp_path / "run/evaluations/000000_inline", "scripted")) == 2


def test_two_evaluations_are_compared_by_the_mean_score_of_each_example(sampler: SamplingClient):
    found = run(Scripted([3, 1]), sampler)
    assert mean_scores(found.rows, "correct") == pytest.approx({"0": 1.0, "1": 1 / 3})
    assert mean_scores(found.rows, "win_rate") == {}

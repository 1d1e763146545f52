"""Each stage of preference models alone, with nothing but what it reads, on the recording backend."""

import asyncio
from pathlib import Path

import pytest

from kitchen.stages.configs import ANSWERS, write_comparisons
from stovetop.backends.in_process import InProcessServiceClient
from stovetop.client import TrainingClient
from stovetop.errors import NothingToTrain
from stovetop.kitchen.stages import reward_model
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.preference import load_comparisons
from stovetop.kitchen.stages.session import choose_adapter, init_renderer
from stovetop.preference.comparison_renderer import ComparisonRenderer
from stovetop.preference.datasets import LabeledComparisons
from stovetop.preference.reward_model import PreferenceModel
from stovetop.preference.types import LabeledComparison
from stovetop.runs import Run, load

ADAPTER = choose_adapter("any/model", 4)


@pytest.fixture
def comparisons(tmp_path: Path, run: Run) -> LabeledComparisons:
    return load_comparisons(write_comparisons(tmp_path / "rows.jsonl"), run, test_size=2)


@pytest.fixture
def comparison_renderer(client: TrainingClient) -> ComparisonRenderer:
    return reward_model.init_comparison_renderer(init_renderer(client))


@pytest.fixture
def judge(service: InProcessServiceClient) -> PreferenceModel:
    return asyncio.run(reward_model.init_preference_model(service, ADAPTER, None))


def emitted(run: Run, name: str) -> list[dict[str, float]]:
    return [dict(event.values) for event in load(run.path).events if event.name == name]


def test_build_comparison_dataset_has_each_comparison_in_both_orders_with_one_token_to_train(
    comparisons: LabeledComparisons,
    comparison_renderer: ComparisonRenderer,
    service: InProcessServiceClient,
    client: TrainingClient,
    run: Run,
) -> None:
    built = reward_model.build_comparison_dataset(comparisons, comparison_renderer, service, client, run)
    assert [len(data) for data in built.examples.data_of_chat] == [2] * (len(ANSWERS) - 2)
    assert len(built.test_D) == 4
    assert built.test_comparisons == list(comparisons.test)
    label_of_token = comparison_renderer.label_of_token
    for data in built.examples.data_of_chat:
        targets = [datum.loss_fn_inputs["target_tokens"].array[-1] for datum in data]
        assert [label_of_token[target] for target in targets] == ["A", "B"]
        assert all(datum.loss_fn_inputs["weights"].array.sum() == 1 for datum in data)
    counts = {"num_comparisons": 7, "num_test": 2, "num_untrainable": 0, "num_test_untrainable": 0}
    assert emitted(run, "reward_model.dataset_built") == [counts]


def test_build_comparison_dataset_leaves_out_what_is_too_long_and_counts_it(
    comparisons: LabeledComparisons,
    comparison_renderer: ComparisonRenderer,
    service: InProcessServiceClient,
    client: TrainingClient,
    run: Run,
) -> None:
    lengths = sorted(comparison_renderer.to_model_input_weights(one).model_input.length for one in comparisons.train)
    built = reward_model.build_comparison_dataset(
        comparisons, comparison_renderer, service, client, run, max_length=lengths[4]
    )
    assert len(built.examples.data_of_chat) == sum(length <= lengths[4] for length in lengths) < 7
    assert len(built.examples.data_of_chat) + len(built.examples.untrainable) == 7
    with pytest.raises(NothingToTrain, match="more than half"):
        reward_model.build_comparison_dataset(comparisons, comparison_renderer, service, client, run, max_length=5)


def test_make_judge_evaluators_measures_the_judge_and_its_loss_on_what_is_held_out(
    comparisons: LabeledComparisons,
    comparison_renderer: ComparisonRenderer,
    service: InProcessServiceClient,
    client: TrainingClient,
    run: Run,
) -> None:
    built = reward_model.build_comparison_dataset(comparisons, comparison_renderer, service, client, run)
    evaluators = reward_model.make_judge_evaluators(built.test_D, built.test_comparisons, comparison_renderer)
    [loss], [accuracy] = evaluators
    assert asyncio.run(loss(client)).keys() == {"test/nll"}
    sampling = client.save_weights_and_get_sampling_client().result()
    assert asyncio.run(accuracy(sampling)) == {"test/accuracy": 0.0, "test/no_answer": 1.0}
    assert reward_model.make_judge_evaluators([], [], comparison_renderer) == Evaluators()


def test_init_preference_model_judges_with_weights_of_its_own_or_with_a_model_as_it_is(
    service: InProcessServiceClient, client: TrainingClient
) -> None:
    saved = client.save_weights_for_sampler("judge").result().path
    asyncio.run(reward_model.init_preference_model(service, ADAPTER, saved))
    asyncio.run(reward_model.init_preference_model(service, ADAPTER, None))
    asyncio.run(reward_model.init_preference_model(service, ADAPTER, None, "another/model", "chat_template"))
    opened = [call.arguments for call in service.calls if call.verb == "create_sampling_client"]
    assert opened == [
        {"model_path": saved, "base_model": None},
        {"model_path": None, "base_model": "any/model"},
        {"model_path": None, "base_model": "another/model"},
    ]


def test_build_preference_groups_has_a_group_for_every_prompt_that_fits(
    comparisons: LabeledComparisons, client: TrainingClient, judge: PreferenceModel, run: Run
) -> None:
    renderer = init_renderer(client, "role_colon")
    builders = reward_model.build_preference_groups(comparisons, renderer, judge, group_size=3, run=run)
    assert len(builders) == 7
    assert len(asyncio.run(builders[0].make_envs())) == 3
    long = LabeledComparison(comparisons.train[0].comparison, "A")
    long.comparison.prompt_conversation[0]["content"] = "q" * 99
    kept = reward_model.build_preference_groups(comparisons, renderer, judge, 3, run, max_prompt_tokens=60)
    assert len(kept) == 6
    counts = {"num_train": 7, "num_left_out": 0, "group_size": 3}
    assert emitted(run, "rl.env_group_built") == [counts, {**counts, "num_train": 6, "num_left_out": 1}]


def test_make_win_rate_evaluators_measures_against_the_better_answers(
    comparisons: LabeledComparisons, client: TrainingClient, judge: PreferenceModel
) -> None:
    renderer = init_renderer(client, "role_colon")
    swapped = comparisons._replace(test=[one.swap() for one in comparisons.test])
    found = [
        reward_model.make_win_rate_evaluators(each, judge, renderer, max_tokens=3) for each in (comparisons, swapped)
    ]
    assert found[0] == found[1]
    [evaluator] = found[0].sampling
    sampling = client.save_weights_and_get_sampling_client().result()
    assert asyncio.run(evaluator(sampling)) == {"test/win_rate": 0.5, "test/stderr": 0.0}  # the judge gives no answer
    assert not any(reward_model.make_win_rate_evaluators(comparisons._replace(test=[]), judge, renderer, 3))

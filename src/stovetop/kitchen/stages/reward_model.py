"""Stages of preference models: a language model learns to say which of two answers is better, and then it judges the
answers of a policy in training. How it reads a comparison is `preference.comparison_renderer`'s business.

Shape suffix: `D` datums.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from stovetop.client import SamplingClient, ServiceClient, TrainingClient
from stovetop.errors import NothingToTrain
from stovetop.kitchen.stage import stage
from stovetop.kitchen.stages.evaluation import Evaluators
from stovetop.kitchen.stages.session import Adapter
from stovetop.model_families import context_length, recommended_renderer_name
from stovetop.preference.comparison_renderer import ComparisonRenderer, ComparisonRendererFromChatRenderer
from stovetop.preference.datasets import LabeledComparisons, comparison_to_datum
from stovetop.preference.envs import PairwisePreferenceGroupBuilder
from stovetop.preference.evaluator import ComparisonPolicyEvaluator, PreferenceModelEvaluator
from stovetop.preference.reference import create_reference_client
from stovetop.preference.reward_model import PreferenceModel, PreferenceModelFromChatRenderer
from stovetop.preference.types import LabeledComparison
from stovetop.renderers import get_renderer
from stovetop.renderers.base import Renderer
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.types import EnvGroupBuilder
from stovetop.runs import Run
from stovetop.supervised.data import ChatData
from stovetop.supervised.nll import NLLEvaluator
from stovetop.supervised.untrainable import make_rows
from stovetop.types import Datum

# ---- to train one ----------------------------------------------------------------------------------------------------


@stage(writes="comparison_renderer")
def init_comparison_renderer(renderer: Renderer) -> ComparisonRenderer:
    """A chat that shows both answers and asks for one token. Replace it to put comparisons another way."""
    return ComparisonRendererFromChatRenderer(renderer)


class JudgedData(NamedTuple):
    """What comparisons came to, as data of chats."""

    examples: ChatData  # each comparison in both orders
    test_D: list[Datum]
    test_comparisons: list[LabeledComparison]  # that test_D are made of


@stage(writes=("examples", "test_D", "test_comparisons"))
def build_comparison_dataset(
    comparisons: LabeledComparisons,
    comparison_renderer: ComparisonRenderer,
    service: ServiceClient,
    training_client: TrainingClient,
    run: Run,
    max_length: int | None = None,
) -> JudgedData:
    """Each comparison in both orders, so that no place is learnt to be the better; of each, its label is the one token
    to train on. A comparison that is longer than max_length, or than the model's context, has lost its label: it is
    left out and counted."""
    limits = [limit for limit in (max_length, context_length(service, training_client)) if limit is not None]
    make = partial(_both_orders, comparison_renderer=comparison_renderer, max_length=min(limits, default=None))
    train, test = make_rows(comparisons.train, make), make_rows(comparisons.test, make)
    left_out = {"num_untrainable": len(train.untrainable), "num_test_untrainable": len(test.untrainable)}
    run.emit("reward_model.dataset_built", num_comparisons=len(train.made), num_test=len(test.made), **left_out)
    return JudgedData(
        ChatData(list(train.made.values()), train.untrainable, "comparisons"),
        [datum for data in test.made.values() for datum in data],
        [comparisons.test[index] for index in test.made],
    )


def _both_orders(
    labeled: LabeledComparison, comparison_renderer: ComparisonRenderer, max_length: int | None
) -> list[Datum]:
    return [comparison_to_datum(one, comparison_renderer, max_length) for one in (labeled, labeled.swap())]


@stage(writes="evaluators")
def make_judge_evaluators(
    test_D: list[Datum], test_comparisons: list[LabeledComparison], comparison_renderer: ComparisonRenderer
) -> Evaluators:
    """How often the model is right about the comparisons that are held out, if there are any, and its loss there."""
    if not test_comparisons:
        return Evaluators()
    return Evaluators((NLLEvaluator(test_D),), (PreferenceModelEvaluator(test_comparisons, comparison_renderer),))


# ---- to learn from one -----------------------------------------------------------------------------------------------


@stage(writes="preference_model")
async def init_preference_model(
    service: ServiceClient,
    adapter: Adapter,
    rm_weights_path: str | None,
    rm_model_name: str | None = None,
    rm_renderer_name: str | None = None,
) -> PreferenceModel:
    """The judge: weights that REWARD_MODEL has trained, of the policy's base model unless another is named; without
    weights, a model as it is. It reads comparisons as it was trained to."""
    client = await create_reference_client(service, rm_model_name or adapter.model_name, rm_weights_path)
    renderer = _renderer_of(client, rm_renderer_name)
    return PreferenceModelFromChatRenderer(ComparisonRendererFromChatRenderer(renderer), client)


def _renderer_of(client: SamplingClient, name: str | None) -> Renderer:
    tokenizer = client.get_tokenizer()
    return get_renderer(name or recommended_renderer_name(tokenizer), tokenizer)


@stage(writes="builders")
def build_preference_groups(
    comparisons: LabeledComparisons,
    renderer: Renderer,
    preference_model: PreferenceModel,
    group_size: int,
    run: Run,
    max_prompt_tokens: int | None = None,
) -> Sequence[EnvGroupBuilder]:
    """The prompts of the comparisons, `group_size` answers to each, which the judge compares with each other. A prompt
    that leaves no room for an answer is left out and counted."""

    def make(labeled: LabeledComparison) -> EnvGroupBuilder:
        prompt = labeled.comparison.prompt_conversation
        num_tokens = renderer.build_generation_prompt(prompt).length
        if max_prompt_tokens is not None and num_tokens > max_prompt_tokens:
            raise NothingToTrain(
                f"its prompt has {num_tokens} tokens, and the model's context leaves {max_prompt_tokens} beside "
                "max_tokens"
            )
        return PairwisePreferenceGroupBuilder(prompt, renderer, preference_model, group_size)

    made = make_rows(comparisons.train, make)
    run.emit("rl.env_group_built", num_train=len(made.made), num_left_out=len(made.untrainable), group_size=group_size)
    return list(made.made.values())


@stage(writes="evaluators")
def make_win_rate_evaluators(
    comparisons: LabeledComparisons,
    preference_model: PreferenceModel,
    renderer: Renderer,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    rollout_record: RolloutRecord | None = None,
) -> Evaluators:
    """How often the judge prefers the policy's answers to the better ones of the comparisons that are held out."""
    better_as_a = [one.swap() if one.label == "B" else one for one in comparisons.test]
    if not better_as_a:
        return Evaluators()
    held_out = [one.comparison for one in better_as_a]
    evaluator = ComparisonPolicyEvaluator(
        held_out,
        preference_model,
        renderer,
        max_tokens,
        temperature,
        name="test",
        seed=seed,
        record=rollout_record,
    )
    return Evaluators(sampling=(evaluator,))

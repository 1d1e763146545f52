"""How often a policy's answers are preferred to reference answers, how often a judge is right, and what a loss on pairs
says of held-out ones. When an evaluator runs, and what else it may be, is in evaluators.

Shape suffix: `D` datums, a chosen answer at every even index and the rejected one behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stovetop.client import SamplingClient, TrainingClient
from stovetop.completers import SampledMessage, SamplingMessageCompleter, TokensWithLogprobs
from stovetop.concurrency import map_together, together
from stovetop.errors import InvalidRequest
from stovetop.preference.comparison_renderer import ComparisonRenderer
from stovetop.preference.loss_values import PreferenceLoss
from stovetop.preference.reward_model import PreferenceModel, PreferenceModelFromChatRenderer, checked_score
from stovetop.preference.types import Comparison, LabeledComparison
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Content, Message, get_text_content
from stovetop.rl.rollout_record import RolloutRecord
from stovetop.rl.types import Trajectory, TrajectoryGroup, Transition
from stovetop.supervised.logprobs import Logprobs
from stovetop.types import Datum, ModelInput


@dataclass(frozen=True, slots=True)
class PairsEvaluator:
    """A TrainingClientEvaluator: the loss of held-out pairs and its metrics, as `<name>/dpo_loss`, `<name>/accuracy`
    and so on. `reference_logprobs_D` are those of the same data, None for a loss that needs none."""

    data_D: Sequence[Datum]
    loss: PreferenceLoss
    reference_logprobs_D: Sequence[Logprobs] | None
    name: str = "test"

    async def __call__(self, client: TrainingClient) -> dict[str, float]:
        from stovetop.preference.losses import preference_loss_fn  # torch

        output = await client.forward(list(self.data_D), "cross_entropy")
        logprobs_D = [outputs["logprobs"].to_torch() for outputs in output.loss_fn_outputs]
        _, metrics = preference_loss_fn(self.loss, self.reference_logprobs_D)(list(self.data_D), logprobs_D)
        return {f"{self.name}/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True, slots=True)
class PreferenceModelEvaluator:
    """A SamplingClientEvaluator: how often a preference model says what people said of held-out comparisons, as
    `<name>/accuracy`, and how often its token was no answer at all, as `<name>/no_answer`; both are shares. It judges
    each comparison in both orders, so one that always says A is right in half of those that are no tie."""

    comparisons: Sequence[LabeledComparison]
    comparison_renderer: ComparisonRenderer
    name: str = "test"

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise InvalidRequest("a PreferenceModelEvaluator needs at least one comparison: there is none")

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        judge = PreferenceModelFromChatRenderer(self.comparison_renderer, client)
        both_orders = [one for labeled in self.comparisons for one in (labeled, labeled.swap())]
        verdicts = await map_together(lambda one: judge.judge(one.comparison), both_orders, name="comparison")
        num_right = sum(verdict.value == one.label for verdict, one in zip(verdicts, both_orders, strict=True))
        return {
            f"{self.name}/accuracy": num_right / len(both_orders),
            f"{self.name}/no_answer": judge.num_without_answer / len(both_orders),
        }


@dataclass(frozen=True, slots=True)
class ComparisonPolicyEvaluator:
    """A SamplingClientEvaluator: completion A of each comparison is the reference answer, and the policy's own takes
    the place of completion B. Reports `win_rate`, where 1 is a win, 0 a loss and ½ a tie, and `stderr`, its standard
    error: the standard deviation of the items over the root of their number."""

    comparisons: Sequence[Comparison]
    preference_model: PreferenceModel
    renderer: Renderer
    max_tokens: int = 1024  # of an answer
    temperature: float = 1.0
    both_ways: bool = True  # ask about both orders, and take the mean; False: once, with the policy's answer as B
    content_preprocessor: Callable[[Content], Content] | None = None  # of the policy's answer, before it is judged
    name: str = ""  # before the metrics, with a slash; none without it
    seed: int | None = None  # each answer's is made of it and of its prompt; None: fresh ones each time
    record: RolloutRecord | None = None  # keeps the answers of each round, with 0 to 1 as their reward; None: they go

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise InvalidRequest("a ComparisonPolicyEvaluator needs at least one comparison: there is none")

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        policy = SamplingMessageCompleter(
            client, self.renderer, self.max_tokens, temperature=self.temperature, seed=self.seed
        )
        judged = await map_together(lambda one: self._judged(policy, one), self.comparisons, name="comparison")
        if self.record is not None:
            await self.record.keep_answers(self.name or "comparisons", [each.as_group() for each in judged])
        scores = np.array([each.score for each in judged])
        prefix = f"{self.name}/" if self.name else ""
        return {
            f"{prefix}win_rate": float(scores.mean()),
            f"{prefix}stderr": float(scores.std() / np.sqrt(len(scores))),
        }

    async def _judged(self, policy: SamplingMessageCompleter, comparison: Comparison) -> "_Judged":
        answer = await policy.answer(comparison.prompt_conversation)
        message = answer.message
        if self.content_preprocessor is not None:
            message["content"] = self.content_preprocessor(message["content"])
        score = await preferred_to_reference(self.preference_model, comparison, message, both_ways=self.both_ways)
        return _Judged(comparison, answer, score)


class _Judged(NamedTuple):
    """What the policy has said to a prompt, and how often that was preferred."""

    comparison: Comparison
    answer: SampledMessage
    score: float

    def as_group(self) -> TrajectoryGroup:
        """An episode of one turn; the answer that it was compared with is in its logs."""
        prompt, sequence, message = self.answer
        logprobs = None if sequence.logprobs is None else list(sequence.logprobs)
        action = TokensWithLogprobs(list(sequence.tokens), logprobs, sequence.stop_reason)
        reference = "\n".join(get_text_content(each) for each in self.comparison.completion_A)
        turn = Transition(prompt, action, self.score, episode_done=True, logs={"reference": reference})
        chat = [*self.comparison.prompt_conversation, message]
        return TrajectoryGroup([Trajectory([turn], ModelInput.empty(), final_chat=chat)], [0.0], [{}])


async def preferred_to_reference(
    preference_model: PreferenceModel, comparison: Comparison, answer: Message, *, both_ways: bool = True
) -> float:
    """Whether an answer is better than completion A of a comparison, from 0, the reference is better, to 1. Judged both
    ways it is (r₀ - r₁ + 2) / 4, where r₁ is of the swapped comparison: a judge that always says A gives ½."""
    judged = replace(comparison, completion_B=[answer])
    if not both_ways:
        return (await checked_score(preference_model, judged) + 1) / 2
    first, swapped = await together(
        [checked_score(preference_model, judged), checked_score(preference_model, judged.swap())]
    )
    return (first - swapped + 2) / 4

"""Answers of a policy that a judge compares with reference answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.completers import SamplingMessageCompleter
from stovetop.evaluation.estimates import Estimate
from stovetop.evaluation.example_set import Reported
from stovetop.evaluation.rows import ExampleRow, Sample
from stovetop.preference.evaluator import preferred_to_reference
from stovetop.preference.reward_model import PreferenceModel
from stovetop.preference.types import Comparison
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import get_text_content
from stovetop.seeds import seed_for
from stovetop.types import SamplingParams

REPORTED = Reported(means=("win_rate",))


@dataclass(frozen=True, slots=True)
class PairwiseSet:
    """An ExampleSet: how often the policy's answer is preferred to the reference, completion A of a comparison, as
    `win_rate`: 1 is a win, 0 a loss, ½ a tie. Each pair is judged in both orders."""

    name: str
    comparisons: Mapping[str, Comparison]  # by id of the example; completion B is not read
    judge: PreferenceModel
    renderer: Renderer  # of the policy
    max_tokens: int = 1024  # of an answer
    temperature: float = 0.0
    num_samples: int = 1

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)  # refuses all others

    @property
    def ids(self) -> Sequence[str]:
        return list(self.comparisons)

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        samples: list[Sample] = []
        for number in range(self.num_samples):
            policy = SamplingMessageCompleter(
                client,
                self.renderer,
                self.max_tokens,
                temperature=self.temperature,
                seed=seed_for(seed, f"{id} {number}"),
            )
            answer = await policy(self.comparisons[id].prompt_conversation)
            won = await preferred_to_reference(self.judge, self.comparisons[id], answer)
            samples.append(Sample({"win_rate": won}, get_text_content(answer)))
        return samples

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        return REPORTED.metrics(rows)

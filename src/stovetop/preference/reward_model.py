"""Preference models: judges that say which of two answers is better. The one here is a language model that was trained
on comparisons (`datasets.ChatDatasetBuilderFromComparisons`) and answers with one token.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from stovetop.client import SamplingClient, ServiceClient
from stovetop.errors import GradeError
from stovetop.preference.comparison_renderer import ComparisonRenderer, ComparisonRendererFromChatRenderer
from stovetop.preference.types import Comparison
from stovetop.renderers import get_renderer
from stovetop.types import SamplingParams


class PreferenceModel(Protocol):
    """Judges a comparison by one number from -1 (A is better) over 0 (a tie) to 1 (B is better)."""

    async def __call__(self, comparison: Comparison) -> float: ...


async def checked_score(preference_model: PreferenceModel, comparison: Comparison) -> float:
    """The judge's score, if it is one: what is out of range or not a number never becomes a reward."""
    score = await preference_model(comparison)
    if not -1 <= score <= 1:
        raise GradeError(f"{type(preference_model).__name__} must answer with a number from -1 to 1: {score}")
    return score


class PreferenceModelBuilder(Protocol):
    """The config from which a preference model is made."""

    async def __call__(self, service: ServiceClient) -> PreferenceModel: ...


class Verdict(Enum):
    """What a judge said in one token."""

    A = "A"
    B = "B"
    TIE = "Tie"
    NONE = "none"  # the token is no answer

    @property
    def is_answer(self) -> bool:
        """Whether the judge's token was one of its three answers."""
        return self is not Verdict.NONE

    @property
    def score(self) -> float:
        """As a PreferenceModel's; 0 where the token is no answer, as for a tie."""
        return {Verdict.A: -1.0, Verdict.B: 1.0, Verdict.TIE: 0.0, Verdict.NONE: 0.0}[self]

    def __bool__(self) -> bool:
        raise TypeError("a Verdict is not a truth value; ask .is_answer or .score")


class PreferenceModelFromChatRenderer:
    """A PreferenceModel that samples one token at temperature 0. It counts how often it was asked, and how often the
    token was no answer: a judge that often gives none has the wrong renderer or the wrong weights."""

    def __init__(self, comparison_renderer: ComparisonRenderer, sampling_client: SamplingClient) -> None:
        self._renderer = comparison_renderer
        self._client = sampling_client
        self.num_asked = 0
        self.num_without_answer = 0

    async def __call__(self, comparison: Comparison) -> float:
        return (await self.judge(comparison)).score

    async def judge(self, comparison: Comparison) -> Verdict:
        """What the judge says of a comparison, in the order it is given in; completions are not swapped. Costs one
        token."""
        prompt = self._renderer.build_generation_prompt(comparison)
        params = SamplingParams(max_tokens=1, temperature=0.0, stop=[])
        [token] = (await self._client.sample(prompt, 1, params)).sequences[0].tokens
        verdict = Verdict(self._renderer.label_of_token.get(token, "none"))
        self.num_asked += 1
        self.num_without_answer += not verdict.is_answer
        return verdict

    def metrics(self) -> dict[str, float]:
        """Over all comparisons judged so far."""
        return {
            "preference_model/num_asked": self.num_asked,
            "preference_model/num_without_answer": self.num_without_answer,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceModelBuilderFromChatRenderer:
    """A judge from trained weights, or from a model as it is."""

    renderer_name: str
    model_name: str
    rm_weights_path: str | None = None  # a saved checkpoint of the model; None: its own weights

    async def __call__(self, service: ServiceClient) -> PreferenceModelFromChatRenderer:
        client = await (
            service.create_sampling_client(base_model=self.model_name)
            if self.rm_weights_path is None
            else service.create_sampling_client(model_path=self.rm_weights_path)
        )
        renderer = get_renderer(self.renderer_name, client.get_tokenizer())
        return PreferenceModelFromChatRenderer(ComparisonRendererFromChatRenderer(renderer), client)

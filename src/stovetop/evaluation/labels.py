"""Classification: the policy is asked for a label, and what it says is one of them or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stovetop.client import SamplingClient
from stovetop.evaluation.estimates import Estimate
from stovetop.evaluation.problems import ProblemSet
from stovetop.evaluation.rows import ExampleRow, Sample
from stovetop.evaluators import ClassificationReport, classification_report
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, get_text_content
from stovetop.rl.problem_env import OneTurnEnv, TurnResult
from stovetop.rl.types import Action

NO_LABEL = "(none)"  # what is predicted by an answer that is no label
PREDICTED = "predicted"  # the score of a sample: which of the labels it says, -1 for none


def read_label(text: str, labels: Sequence[str]) -> int | None:
    """Which label an answer is, ignoring case, white space around it and a full stop behind it; None for anything
    else.

    read_label(" Spam.", ["ham", "spam"]) is 1.
    """
    said = text.strip().removesuffix(".").strip().casefold()
    return next((index for index, label in enumerate(labels) if label.casefold() == said), None)


@dataclass(frozen=True, slots=True)
class LabelEnv(OneTurnEnv):
    """A chat that ends with a question, answered by a label. The reward is 1 for the right one."""

    chat: Sequence[Message]
    labels: Sequence[str]
    expected: str
    renderer: Renderer

    def get_chat(self) -> Sequence[Message]:
        return self.chat

    async def grade(self, action: Action) -> TurnResult:
        message, _ = self.renderer.parse_response(action.tokens)
        said = read_label(get_text_content(message), self.labels)
        correct = float(said is not None and self.labels[said] == self.expected)
        return TurnResult(correct, {"correct": correct, PREDICTED: -1.0 if said is None else float(said)})


@dataclass(frozen=True, slots=True)
class LabelSet:
    """An ExampleSet: besides the metrics of its problems, `precision`, `recall` and `f1` as means over the labels.
    These have no standard error: they are no means over examples."""

    problems: ProblemSet
    labels: Sequence[str]
    expected: Mapping[str, str]  # by id of the example

    @property
    def name(self) -> str:
        return self.problems.name

    @property
    def ids(self) -> Sequence[str]:
        return self.problems.ids

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        return await self.problems.measure(id, client, seed)

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        macro = self.report(rows).macro()
        own = self.problems.metrics(rows)
        return own | {name: Estimate(macro[name]) for name in ("precision", "recall", "f1")}

    def report(self, rows: Sequence[ExampleRow]) -> ClassificationReport:
        """Of each label, and what was taken for what: all samples count alike."""
        said = [(row.id, int(sample.scores[PREDICTED])) for row in rows for sample in row.samples]
        predicted = [NO_LABEL if index < 0 else self.labels[index] for _, index in said]
        return classification_report([self.expected[id] for id, _ in said], predicted)

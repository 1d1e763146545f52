"""What an evaluator is, and how a round of them runs. Evaluators themselves live with what they measure."""

from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from stovetop.client import SamplingClient, TrainingClient
from stovetop.concurrency import together
from stovetop.errors import InvalidRequest
from stovetop.futures import APIFuture
from stovetop.tracking.waiting import waiting_for

Metrics = dict[str, float]


class TrainingClientEvaluator(Protocol):
    """Measures the weights in training, without a sampler: a held-out loss, say. It leaves no gradient."""

    async def __call__(self, client: TrainingClient) -> Metrics: ...


class SamplingClientEvaluator(Protocol):
    """Measures what the weights say when they are sampled from."""

    async def __call__(self, client: SamplingClient) -> Metrics: ...


async def run_evaluators(
    training_client: TrainingClient,
    *,
    training: Sequence[TrainingClientEvaluator] = (),
    sampling: Sequence[SamplingClientEvaluator] = (),
) -> Metrics:
    """One round: all at once, all on the weights as of this call if nothing else is submitted until it returns. The
    sampling evaluators share one sampling client. Two that report the same metric are refused."""
    rounds = [_named(evaluator, evaluator(training_client)) for evaluator in training]
    if sampling:
        snapshot = training_client.save_weights_and_get_sampling_client()
        rounds += [_named(evaluator, _evaluate(snapshot, evaluator)) for evaluator in sampling]
    metrics: Metrics = {}
    for reported in await together(rounds, name="evaluator"):
        if clash := metrics.keys() & reported.keys():
            raise InvalidRequest(f"two evaluators report the same metric; give one of them another name: {min(clash)}")
        metrics |= reported
    return metrics


async def _named(evaluator: object, metrics: Awaitable[Metrics]) -> Metrics:
    with waiting_for("evaluator %s", type(evaluator).__name__):
        return await metrics


async def _evaluate(snapshot: APIFuture[SamplingClient], evaluator: SamplingClientEvaluator) -> Metrics:
    return await evaluator(await snapshot)


# ---- labels ------------------------------------------------------------------------------------------------------


class LabelReport(NamedTuple):
    """Of one label. A ratio whose denominator is 0, of a label that is never predicted or never expected, is 0."""

    label: str
    precision: float  # of what was predicted to be it, the share that is
    recall: float  # of what is it, the share that was predicted to be
    f1: float  # the harmonic mean of both
    num_expected: int
    num_predicted: int


class ClassificationReport(NamedTuple):
    """How predicted labels compare with those that were expected."""

    accuracy: float
    labels: list[LabelReport]  # that occur, in alphabetical order
    confusion: dict[tuple[str, str], int]  # how often (expected, predicted) occurs, where it does

    def macro(self) -> dict[str, float]:
        """accuracy, and precision, recall and f1 as means over the labels, each counted alike."""
        precision, recall, f1 = (
            sum(values) / len(self.labels)
            for values in zip(*((each.precision, each.recall, each.f1) for each in self.labels), strict=True)
        )
        return {"accuracy": self.accuracy, "precision": precision, "recall": recall, "f1": f1}


def classification_report(expected: Sequence[str], predicted: Sequence[str]) -> ClassificationReport:
    """classification_report(["a", "a", "b"], ["a", "b", "b"]) has the accuracy 2/3, and of "b" the precision 1/2 and
    the recall 1."""
    pairs = list(zip(expected, predicted, strict=True))
    if not pairs:
        raise InvalidRequest("there is no label to compare: expected is empty")
    confusion = Counter(pairs)
    of_expected, of_predicted = Counter(expected), Counter(predicted)
    labels: list[LabelReport] = []
    for label in sorted({*expected, *predicted}):
        hits, num_expected, num_predicted = confusion[label, label], of_expected[label], of_predicted[label]
        precision = hits / num_predicted if num_predicted else 0.0
        recall = hits / num_expected if num_expected else 0.0
        f1 = 2 * hits / (num_expected + num_predicted)
        labels.append(LabelReport(label, precision, recall, f1, num_expected, num_predicted))
    accuracy = sum(one == other for one, other in pairs) / len(pairs)
    return ClassificationReport(accuracy, labels, {pair: confusion[pair] for pair in sorted(set(pairs))})


def compute_classification_metrics(expected: Sequence[str], predicted: Sequence[str]) -> Metrics:
    """accuracy, and precision, recall and f1 as means over the labels that occur, each counted alike. A label that is
    never predicted has precision 0, one that is never expected recall 0.

    compute_classification_metrics(["a", "a", "b"], ["a", "b", "b"]) has accuracy 2/3, precision and recall 3/4.
    """
    return classification_report(expected, predicted).macro()

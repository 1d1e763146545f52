"""What an evaluator is, and how a round of them runs. Evaluators themselves live with what they measure."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

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


def compute_classification_metrics(expected: Sequence[str], predicted: Sequence[str]) -> Metrics:
    """accuracy, and precision, recall and f1 as means over the labels that occur, each counted alike. A label that is
    never predicted has precision 0, one that is never expected recall 0.

    compute_classification_metrics(["a", "a", "b"], ["a", "b", "b"]) has accuracy 2/3, precision and recall 3/4.
    """
    pairs = list(zip(expected, predicted, strict=True))
    if not pairs:
        raise InvalidRequest("there is no label to compare: expected is empty")
    of_labels: list[tuple[float, float, float]] = []
    for label in sorted({*expected, *predicted}):
        hits = pairs.count((label, label))
        num_expected, num_predicted = expected.count(label), predicted.count(label)
        of_labels.append(
            (
                hits / num_predicted if num_predicted else 0.0,
                hits / num_expected if num_expected else 0.0,
                2 * hits / (num_expected + num_predicted),
            )
        )
    precision, recall, f1 = (sum(values) / len(of_labels) for values in zip(*of_labels, strict=True))
    accuracy = sum(one == other for one, other in pairs) / len(pairs)
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}

"""The protocol ExampleSet, and `evaluate`: it measures each example once for each seed, skips those that a file already
has rows of, and averages the rows into metrics. The sets themselves are in the modules beside this: problems, chats,
labels, pairwise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stovetop.client import SamplingClient
from stovetop.concurrency import map_together
from stovetop.errors import InvalidRequest
from stovetop.evaluation.estimates import Estimate, mean_of_examples, pass_at_k, ratio_of_examples
from stovetop.evaluation.rows import ExampleRow, RowFile, RowKey, RunRows, Sample
from stovetop.tracking.waiting import waiting_for

NUM_AT_ONCE = 64  # examples that are asked about at the same time; the service batches them

Metrics = Mapping[str, Estimate]


class Ratio(NamedTuple):
    """A metric that is the sum of one score over the sum of another, such as nats per token."""

    total: str
    size: str


@dataclass(frozen=True, slots=True)
class Reported:
    """Which metrics the scores of samples come to."""

    means: Sequence[str] = ()  # scores whose mean is a metric of the same name
    ratios: Mapping[str, Ratio] = field(default_factory=dict[str, Ratio])
    correct: str | None = None  # the score, 0 or 1, that pass@k counts
    ks: Sequence[int] = (1,)  # of pass@k

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        """Of all rows. Several rows of one example, of different seeds, are further samples of it."""
        samples_P = list(_samples_by_id(rows).values())
        metrics: dict[str, Estimate] = {}
        if self.correct is not None:
            for k in self.ks:
                passed_P = [_passed(samples, self.correct, k) for samples in samples_P]
                metrics[f"pass@{k}"] = mean_of_examples(passed_P)
        for name in self.means:
            metrics[name] = mean_of_examples(
                [_mean(sample.scores[name] for sample in samples) for samples in samples_P]
            )
        for name, (total, size) in self.ratios.items():
            totals_P, sizes_P = (
                [_mean(sample.scores[score] for sample in samples) for samples in samples_P] for score in (total, size)
            )
            metrics[name] = ratio_of_examples(totals_P, sizes_P)
        return metrics


class ExampleSet(Protocol):
    """Examples of one kind, each with an id, and how one of them is measured."""

    @property
    def name(self) -> str:
        """What its files and its line of the table are called."""
        ...

    @property
    def ids(self) -> Sequence[str]:
        """Of its examples, in order; no two are the same."""
        ...

    async def measure(self, id: str, client: SamplingClient, seed: int) -> Sequence[Sample]:
        """All samples of one example. With the same seed and the same weights they are the same, whatever else is
        measured meanwhile."""
        ...

    def metrics(self, rows: Sequence[ExampleRow]) -> dict[str, Estimate]:
        """What rows of this set come to."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a set came to."""

    name: str
    metrics: Metrics
    metrics_by_seed: Mapping[int, Metrics]
    rows: Sequence[ExampleRow]

    @property
    def num_examples(self) -> int:
        """Each once, with however many seeds."""
        return len({row.id for row in self.rows})

    @property
    def num_samples(self) -> int:
        """Of all examples and seeds together."""
        return sum(len(row.samples) for row in self.rows)


async def evaluate(
    example_set: ExampleSet,
    client: SamplingClient,
    seeds: Sequence[int] = (0,),
    *,
    file: RowFile | None = None,
    on_row: Callable[[ExampleRow], None] | None = None,
) -> Evaluation:
    """Measures every example with every seed. What `file` has a row of is not measured again; every new row is added
    to it at once, so an evaluation that was killed goes on where it was. `on_row` hears of each row that is done. The
    first failure is raised: a set with holes in it would give numbers that do not compare."""
    wanted = [RowKey(id, seed) for seed in seeds for id in example_set.ids]
    if not wanted or len(set(wanted)) < len(wanted):
        raise InvalidRequest(
            f"an evaluation needs an example and a seed, each once; {example_set.name} has {len(example_set.ids)} "
            f"examples, {len(set(example_set.ids))} of them different; seeds: {list(seeds)}"
        )

    async def row_of(key: RowKey) -> ExampleRow:
        if file is not None and (known := file.get(key)) is not None:
            return known
        with waiting_for("example %s of %s", key.id, example_set.name):
            row = ExampleRow(*key, tuple(await example_set.measure(key.id, client, key.seed)))
        if file is not None:
            file.add(row)
        if on_row is not None:
            on_row(row)
        return row

    rows = await map_together(row_of, wanted, limit=NUM_AT_ONCE, name=f"example of {example_set.name}")
    by_seed = {seed: example_set.metrics([row for row in rows if row.seed == seed]) for seed in seeds}
    return Evaluation(example_set.name, example_set.metrics(rows), by_seed, rows)


@dataclass(frozen=True, slots=True)
class ExampleSetEvaluator:
    """A SamplingClientEvaluator, for recipes: a set on a cadence. Metrics are `<name>/<set>/<metric>`, with the
    standard error as `<name>/<set>/<metric>/stderr`. With `keeps`, each example's answers and scores are a row in the
    run's folder, and an evaluation that was interrupted goes on with the examples that it has none of."""

    example_set: ExampleSet
    seeds: Sequence[int] = (0,)
    name: str = "test"
    keeps: RunRows | None = None  # None: nothing is kept

    async def __call__(self, client: SamplingClient) -> dict[str, float]:
        file = None if self.keeps is None else self.keeps.open(self.name, self.example_set.name)
        found = await evaluate(self.example_set, client, self.seeds, file=file)
        reported: dict[str, float] = {}
        for metric, (value, stderr) in found.metrics.items():
            reported[f"{self.name}/{found.name}/{metric}"] = value
            if stderr is not None:
                reported[f"{self.name}/{found.name}/{metric}/stderr"] = stderr
        return reported


def mean_scores(rows: Sequence[ExampleRow], score: str) -> dict[str, float]:
    """Of each example, by id, the mean of a score over its samples; without those that do not have the score."""
    scores_by_id = {
        id: [sample.scores[score] for sample in samples if score in sample.scores]
        for id, samples in _samples_by_id(rows).items()
    }
    return {id: _mean(scores) for id, scores in scores_by_id.items() if scores}


def _samples_by_id(rows: Sequence[ExampleRow]) -> dict[str, list[Sample]]:
    by_id: dict[str, list[Sample]] = {}
    for row in rows:
        by_id.setdefault(row.id, []).extend(row.samples)
    return by_id


def _passed(samples: Sequence[Sample], correct: str, k: int) -> float:
    return pass_at_k(len(samples), sum(sample.scores[correct] == 1 for sample in samples), k)


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)

"""What `stovetop eval` says of its results: a table for people, one object for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stovetop.cli.tables import print_table
from stovetop.evaluation.estimates import Estimate, paired_difference
from stovetop.evaluation.example_set import Evaluation, ExampleSet, mean_scores
from stovetop.evaluation.labels import LabelSet
from stovetop.evaluation.rows import Settings, read_rows
from stovetop.evaluators import ClassificationReport
from stovetop.preference.judge import JudgeCompleter
from stovetop.tasks.evaluation_kinds import LoadedSet
from stovetop.tracking.console import format_number

COMPARED = ("correct", "win_rate")  # scores that two evaluations are compared by


@dataclass(frozen=True, slots=True)
class SetReport:
    """Of one set."""

    evaluation: Evaluation
    settings: Settings
    left_out: Mapping[str, int]
    needs_judge: bool = False
    labels: ClassificationReport | None = None
    num_judged: int = 0
    num_without_verdict: int = 0

    @classmethod
    def of(cls, evaluation: Evaluation, example_set: ExampleSet, loaded: LoadedSet, settings: Settings) -> "SetReport":
        labels = example_set.report(evaluation.rows) if isinstance(example_set, LabelSet) else None
        return cls(evaluation, settings, loaded.left_out, loaded.needs == "judge", labels)

    def with_judge(self, judge: JudgeCompleter) -> "SetReport":
        """With what the judge has counted in this process."""
        return replace(self, num_judged=judge.num_asked, num_without_verdict=judge.num_without_answer)

    def to_json(self) -> dict[str, object]:
        found = self.evaluation
        written: dict[str, object] = {
            "set": found.name,
            "metrics": {name: _as_json(estimate) for name, estimate in found.metrics.items()},
            "by_seed": {
                str(seed): {name: estimate.value for name, estimate in metrics.items()}
                for seed, metrics in found.metrics_by_seed.items()
            },
            "num_examples": found.num_examples,
            "num_samples": found.num_samples,
            "left_out": dict(self.left_out),
            "settings": dict(self.settings),
        }
        if self.labels is not None:
            written["labels"] = [label._asdict() for label in self.labels.labels]
            written["confusion"] = [
                {"expected": expected, "predicted": predicted, "number": number}
                for (expected, predicted), number in self.labels.confusion.items()
            ]
        if self.needs_judge:
            written["judge"] = {"num_asked": self.num_judged, "num_without_verdict": self.num_without_verdict}
        return written


@dataclass(frozen=True, slots=True)
class Difference:
    """Of this evaluation from another, on the examples that both have."""

    name: str  # of the set
    score: str
    estimate: Estimate
    num_examples: int


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    weights: str
    folder: str
    sets: Sequence[SetReport]
    differences: Sequence[Difference] = ()

    def to_json(self) -> dict[str, object]:
        """For programs."""
        differences = [
            {"set": each.name, "score": each.score, "num_examples": each.num_examples, **_as_json(each.estimate)}
            for each in self.differences
        ]
        return {
            "weights": self.weights,
            "folder": self.folder,
            "sets": [each.to_json() for each in self.sets],
            "differences": differences,
        }


def reports_against(folder: Path | None, sets: Sequence[SetReport]) -> list[Difference]:
    """How much larger each score is here than in the evaluation in that folder."""
    if folder is None:
        return []
    found: list[Difference] = []
    for each in sets:
        before = read_rows(folder, each.evaluation.name)
        for score in COMPARED:
            first, second = mean_scores(before, score), mean_scores(each.evaluation.rows, score)
            if both := [id for id in second if id in first]:
                estimate = paired_difference([first[id] for id in both], [second[id] for id in both])
                found.append(Difference(each.evaluation.name, score, estimate, len(both)))
    return found


# ---- for people ------------------------------------------------------------------------------------------------------


def show_report(report: Report, *, as_json: bool) -> None:
    """Prints it."""
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        return
    print(report.weights)
    print_table([row for each in report.sets for row in _rows(each)])
    for each in report.sets:
        _show_notes(each)
    for each in report.differences:
        value, stderr = each.estimate
        error = "" if stderr is None else f" ± {stderr:.3g}"
        print(f"{each.name}: {each.score} is {value:+.3g}{error} above the other's, on {each.num_examples} examples")
    print(f"rows and results: {report.folder}")


def _rows(report: SetReport) -> list[dict[str, str]]:
    found = report.evaluation
    by_seed = list(found.metrics_by_seed.values()) if len(found.metrics_by_seed) > 1 else []
    rows: list[dict[str, str]] = []
    for name, estimate in found.metrics.items():
        interval = estimate.interval()
        row = {
            "set": found.name,
            "metric": name,
            "value": format_number(estimate.value),
            "std. error": "-" if estimate.stderr is None else format_number(estimate.stderr),
            "95 %": "-" if interval is None else " to ".join(map(format_number, interval)),
            "examples": str(found.num_examples),
            "samples": str(found.num_samples),
            "by seed": " ".join(format_number(metrics[name].value) for metrics in by_seed) or "-",
        }
        rows.append(row)
    return rows


def _show_notes(report: SetReport) -> None:
    name = report.evaluation.name
    for reason, number in report.left_out.items():
        print(f"{name}: {number} rows were left out: {reason}")
    passed = report.evaluation.metrics.get("pass@1")
    if passed is not None and passed.value in (0, 1):
        at_most = min(1.0, 3 / report.evaluation.num_examples)  # the "rule of three", 1 - 0.05^(1/n)
        found, bound = ("none", f"below {at_most:.3g}") if passed.value == 0 else ("all", f"above {1 - at_most:.3g}")
        print(f"{name}: {found} are right, so the standard error says nothing; with 95 % confidence pass@1 is {bound}")
    if report.num_without_verdict:
        print(f"{name}: {report.num_without_verdict} of {report.num_judged} answers of the judge had no verdict: ties")
    if report.labels is not None:
        print(f"{name}, by label:")
        print_table([_label_row(label._asdict()) for label in report.labels.labels])
        for (expected, predicted), number in report.labels.confusion.items():
            if expected != predicted:
                print(f"  {expected} taken for {predicted}: {number}")


def _label_row(label: Mapping[str, str | float]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else format_number(value) for key, value in label.items()}


def _as_json(estimate: Estimate) -> dict[str, object]:
    interval = estimate.interval()
    return {"value": estimate.value, "stderr": estimate.stderr, "interval": None if interval is None else [*interval]}

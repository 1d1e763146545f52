"""The rows of an evaluation: what each example came to, kept in a file that an evaluation goes on with after a kill.

    FOLDER/NAME.json      what was evaluated and how; rows of anything else are never added to
    FOLDER/NAME.jsonl     one row for each example and seed, in the order in which they were done

A row that a kill has cut off is measured again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

from stovetop.durable import append_row, parse_rows, write_file, writing
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.runs import Run
from stovetop.tracking.evaluated import evaluation_folder

Settings = Mapping[str, str | int | float | list[str] | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of an example: an answer of the policy and its scores; or of what is only read, its scores."""

    scores: Mapping[str, float]
    answer: str = ""
    stop_reason: str = ""  # of the answer: "stop", or "length" where it was cut off


class RowKey(NamedTuple):
    """An example is measured once for each seed."""

    id: str
    seed: int


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """All samples of one example with one seed. It is written when all of them are there."""

    id: str  # within its set
    seed: int
    samples: tuple[Sample, ...]

    @property
    def key(self) -> RowKey:
        """What no other row of the set has."""
        return RowKey(self.id, self.seed)

    def to_dict(self) -> dict[str, Any]:
        """As a row of the file."""
        samples = [
            {"scores": dict(sample.scores), "answer": sample.answer, "stop_reason": sample.stop_reason}
            for sample in self.samples
        ]
        return {"id": self.id, "seed": self.seed, "samples": samples}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """From a row of the file."""
        try:
            samples = tuple(Sample(**sample) for sample in row["samples"])
            return cls(row["id"], row["seed"], samples)
        except (KeyError, TypeError) as error:
            raise InvalidRequest(f"a row of an evaluation has id, seed and samples; this has {sorted(row)}") from error


class RowFile:
    """The rows of one set. Open it with `open_rows`."""

    def __init__(self, path: Path, rows: Sequence[ExampleRow]) -> None:
        self.path = path
        self._rows = {row.key: row for row in rows}

    def get(self, key: RowKey) -> ExampleRow | None:
        """The row of an example that was measured before."""
        return self._rows.get(key)

    def add(self, row: ExampleRow) -> None:
        """Writes a row. The end of the process, however it comes, does not cost it."""
        append_row(self.path, row.to_dict(), synced=False)
        self._rows[row.key] = row


def open_rows(folder: Path, name: str, settings: Settings, *, replaces: bool = False) -> RowFile:
    """The rows of a set in this folder, which is made if need be. Rows that were measured with other settings are
    refused, with the setting that differs; or removed, where the new ones are to replace them."""
    if not replaces:
        refuse_other_settings(folder, name, settings)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if replaces and (read_settings(folder, name) is None or _other_settings(folder, name, settings)):
            (folder / f"{name}.jsonl").unlink(missing_ok=True)
    write_file(folder / f"{name}.json", json.dumps(dict(settings), indent=1).encode())
    return RowFile(folder / f"{name}.jsonl", read_rows(folder, name))


@dataclass(frozen=True, slots=True)
class RunRows:
    """Where the evaluators of a run keep what they measure, step by step: see `tracking.evaluated`."""

    run: Run
    settings: Settings  # what the rows depend on besides the weights

    def open(self, evaluator: str, name: str) -> RowFile:
        """The rows of a set, measured by an evaluator of this name with the weights as they are. Those that another
        config has left for the same step are removed."""
        step = self.run.evaluated_step
        weights = f"step {step} of a run with the config {self.run.config_digest}"
        folder = evaluation_folder(self.run.path, step, evaluator)
        return open_rows(folder, name, {"weights": weights, **self.settings}, replaces=True)


def read_rows(folder: Path, name: str) -> list[ExampleRow]:
    """The rows that are there; one that a kill has cut off is left out."""
    return parse_rows(folder / f"{name}.jsonl", ExampleRow.from_dict)


def refuse_other_settings(folder: Path, name: str, settings: Settings) -> None:
    """Refuses to go on with rows of another model, other data or other sampling. What is not given is not compared."""
    if differs := _other_settings(folder, name, settings):
        raise InvalidRequest(
            f"the rows of {name} in {str(folder)!r} were measured otherwise: {'; '.join(differs)}. Pass the same, or "
            "another folder as --out"
        )


def _other_settings(folder: Path, name: str, settings: Settings) -> list[str]:
    """Those that the rows in this folder were not measured with, in words."""
    before = read_settings(folder, name)
    if before is None:
        return []
    wanted = json.loads(json.dumps(dict(settings)))  # as it is read back
    changed = [key for key in wanted if before.get(key) != wanted[key]]
    return [f"{key} was {before.get(key)!r} and is {wanted[key]!r}" for key in changed]


def read_settings(folder: Path, name: str) -> dict[str, Any] | None:
    """What the rows of a set were measured with; None where there are none."""
    file = folder / f"{name}.json"
    try:
        settings: object = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StovetopError(f"{file} cannot be read ({error}); remove it and {name}.jsonl to begin anew") from error
    return cast("dict[str, Any]", settings)

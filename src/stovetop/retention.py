"""Which checkpoints of a run stay, and the deletion of the others.

    keep_checkpoints=2                      the last two, and the final one
    keep_checkpoints="2 lowest:test/nll"    and the one at which a metric is lowest; "highest:..." likewise
    keep_checkpoints=all

A checkpoint that stays, stays with all that its row names: state, weights, the policies that the next batches are
sampled with, the reference. One that another run uses stays too (`checkpoint_users.py`). Rows of checkpoints.jsonl all
stay; what was deleted of them has a row in deleted.jsonl, `{"path": ..., "name": of the checkpoint, "time": ...}`.

Deleted is only what lies in the folder of the run, or of the run that it is part of; and of a server's, what the
process itself has saved, since a copy of a run names the same checkpoints as the original.

A run that is killed between a save and its row leaves one that no row names. When the run goes on and has saved the
same again, that goes too; `stovetop prune` deletes all that no row names, after saying so.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from stovetop.checkpoint_users import home_of, is_being_read, no_new_users, user_of
from stovetop.checkpoints import COPY_FILE, CheckpointRecord, located, located_record
from stovetop.client import ServiceClient
from stovetop.concurrency import in_thread
from stovetop.durable import MANIFEST, append_row, parse_rows, read_rows
from stovetop.errors import CheckpointNotFound, InvalidRequest, StovetopError
from stovetop.rules import Text
from stovetop.run_folder import CHECKPOINTS_FILE, METRICS_FILE, runs_within, saved_folders
from stovetop.tracking.events import metrics_from_row

log = logging.getLogger(__name__)

DELETED_FILE = "deleted.jsonl"
DEFAULT_KEEP = "2"
ALL = "all"
_STEP = re.compile(rb'"step"\s*:\s*(\d+)')  # in a row of metrics
_FORM = (
    "all, or a number of checkpoints from 1 on, and behind it maybe the best by a metric: 2, '2 lowest:test/nll', "
    "'2 highest:env/all/reward/total'"
)


# ---- what stays ------------------------------------------------------------------------------------------------------


class Best(NamedTuple):
    """The checkpoint at which a metric is lowest or highest."""

    extreme: Literal["lowest", "highest"]
    metric: str


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays, besides final checkpoints and those that other runs use."""

    last: int | None  # None: all
    best: tuple[Best, ...] = ()


def parse_keep(text: str) -> Keep:
    """What the config field `keep_checkpoints` says."""
    number, *words = text.split() or [""]
    if number == ALL and not words:
        return Keep(None)
    best: list[Best] = []
    for word in words:
        extreme, _, metric = word.partition(":")
        if metric and (extreme == "lowest" or extreme == "highest"):
            best.append(Best(extreme, metric))
    if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) >= 1) or len(best) < len(words):
        raise InvalidRequest(f"keep_checkpoints must be {_FORM}: {text!r}")
    return Keep(int(number), tuple(best))


def _is_keep(text: str) -> bool:
    try:
        parse_keep(text)
    except InvalidRequest:
        return False
    return True


KeepCheckpoints = Annotated[str, Text(_FORM, suits=_is_keep)]


def choose(
    records: Sequence[CheckpointRecord],
    keep: Keep,
    values: Mapping[int, Mapping[str, float]],
    users: Mapping[str, str],
) -> dict[int, str]:
    """Why each that stays does, by its index. `records` are those that are there, in order. `values` has the metrics of
    each step: those of step k are of the weights after k updates, so of the checkpoint whose next batch is k. `users`
    has a user of each path that is used. A run can go on from the last of what stays: the last with a state are in it.
    """
    reasons: dict[int, str] = {}
    with_state = [index for index, record in enumerate(records) if record.state_path and record.batch is not None]
    last = len(records) if keep.last is None else keep.last
    for index in {*with_state[-last:], *range(len(records))[-last:]}:
        reasons[index] = "all are kept" if keep.last is None else f"one of the last {keep.last}"
    for best in keep.best:
        if (index := _best(records, best, values)) is not None:
            reasons.setdefault(index, f"{best.extreme} {best.metric}")
    for index, record in enumerate(records):
        used = [users[path] for path in paths_of(record) if path in users]
        if record.final or used:
            reasons[index] = "final" if record.final else f"used by {used[0]}"
    return dict(sorted(reasons.items()))


def _best(records: Sequence[CheckpointRecord], best: Best, values: Mapping[int, Mapping[str, float]]) -> int | None:
    found = {
        index: value
        for index, record in enumerate(records)
        if record.batch is not None and math.isfinite(value := values.get(record.batch, {}).get(best.metric, math.nan))
    }
    sign = 1 if best.extreme == "lowest" else -1
    return min(found, key=lambda index: sign * found[index], default=None)


def paths_of(record: CheckpointRecord) -> list[str]:
    """All that a row names."""
    paths = [record.state_path, record.sampler_path, record.reference_path, *record.policy_paths]
    return [path for path in paths if path is not None]


# ---- of one run ------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A checkpoint that stays, and why."""

    record: CheckpointRecord
    reason: str


class Doomed(NamedTuple):
    """A folder, or what a server has, that is not to stay."""

    path: str  # as the row has it
    name: str  # of its checkpoint


class Plan(NamedTuple):
    """For the checkpoints of a run that are there."""

    kept: Sequence[Kept]
    doomed: Sequence[Doomed]


def plan(log_dir: Path, keep: Keep) -> Plan:
    """What stays, and what may be deleted. Nothing is."""
    rows = parse_rows(log_dir / CHECKPOINTS_FILE, CheckpointRecord.from_dict)
    deleted = _deleted(log_dir)

    def is_there(path: str) -> bool:
        if path in deleted:  # of a long run, most are: the disk is not asked
            return False
        lies_at = Path(located(path, log_dir))
        return not lies_at.is_absolute() or (lies_at / MANIFEST).is_file()

    def usable(record: CheckpointRecord) -> CheckpointRecord:
        """Without a state from which no run goes on: it, or a policy of it, is gone."""
        needed = [path for path in (record.state_path, *record.policy_paths) if path is not None]
        return record if all(map(is_there, needed)) else replace(record, state_path=None)

    there = [row for row in rows if any(is_there(path) for path in (row.state_path, row.sampler_path) if path)]
    steps = _rows_at({row.batch for row in there}, log_dir) if keep.best else []
    users = {path: user for record in there for path in paths_of(record) if (user := _user(path, log_dir))}
    reasons = choose([*map(usable, there)], keep, {int(row["step"]): row for row in steps}, users)
    kept = [Kept(there[index], reason) for index, reason in reasons.items()]
    # A run that was moved has rows that name the same folder in two ways.
    needed = {located(path, log_dir) for each in kept for path in paths_of(each.record)}
    doomed = {path: row.name for row in rows for path in paths_of(row)}
    return Plan(
        kept,
        [
            Doomed(path, name)
            for path, name in doomed.items()
            if path not in deleted and located(path, log_dir) not in needed
        ],
    )


def _rows_at(steps: Set[int | None], log_dir: Path) -> list[dict[str, float]]:
    """The metrics of these steps. Of a long run few rows are read, for it is asked at each of its checkpoints."""

    def wanted(line: bytes) -> bool:
        step = _STEP.search(line)
        return step is None or int(step[1]) in steps

    return parse_rows(log_dir / METRICS_FILE, metrics_from_row, wanted=wanted)


def remaining(log_dir: Path) -> list[CheckpointRecord]:
    """The rows of a run's checkpoints that were not deleted."""
    deleted = _deleted(log_dir)
    rows = parse_rows(log_dir / CHECKPOINTS_FILE, CheckpointRecord.from_dict)
    return [located_record(row, log_dir) for row in rows if not {row.state_path, row.sampler_path} & deleted]


def unnamed(folder: Path) -> list[Path]:
    """What was saved into a run's folder, or that of a run within it, and is in no row of any of them, nor in the copy
    of the rows: it was saved by hand, or the run was killed before the row was written."""
    named: set[str] = set()
    for run in runs_within(folder):
        deleted = _deleted(run)
        for file in (CHECKPOINTS_FILE, COPY_FILE):
            rows = parse_rows(run / file, CheckpointRecord.from_dict)
            named |= {located(path, run) for row in rows for path in paths_of(row) if path not in deleted}
    return [saved for run in runs_within(folder) for saved in saved_folders(run) if str(saved) not in named]


def _deleted(log_dir: Path) -> set[str | None]:
    return {str(row.get("path")) for row in read_rows(log_dir / DELETED_FILE)}


def _user(path: str, log_dir: Path) -> str | None:
    lies_at = located(path, log_dir)
    home = home_of(lies_at, log_dir)
    return None if home is None else user_of(lies_at, home)


class Retention:
    """Of a run that is open."""

    def __init__(self, log_dir: Path, keep_checkpoints: str) -> None:
        self._log_dir = log_dir
        self._keep = parse_keep(keep_checkpoints)
        rows = parse_rows(log_dir / CHECKPOINTS_FILE, CheckpointRecord.from_dict)
        self._of_before = {path for record in rows for path in paths_of(record)}
        self._unnamed = (
            unnamed(log_dir) if saved_folders(log_dir) else []
        )  # before anything is saved that has no row yet
        self._said = set[str]()

    async def apply(self, service: ServiceClient) -> None:
        """Deletes what is not to stay: for when the row of a new checkpoint is written. What cannot be deleted is said,
        and tried again after the next checkpoint; it never stops a run."""
        if self._keep.last is not None:
            await in_thread(lambda: self._apply(service))

    def _apply(self, service: ServiceClient) -> None:
        try:
            planned = plan(self._log_dir, self._keep)
        except (StovetopError, OSError) as error:  # such as used_by.jsonl, which others write, and people edit
            self._say("plan", f"no checkpoint is deleted, for it cannot be told which are needed: {error}")
            return
        doomed = [each for each in planned.doomed if self._is_ours(each)]
        if doomed:
            self._say_what_is_not_known(planned)
        doomed += self._saved_again()

        def remove(path: str) -> None:
            service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()

        for each in doomed:
            try:
                delete(each, self._log_dir, remove)
            except (StovetopError, OSError) as error:
                self._say("deletion", f"a checkpoint that is not needed any more stays, as may others: {error}")

    def _saved_again(self) -> list[Doomed]:
        """What a killed process has saved without a row, and this one has saved with one since."""
        if not self._unnamed:
            return []
        rows = parse_rows(self._log_dir / CHECKPOINTS_FILE, CheckpointRecord.from_dict)
        paths = {path for record in rows for path in paths_of(record)} - self._of_before
        again = {Path(path).parts[-2:] for path in paths}  # such as weights/000020
        self._unnamed = [saved for saved in self._unnamed if saved.is_dir()]
        still = set(unnamed(self._log_dir))
        return [
            Doomed(str(saved), saved.name) for saved in self._unnamed if saved in still and saved.parts[-2:] in again
        ]

    def _is_ours(self, doomed: Doomed) -> bool:
        lies_at = located(doomed.path, self._log_dir)
        if not Path(lies_at).is_absolute():
            return doomed.path not in self._of_before
        home = home_of(lies_at, self._log_dir)
        return home is not None and (home == self._log_dir or home in self._log_dir.parents)

    def _say_what_is_not_known(self, planned: Plan) -> None:
        """A metric that no checkpoint has keeps none."""
        saved = _rows_at({kept.record.batch for kept in planned.kept}, self._log_dir) if self._keep.best else []
        for best in self._keep.best:
            if best.metric in self._said or any(best.metric in row for row in saved):
                continue
            rows = parse_rows(self._log_dir / METRICS_FILE, metrics_from_row)
            steps = [int(row["step"]) for row in rows if best.metric in row]
            if steps == [0]:
                continue
            found = f"so far only steps {steps[:5]} have it" if steps else "so far no row has it"
            self._say(
                best.metric,
                f"keep_checkpoints: no checkpoint is kept for {best.metric}, for none has a value of it: {found}. "
                "A checkpoint has that of the step it begins with: evaluate where one is saved (eval_every, "
                "save_every)",
            )

    def _say(self, what: str, message: str) -> None:
        """Once."""
        if what not in self._said:
            log.warning("%s", message)
        self._said.add(what)


def delete(doomed: Doomed, log_dir: Path, remove: Callable[[str], None]) -> bool:
    """Removes it from where it lies now, unless a run has begun with it meanwhile, or a process is reading it, and adds
    the row that says so: then True. What was killed in between is done again."""
    lies_at = located(doomed.path, log_dir)
    home = home_of(lies_at, log_dir) or log_dir
    with no_new_users(home):
        if user_of(lies_at, home) is not None or is_being_read(lies_at):
            return False
        with suppress(CheckpointNotFound):  # it was deleted before, and the row is missing
            remove(lies_at)
        append_row(log_dir / DELETED_FILE, {**doomed._asdict(), "time": time.time()})
    return True

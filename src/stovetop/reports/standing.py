"""How far a run is: its state, with the reason; its step of how many; its last numbers; since when and how long still.

Read from the ends of its files: it takes no longer for a run of 100,000 steps than for one of ten.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stovetop.checkpoints import CheckpointRecord, get_last_checkpoint
from stovetop.durable import parse_last_rows
from stovetop.errors import StovetopError
from stovetop.kitchen.phases import Listed, phases_in
from stovetop.recipes import RECIPES
from stovetop.run_folder import CHECKPOINTS_FILE, EVENTS_FILE, MARK_FILE, METRICS_FILE, Plan, read_plan, writer_in
from stovetop.stored_configs import read_config
from stovetop.tracking.events import Event, event_from_row, metrics_from_row

State = Literal["running", "complete", "stopped", "failed", "damaged"]

TAIL_BYTES = 256 * 1024  # of each file: some hundred rows, and the events of some steps
BEGAN, ENDED = "run.start", "run.stop"
INTERRUPTIONS = ("CancelledError", "KeyboardInterrupt", "Interrupted", "_Stopped", "SystemExit", "GeneratorExit")
EVERYDAY = ("learning_rate", "optim/lr", "grad_norm", "num_loss_tokens", "lag")  # says little of how a run goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Of one run, or of one phase of a run."""

    run: Path
    recipe: str = ""  # or the class of its config, where that is no recipe's; "" where it cannot be read
    phase: str = ""  # its folder, where it is a phase of a run
    state: State
    reason: str = ""  # why it stopped or failed; what of it is damaged; who writes to it
    num_done: int = 0  # steps; of a run of phases: phases
    num_steps: int | None = None  # in all; None: it has not said
    num_phases: int = 0
    values: Mapping[str, float] = field(default_factory=dict[str, float])  # the last ones
    began_s: float | None = None  # since 1970
    last_s: float | None = None  # when it went on last
    seconds_left: float | None = None  # of one that is running

    @property
    def progress(self) -> str:
        """ "12 of 300", "phase 2 of 3"."""
        if self.num_phases:
            return f"phase {min(self.num_done + 1, self.num_phases)} of {self.num_phases}"
        return str(self.num_done) if self.num_steps is None else f"{self.num_done} of {self.num_steps}"


def standing_of(folder: Path) -> Standing:
    """Of the run in this folder. One whose files are damaged is told as such, with what is wrong."""
    try:
        return _standing(folder)
    except StovetopError as error:
        return Standing(run=folder, state="damaged", reason=str(error))


def _standing(folder: Path) -> Standing:
    whole = folder.parent if is_phase(folder) else folder
    rows = parse_last_rows(folder / METRICS_FILE, metrics_from_row, TAIL_BYTES)
    events = parse_last_rows(folder / EVENTS_FILE, event_from_row, TAIL_BYTES)
    last, plan, phases = get_last_checkpoint(folder), read_plan(folder), phases_in(folder)
    last_step = int(rows[-1]["step"]) if rows else -1
    is_complete = _is_complete(folder, last, last_step, phases)
    state, reason = _state(folder, events, is_complete=is_complete, has_begun=bool(rows) or last is not None)
    num_done = _num_done(last_step, last, plan)
    return Standing(
        run=folder,
        recipe=_name(whole),
        phase="" if whole == folder else folder.name,
        state=state,
        reason=reason,
        num_done=sum(phase.is_complete for phase in phases) if phases else num_done,
        num_steps=plan.num_steps,
        num_phases=len(phases),
        values=last_values(rows, plan.columns),
        began_s=_began_s(folder),
        last_s=_last_s(folder, is_complete=is_complete and bool(rows)),
        seconds_left=_seconds_left(rows, plan, num_done) if state == "running" else None,
    )


# ---- the state -------------------------------------------------------------------------------------------------------


def _is_complete(folder: Path, last: CheckpointRecord | None, last_step: int, phases: Sequence[Listed]) -> bool:
    """Nothing is left to do: the final checkpoint is there, and no step beyond it; or every phase is complete."""
    if phases:
        return all(phase.is_complete for phase in phases)
    if last is not None and last.final:
        return last.batch is None or last_step <= last.batch
    return any(phase.folder == folder and phase.is_complete for phase in phases_in(folder.parent))


def _state(folder: Path, events: Sequence[Event], *, is_complete: bool, has_begun: bool) -> tuple[State, str]:
    """Of a run that was ended, by what its last event says; of another by whether its process is there."""
    end = next((event for event in reversed(events) if event.name in (BEGAN, ENDED)), None)
    if end is None or end.name == BEGAN:
        writer = writer_in(folder)
        if writer is not None:
            return "running", writer
        if is_complete:
            return "complete", ""
        return "stopped", "killed, or the machine stopped: its process has ended without a word"
    outcome = end.labels.get("outcome", "")
    if is_complete:
        return "complete", ""
    if outcome == "completed":
        return ("complete", "") if has_begun else ("stopped", "it was left before its first step")
    if outcome in INTERRUPTIONS:
        return "stopped", "interrupted"
    return "failed", end.labels.get("reason") or outcome


def _num_done(last_step: int, last: CheckpointRecord | None, plan: Plan) -> int:
    """The row of the evaluation at the end is numbered by how many steps there were."""
    num_done = max(last_step + 1, (last.batch or 0) if last is not None else 0)
    return num_done if plan.num_steps is None else min(num_done, plan.num_steps)


# ---- numbers and times -----------------------------------------------------------------------------------------------


def last_values(rows: Sequence[Mapping[str, float]], columns: Sequence[str] = ()) -> dict[str, float]:
    """Each metric in the last row that has it: those that its recipe shows, but for what says little; without a recipe,
    those of the last row."""
    if not columns:
        return {} if not rows else {name: value for name, value in rows[-1].items() if _tells(name)}
    found: dict[str, float] = {}
    for name in filter(_tells, columns):
        value = next((row[name] for row in reversed(rows) if name in row), None)
        if value is not None:
            found[name] = value
    return found


def _tells(name: str) -> bool:
    return name not in (*EVERYDAY, "step") and not name.startswith(("time/", "progress"))


def _seconds_left(rows: Sequence[Mapping[str, float]], plan: Plan, num_done: int) -> float | None:
    """By the mean time between the last rows."""
    times_s = [row["time/step"] for row in rows if "time/step" in row]
    if plan.num_steps is None or not times_s:
        return None
    return sum(times_s) / len(times_s) * (plan.num_steps - num_done)


def _began_s(folder: Path) -> float | None:
    """When its first event was written."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            return event_from_row(json.loads(file.readline())).time
    except (OSError, ValueError):
        return _changed_s(folder / MARK_FILE) or None


def _last_s(folder: Path, *, is_complete: bool) -> float | None:
    """When it last went on. Whoever opens a run that is complete makes events, and the run no longer."""
    names = (METRICS_FILE, CHECKPOINTS_FILE) if is_complete else (METRICS_FILE, EVENTS_FILE)
    return max(_changed_s(folder / name) for name in names) or None


def _changed_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


# ---- which recipe ----------------------------------------------------------------------------------------------------


def recipe_of(config_class: str) -> str | None:
    """The name of the recipe with this config, "module:name"; or the file of one of the user's own, where it lies in
    the current folder."""
    classes = {f"{recipe.module}:Config": name for name, recipe in RECIPES.items()}
    own = Path(config_class.removesuffix(":Config") + ".py")
    return classes.get(config_class) or (str(own) if own.is_file() else None)


def _name(run: Path) -> str:
    try:
        config_class = read_config(run).config_class
    except StovetopError:  # a folder of several runs has no config of its own
        return ""
    return recipe_of(config_class) or config_class


def is_phase(folder: Path) -> bool:
    """Whether the run in this folder is a phase of the run in the folder above."""
    return any(phase.folder == folder for phase in phases_in(folder.parent))

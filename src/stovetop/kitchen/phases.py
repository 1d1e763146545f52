"""Several workflows in a row as one run: a warm start and then reinforcement, say. Each phase is a run like any other,
in a folder of its own within that of the whole:

    RUN/config.json         the config of the whole
    RUN/workflow.json       its phases
    RUN/events.jsonl        phase.start and phase.stop
    RUN/1_supervised/       the run of the first phase, with its own config.json, workflow.json, metrics.jsonl ...
    RUN/2_reinforcement/

A phase is complete when its final checkpoint is recorded; without a loop, when its file is there. Which phases are
complete is all that is needed to go on.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from inspect import isfunction, signature
from pathlib import Path
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from stovetop.checkpoints import get_last_checkpoint
from stovetop.client import ServiceClient
from stovetop.durable import write_file
from stovetop.errors import InvalidRequest, StovetopError, UnknownName
from stovetop.kitchen.annotations import resolved
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.workflow import WORKFLOW_FILE, Workflow
from stovetop.run_folder import is_run, run_path
from stovetop.runs import Run, check_opening, load, open_run
from stovetop.stored_configs import read_config
from stovetop.tracking.configs import Change, changeable_fields, changed_fields, config_to_dict
from stovetop.tracking.events import Sink

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=RunConfig)
OwnT = TypeVar("OwnT", bound=RunConfig)


@dataclass(frozen=True)
class Finished:
    """What a phase has left. As long as it is not complete, its paths are words: what will be where."""

    name: str
    paths: Mapping[str, str]

    @property
    def state_path(self) -> str:
        """The final weights and the optimizer: for `load_checkpoint_path`, which takes the weights alone."""
        return self._path("state_path")

    @property
    def sampler_path(self) -> str:
        """The final weights, to sample from."""
        return self._path("sampler_path")

    @property
    def file(self) -> str:
        """What a phase without a loop has written."""
        return self._path("file")

    def _path(self, key: str) -> str:
        if key not in self.paths:
            raise UnknownName(f"path that phase {self.name!r} leaves", key, self.paths)
        return self.paths[key]


@dataclass(frozen=True)
class Phase(Generic[ConfigT]):
    """One of several runs in a row. `config_of(config, done)` makes its config of that of the whole and of what earlier
    phases have left, by name; or returns None where it is not to be run: the user gives what it would leave, or has
    chosen another phase. The fields of RunConfig are then those of the whole, but for the folder.

        def reinforcement(config: Config, done: Mapping[str, Finished]) -> RLConfig:
            return RLConfig(load_checkpoint_path=done["supervised"].state_path, ...)
    """

    name: str
    workflow: Workflow
    config_of: Callable[[ConfigT, Mapping[str, Finished]], RunConfig | None]
    file: str | None = (
        None  # of a workflow without a loop: what it leaves in its run, written with `durable.write_file`
    )
    columns: tuple[str, ...] = ()  # the metrics to show

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise InvalidRequest(f"the name of a phase is an identifier, such as 'supervised': {self.name!r}")
        if (self.file is None) == (self.workflow.loop is None):
            raise InvalidRequest(
                "a phase without a loop is complete when its file is there, one with a loop when its final checkpoint "
                f"is; name a file=... for the former alone: phase {self.name!r}, file {self.file!r}"
            )
        if not issubclass(self.config_class, RunConfig):
            raise InvalidRequest(
                f"config_of of phase {self.name!r} must be a function that says what it returns, a class that extends "
                f"RunConfig: def {self.name}(config: Config, done: Mapping[str, Finished]) -> OwnConfig"
            )

    @property
    def config_class(self) -> type:
        """What `config_of` says that it returns."""
        if not isfunction(self.config_of):
            return object
        returned = resolved(signature(self.config_of).return_annotation, self.config_of.__globals__)
        classes = [kind for kind in get_args(returned) or (returned,) if kind is not NoneType]
        return classes[0] if isinstance(classes[0], type) else object

    def left_in(self, folder: Path) -> Finished | None:
        """What it has left in its folder; None where it is not complete."""
        paths = _left_in(folder, self.file)
        return None if paths is None else Finished(self.name, paths)

    def will_leave_in(self, folder: Path) -> Finished:
        """The same in words, before it is complete."""
        kinds = {"state_path": "state", "sampler_path": "weights"} if self.file is None else {"file": self.file}
        return Finished(self.name, {key: f"{folder}: {what}, will exist" for key, what in kinds.items()})


def config_from(whole: RunConfig, kind: type[OwnT], **own: Any) -> OwnT:
    """For `config_of`: the config of a phase that has the fields of this name of the whole, but for its own."""
    names = ({field.name for field in fields(kind)} - own.keys()) & {field.name for field in fields(whole)}
    return kind(**{name: getattr(whole, name) for name in names}, **own)


def _left_in(folder: Path, file: str | None) -> Mapping[str, str] | None:
    if file is not None:
        return {"file": str(folder / file)} if (folder / file).is_file() else None
    last = get_last_checkpoint(folder)
    if last is None or not last.final:
        return None
    paths = {"state_path": last.state_path, "sampler_path": last.sampler_path}
    return {key: path for key, path in paths.items() if path is not None}


# ---- before anything runs --------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A phase of a run."""

    phase: Phase[Any]
    folder: Path
    config: RunConfig | None  # None: it is not run
    is_complete: bool
    is_last: bool  # of those that are run

    @property
    def may_be_longer(self) -> bool:
        """Whether it goes on where it is complete and its config asks for more: nothing begins with what it left."""
        return self.is_last and self.phase.file is None

    def changes(self) -> dict[str, Change]:
        """From the run that is there to this config, of what decides what is learnt."""
        if self.config is None:
            return {}
        changes = changed_fields(read_config(self.folder).config, config_to_dict(self.config))
        always = {name for name, when in changeable_fields(type(self.config)).items() if when.only_while is None}
        return {name: change for name, change in changes.items() if name not in always}

    @property
    def remains(self) -> bool:
        """Whether there is something to do: of a complete phase what comes after its final checkpoint, where it was
        killed in that; and further steps."""
        if self.config is None or not self.is_complete:
            return self.config is not None
        if self.phase.file is not None:
            return False
        was_ended = any(event.name == "workflow.stop" for event in load(self.folder).events)
        return not was_ended or (self.may_be_longer and bool(self.changes()))


def plan_phases(phases: Sequence[Phase[ConfigT]], config: ConfigT) -> list[Planned]:
    """Each phase with its folder and its config, of what earlier phases have left or will leave."""
    done: dict[str, Finished] = {}
    planned: list[Planned] = []
    begins_anew = config.behavior_if_exists == "delete"
    shared = {field.name: getattr(config, field.name) for field in fields(RunConfig)}
    for number, phase in enumerate(phases, start=1):
        folder = run_path(config.log_path) / f"{number}_{phase.name}"
        own = phase.config_of(config, done)
        left = None if begins_anew or own is None else phase.left_in(folder)
        if own is not None:
            own = replace(own, **{**shared, "log_path": str(folder), "behavior_if_exists": "resume"})
            done[phase.name] = left or phase.will_leave_in(folder)
        planned.append(Planned(phase, folder, own, left is not None, is_last=False))
    last = max((index for index, each in enumerate(planned) if each.config is not None), default=-1)
    return [each._replace(is_last=index == last) for index, each in enumerate(planned)]


def check_phases(phases: Sequence[Phase[ConfigT]], config: ConfigT) -> list[Planned]:
    """The plan. Raises, together, every problem that a workflow of it has; and refuses a config that is not the one
    that the run or a phase of it was begun with. Nothing is run or written."""
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"each phase has a name of its own: {', '.join(names)}")
    check_opening(config.log_path, config, config.behavior_if_exists)
    planned = plan_phases(phases, config)
    problems = [
        f"phase {each.folder.name!r}: {problem}"
        for each in planned
        if each.config is not None
        for problem in each.phase.workflow.check(each.config, {"service": ServiceClient, "run": Run}).problems
    ]
    if problems:
        raise InvalidRequest("the phases cannot run:" + "".join(f"\n  - {problem}" for problem in problems))
    if config.behavior_if_exists != "delete":
        for each in planned:
            _refuse_another_config(each)
    return planned


def _refuse_another_config(planned: Planned) -> None:
    if planned.config is None:
        return
    if not planned.is_complete or planned.may_be_longer:
        check_opening(planned.folder, planned.config)
    elif changes := planned.changes():
        listed = "".join(f"\n  {name}: {change}" for name, change in changes.items())
        raise InvalidRequest(
            f"this phase is complete, and others begin with what it has left; its config would be another now:{listed}"
            f"\nTake the old values, choose another log_path, or begin afresh with behavior_if_exists=delete. The "
            f"phase: {planned.folder}"
        )


# ---- running ---------------------------------------------------------------------------------------------------------


async def run_phases(
    phases: Sequence[Phase[ConfigT]],
    config: ConfigT,
    open_service: Callable[[str], ServiceClient],
    *,
    console: bool = True,
    sinks: Sequence[Sink] = (),
) -> None:
    """Checks all phases, then runs them in order, beginning with the first that is not complete. The last one is begun
    again also when it is complete and is to be longer now.

    `open_service` opens the service of a phase, which saves into this folder; `console` and `sinks` are those of
    `open_run`, for every phase."""
    behavior, planned = config.behavior_if_exists, check_phases(phases, config)
    is_complete = not any(each.remains for each in planned)
    with open_run(config.log_path, config, behavior_if_exists=behavior, console=console and is_complete) as whole:
        whole.store_config()
        if is_complete:
            log.info("already complete: all of the %d phases", len(phases))
        config = replace(config, behavior_if_exists="resume")  # what was to be deleted is
        write_file(whole.path / WORKFLOW_FILE, _described(planned))
        for index, phase in enumerate(phases):
            this = plan_phases(phases, config)[index]  # now with what the one before has left
            if this.config is None or not this.remains:
                continue
            with (
                _recorded(whole, phase),
                open_service(str(this.folder)) as service,
                open_run(
                    this.folder,
                    this.config,
                    console=console,
                    columns=phase.columns,
                    sinks=sinks,
                    **this.config.run_options(),
                ) as run,
            ):
                log.info("phase %d of %d: %s", index + 1, len(phases), phase.name)
                await phase.workflow.run(this.config, service=service, run=run)


@contextmanager
def _recorded(whole: Run, phase: Phase[Any]) -> Generator[None]:
    """Emits when a phase begins and how it ends."""
    began_s, outcome = time.perf_counter(), "completed"
    whole.emit("phase.start", phase=phase.name, workflow=phase.workflow.name)
    try:
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        whole.emit("phase.stop", phase=phase.name, seconds=time.perf_counter() - began_s, outcome=outcome)


# ---- a run that is there ---------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """A phase of a run that is there."""

    folder: Path
    is_complete: bool


def phases_in(run: Path) -> list[Listed]:
    """The phases of the run in this folder, those that have not begun too; none where it has no phases."""
    file = run / WORKFLOW_FILE
    if not (is_run(run) and file.is_file()):
        return []
    try:
        entries = [(run / entry["folder"], entry["file"]) for entry in json.loads(file.read_bytes()).get("phases", ())]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StovetopError(f"{file} cannot be read ({error}); remove it, the run writes it when it goes on") from error
    return [Listed(folder, is_complete=_left_in(folder, left) is not None) for folder, left in entries]


def _described(planned: Sequence[Planned]) -> bytes:
    entries = [
        {"folder": each.folder.name, "workflow": each.phase.workflow.name, "file": each.phase.file}
        for each in planned
        if each.config is not None
    ]
    return json.dumps({"phases": entries}, indent=1).encode()

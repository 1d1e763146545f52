"""What can be known of a workflow before it runs: that every name has one source, and every reader one that is there.
All problems are found at once. Nothing is run, and no service is asked.
"""

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, get_args

from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen.annotations import UNKNOWN, fields_of, fits, shown
from stovetop.kitchen.nodes import Condition, Loop, Phase, Placed, Position, Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.stage import annotations_of, optional_of
from stovetop.runs import Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STANDARD_PORTS = ("service", "run")
_NEVER_WRITTEN = "config fields, ports and what the loop gives are never written"


@dataclass(frozen=True)
class Checked:
    """What `Workflow.check` found."""

    workflow: str
    problems: tuple[str, ...]
    unread: tuple[str, ...]  # config fields that nothing reads
    config_fields: Mapping[str, tuple[str, ...]]  # every other field, and what reads it
    ports: Mapping[str, tuple[str, ...]]  # likewise, those that are missing too

    def raise_problems(self) -> None:
        """Raises all of them in one InvalidRequest."""
        if self.problems:
            listed = "".join(f"\n  - {problem}" for problem in self.problems)
            raise InvalidRequest(f"workflow {self.workflow!r} cannot run:{listed}")


def check(
    workflow: str,
    stages: Sequence[Placed],
    loop: Loop | None,
    config: "DataclassInstance | type[DataclassInstance]",
    ports: Mapping[str, object],
) -> Checked:
    """`config` and each of the `ports` may be a value, or its class where there is no value yet."""
    if not dataclasses.is_dataclass(config):
        raise InvalidRequest(f"a config is a dataclass, or a value of one: {config!r}")
    config_class = config if isinstance(config, type) else type(config)
    fields = {each.name: each for each in dataclasses.fields(config_class)}
    names = _Namespace(config_class.__name__, stages)
    annotations = fields_of(config_class)
    for name in fields:
        names.give(name, _Source(f"config field {name!r}", annotations[name], None, fixed=True))
    for name, port in ports.items():
        names.give(name, _Source(f"port {name!r}", port if isinstance(port, type) else type(port), None, fixed=True))
    names.walk(loop)
    problems = [*names.problems, *_port_problems(names, ports), *_shape_problems(stages)]
    problems += [] if isinstance(config, type) else _value_problems(stages, config)
    if loop is not None:
        names.readers.setdefault(str(loop.depth), []).append("the loop")
        in_loop = [each for each in stages if each.phase == "loop"]
        problems += [*_depth_problems(loop, config), *_carry_problems(in_loop, loop)]
        problems += [*_training_problems(stages, in_loop), *_record_problems(in_loop)]
    of_run = (
        {each.name for each in dataclasses.fields(RunConfig)} if issubclass(config_class, RunConfig) else set[str]()
    )
    unread = [name for name in fields if name not in names.readers and name not in of_run]
    problems += [
        f"config field {name!r} is set to {getattr(config, name)!r}, and no stage reads it"
        for name in unread
        if not isinstance(config, type) and getattr(config, name) != _default(fields[name])
    ]
    readers = {name: tuple(who) for name, who in names.readers.items()}
    return Checked(
        workflow,
        tuple(problems),
        tuple(unread),
        {name: readers[name] for name in fields if name in readers},
        {name: readers[name] for name in (*ports, *names.missing) if name in readers},
    )


def _default(field: "dataclasses.Field[object]") -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


# ---- names -----------------------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where a name comes from."""

    what: str
    annotation: object
    phase: Phase | None  # None: it is there from the beginning to the end
    condition: Condition | None = None
    fixed: bool = False  # it is no stage's

    def is_seen_in(self, phase: Phase) -> bool:
        return self.phase in (None, "before", phase)


class _Reader(NamedTuple):
    name: str
    phase: Phase
    kind: str = ""  # "stage", "condition"
    condition: Condition | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.kind else self.name


@dataclass
class _Namespace:
    """The names that there are up to some stage, who reads them, and what was found wrong."""

    config_name: str
    stages: Sequence[Placed]
    sources: dict[str, list[_Source]] = field(default_factory=dict[str, list[_Source]])
    readers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    missing: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # ports, with who reads them
    problems: list[str] = field(default_factory=list[str])

    def walk(self, loop: Loop | None) -> None:
        """Every stage in order, the loop itself in its place."""
        self._stages_of("before", {})
        if loop is None:
            return
        self.read(_Reader("the loop", "before"), loop.items, Positions, optional=False)
        for name, annotation in {**fields_of(Position), "row": Row}.items():
            self.give(name, _Source("the loop", annotation, "loop", fixed=True))
        for name, first in loop.carry.items():
            self.read(_Reader("the loop", "before"), first, UNKNOWN, optional=False)
            given = [source.annotation for source in self.sources.get(first, [])]
            of_list = get_args(given[-1]) if given else ()
            self.give(name, _Source("the loop", of_list[0] if len(of_list) == 1 else UNKNOWN, "loop", fixed=True))
        self._stages_of("loop", loop.carry)
        for name in loop.carry:
            self.sources[name].append(self.sources[name][0]._replace(phase="after"))
        self._stages_of("after", {})

    def _stages_of(self, phase: Phase, carry: Mapping[str, str]) -> None:
        asked: set[Condition] = set()
        for place in self.stages:
            if place.phase != phase:
                continue
            if place.condition is not None and place.condition not in asked:
                asked.add(place.condition)
                reader = _Reader(place.condition.__name__, phase, "condition")
                for name, annotation in annotations_of(place.condition).items():
                    self.read(reader, name, annotation, optional=name in optional_of(place.condition))
            stage, reader = place.stage, _Reader(place.stage.name, phase, "stage", place.condition)
            for parameter, annotation in stage.takes().items():
                self.read(reader, stage.reads[parameter], annotation, optional=parameter in stage.optional)
            for name, annotation in stage.gives().items():
                if name not in carry:
                    self._write(place, name, annotation)

    def give(self, name: str, source: _Source) -> None:
        """Of what is no stage's."""
        self.problems += [
            f"{name!r} has two sources: {other.what}, and {source.what}" for other in self.sources.get(name, [])
        ]
        self.sources.setdefault(name, []).append(source)

    def read(self, reader: _Reader, name: str, annotation: object, *, optional: bool) -> None:
        known = self.readers.setdefault(name, [])
        known += [reader.name] if reader.name not in known else []
        sources = [source for source in self.sources.get(name, []) if source.is_seen_in(reader.phase)]
        if not sources:
            if name in STANDARD_PORTS and not optional:
                self.missing[name] = known
            elif not optional:
                self.problems.append(f"{reader} reads {name!r}, {self._missing(name, reader.phase)}")
            return
        last = sources[-1]
        if not optional and not any(_is_there(source, reader) for source in sources):
            condition = "" if last.condition is None else last.condition.__name__
            self.problems.append(
                f"{reader} reads {name!r}, which {last.what} writes only when {condition}; give the parameter a default"
            )
        if not fits(last.annotation, annotation):
            wanted, given = shown(annotation), shown(last.annotation)
            self.problems.append(f"{reader} reads {name!r} as {wanted}; {last.what} gives {given}")

    def _missing(self, name: str, phase: Phase) -> str:
        writers = [each for each in self.stages if name in each.stage.writes.values()]
        in_loop = [f"stage {each.stage.name!r}" for each in writers if each.phase == "loop"]
        if phase != "loop" and (in_loop or name in self.sources or name in (*Position._fields, "row")):
            return f"which exists only inside the loop ({', '.join(in_loop) or 'the loop gives it'})"
        text = f"and nobody writes it before: no config field of {self.config_name}, no port, no earlier stage's"
        if writers:
            return f"{text}; stage {writers[0].stage.name!r} writes it later"
        names = {*self.sources, *(written for each in self.stages for written in each.stage.writes.values())}
        nearest = difflib.get_close_matches(name, sorted(names), n=1)
        return f"{text}; did you mean {nearest[0]!r}?" if nearest else text

    def _write(self, place: Placed, name: str, annotation: object) -> None:
        who = f"stage {place.stage.name!r}"
        sources = self.sources.setdefault(name, [])
        earlier = [source for source in sources if source.fixed or source.is_seen_in(place.phase)]
        outside = [source for source in earlier if source.phase == "before" and place.phase == "loop"]
        if earlier and earlier[0].fixed:
            self.problems.append(f"{name!r} has two sources: {earlier[0].what}, and {who}; {_NEVER_WRITTEN}")
        elif outside:
            self.problems.append(
                f"{who} changes {name!r} inside the loop, and {outside[0].what} wrote it before the loop: items would "
                f"differ by who came first; write another name"
            )
        elif earlier and name not in place.stage.reads.values():
            self.problems.append(
                f"{name!r} has two sources: {earlier[-1].what}, and {who}; a stage that changes a value reads it too"
            )
        sources.append(_Source(who, annotation, place.phase, place.condition))


def _is_there(source: _Source, reader: _Reader) -> bool:
    """Whether it was written for sure where its reader runs."""
    return source.condition is None or (source.condition, source.phase) == (reader.condition, reader.phase)


def _value_problems(stages: Sequence[Placed], config: "DataclassInstance") -> Iterator[str]:
    """What the config says and a stage cannot take."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    for stage, *_ in stages:
        for name, rule in stage.rules().items():
            if name in values and not rule.fits(values[name]):
                yield f"stage {stage.name!r} reads {name!r}, which must be {rule.says}: {values[name]!r}"


# ---- stages and stations ---------------------------------------------------------------------------------------------


def _port_problems(names: _Namespace, ports: Mapping[str, object]) -> Iterator[str]:
    if names.missing:
        read_by = [f"{name} (by {', '.join(readers)})" for name, readers in names.missing.items()]
        yield f"missing ports: {', '.join(read_by)}".replace("(by", "(read by", 1)
    run = ports.get("run", Run)
    if not issubclass(kind := run if isinstance(run, type) else type(run), Run):
        yield f"port 'run' must be a Run, which open_run gives, not {kind.__name__}"


def _shape_problems(stages: Sequence[Placed]) -> Iterator[str]:
    for name, count in Counter(each.stage.name for each in stages).items():
        if count > 1:
            yield f"{count} stages are named {name!r}; give one of them another: stage.using('other_name')"
    for stage, phase, *_ in stages:
        if stage.opens and phase == "loop":
            yield f"stage {stage.name!r} is an async generator, which stays open until the end; put it before the loop"
        returned = stage.returned()
        names = getattr(returned, "_fields", None) if len(stage.writes) > 1 else None
        if names is not None and not set(stage.writes) <= set(names):
            written = ", ".join(stage.writes)
            yield f"stage {stage.name!r} writes {written}, and returns {shown(returned)} with {', '.join(names)}"


def _depth_problems(loop: Loop, config: "DataclassInstance | type[DataclassInstance]") -> Iterator[str]:
    if isinstance(loop.depth, str) and loop.depth not in (each.name for each in dataclasses.fields(config)):
        yield f"the depth of the loop is {loop.depth!r}, and there is no such config field"
    elif isinstance(loop.depth, str) and not isinstance(config, type):
        depth = getattr(config, loop.depth)
        if type(depth) is not int or depth < 0:
            yield f"config field {loop.depth!r} is the depth of the loop, an integer of 0 or more: {depth!r}"


def _carry_problems(in_loop: Sequence[Placed], loop: Loop) -> Iterator[str]:
    for name, listed in loop.carry.items():
        writers = [each for each in in_loop if name in each.stage.writes.values()]
        if len(writers) != 1 or writers[0].condition is not None:
            found = ", ".join(f"{each.stage.name} ({each})" for each in writers)
            yield f"{name!r} is carried: exactly one stage of the loop writes it, in every step, not {found or 'none'}"
            continue
        last = in_loop.index(writers[0])
        for index, each in enumerate(in_loop):
            is_complete = index > last and each.station == in_loop[-1].station and not each.together
            if listed in each.stage.reads.values() and not is_complete:
                yield (
                    f"stage {each.stage.name!r} reads {listed!r} where it is not complete: inside the loop, that is in "
                    f"the last station, one that serves one item at a time, behind stage {writers[0].stage.name!r}"
                )


def _training_problems(stages: Sequence[Placed], in_loop: Sequence[Placed]) -> Iterator[str]:
    """What is submitted to a training client takes effect in program order, which only one serial station has."""
    clients = {name for stage, *_ in stages for name, kind in stage.annotations().items() if _is_training_client(kind)}
    for client in sorted(clients):
        users = [each for each in in_loop if client in each.stage.reads.values()]
        for each in users:
            if each.together:
                yield (
                    f"stage {each.stage.name!r} uses the training client in a station that serves items together: what "
                    f"it submits for an item would mix with what it submits for the next; put it in one that does not"
                )
        first_of = {each.station: each.stage.name for each in reversed(users)}
        if len(first_of) > 1:
            last, *others = map(repr, first_of.values())
            number = "two" if len(first_of) == 2 else len(first_of)
            yield (
                f"stages {', '.join(reversed(others))} and {last} use the training client in {number} stations: what "
                f"one submits for an item would mix with what the other submits for the next; put them in one station"
            )


def _is_training_client(annotation: object) -> bool:
    return TrainingClient in (annotation, *get_args(annotation))


def _record_problems(in_loop: Sequence[Placed]) -> Iterator[str]:
    """A checkpoint's row comes behind its step's row: a run killed in between would go on without the latter."""
    order = {each.stage.function.__name__: index for index, each in enumerate(in_loop)}
    if (recorded := order.get("record_checkpoint")) is None:
        return
    if order.get("log_step", -1) > recorded or in_loop[recorded].station != in_loop[-1].station:
        name = in_loop[recorded].stage.name
        yield f"stage {name!r} must be in the last station, behind log_step: a run killed in between would lose a row"

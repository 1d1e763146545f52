"""What can be known of a workflow before it runs: that every name has one source, and every reader one that is there.

`_table` lists who gives a name and who reads it, in the order of the run; each line is compared with the sources before
it. All problems are found at once. Nothing is run, and no service is asked.
"""

import dataclasses
import difflib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args, get_origin

from stovetop.client import TrainingClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen.annotations import UNKNOWN, fields_of, fits, shown
from stovetop.kitchen.nodes import Loop, Phase, Placed, Position, Positions
from stovetop.kitchen.run import Row
from stovetop.kitchen.run_config import RunConfig
from stovetop.kitchen.stage import AnyStage
from stovetop.rules import Rule, Whole
from stovetop.runs import Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STANDARD_PORTS = ("service", "run")
SOURCES = ("gives", "changes")


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
    config_class = _class_of(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    annotations = fields_of(config_class)
    table = list(_table(stages, loop, {name: annotations[name] for name in fields}, ports))
    readers: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for use in table:
        if use.how not in SOURCES and use.by not in readers[use.name]:
            readers[use.name] += (use.by,)
    unwritten = {use.name for use in table if use.how == "reads"} - {use.name for use in table if use.how in SOURCES}
    missing = {name: by for name, by in readers.items() if name in STANDARD_PORTS and name in unwritten}
    of_run = {field.name for field in dataclasses.fields(RunConfig)} if issubclass(config_class, RunConfig) else ()
    unread = tuple(name for name in fields if name not in readers and name not in of_run)
    values = {} if config is config_class else {name: getattr(config, name) for name in fields}
    problems = [
        *_name_problems(table, config_class.__name__),
        *_value_problems(table, values),
        *_port_problems(missing, ports),
        *_stage_problems(stages),
    ]
    if loop is not None:
        problems += _loop_problems([each for each in stages if each.phase == "loop"], loop, table)
        problems += _depth_problems(stages, loop, values)
    problems += [
        f"config field {name!r} is set to {values[name]!r}, and no stage reads it"
        for name in unread
        if name in values and values[name] != _default(fields[name])
    ]
    config_fields = {name: readers[name] for name in fields if name in readers}
    of_ports = {name: readers[name] for name in (*ports, *missing) if name in readers}
    return Checked(workflow, tuple(dict.fromkeys(problems)), unread, config_fields, of_ports)


def _class_of(value: object) -> type:
    return value if isinstance(value, type) else type(value)


def _default(field: "dataclasses.Field[object]") -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


# ---- names -----------------------------------------------------------------------------------------------------------


_When = (
    tuple[Phase | None, Callable[..., object]] | None
)  # a condition, which each phase asks anew; None: with one answer


class _Use(NamedTuple):
    """One line of the table: a source of a name, or what reads it."""

    role: str  # "stage", "condition", "config field", "port"; nothing for the loop
    by: str
    how: Literal["gives", "changes", "reads", "may read"]
    name: str
    annotation: object
    phase: Phase | None = None  # None: from the beginning to the end
    when: _When = None

    def __str__(self) -> str:
        return f"{self.role} {self.by!r}" if self.role else self.by


def _table(
    stages: Sequence[Placed], loop: Loop | None, fields: Mapping[str, object], ports: Mapping[str, object]
) -> Iterator[_Use]:
    yield from (_Use("config field", name, "gives", name, annotation) for name, annotation in fields.items())
    yield from (_Use("port", name, "gives", name, _class_of(port)) for name, port in ports.items())
    constant = {*fields, *ports}
    yield from _uses(stages, "before", constant)
    if loop is None:
        return
    depth = {loop.depth: Annotated[int, Whole(0)]} if isinstance(loop.depth, str) else {}
    for name, annotation in {loop.items: Positions, **depth, **dict.fromkeys(loop.carry.values(), UNKNOWN)}.items():
        yield _Use("", "the loop", "reads", name, annotation, "before")
    written = {name: annotation for each in stages for name, annotation in each.stage.gives().items()}
    carried = {name: written.get(name, UNKNOWN) for name in loop.carry}
    for name, annotation in [*fields_of(Position).items(), ("row", Row), *carried.items()]:
        yield _Use("", "the loop", "gives", name, annotation, "loop")
    yield from _uses(stages, "loop", constant, carried)
    yield from (_Use("", "the loop", "gives", name, annotation, "after") for name, annotation in carried.items())
    yield from _uses(stages, "after", constant)


def _uses(stages: Sequence[Placed], phase: Phase, constant: set[str], carried: Container[str] = ()) -> Iterator[_Use]:
    """`constant` are the names whose values never change: a condition on them alone holds everywhere or nowhere."""
    for stage, condition in [(each.stage, each.condition) for each in stages if each.phase == phase]:
        when = None
        if condition is not None:
            is_constant = constant.issuperset(condition.reads.values())
            when = (None if is_constant else phase, condition.function)
        if condition is not None:
            yield from _reads("condition", condition, phase)
        yield from _reads("stage", stage, phase, when)
        for name, annotation in stage.gives().items():
            if name not in carried:
                how = "changes" if name in stage.reads.values() else "gives"
                yield _Use("stage", stage.name, how, name, annotation, phase, when)


def _reads(role: str, reader: AnyStage, phase: Phase, when: _When = None) -> Iterator[_Use]:
    for parameter, annotation in reader.takes().items():
        how = "may read" if parameter in reader.optional else "reads"
        yield _Use(role, reader.name, how, reader.reads[parameter], annotation, phase, when)


def _name_problems(table: Sequence[_Use], config_name: str) -> Iterator[str]:
    sources: defaultdict[str, list[_Use]] = defaultdict(list)
    for use in table:
        seen = [each for each in sources[use.name] if each.phase in (None, "before", use.phase)]
        if use.how in SOURCES:
            sources[use.name].append(use)
            yield from _source_problems(use, seen) if seen else ()
        elif seen:
            yield from _reader_problems(use, seen)
        elif use.how == "reads" and use.name not in STANDARD_PORTS:
            yield f"{use} reads {use.name!r}, {_why_missing(use, table, config_name)}"


def _source_problems(use: _Use, others: Sequence[_Use]) -> Iterator[str]:
    first, last = others[0], others[-1]
    if use.role != "stage":
        yield f"{use.name!r} has two sources: {first}, and {use}"
    elif first.role != "stage":
        rule = "config fields, ports and what the loop gives are never written"
        yield f"{use.name!r} has two sources: {first}, and {use}; {rule}"
    elif (first.phase, use.phase) == ("before", "loop"):
        yield (
            f"{use} changes {use.name!r} inside the loop, and {first} wrote it before the loop: items would differ by "
            f"who came first; write another name"
        )
    elif use.how == "gives":
        yield f"{use.name!r} has two sources: {last}, and {use}; a stage that changes a value reads it too"


def _reader_problems(use: _Use, sources: Sequence[_Use]) -> Iterator[str]:
    last = sources[-1]
    if last.when and use.how == "reads" and all(each.when not in (None, use.when) for each in sources):
        advice = "give the parameter a default" if use.role else "it is needed in any case"
        yield f"{use} reads {use.name!r}, which {last} writes only when {last.when[1].__name__}; {advice}"
    if not fits(last.annotation, use.annotation):
        yield f"{use} reads {use.name!r} as {shown(use.annotation)}; {last} gives {shown(last.annotation)}"


def _value_problems(table: Sequence[_Use], values: Mapping[str, object]) -> Iterator[str]:
    """What the config says and a reader cannot take: `Annotated[int, Whole(1)]`."""
    for use in table:
        is_ruled = use.how not in SOURCES and use.name in values and get_origin(use.annotation) is Annotated
        for rule in get_args(use.annotation)[1:] if is_ruled else ():
            if isinstance(rule, Rule) and not rule.fits(values[use.name]):
                yield f"{use} reads {use.name!r}, which must be {rule.says}: {values[use.name]!r}"


def _why_missing(use: _Use, table: Sequence[_Use], config_name: str) -> str:
    sources = [each for each in table if each.name == use.name and each.how in SOURCES]
    in_loop = [str(each) if each.role else "the loop gives it" for each in sources if each.phase == "loop"]
    if in_loop and use.phase != "loop":
        return f"which exists only inside the loop ({', '.join(in_loop)})"
    text = f"and nobody writes it before: no config field of {config_name}, no port, no earlier stage's"
    if sources:
        return f"{text}; {sources[0]} writes it later"
    nearest = difflib.get_close_matches(use.name, {each.name for each in table if each.how in SOURCES}, n=1)
    return f"{text}; did you mean {nearest[0]!r}?" if nearest else text


# ---- ports, stages and the loop --------------------------------------------------------------------------------------


def _port_problems(missing: Mapping[str, Sequence[str]], ports: Mapping[str, object]) -> Iterator[str]:
    if missing:
        read_by = [f"{name} (by {', '.join(readers)})" for name, readers in missing.items()]
        yield f"missing ports: {', '.join(read_by)}".replace("(by", "(read by", 1)
    if not issubclass(kind := _class_of(ports.get("run", Run)), Run):
        yield f"port 'run' must be a Run, which open_run gives, not {kind.__name__}"


def _stage_problems(stages: Sequence[Placed]) -> Iterator[str]:
    for name, count in Counter(each.stage.name for each in stages).items():
        if count > 1:
            yield f"{count} stages are named {name!r}; give one of them another: stage.using('other_name')"
    for stage, _, phase, *_ in stages:
        if stage.opens and phase == "loop":
            yield f"stage {stage.name!r} is an async generator, which stays open until the end; put it before the loop"
        returned = stage.returned()
        names = getattr(returned, "_fields", None) if len(stage.writes) > 1 else None
        if names is not None and not set(stage.writes) <= set(names):
            written = ", ".join(stage.writes)
            yield f"stage {stage.name!r} writes {written}, and returns {shown(returned)} with {', '.join(names)}"


def _loop_problems(stages: Sequence[Placed], loop: Loop, table: Sequence[_Use]) -> Iterator[str]:
    """Of its own `stages`."""
    for name, listed in loop.carry.items():
        writers = [each for each in stages if name in each.stage.writes.values()]
        if len(writers) != 1 or writers[0].condition or writers[0].together:
            found = ", ".join(f"{each.stage.name} ({each})" for each in writers)
            yield f"{name!r} is carried: exactly one stage of the loop writes it, in every step, not {found or 'none'}"
            continue
        behind = f"complete only behind stage {writers[0].stage.name!r}, which writes what is carried"
        for stage in (each.stage for each in stages[: stages.index(writers[0]) + 1]):
            if listed in stage.reads.values():
                yield f"stage {stage.name!r} reads {listed!r}, {behind}"
    for client in sorted({use.name for use in table if TrainingClient in (use.annotation, *get_args(use.annotation))}):
        yield from _training_problems([each for each in stages if client in each.stage.reads.values()])
    order = {each.stage.function.__name__: index for index, each in enumerate(stages)}
    recorded = order.get("record_checkpoint")
    if recorded is not None and (
        order.get("log_step", -1) > recorded or stages[recorded].station != stages[-1].station
    ):
        name = stages[recorded].stage.name
        yield f"stage {name!r} must be in the last station, behind log_step: a run killed in between would lose a row"


def _depth_problems(stages: Sequence[Placed], loop: Loop, values: Mapping[str, object]) -> Iterator[str]:
    """Of a depth that is a number: stages that correct for it, and save what a resumed run needs, go by another one."""
    own, depth = "max_steps_off_policy", loop.depth
    readers = [each.stage for each in stages if own in each.stage.reads]
    if not values or not readers or not isinstance(depth, int) or depth < 1:
        return
    default = inspect.signature(readers[0].function).parameters[own].default
    name = readers[0].reads[own]
    known = values.get(name, default)
    if isinstance(known, int) and known < depth:
        by = ", ".join(reader.name for reader in readers)
        yield f"the loop is at depth {depth}, and {by} take it to be {name}: set {name}={depth}, it is {known}"


def _training_problems(users: Sequence[Placed]) -> Iterator[str]:
    """What is submitted to a training client takes effect in program order, which only one serial station has."""
    for stage in (each.stage for each in users if each.together):
        yield (
            f"stage {stage.name!r} uses the training client in a station that serves items together: what it submits "
            f"for an item would mix with what it submits for the next; put it in one that does not"
        )
    first_of = {each.station: repr(each.stage.name) for each in reversed(users)}
    if len(first_of) > 1:
        *others, last = reversed(first_of.values())
        number = "two" if len(first_of) == 2 else len(first_of)
        yield (
            f"stages {', '.join(others)} and {last} use the training client in {number} stations: what one submits for "
            f"an item would mix with what the other submits for the next; put them in one station"
        )

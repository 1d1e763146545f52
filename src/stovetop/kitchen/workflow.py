"""A workflow: stages in order, with at most one loop. A value that can be described, checked, edited and run.

Stages share one namespace. A name comes from a field of the config, from a port (an argument of `run`), or from the
stage that writes it; inside the loop also from the item: `step`, `epoch`, `batch`, `enters_epoch`, `ends_epoch`, `row`
and what is carried. Every name has one source; a stage that writes what another wrote reads it too. What a stage in the
loop writes belongs to its item, and is gone when the item leaves the loop.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from stovetop.durable import write_file
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen.annotations import UNKNOWN
from stovetop.kitchen.check import Checked, check
from stovetop.kitchen.nodes import Loop, Node, Placed, Station, When, check_kinds, placed
from stovetop.kitchen.run import Runner
from stovetop.kitchen.stage import AnyStage, Stage
from stovetop.runs import Run

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WORKFLOW_FILE = "workflow.json"  # in the run
_Edit = Callable[[AnyStage | When], Sequence[AnyStage | When]]


@dataclass(frozen=True, init=False)
class Workflow:
    """`Workflow("supervised", load, Loop("positions", Station(train, log)), save)`. Edits return a new one."""

    name: str
    nodes: tuple[Node, ...]

    def __init__(self, name: str, /, *nodes: Node) -> None:
        check_kinds("a Workflow", nodes, Stage, When, Loop)
        if sum(isinstance(node, Loop) for node in nodes) > 1:
            raise InvalidRequest(f"a workflow has one loop at most; make two of it, one run after the other: {name!r}")
        vars(self).update(name=name, nodes=nodes)

    @property
    def stages(self) -> list[Placed]:
        """All of them, in order, each with its place."""
        return placed(self.nodes)

    @property
    def loop(self) -> Loop | None:
        """The one that it has, if it has one."""
        return next((node for node in self.nodes if isinstance(node, Loop)), None)

    def check(
        self, config: "DataclassInstance | type[DataclassInstance]", ports: Mapping[str, object] | None = None
    ) -> Checked:
        """Every problem that can be known before it runs. The config and each port may be a value, or its class where
        there is no value yet. With a value, a field that nothing reads must have its default."""
        return check(self.name, self.stages, self.loop, config, ports or {})

    async def run(self, config: "DataclassInstance", **ports: object) -> dict[str, object]:
        """Checks it, runs it, and returns what the stages outside the loop have written, and what was carried.

        Problems are raised together, as one InvalidRequest, before anything runs; then the first failure is raised,
        what a stage raises as a StageFailed. Events go to the port `run`, if there is one. A run resumes because its
        directory says so: the set-up stages run again, and say where the loop begins. `workflow.json` in there is what
        `describe` says of the workflow that ran last.
        """
        if isinstance(config, type):
            raise InvalidRequest(f"a workflow runs with a value of its config, not with the class: {config.__name__}")
        self.check(config, {name: type(port) for name, port in ports.items()}).raise_problems()
        run = ports.get("run")
        if isinstance(run, Run):
            described = json.dumps(dataclasses.asdict(self.describe()), indent=1)
            write_file(run.path / WORKFLOW_FILE, described.encode())
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | ports
        return await Runner(self.name, self.stages, given).run(self.loop)

    def describe(self) -> "Description":
        """Every stage, with what it reads and writes."""
        stages_of: dict[str, list[str]] = {}  # by the name whose type is not known
        for stage, *_ in self.stages:
            for name, kind in (stage.takes() | stage.gives()).items():
                if kind is UNKNOWN:
                    stages_of.setdefault(name, []).append(stage.name)
        notes = [
            f"the type of {name!r} is not known when the program runs, and not compared: {', '.join(stages)}"
            for name, stages in stages_of.items()
        ]
        if self.loop is not None and self.loop.depth != 0 and [each.together for each in self.loop.stations] == [False]:
            notes.insert(0, f"depth {self.loop.depth}, one station: nothing overlaps")
        return Description(self.name, tuple(map(StageRow.of, self.stages)), tuple(notes))

    # ---- edits

    def named(self, name: str) -> "Workflow":
        """The same under another name, which its events and errors carry."""
        return Workflow(name, *self.nodes)

    def at_depth(self, depth: int | str, carry: Mapping[str, str] | None = None) -> "Workflow":
        """With its loop at another depth, and with another carry where one is given: {} is none."""
        loop = self.loop
        if loop is None:
            raise InvalidRequest(f"a workflow without a loop has no depth: {self.name!r}")
        other = Loop(loop.items, *loop.stations, depth=depth, carry=loop.carry if carry is None else carry)
        return Workflow(self.name, *(other if node is loop else node for node in self.nodes))

    def replace(self, name: str, *new: AnyStage | When) -> "Workflow":
        """With others in the place of this stage. Where it is under a condition, so are they."""
        return self._edited(name, lambda node: _replaced(node, name, new))

    def remove(self, name: str) -> "Workflow":
        """Without this stage; a When or a Station that has no other disappears."""
        return self.replace(name)

    def insert_before(self, name: str, *new: AnyStage | When) -> "Workflow":
        """With others before this stage; where that is under a condition, before it and not under it."""
        return self._edited(name, lambda node: (*new, node))

    def insert_after(self, name: str, *new: AnyStage | When) -> "Workflow":
        """With others after this stage; where that is under a condition, after it and not under it."""
        return self._edited(name, lambda node: (node, *new))

    def _edited(self, name: str, edit: _Edit) -> "Workflow":
        """With others in the place of the node that is or holds this stage."""
        names = [each.stage.name for each in self.stages]
        if name not in names:
            raise UnknownName(f"stage of workflow {self.name!r}", name, names)
        if names.count(name) > 1:
            raise InvalidRequest(f"{names.count(name)} stages have this name; give one of them another: {name!r}")

        def edited(nodes: Sequence[Node]) -> Iterator[Any]:
            for node in nodes:
                if isinstance(node, Loop):
                    stations = [Station(*edited(each.nodes), together=each.together) for each in node.stations]
                    kept = [each for each in stations if each.nodes]
                    yield Loop(node.items, *kept, depth=node.depth, carry=node.carry)
                else:
                    is_it = any(place.stage.name == name for place in placed([node]))
                    yield from edit(node) if is_it else (node,)

        return Workflow(self.name, *edited(self.nodes))


def _replaced(node: AnyStage | When, name: str, new: Sequence[AnyStage | When]) -> Sequence[AnyStage | When]:
    if isinstance(node, Stage):
        return new
    stages: list[Any] = [each for stage in node.stages for each in (new if stage.name == name else (stage,))]
    return [When(node.condition.function, *stages)] if stages else []


# ---- as it is shown --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageRow:
    """One stage, as `describe` shows it."""

    stage: str
    where: str  # before the loop; loop, station 2, when saves
    reads: tuple[str, ...]
    optional: tuple[str, ...]  # those of `reads` that may be absent
    writes: tuple[str, ...]
    doc: str
    file: str
    line: int

    @classmethod
    def of(cls, place: Placed) -> Self:
        """That of a stage."""
        stage, code = place.stage, inspect.unwrap(place.stage.function).__code__
        reads, writes = tuple(stage.reads.values()), tuple(stage.writes.values())
        optional = tuple(name for parameter, name in stage.reads.items() if parameter in stage.optional)
        file, line = code.co_filename, code.co_firstlineno
        return cls(stage.name, str(place), reads, optional, writes, stage.doc, file, line)


@dataclass(frozen=True)
class Description:
    """What `Workflow.describe` returns."""

    workflow: str
    stages: tuple[StageRow, ...]
    notes: tuple[str, ...]

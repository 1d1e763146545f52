"""What `stovetop describe` says: of a recipe its stages, its ports and the fields of its config, of a flat loop the
fields alone; of a workflow its stages and what it reads from a config. Nothing is run.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import stovetop
from stovetop.cli.configs import Field, config_fields, fields_in_order
from stovetop.cli.loading import RecipeModule, checked_workflow, phases_of, presets_of, workflow_of
from stovetop.cli.tables import WIDTH, filled
from stovetop.kitchen.annotations import shown
from stovetop.kitchen.stage import AnyStage
from stovetop.tracking.configs import config_to_dict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stovetop.kitchen.phases import Phase
    from stovetop.kitchen.run_config import RunConfig
    from stovetop.kitchen.workflow import StageRow, Workflow

PACKAGE = Path(stovetop.__file__).parent
PORTS = ("service", "run")  # that every recipe passes


class Input(NamedTuple):
    """A name that a workflow reads and none of its stages writes: its config has such a field."""

    name: str
    type: str
    default: str  # where the field may be left out; "" where it may not
    read_by: list[str]


# ---- for programs ----------------------------------------------------------------------------------------------------


def recipe_as_json(
    name: str, recipe: RecipeModule, preset: str | None = None, config: "DataclassInstance | None" = None
) -> dict[str, object]:
    """One object: recipe, description, presets, fields; of a workflow also its name, stages, ports and notes, and what
    reads each field; of phases each one's. Of a preset, whose config is given, also its name and the config."""
    fields = [field._asdict() for field in config_fields(recipe.Config)]
    described: dict[str, object] = {
        "recipe": name,
        "description": inspect.getdoc(recipe) or "",
        "presets": {each: config_to_dict(value) for each, value in presets_of(recipe).items()},
        "fields": fields,
    }
    if config is not None:
        described |= {"preset": preset, "config": config_to_dict(config)}
    if phases := phases_of(recipe):
        return described | {"phases": _phases_as_json(phases)}
    workflow, checked = workflow_of(recipe), checked_workflow(recipe, recipe.Config)
    if workflow is None or checked is None:
        return described
    for field in fields:
        field["read_by"] = list(checked.config_fields.get(str(field["name"]), ()))
    ports = {port: list(readers) for port, readers in checked.ports.items()}
    return described | _workflow_as_json(workflow) | {"ports": ports}


def _phases_as_json(phases: "Sequence[Phase[Any]]") -> list[dict[str, object]]:
    """Of each its name, and what `workflow_as_json` says of its workflow."""
    return [{"phase": f"{index}_{each.name}"} | workflow_as_json(each.workflow) for index, each in enumerate(phases, 1)]


def workflow_as_json(workflow: "Workflow") -> dict[str, object]:
    """One object: workflow, stages, notes, ports, and the inputs that a config has fields for."""
    inputs = inputs_of(workflow)
    ports = {port: inputs[port].read_by for port in PORTS if port in inputs}
    others = [each._asdict() for name, each in inputs.items() if name not in PORTS]
    return _workflow_as_json(workflow) | {"ports": ports, "inputs": others}


def _workflow_as_json(workflow: "Workflow") -> dict[str, object]:
    description = workflow.describe()
    return {
        "workflow": description.workflow,
        "stages": [asdict(row) for row in description.stages],
        "notes": list(description.notes),
    }


def inputs_of(workflow: "Workflow") -> dict[str, Input]:
    """What it reads and does not write, by name, in the order of reading."""
    given = {name for place in workflow.stages for name in place.stage.writes.values()}
    if workflow.loop is not None:
        given |= {"step", "epoch", "batch", "enters_epoch", "ends_epoch", "row", *workflow.loop.carry}
    inputs: dict[str, Input] = {}
    for read in _reads(workflow):
        if read.name not in given:
            known = inputs.setdefault(read.name, read)
            known.read_by.extend(reader for reader in read.read_by if reader not in known.read_by)
            inputs[read.name] = known if read.default else known._replace(default="")
    return inputs


def _reads(workflow: "Workflow") -> Iterator[Input]:
    """Everything that is read, in order, once for each reader."""
    asked: set[object] = set()
    for place in workflow.stages:
        if place.condition is not None and place.condition.function not in asked:
            asked.add(place.condition.function)
            yield from _reads_of(place.condition)
        yield from _reads_of(place.stage)
    if workflow.loop is not None and isinstance(workflow.loop.depth, str):
        yield Input(workflow.loop.depth, "int", "", ["the loop"])


def _reads_of(reader: AnyStage) -> Iterator[Input]:
    parameters = inspect.signature(reader.function).parameters
    for own, annotation in reader.takes().items():
        default = "" if own not in reader.optional else str(parameters[own].default)
        yield Input(reader.reads[own], shown(annotation), default, [reader.name])


# ---- for people ------------------------------------------------------------------------------------------------------


def recipe_as_text(
    recipe: RecipeModule,
    preset: str | None = None,
    config: "DataclassInstance | None" = None,
    *,
    places: bool = True,
    width: int = WIDTH,
) -> str:
    """The same as lines of at most this width. `places`: with the file and the line of each stage."""
    lines = [*_reflowed(inspect.getdoc(recipe) or "", width), ""]
    for index, phase in enumerate(phases_of(recipe), start=1):
        lines += [f"Phase {index}_{phase.name}.", *_stage_lines(phase.workflow, width, places=places), ""]
    workflow, checked = workflow_of(recipe), checked_workflow(recipe, recipe.Config)
    if workflow is not None and checked is not None:
        lines += [*_stage_lines(workflow, width, places=places), "", *_port_lines(checked.ports, width), ""]
    fields = config_fields(recipe.Config)
    if config is None:
        lines += _preset_lines(recipe, fields, width)
    else:
        lines += [*filled(f"With the preset {preset!r}; what it sets is shown with its default.", "", width), ""]
    return "\n".join([*lines, *_field_lines(fields, {} if config is None else _set_by(config, fields), width)])


def _preset_lines(recipe: RecipeModule, fields: Sequence[Field], width: int) -> Iterator[str]:
    """What each preset sets."""
    for name, config in presets_of(recipe).items():
        values = " ".join(f"{field}={value}" for field, value in _set_by(config, fields).items())
        yield from filled(f"The preset {name!r} sets {values}", "", width)
        yield ""


def _set_by(config: "DataclassInstance", fields: Sequence[Field]) -> dict[str, str]:
    """The fields that have not their default, with their values."""
    values = {field.name: str(getattr(config, field.name)) for field in fields}
    return {field.name: values[field.name] for field in fields if values[field.name] != field.default}


def phases_as_text(phases: "Sequence[Phase[Any]]", config: "DataclassInstance", width: int = WIDTH) -> Iterator[str]:
    """What each phase of a run with this config would do."""
    from stovetop.kitchen.phases import plan_phases

    for phase, folder, own, is_complete, _ in plan_phases(phases, cast("RunConfig", config)):
        if own is None:
            yield f"Phase {folder.name} is not run: this config does not need it."
            continue
        yield f"Phase {folder.name}{' is complete' if is_complete else ''}, in {folder}:"
        yield from (f"  {field.name}={getattr(own, field.name)}" for field in fields_in_order(type(own)))
        stages = ", ".join(place.stage.name for place in phase.workflow.stages)
        yield from filled(f"The stages: {stages}.", "  ", width)


def workflow_as_text(workflow: "Workflow", *, places: bool = True, width: int = WIDTH) -> str:
    """The same as lines, likewise."""
    inputs = inputs_of(workflow)
    ports = {port: inputs[port].read_by for port in PORTS if port in inputs}
    lines = [*_stage_lines(workflow, width, places=places), "", *_port_lines(ports, width), ""]
    lines += filled(
        "What its config has fields for, or a stage of yours writes; what has a default may be left out:", "", width
    )
    for name, each in inputs.items():
        if name not in PORTS:
            lines.append(f"  {name}: {each.type}" + (f" = {each.default}" if each.default else ""))
            lines += filled(f"read by {', '.join(each.read_by)}", "      ", width)
    return "\n".join(lines)


def _stage_lines(workflow: "Workflow", width: int, *, places: bool) -> Iterator[str]:
    """In order, each with what it reads and writes; what may be absent is in brackets."""
    description = workflow.describe()
    yield from filled(
        f"The stages of the workflow {description.workflow!r}; what is read in [brackets] may be absent:", "", width
    )
    for where, rows in groupby(description.stages, key=lambda row: row.where):
        yield f"  {where}"
        for row in rows:
            yield f"    {row.stage}" + (f"  ({_short_path(row.file)}:{row.line})" if places else "")
            yield from filled(row.doc, " " * 8, width)
            written = f"; writes {', '.join(row.writes)}" if row.writes else ""
            yield from filled(f"reads {_listed(row)}{written}", " " * 8, width)
    for note in description.notes:
        yield from filled(f"note: {note}", "  ", width)


def _port_lines(ports: Mapping[str, Iterable[str]], width: int) -> Iterator[str]:
    yield "The ports, and what reads them:"
    for port, readers in ports.items():
        yield from filled(f"{port}: {', '.join(readers)}", "  ", width)


def _field_lines(fields: Sequence[Field], preset: Mapping[str, str], width: int) -> Iterator[str]:
    yield "The fields of the config:"
    for field in fields:
        value = f"{preset[field.name]} (default {field.default})" if field.name in preset else field.default
        yield f"  {field.name}: {field.type} = {value}"
        if meaning := "; ".join(part for part in (field.meaning, field.accepts) if part):
            yield from filled(meaning, "      ", width)
    changes = [
        field.name + (f" ({field.may_change})" if field.may_change != "always" else "")
        for field in fields
        if field.may_change
    ]
    if changes:
        yield from filled(f"A run that goes on may have another value of: {', '.join(changes)}.", "", width)


def _listed(row: "StageRow") -> str:
    return ", ".join(f"[{name}]" if name in row.optional else name for name in row.reads) or "nothing"


def _short_path(file: str) -> str:
    """From the package on, for a file of the package; else from the current folder on, where it is in there."""
    for root in (PACKAGE.parent, Path.cwd()):
        if Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return file


def _reflowed(text: str, width: int) -> Iterator[str]:
    """Paragraphs; one with an indented line stays as it is."""
    for index, paragraph in enumerate(text.split("\n\n")):
        if index:
            yield ""
        if re.search(r"^\s", paragraph, re.MULTILINE):
            yield paragraph
        else:
            yield from textwrap.wrap(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)

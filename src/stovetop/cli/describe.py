"""What `stovetop describe` and `--dry-run` say of a recipe: its stages, its ports, the fields of its config. A recipe
that is a flat loop has fields alone. Nothing is run.
"""

import importlib
import inspect
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import stovetop
from stovetop.cli.configs import Field, config_fields
from stovetop.cli.words import entry
from stovetop.client import ServiceClient
from stovetop.recipes import RECIPES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stovetop.kitchen.check import Checked
    from stovetop.kitchen.workflow import Description, StageRow, Workflow

PACKAGE = Path(stovetop.__file__).parent


class RecipeModule(Protocol):
    """What the module of a recipe has. It may have `check(config)` too, for `--dry-run`, which refuses what can be
    known to be wrong without a model and without writing anything; and `WORKFLOW`, which its `main` runs with the ports
    `service` and `run`."""

    Config: type["DataclassInstance"]
    main: Callable[["DataclassInstance"], Coroutine[None, None, None]]


def load_recipe(name: str) -> RecipeModule:
    """The one of this name, in which - is as good as _."""
    recipe = entry("recipe", name.replace("-", "_"), RECIPES)
    return cast(RecipeModule, importlib.import_module(recipe.module))


def workflow_of(recipe: RecipeModule) -> "Workflow | None":
    """None for a flat loop."""
    return vars(recipe).get("WORKFLOW")


def checked_workflow(recipe: RecipeModule, config: "DataclassInstance | type[DataclassInstance]") -> "Checked | None":
    """What can be known of the recipe's workflow with this config, or with any of its class."""
    from stovetop.runs import Run

    workflow = workflow_of(recipe)
    return None if workflow is None else workflow.check(config, {"service": ServiceClient, "run": Run})


# ---- for programs ----------------------------------------------------------------------------------------------------


def as_json(name: str, recipe: RecipeModule) -> dict[str, object]:
    """One object: recipe, description, fields; of a workflow also its name, stages, ports and notes, and what reads
    each field."""
    fields = [field._asdict() for field in config_fields(recipe.Config)]
    described: dict[str, object] = {"recipe": name, "description": inspect.getdoc(recipe) or "", "fields": fields}
    workflow, checked = workflow_of(recipe), checked_workflow(recipe, recipe.Config)
    if workflow is None or checked is None:
        return described
    for field in fields:
        field["read_by"] = list(checked.config_fields.get(str(field["name"]), ()))
    description = workflow.describe()
    return {
        **described,
        "workflow": description.workflow,
        "stages": [asdict(row) for row in description.stages],
        "ports": {port: list(readers) for port, readers in checked.ports.items()},
        "notes": list(description.notes),
    }


# ---- for people ------------------------------------------------------------------------------------------------------


def as_text(recipe: RecipeModule, *, places: bool = True) -> str:
    """The same as lines. `places`: with the file and the line of each stage."""
    lines = [inspect.getdoc(recipe) or "", ""]
    workflow, checked = workflow_of(recipe), checked_workflow(recipe, recipe.Config)
    if workflow is not None and checked is not None:
        lines += [*_stage_lines(workflow.describe(), places=places), "", *_port_lines(checked), ""]
    return "\n".join([*lines, *_field_lines(config_fields(recipe.Config))])


def _stage_lines(description: "Description", *, places: bool) -> Iterator[str]:
    """In order, each with what it reads and writes; what may be absent is in brackets."""
    yield f"The stages of the workflow {description.workflow!r}; what is read in [brackets] may be absent:"
    for where, rows in groupby(description.stages, key=lambda row: row.where):
        yield f"  {where}"
        for row in rows:
            yield f"    {row.stage}" + (f"  ({_short_path(row.file)}:{row.line})" if places else "")
            yield f"        {row.doc}"
            yield f"        reads {_listed(row)}" + (f"; writes {', '.join(row.writes)}" if row.writes else "")
    for note in description.notes:
        yield f"  note: {note}"


def _port_lines(checked: "Checked") -> Iterator[str]:
    yield "The ports, and what reads them:"
    for port, readers in checked.ports.items():
        yield f"  {port}: {', '.join(readers)}"


def _field_lines(fields: Sequence[Field]) -> Iterator[str]:
    yield "The fields of the config:"
    for field in fields:
        yield f"  {field.name}: {field.type} = {field.default}"
        if meaning := "; ".join(part for part in (field.meaning, field.accepts) if part):
            yield f"      {meaning}"
    changes = [
        field.name + (f" ({field.may_change})" if field.may_change != "always" else "")
        for field in fields
        if field.may_change
    ]
    if changes:
        yield f"A run that goes on may have another value of: {', '.join(changes)}."


def _listed(row: "StageRow") -> str:
    return ", ".join(f"[{name}]" if name in row.optional else name for name in row.reads) or "nothing"


def _short_path(file: str) -> str:
    """From the package on, for a file of the package; else from the current folder on, where it is in there."""
    for root in (PACKAGE.parent, Path.cwd()):
        if Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return file

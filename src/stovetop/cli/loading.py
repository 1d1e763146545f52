"""Recipes as modules: found by name or by file, with their presets, and what can be known of their workflow."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from stovetop.checks import collecting
from stovetop.client import ServiceClient
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.recipes import RECIPES

if TYPE_CHECKING:
    from types import ModuleType

    from _typeshed import DataclassInstance

    from stovetop.kitchen.check import Checked
    from stovetop.kitchen.phases import Phase
    from stovetop.kitchen.run_config import RunConfig
    from stovetop.kitchen.workflow import Workflow


class RecipeModule(Protocol):
    """What the module of a recipe has. It may have `check(config)` too, which refuses, before a run, what can be known
    to be wrong without a model and without writing anything; `WORKFLOW`, which its `main` runs with the ports
    `service` and `run`, or `PHASES`, which it gives to `run_phases`; `PRESETS`, configs by name; and `COOKBOOK_NAMES`,
    further names of fields for the command line."""

    Config: type["DataclassInstance"]
    main: Callable[["DataclassInstance"], Coroutine[None, None, None]]


class Chosen(NamedTuple):
    """What RECIPE or RECIPE:PRESET names."""

    recipe: RecipeModule
    preset: str | None  # None where none is named
    config: "DataclassInstance | None"  # of the preset


def load_chosen(name: str) -> Chosen:
    """The recipe of this name, see `load_recipe`, and its preset where one is named: dpo:small, FILE.py:small."""
    recipe_name, preset = split_name(name)
    recipe = load_recipe(recipe_name)
    if preset is None:
        return Chosen(recipe, None, None)
    presets = presets_of(recipe)
    if not presets:
        raise InvalidRequest(f"{recipe_name} has no presets; leave the name of one out: {preset!r}")
    if preset not in presets:
        raise UnknownName(f"preset of {recipe_name}", preset, presets)
    return Chosen(recipe, preset, presets[preset])


def split_name(name: str) -> tuple[str, str | None]:
    """The recipe and the preset, if one is named; - is as good as _, but in the name of a file."""
    recipe, colon, preset = name.rpartition(":") if not name.endswith(".py") else ("", "", name)
    if not colon:
        recipe = preset
    return recipe if recipe.endswith(".py") else recipe.replace("-", "_"), preset.replace("-", "_") if colon else None


def load_recipe(name: str) -> RecipeModule:
    """The one of this name; or a file of the user's own, FILE.py."""
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES, hint="A recipe of your own is a file: FILE.py")
    return cast(RecipeModule, importlib.import_module(RECIPES[name].module))


def _load_file(path: Path) -> RecipeModule:
    """As `import` would from its folder, so that worker processes find it too."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise InvalidRequest(f"there is no such file: {str(path)!r}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise InvalidRequest(f"another module has this name, {module.__file__}; rename the file: {str(path)!r}")
    if not _is_recipe(module):
        raise InvalidRequest(
            f"a recipe has a dataclass `Config` of its own, by which its runs know it, and `async def main(config)`: "
            f"{str(path)!r}"
        )
    return cast(RecipeModule, module)


def _is_recipe(module: "ModuleType") -> bool:
    config, main = vars(module).get("Config"), vars(module).get("main")
    return (
        isinstance(config, type)
        and dataclasses.is_dataclass(config)
        and config.__module__ == module.__name__
        and inspect.iscoroutinefunction(main)
    )


def workflow_of(recipe: RecipeModule) -> "Workflow | None":
    """None for a flat loop, and where there are phases."""
    return vars(recipe).get("WORKFLOW")


def phases_of(recipe: RecipeModule) -> "Sequence[Phase[Any]]":
    """None for all others."""
    return vars(recipe).get("PHASES", ())


def workflow_names(recipe: RecipeModule) -> list[str]:
    """Of its workflow, or of those of its phases, in order; none for a flat loop."""
    workflow = workflow_of(recipe)
    return [each.workflow.name for each in phases_of(recipe)] if workflow is None else [workflow.name]


def presets_of(recipe: RecipeModule) -> "Mapping[str, DataclassInstance]":
    """Configs by name, which `run` begins with; most are runs that need no network."""
    presets: Mapping[str, object] = vars(recipe).get("PRESETS", {})
    for name, config in presets.items():
        if not name.isidentifier() or not isinstance(config, recipe.Config):
            raise InvalidRequest(
                f"PRESETS of {vars(recipe)['__name__']} has configs of its own class by name, such as "
                f'{{"small": Config(...)}}; this entry is none: {name!r}: {config!r}'
            )
    return cast("Mapping[str, DataclassInstance]", presets)


def cookbook_names_of(recipe: RecipeModule) -> Mapping[str, str]:
    """Fields by what the recipe of the cookbook calls them, where that is no name that others of its recipes have."""
    return vars(recipe).get("COOKBOOK_NAMES", {})


def check_run(recipe: RecipeModule, config: "DataclassInstance") -> None:
    """Refuses a config with all that can be known to be wrong with it without a model and without writing anything."""
    with collecting() as problem:
        with problem:
            _check_workflow(recipe, config)
        if (check := vars(recipe).get("check")) is not None:
            with problem:
                check(config)


def _check_workflow(recipe: RecipeModule, config: "DataclassInstance") -> None:
    """Every problem that the recipe's workflow, or its phases, have with this config; a flat loop has none."""
    from stovetop.kitchen.phases import check_phases

    if (checked := checked_workflow(recipe, config)) is not None:
        checked.raise_problems()
    if phases := phases_of(recipe):
        check_phases(phases, cast("RunConfig", config))


def checked_workflow(recipe: RecipeModule, config: "DataclassInstance | type[DataclassInstance]") -> "Checked | None":
    """What can be known of the recipe's workflow with this config, or with any of its class."""
    from stovetop.runs import Run

    workflow = workflow_of(recipe)
    return None if workflow is None else workflow.check(config, {"service": ServiceClient, "run": Run})

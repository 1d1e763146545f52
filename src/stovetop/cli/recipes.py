"""The commands about recipes: run, resume, list, describe."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from stovetop.cli.configs import config_of, fields_in_order
from stovetop.cli.describe import (
    phases_as_text,
    recipe_as_json,
    recipe_as_text,
    workflow_as_json,
    workflow_as_text,
)
from stovetop.cli.interrupts import run_interruptibly
from stovetop.cli.loading import (
    Chosen,
    RecipeModule,
    check_run,
    load_chosen,
    load_recipe,
    phases_of,
    presets_of,
    split_name,
    workflow_names,
    workflow_of,
)
from stovetop.cli.runs import (
    config_to_go_on_with,
    how_to_go_on,
    refuse_another_place,
    stored_run,
)
from stovetop.cli.tables import filled, print_table, text_width
from stovetop.cli.words import Action
from stovetop.errors import StageFailed, StovetopError, UnknownName
from stovetop.recipes import RECIPES
from stovetop.runs import check_opening

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PUBLISHED = ("model_name", "dataset")  # fields whose default may have to be fetched

RUN_HELP = """\
usage: stovetop run <recipe or FILE.py>[:<preset>] [--field value | field=value ...] [--dry-run] [--debug]

A run is a directory. When it exists already, the run in it goes on from its last checkpoint.

recipes:
{recipes}
  {own:<{width}}  one of your own: docs/workflows.md

A recipe's own config is the published one: a large model, and data from a hub. A preset is another config to begin
with; `stovetop list` names them, and most are small runs that need no network.

options:
  field=value    a field of the recipe's config; --field=value and --field value are the same.
                 model is short for model_name, epochs for num_epochs
  --dry-run      check all that can be known without the model, print the stages and the config, and stop
  --debug        show the traceback of an error

stovetop run <recipe> --help lists the fields. An example:
  stovetop run sl_loop model=smollm2 epochs=2 learning_rate=2e-4
"""


# ---- run ------------------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> Action:
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, RECIPES))
        recipes = "\n".join(f"  {name:<{width}}  {recipe.summary}" for name, recipe in RECIPES.items())
        return lambda: print(RUN_HELP.format(recipes=recipes, own="FILE.py", width=width), end="")

    chosen = load_chosen(words[0])
    recipe = chosen.recipe
    with _next_step(chosen, words[0]):
        config = config_of(
            recipe, words[1:], f"stovetop run {words[0]}", chosen.config, lambda config: check_run(recipe, config)
        )
    if "--dry-run" in words:
        return lambda: _show_what_would_run(recipe, config)

    def begin() -> None:
        with _next_step(chosen, words[0]):
            run_interruptibly(recipe.main(config), lambda: how_to_go_on(config, ["run", *words]))

    return begin


@contextlib.contextmanager
def _next_step(chosen: Chosen, name: str) -> Generator[None]:
    """Where the recipe's own model or data set is not to be had, or the model not run here, its preset is: says so."""
    try:
        yield
    except StovetopError as error:
        own = {repr(field.default) for field in dataclasses.fields(chosen.recipe.Config) if field.name in PUBLISHED}
        is_of_model = isinstance(error, StageFailed) and error.stage == "init_session"
        if chosen.preset is None and (is_of_model or any(each in str(error) for each in own)):
            for preset in presets_of(chosen.recipe):
                error.add_note(f"Without a network and a large model: stovetop run {name}:{preset}")
        raise


def _show_what_would_run(recipe: RecipeModule, config: "DataclassInstance") -> None:
    print("The config is valid, as far as can be known without the model. Nothing was run or written.")
    for field in fields_in_order(type(config)):
        print(f"  {field.name}={getattr(config, field.name)}")
    if (workflow := workflow_of(recipe)) is not None:
        stages = f"The stages: {', '.join(place.stage.name for place in workflow.stages)}."
        print("\n".join(filled(stages, "", text_width())))
    if phases := phases_of(recipe):
        print("\n".join(phases_as_text(phases, config)))


# ---- resume ---------------------------------------------------------------------------------------------------------


def resume(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser(
        "stovetop resume",
        description="Goes on with a run from its last checkpoint, with the config that it was begun with.",
        epilog="A field may be given another value where that does not change what is learnt; stovetop describe says\n"
        "for which that is so. What else is wanted is a new run: load_checkpoint_path says where it starts.",
        usage="stovetop resume <run> [--field value | field=value ...] [--dry-run] [--debug]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="its folder, such as runs/sl_basic")
    folder = parser.parse_args(words[:1]).run
    name, stored = stored_run(folder)
    recipe = load_recipe(name)
    own = config_to_go_on_with(stored, recipe.Config)

    def also(config: "DataclassInstance") -> None:
        refuse_another_place(config, stored)
        check_opening(stored.path, config)
        check_run(recipe, config)

    config = config_of(recipe, words[1:], f"stovetop resume {folder}", own, also)
    if "--dry-run" in words:
        return lambda: _show_what_would_run(recipe, config)
    return lambda: run_interruptibly(recipe.main(config), lambda: how_to_go_on(config, ["resume", *words]))


# ---- list, describe -------------------------------------------------------------------------------------------------


def list_recipes(words: Sequence[str]) -> Action:
    parser = argparse.ArgumentParser("stovetop list", description="The recipes that stovetop run can run.")
    parser.add_argument("--json", action="store_true", help="for programs: a list of objects with the same columns")
    as_json = parser.parse_args(words).json
    return lambda: _show_recipes(as_json=as_json)


def _show_recipes(*, as_json: bool) -> None:
    modules = {name: load_recipe(name) for name in RECIPES}
    names = {name: (workflow_names(module), list(presets_of(module))) for name, module in modules.items()}
    if as_json:
        rows = [
            {"recipe": name, "summary": RECIPES[name].summary, "workflow": workflows, "presets": presets}
            for name, (workflows, presets) in names.items()
        ]
        print(json.dumps(rows, indent=1))
        return
    print_table(
        [
            {
                "recipe": name,
                "summary": RECIPES[name].summary,
                "workflow": ", ".join(workflows) or "-",
                "presets": ", ".join(f"{name}:{preset}" for preset in presets) or "small as it is",
            }
            for name, (workflows, presets) in names.items()
        ]
    )


def describe(words: Sequence[str]) -> Action:
    from stovetop.kitchen.workflows import list_workflows

    workflows = list_workflows()
    parser = argparse.ArgumentParser(
        "stovetop describe",
        description="What a recipe does: its stages and its config; RECIPE:PRESET, with the config of the preset. Or\n"
        "what a workflow does, and what it wants of a config.",
        epilog=f"recipes: {', '.join(RECIPES)}\nworkflows: {', '.join(workflows)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="a recipe or a workflow, see below; or FILE.py, a recipe of your own")
    parser.add_argument("--json", action="store_true", help="for programs: one object with all of it")
    options = parser.parse_args(words)
    (name, preset), width = split_name(options.recipe), text_width()
    if preset is None and (workflow := workflows.get(name)) is not None:
        described = workflow_as_json(workflow) if options.json else workflow_as_text(workflow, width=width)
    elif name in RECIPES or name.endswith(".py"):
        chosen = load_chosen(options.recipe)
        described = recipe_as_json(name, *chosen) if options.json else recipe_as_text(*chosen, width=width)
    else:
        kind, known = ("recipe or workflow", [*RECIPES, *workflows]) if preset is None else ("recipe", [*RECIPES])
        raise UnknownName(kind, name, known)
    return lambda: print(json.dumps(described, indent=1) if options.json else described)

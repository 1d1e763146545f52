"""Every field of every recipe's config, from the command line: it is settable, by itself, and to what was said."""

from dataclasses import asdict, fields, replace
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from stovetop.cli.configs import config_fields, config_of
from stovetop.cli.loading import RecipeModule, load_recipe
from stovetop.recipes import RECIPES
from stovetop.tracking.configs import config_to_dict

NAMED = {
    "num_test_problems": 7,
    "renderer_name": "role_colon",
    "loss_fn": "ppo",
    "answer_pattern": "(other)",
    "loss_fn_config": {"clip_low_threshold": 0.25},
}


def another(name: str, hint: Any, default: object) -> object:
    """A value that a field takes and that is not its default."""
    if name in NAMED:
        return NAMED[name]
    if get_origin(hint) is Annotated:
        return another(name, get_args(hint)[0], default)
    if NoneType in get_args(hint):
        return another(name, next(kind for kind in get_args(hint) if kind is not NoneType), default)
    if float in get_args(hint):  # or a word
        return another(name, float, default)
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != default)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(member for member in hint if member is not default)
    number = default if isinstance(default, int | float) else 4
    others: dict[type, object] = {bool: not default, int: number + 1, float: number / 2 or 0.25, str: f"other {name}"}
    return others[hint]


def words_for(name: str, value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}.{key}={entry}" for key, entry in value.items()]
    return [f"{name}={value.value if isinstance(value, Enum) else value}"]


def others_of(recipe: RecipeModule) -> dict[str, object]:
    hints, default = get_type_hints(recipe.Config, include_extras=True), recipe.Config()
    return {
        field.name: another(field.name, hints[field.name], getattr(default, field.name))
        for field in fields(recipe.Config)
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_is_settable_and_none_is_mistaken_for_another(name: str) -> None:
    recipe = load_recipe(name)
    others = others_of(recipe)
    assert all(getattr(recipe.Config(), field) != value for field, value in others.items())
    said = config_of(recipe, [word for field, value in others.items() for word in words_for(field, value)], "stovetop")
    assert said == recipe.Config(**others)


@pytest.mark.parametrize("name", ["sl_loop", "rl_basic"])
def test_a_field_that_is_set_changes_that_field_alone(name: str) -> None:
    """Also of a run that goes on, whose config has no defaults left."""
    recipe = load_recipe(name)
    others = others_of(recipe)
    for own, field in ((recipe.Config(), "seed"), (recipe.Config(**others), "max_steps" if "rl" in name else "seed")):
        said = config_of(recipe, words_for(field, 7), "stovetop", own)
        assert asdict(said) == asdict(replace(own, **{field: 7}))  # pyright: ignore[reportArgumentType]  its own class


@pytest.mark.parametrize("name", RECIPES)
def test_every_config_has_a_json_that_tells_its_fields_apart(name: str) -> None:
    recipe = load_recipe(name)
    before, after = config_to_dict(recipe.Config()), config_to_dict(recipe.Config(**others_of(recipe)))
    assert set(before) == {field.name for field in fields(recipe.Config)}
    assert all(before[field] != after[field] for field in before)


@pytest.mark.parametrize(
    "words",
    [
        ["loss_fn_config.clip_low_threshold=0.5", "loss_fn_config.clip_high_threshold=2"],
        ["--loss-fn-config", "clip_low_threshold", "0.5", "clip_high_threshold", "2"],
    ],
)
def test_a_field_that_is_a_dict_takes_its_entries_in_either_form(words: list[str]) -> None:
    said = config_of(load_recipe("rl_basic"), ["loss_fn=ppo", *words, "seed=3"], "stovetop")
    assert said.loss_fn_config == {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}  # pyright: ignore[reportAttributeAccessIssue]  its own class
    assert said.seed == 3  # pyright: ignore[reportAttributeAccessIssue]  likewise


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_says_what_it_is(name: str) -> None:
    assert [field.name for field in config_fields(load_recipe(name).Config) if not field.meaning] == []

"""Every field of every recipe's config, from the command line: it is settable, by itself, and to what was said."""

from dataclasses import Field, asdict, fields, replace
from enum import Enum
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from stovetop.cli import main
from stovetop.cli.configs import config_fields, config_of
from stovetop.cli.field_names import COOKBOOK_ALIASES, FIELD_ALIASES, NOT_HERE
from stovetop.cli.loading import RecipeModule, cookbook_names_of, load_recipe
from stovetop.recipes import RECIPES, rlhf
from stovetop.tracking.configs import config_to_dict

NAMED = {
    "num_test_problems": 7,
    "renderer_name": "role_colon",
    "loss_fn": "ppo",
    "answer_pattern": "(other)",
    "keep_checkpoints": "5 lowest:test/nll",
    "trackers": "wandb:mine tensorboard",
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


def fields_of(recipe: RecipeModule) -> tuple[Field[object], ...]:
    return fields(recipe.Config)


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


# ---- the cookbook's names --------------------------------------------------------------------------------------------

HERE = ["base_url=recording", "model_name=any/model", "renderer_name=role_colon"]  # in place of a large model


@pytest.mark.parametrize(
    ("command", "config"),
    [
        (
            "chat_sl dataset=sample:no_robots learning_rate=5e-4 batch_size=64 lora_rank=64 eval_every=20 "
            "save_every=20 behavior_if_log_dir_exists=raise",
            {"batch_size": 64, "lora_rank": 64, "behavior_if_exists": "raise"},
        ),
        (
            "math_rl env=sample:gsm8k group_size=64 groups_per_batch=32 learning_rate=8e-5 max_tokens=1024 "
            "loss_fn=importance_sampling test_size=4",
            {"dataset": "sample:gsm8k", "group_size": 64, "groups_per_batch": 32, "max_tokens": 1024},
        ),
        (
            "dpo dataset=sample:hhh learning_rate=1e-5 dpo_beta=0.1 test_size=4",
            {"dataset": "sample:hhh", "dpo_beta": 0.1, "learning_rate": 1e-5},
        ),
        (
            "on_policy_distillation teacher_model=any/model dataset=sample:tickets learning_rate=1e-4 "
            "groups_per_batch=64 lora_rank=128 max_tokens=16",
            {"teacher_model_name": "any/model", "groups_per_batch": 64},
        ),
        (
            "distill_composite dataset=sample:tickets second_dataset=sample:sorting learning_rate=1e-4 "
            "deepmath_teacher_model=any/model tulu3_teacher_model=any/model deepmath_groups_per_batch=256 "
            "tulu3_groups_per_batch=128 lora_rank=128",
            {"groups_per_batch": 256, "second_groups_per_batch": 128, "teacher_model_name": "any/model"},
        ),
        ("guess_number group_size=8 batch_size=16 max_steps=3", {"groups_per_batch": 16}),
        (
            "rlhf base_model=any/model sft_dataset=sample:chats dataset=sample:hhh rl_group_size=8 rl_max_tokens=64 "
            "test_size=2 rl_test_size=2",
            {"group_size": 8, "max_tokens": 64},
        ),
    ],
)
def test_a_command_with_the_names_of_the_cookbook_is_understood(
    command: str, config: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = command.split()
    here = [word for word in HERE if not (word.startswith("model_name") and "base_model=any/model" in words)]
    assert main(["run", name, *words, *here, "--dry-run"]) == 0
    said, others = capsys.readouterr()
    names = {**COOKBOOK_ALIASES, **cookbook_names_of(load_recipe(name))}
    fields = {field.name for field in fields_of(load_recipe(name))}
    for field, value in config.items():
        assert f"  {field}={value}\n" in said
    for alias in (word.partition("=")[0] for word in words):
        if alias in names and alias not in fields:
            assert f"{alias} is {names[alias]} here\n" in others


def test_what_the_cookbook_has_and_we_have_not_is_refused_with_what_to_do_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "chat_sl:small", "wandb_project=cookbook_sl", "session_name=mine", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "'wandb_project' is not here: trackers=wandb:PROJECT sends the run there" in said
    assert "'session_name' is not here: a run is named by its folder, log_path=runs/NAME" in said


def test_a_field_under_two_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "rl_basic:small", "batch_size=4", "groups_per_batch=8", "--dry-run"]) == 2
    assert "batch_size and groups_per_batch are one field, groups_per_batch; give it once" in capsys.readouterr().err


def test_no_other_name_is_that_of_a_field_in_vain() -> None:
    every = {field.name for name in RECIPES for field in fields_of(load_recipe(name))}
    assert every >= {*FIELD_ALIASES.values(), *COOKBOOK_ALIASES.values()}
    for name in RECIPES:
        recipe = load_recipe(name)
        assert {field.name for field in fields_of(recipe)} >= set(cookbook_names_of(recipe).values())
    assert not every & NOT_HERE.keys()


def test_what_no_run_can_change_is_not_said_to_be_changeable() -> None:
    """The phases of rlhf have rates of their own; the whole has no lr_schedule, by which a run could be made longer."""
    may_change = {
        name: {each.name: each.may_change for each in config_fields(load_recipe(name).Config)} for name in RECIPES
    }
    assert may_change["rlhf"]["max_steps"] == ""
    assert may_change["sl_basic"]["max_steps"] == "while lr_schedule=constant"


def test_what_a_preset_says_of_an_engine_in_this_process_is_not_sent_to_another_service() -> None:
    preset = rlhf.PRESETS["small"]
    assert preset.dtype is not None

    def dtype(*words: str) -> object:
        return config_to_dict(config_of(load_recipe("rlhf"), words, "stovetop run rlhf", preset))["dtype"]

    assert dtype("seed=1") == preset.dtype
    assert dtype("base_url=local") == preset.dtype
    assert dtype("base_url=recording") is None
    assert dtype("base_url=http://127.0.0.1:8765", "dtype=float32") == "float32"  # where it is refused by name

"""What holds for every recipe of the table, and for every preset. A recipe is added by one entry in ENTRIES: the words
that make it a run of a few steps on the recording backend, its published defaults, and the stages that it then runs.
What is true of one recipe alone is in a file of its own.
"""

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest

from costly import slow_but
from stovetop.cli import main
from stovetop.cli.configs import config_fields
from stovetop.cli.loading import load_recipe, phases_of, presets_of, workflow_of
from stovetop.client import ServiceClient
from stovetop.data_record import DATA_FILE
from stovetop.kitchen.phases import plan_phases
from stovetop.kitchen.run_config import RunConfig
from stovetop.recipes import RECIPES
from stovetop.run_folder import is_run
from stovetop.runs import Run, load
from stovetop.stored_configs import StoredConfig
from stovetop.tracking.configs import class_path, config_to_dict
from test_docs import maker

OWN_WORDS = {  # of what is another thing in each recipe: its data, and what is counted, measured or compared
    "dataset", "test_dataset", "test_size", "batch_size", "max_length", "max_steps", "answers", "few_shot",
    "group_size", "kl_penalty_coef", "num_substeps", "teacher_checkpoint_path", "rl_learning_rate",
}  # fmt: skip
OWN_RANGE = {  # answers that are not trained on may be greedy; what is not compared may be one, and must be penalised
    "temperature", "group_size", "kl_penalty_coef", "answers", "few_shot", "rl_learning_rate",
}  # fmt: skip
COMMON = ("base_url=recording", "model=any/model", "renderer_name=role_colon")
ADAM: dict[str, object] = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}


@dataclass(frozen=True)
class Entry:
    """What these tests know of a recipe."""

    words: tuple[str, ...] = ()  # a run of a few steps with COMMON; none: it is not run here
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])  # the published ones
    stages: str = ""  # in the order in which each first runs; "/" between phases; of a flat loop none


SESSION = "choose_adapter init_session init_renderer"
PLAN = "plan_steps make_optimizer"
SAVED = "save_final_weights register_model delete_old_checkpoints_at_end"
END = f"evaluate_at_end {SAVED}"
SUPERVISED_LOOP = (
    "get_batch evaluate schedule forward_backward optim_step save_checkpoint await_forward_backward await_optim_step "
    f"log_step_metrics log_step record_checkpoint delete_old_checkpoints {END}"
)
RL_LOOP = (
    "initial_policies do_rollout compute_advantages assemble_rl_batch evaluate schedule train_step save_checkpoint "
    f"freeze_policy log_rl_metrics keep_rollouts log_step record_checkpoint delete_old_checkpoints {END}"
)
TEACHER = (  # an epoch of one step
    f"load_named_chats {SESSION} build_supervised_dataset make_batches make_evaluators {PLAN} get_batch evaluate "
    "schedule forward_backward optim_step await_forward_backward await_optim_step log_step_metrics log_step "
    f"log_epoch_metrics {END}"
)
ON_POLICY_LOOP = (
    f"init_teachers build_prompt_dataset open_rollout_record make_teacher_evaluators {PLAN} make_policy_loss "
    "choose_sampling initial_policies do_rollout assemble_distillation_batch incorporate_teacher_kl evaluate schedule "
    "train_step save_checkpoint freeze_policy log_on_policy_metrics keep_rollouts log_step record_checkpoint "
    f"delete_old_checkpoints {END}"
)
DISTILLATION = (
    "dataset=sample:tickets", "test_size=4", "teacher_dataset=sample:chats", "teacher_model_name=any/model",
    "teacher_batch_size=20", "teacher_learning_rate=0.1", "groups_per_batch=2", "group_size=2", "max_tokens=4",
    "learning_rate=0.1", "max_steps_off_policy=1", "save_every=1", "eval_every=2",
)  # fmt: skip
ENTRIES: dict[str, Entry] = {
    "sl_loop": Entry(
        ("dataset=sample:chats", "batch_size=8", "epochs=1", "learning_rate=0.1", "save_every=1", "eval_every=2"),
        {"learning_rate": 2e-4, "lr_schedule": "linear", "lora_rank": 32, **ADAM},
    ),
    "rl_loop": Entry(
        ("dataset=sample:gsm8k", "test_size=4", "groups_per_batch=4", "group_size=3", "max_tokens=4", "max_steps=3",
         "learning_rate=0.1", "save_every=1", "eval_every=2"),
        {"learning_rate": 4e-5, "lr_schedule": "constant", "loss_fn": "importance_sampling", "temperature": 1.0,
         **ADAM},
    ),
    "sl_basic": Entry(
        ("dataset=sample:no_robots", "batch_size=4", "max_steps=3", "learning_rate=0.1", "save_every=1",
         "eval_every=2"),
        {"dataset": "no_robots", "learning_rate": 2e-4, "lr_schedule": "linear", "num_epochs": 1, "batch_size": 128,
         "max_length": 32768, "eval_every": 8, "save_every": 20, "lora_rank": 32, **ADAM},
        f"load_named_chats {SESSION} build_supervised_dataset make_batches make_evaluators {PLAN} {SUPERVISED_LOOP}",
    ),
    "rl_basic": Entry(
        ("dataset=sample:gsm8k", "test_size=2", "groups_per_batch=2", "group_size=3", "max_tokens=6", "max_steps=3",
         "learning_rate=0.1", "max_steps_off_policy=1", "save_every=1", "eval_every=2"),
        {"dataset": "gsm8k", "learning_rate": 4e-5, "lr_schedule": "constant", "groups_per_batch": 128,
         "group_size": 16, "max_tokens": 256, "temperature": 1.0, "num_substeps": 1, "lora_rank": 32,
         "loss_fn": "importance_sampling", "max_steps_off_policy": 0, "eval_every": 20, "save_every": 20, **ADAM},
        f"load_named_problems open_grader {SESSION} limit_prompts build_problem_groups batch_problems "
        f"open_rollout_record make_rl_evaluators {PLAN} make_policy_loss choose_sampling {RL_LOOP}",
    ),
    "math_rl": Entry(
        ("dataset=sample:gsm8k", "test_size=2", "groups_per_batch=2", "group_size=3", "max_tokens=6", "max_steps=3",
         "learning_rate=0.1", "max_steps_off_policy=1", "save_every=1", "eval_every=2"),
        {"dataset": "arithmetic", "learning_rate": 1e-5, "lr_schedule": "constant", "groups_per_batch": 100,
         "group_size": 4, "max_tokens": 5, "temperature": 1.0, "num_substeps": 1, "lora_rank": 32,
         "loss_fn": "importance_sampling", "kl_penalty_coef": 0.0, "max_steps_off_policy": 0, "eval_every": 20,
         "save_every": 20, **ADAM},
        f"load_math_rows open_math_grader {SESSION} limit_prompts build_math_groups batch_problems "
        f"open_rollout_record make_rl_evaluators {PLAN} make_policy_loss choose_sampling {RL_LOOP}",
    ),
    "code_rl": Entry(
        ("dataset=sample:small_functions", "test_size=1", "groups_per_batch=2", "group_size=2", "max_tokens=6",
         "warm_dataset=sample:chats", "warm_batch_size=24", "learning_rate=0.1", "max_steps=2", "ppo_epochs=2",
         "save_every=1", "eval_every=2"),
        {"model_name": "meta-llama/Llama-3.1-8B-Instruct", "dataset": "deepcoder", "group_size": 4,
         "groups_per_batch": 100, "learning_rate": 1e-5, "gamma": 0.99, "gae_lambda": 0.95, "clip_epsilon": 0.2,
         "ppo_epochs": 4, "kl_penalty_coef": 0.0, "max_steps": 100, "num_substeps": 1, "max_tokens": 4096},
        f"load_named_chats {SESSION} build_supervised_dataset make_batches make_evaluators {PLAN} get_batch schedule "
        "forward_backward optim_step await_forward_backward await_optim_step log_step_metrics log_step "
        f"log_epoch_metrics {SAVED} / load_code_problems find_grader choose_estimator "
        f"{SESSION} limit_prompts build_code_groups batch_problems open_rollout_record make_rl_evaluators {PLAN} "
        f"make_ppo_loss "
        f"choose_sampling {RL_LOOP.replace('train_step', 'ppo_update')}",
    ),
    "guess_number": Entry(
        ("num_numbers=8", "test_size=2", "max_tokens=8", "num_games=8", "games_learning_rate=0.1",
         "groups_per_batch=2", "group_size=3", "learning_rate=0.1", "max_steps=3", "save_every=1", "eval_every=2"),
        {"num_numbers": 1024, "max_turns": 10, "group_size": 8, "groups_per_batch": 32, "max_tokens": 64,
                  "learning_rate": 3e-5, "eval_every": 5, "save_every": 20, "num_games": 0},
        f"show_games {SESSION} build_supervised_dataset make_batches make_evaluators {PLAN} get_batch schedule "
        "forward_backward optim_step await_forward_backward await_optim_step log_step_metrics log_step "
        f"log_epoch_metrics {SAVED} / {SESSION} limit_prompts build_games batch_problems "
        f"open_rollout_record make_rl_evaluators {PLAN} make_policy_loss choose_sampling {RL_LOOP.removesuffix(END)}"
        f"log_epoch_metrics {END}",
    ),
    "dpo": Entry(
        ("dataset=sample:hhh", "batch_size=2", "max_steps=3", "learning_rate=0.05", "save_every=1", "eval_every=2"),
        {"model_name": "meta-llama/Llama-3.2-1B", "dataset": "hhh", "learning_rate": 1e-5, "lr_schedule": "linear",
         "dpo_beta": 0.1, "batch_size": 256, "num_epochs": 1, "reference_model_name": None, "max_length": 8192,
         "eval_every": 10, "save_every": 20, **ADAM},
        f"load_named_comparisons choose_adapter init_session init_reference init_renderer build_preference_dataset "
        f"{PLAN} make_preference_loss make_pairs_evaluator set_epoch get_preference_batch compute_reference_logprobs "
        f"evaluate schedule dpo_forward_backward optim_step save_checkpoint await_dpo await_optim_step "
        f"log_dpo_metrics log_step record_checkpoint delete_old_checkpoints log_epoch_metrics {END}",
    ),
    "rlhf": Entry(
        ("renderer_name=None", "sft_dataset=sample:chats", "dataset=sample:hhh", "test_size=2", "rl_test_size=2",
         "max_steps=2",
         "batch_size=2", "groups_per_batch=2", "max_tokens=3", "lora_rank=4", "sft_learning_rate=0.1",
         "rm_learning_rate=0.1", "rl_learning_rate=0.1", "save_every=1"),
        {"sft_dataset": "no_robots", "dataset": "hhh", "lora_rank": 64, "batch_size": 256, "max_length": 16384,
         "sft_learning_rate": 2e-4, "rm_learning_rate": 3e-4, "rl_learning_rate": 1e-5, "groups_per_batch": 256,
         "group_size": 4, "max_tokens": 1024, "eval_every": 20, "save_every": 100},
        f"load_named_chats {SESSION} build_supervised_dataset make_batches make_evaluators {PLAN} {SUPERVISED_LOOP} / "
        f"load_named_comparisons {SESSION} init_comparison_renderer build_comparison_dataset make_batches "
        f"make_judge_evaluators {PLAN} {SUPERVISED_LOOP} / "
        f"load_named_comparisons {SESSION} init_preference_model limit_prompts build_preference_groups batch_problems "
        f"open_rollout_record make_win_rate_evaluators {PLAN} make_policy_loss choose_sampling {RL_LOOP}",
    ),
    "chat_sl": Entry(
        ("dataset=sample:no_robots", "batch_size=4", "max_steps=3", "learning_rate=0.1", "save_every=1",
         "eval_every=2", "inline_evals=sample:gsm8k", "max_tokens=4", "infrequent_eval_every=2"),
        {"dataset": "no_robots", "learning_rate": 1e-4, "lr_schedule": "linear", "num_epochs": 1, "batch_size": 256,
         "max_length": 16384, "eval_every": 10, "save_every": 20, "infrequent_eval_every": 100, "lora_rank": 32,
         "inline_evals": None, **ADAM},
        f"load_named_chats {SESSION} build_supervised_dataset make_batches make_evaluators "
        f"make_inline_evaluators {PLAN} get_batch evaluate evaluate_infrequently "
        f"{SUPERVISED_LOOP.removeprefix('get_batch evaluate ')}",
    ),
    "prompt_distillation": Entry(
        ("dataset=sample:multilingual", r"answer_pattern=(?s)^(.)", "max_tokens=3", "test_size=85", "batch_size=2",
         "max_steps=3", "learning_rate=0.1", "save_every=1", "eval_every=2"),
        {"num_epochs": 4, "learning_rate": 1e-4, "lr_schedule": "linear", "eval_every": 5, "save_every": 20,
         "batch_size": 128, "max_length": 32768, "lora_rank": 32, "temperature": 0.15, "max_tokens": 1000},
        f"load_texts load_prompt init_prompted_teacher write_answers / load_named_chats {SESSION} "
        f"build_supervised_dataset make_batches make_agreement_evaluators {PLAN} {SUPERVISED_LOOP}",
    ),
    "on_policy_distillation": Entry(
        (*DISTILLATION, "max_steps=2"),
        {"dataset": "deepmath", "groups_per_batch": 1024, "max_tokens": 4096, "learning_rate": 1e-4,
         "lora_rank": 128, "mode": "on_policy"},
        f"{TEACHER} / load_named_prompts {SESSION} choose_teacher choose_prompt_batching choose_sources "
        f"{ON_POLICY_LOOP}",
    ),
    "distill_composite": Entry(
        (*DISTILLATION, "second_dataset=sample:sorting", "second_teacher_dataset=sample:chats",
         "second_teacher_model_name=any/model", "second_groups_per_batch=1", "max_steps=2"),
        {"dataset": "deepmath", "second_dataset": "tulu3", "groups_per_batch": 512, "second_groups_per_batch": 512,
         "max_tokens": 4096, "learning_rate": 1e-4, "lora_rank": 128},
        f"{TEACHER} / {TEACHER} / load_named_prompts load_second_prompts {SESSION} choose_teacher "
        "choose_second_teacher choose_prompt_batching choose_first_source choose_second_source join_sources "
        f"{ON_POLICY_LOOP}",
    ),
    "sort_digits_demo": Entry(),
}  # fmt: skip
RUN_HERE = [name for name, entry in ENTRIES.items() if entry.words]
QUICK = ("sl_loop", "rl_basic", "guess_number")  # a flat loop, a workflow, and phases; each has tests of its own too


def words_of(name: str, log_path: Path, *more: str) -> list[str]:
    return ["run", name, *COMMON, *ENTRIES[name].words, f"log_path={log_path}", *more]


def configs_of(name: str) -> dict[str, Any]:
    """The config of the recipe and those of its presets, by what `stovetop run` calls them."""
    recipe = load_recipe(name)
    return {name: recipe.Config()} | {f"{name}:{preset}": config for preset, config in presets_of(recipe).items()}


def test_every_recipe_is_tested_here() -> None:
    assert set(ENTRIES) == set(RECIPES)


# ---- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_every_config_is_the_same_after_a_round_trip_through_json(name: str) -> None:
    for config in configs_of(name).values():
        stored = json.loads(json.dumps(config_to_dict(config)))
        assert StoredConfig(Path(), class_path(type(config)), stored).config_as(type(config)) == config


@pytest.mark.parametrize("name", ENTRIES)
def test_the_published_defaults_are_kept(name: str) -> None:
    config: Any = load_recipe(name).Config()
    assert {field: getattr(config, field) for field in ENTRIES[name].defaults} == ENTRIES[name].defaults


@pytest.mark.parametrize("name", ENTRIES)
def test_every_field_is_read(name: str) -> None:
    """By a stage, or by what makes the config of a phase, whose own fields are all read in turn; by a flat loop itself.
    Fields of RunConfig are read by whoever opens the run and the service."""
    recipe = load_recipe(name)
    names = {field.name for field in fields(recipe.Config)}
    of_run = {field.name for field in fields(RunConfig)} if issubclass(recipe.Config, RunConfig) else set[str]()
    ports = {"service": ServiceClient, "run": Run}
    if (workflow := workflow_of(recipe)) is not None:
        assert names - of_run == set(workflow.check(recipe.Config, ports).config_fields)
    elif phases := phases_of(recipe):
        read: set[str] = set()
        for config in configs_of(name).values():
            for planned in plan_phases(phases, spied(config, read)):
                if planned.config is not None:
                    assert planned.phase.workflow.check(planned.config, ports).problems == ()
        assert names == read | of_run
    else:
        source = getsource(recipe)  # pyright: ignore[reportArgumentType]  a module
        body = source[source.index("async def main") :] + getsource(vars(recipe).get("load", main))
        assert names == {name for name in names if re.search(rf"\bconfig\.{name}\b", body)}


def test_a_field_that_recipes_share_takes_the_same_and_means_the_same_in_all_of_them() -> None:
    by_recipe = {name: {each.name: each for each in config_fields(load_recipe(name).Config)} for name in RECIPES}
    names = Counter(name for own in by_recipe.values() for name in own)
    shared = [name for name, count in names.items() if count > 1]
    takes = {
        name: {(own[name].type, own[name].accepts) for own in by_recipe.values() if name in own} for name in shared
    }
    means = {name: {own[name].meaning for own in by_recipe.values() if name in own} for name in shared}
    assert {name: kinds for name, kinds in takes.items() if len(kinds) > 1 and name not in OWN_RANGE} == {}
    assert {name: said for name, said in means.items() if len(said) > 1 and name not in OWN_WORDS} == {}


def test_the_fields_of_a_recipe_come_before_those_that_all_have() -> None:
    for name in RECIPES:
        names = [each.name for each in config_fields(load_recipe(name).Config)]
        assert "model_name" in names[:4]
        if issubclass(load_recipe(name).Config, RunConfig):
            assert names[-1] == "threads"


def spied(config: Any, read: set[str]) -> Any:
    """The same config, which notes the fields that are read of it, but for those that all phases share."""
    shared = {field.name for field in fields(RunConfig)}

    class Spied(type(config)):
        def __getattribute__(self, name: str) -> object:
            if name not in shared and not name.startswith("_"):
                read.add(name)
            return super().__getattribute__(name)

    copy = Spied(**{field.name: getattr(config, field.name) for field in fields(config)})
    read.clear()  # of what its own checks looked at
    return copy


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_describe_has_every_field_and_the_config_of_every_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for called, config in configs_of(name).items():
        assert main(["describe", called, "--json"]) == 0
        described = json.loads(capsys.readouterr().out)
        assert sorted(each["name"] for each in described["fields"]) == sorted(field.name for field in fields(config))
        assert described.get("config", config_to_dict(config)) == config_to_dict(config)
        assert main(["describe", called]) == 0
        said = capsys.readouterr().out
        assert [each.name for each in fields(config) if f"  {each.name}: " not in said] == []


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_dry_run_writes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stovetop.backends.open_service", None)  # to open one would be an error
    assert main(words_of(name, tmp_path / "run", "--dry-run")) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a complete run of a recipe."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "whole"
        assert main(words_of(name, folder)) == 0
        return folder

    return run


@pytest.mark.parametrize("name", slow_but(QUICK, RUN_HERE))
def test_every_metric_and_every_event_of_a_run_has_a_meaning_in_the_documentation(
    name: str, whole_run: Callable[[str], Path]
) -> None:
    metrics, events = maker("metrics"), maker("events")
    run_folders = [file.parent for file in whole_run(name).rglob("config.json") if is_run(file.parent)]
    assert run_folders
    for record in map(load, run_folders):
        assert [key for row in record.metrics for key in row if metrics.key_of(key) is None] == []
        for event in record.events:
            values, labels = events.BY_NAME[event.name].values, events.BY_NAME[event.name].labels
            assert events.ANY in values or set(event.values) <= set(values), event
            assert events.ANY in labels or set(event.labels) <= set(labels), event


@pytest.mark.parametrize("name", slow_but(QUICK, RUN_HERE))
def test_it_runs_and_where_it_was_interrupted_it_goes_on_to_the_same_rows_and_weights(
    name: str, whole_run: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, interrupted = whole_run(name), tmp_path / "interrupted"
    assert num_rows(whole) >= 2
    assert stages_of(whole) == ENTRIES[name].stages
    for row in (1, num_rows(whole) - 1):
        with monkeypatch.context() as patched:
            interrupted_before_row(row, interrupted, patched)
            assert main(words_of(name, interrupted) if row == 1 else ["resume", str(interrupted)]) == 130
        assert num_rows(interrupted) == row
    gc.collect()  # asyncio logs the interrupted task as it is freed: within another test's ast.parse, Python 3.11 fails
    assert main(["resume", str(interrupted)]) == 0
    assert outcome(interrupted) == outcome(whole)


@pytest.mark.parametrize("name", slow_but(QUICK, RUN_HERE))
def test_a_dry_run_refuses_data_that_is_not_what_the_run_has_learnt_from(
    name: str, whole_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The data of every phase. What is changed here is what the run has noted of it."""
    whole = whole_run(name)
    records = [run / DATA_FILE for run in runs_in(whole) if (run / DATA_FILE).exists()]
    assert (records != []) == any("dataset=" in word for word in ENTRIES[name].words)
    for record in records:
        noted = json.loads(record.read_text())
        for dataset, sources in noted.items():
            changed = [{**source, "num_rows": source["num_rows"] + 1} for source in sources]
            record.write_text(json.dumps(noted | {dataset: changed}))
            assert main(words_of(name, whole, "--dry-run")) == 2, f"{dataset} in {record}"
            assert "has changed since it was begun" in capsys.readouterr().err
        record.write_text(json.dumps(noted))


def runs_in(folder: Path) -> list[Path]:
    """The run, or those of its phases."""
    phases = sorted(path for path in folder.iterdir() if re.match(r"\d+_", path.name) and is_run(path))
    return phases or [folder]


def num_rows(folder: Path) -> int:
    return sum(len(load(run).metrics) for run in runs_in(folder))


def stages_of(folder: Path) -> str:
    return " / ".join(
        " ".join(dict.fromkeys(event.labels["stage"] for event in load(run).events if event.name == "stage.start"))
        for run in runs_in(folder)
    )


def outcome(folder: Path) -> object:
    """Its rows, without the clock, and the bytes of its final weights."""
    rows = [
        [{name: value for name, value in row.items() if not name.startswith("time/")} for row in load(run).metrics]
        for run in runs_in(folder)
    ]
    weights = [file.read_bytes() for file in sorted(folder.rglob("checkpoints/**/final/*.safetensors"))]
    assert weights
    return rows, weights


def interrupted_before_row(number: int, folder: Path, patched: pytest.MonkeyPatch) -> None:
    """Ctrl-C as the row of this number would be written, counted over all phases from 0."""
    log_metrics = Run.log_metrics

    def interrupting(self: Run, metrics: Mapping[str, float], step: int) -> None:
        if num_rows(folder) == number:
            raise KeyboardInterrupt
        log_metrics(self, metrics, step)

    patched.setattr(Run, "log_metrics", interrupting)


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_a_recipe_without_a_preset_is_small_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name in (name for name in RECIPES if not presets_of(load_recipe(name))):
        values: dict[str, Any] = config_to_dict(load_recipe(name).Config())
        assert values["model_name"] == "smollm2"
        assert values.get("dataset", "sample:").startswith("sample:")
        assert any(line.split()[:1] == [name] and line.rstrip().endswith("small as it is") for line in listed)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_preset_needs_no_network_and_has_a_folder_of_its_own(name: str) -> None:
    recipe = load_recipe(name)
    for preset, config in presets_of(recipe).items():
        values: dict[str, Any] = config_to_dict(config)
        assert values["log_path"] == f"runs/{name}_{preset}"
        assert {value for field, value in values.items() if field.endswith("model_name") and value} == {"smollm2"}
        texts = [value for field, value in values.items() if field.endswith("dataset") and value]
        assert all(text.startswith("sample:") for text in texts)

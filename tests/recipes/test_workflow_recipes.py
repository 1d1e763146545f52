"""The recipes that are workflows, each on the recording backend and on a sample of its data: three steps, a kill, what
is described and what is refused."""

import asyncio
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from costly import slow_but
from processes import run_python
from stovetop.backends import recording
from stovetop.cli import main
from stovetop.cli.configs import config_fields
from stovetop.client import ServiceClient
from stovetop.datasets import load_rows
from stovetop.errors import InvalidRequest, StageFailed
from stovetop.kitchen import RunConfig, Workflow, stage
from stovetop.kitchen.run_config import RunConfig as BaseConfig
from stovetop.recipes import chat_sl, dpo, math_rl, rl_basic, sl_basic
from stovetop.rl.problem_env import problems_from_rows
from stovetop.runs import Run, load

SMALL: dict[str, list[str]] = {
    "sl_basic": ["dataset=sample:no_robots", "batch_size=4", "learning_rate=0.1", "eval_every=2"],
    "chat_sl": ["dataset=sample:no_robots", "batch_size=4", "learning_rate=0.1", "eval_every=2",
                "inline_evals=sample:gsm8k", "max_tokens=6", "infrequent_eval_every=2"],
    "rl_basic": ["dataset=sample:gsm8k", "test_size=2", "groups_per_batch=2", "group_size=3", "max_tokens=6",
                 "learning_rate=0.1", "max_steps_off_policy=1", "eval_every=2"],
    "math_rl": ["dataset=sample:gsm8k", "test_size=2", "groups_per_batch=2", "group_size=3", "max_tokens=6",
                "learning_rate=0.1", "max_steps_off_policy=1", "eval_every=2", "kl_penalty_coef=0.1",
                "compute_post_kl=True"],
    "dpo": ["dataset=sample:hhh", "batch_size=2", "learning_rate=0.05", "eval_every=2"],
}  # fmt: skip
COMMON = ["base_url=recording", "model=any/model", "renderer_name=role_colon", "max_steps=3", "save_every=2"]
MODULES: dict[str, Any] = {
    "sl_basic": sl_basic,
    "chat_sl": chat_sl,
    "rl_basic": rl_basic,
    "math_rl": math_rl,
    "dpo": dpo,
}
RECIPES = [pytest.param(name, id=name) for name in MODULES]


def words_of(recipe: str, log_path: Path, *more: str) -> list[str]:
    return ["run", recipe, *COMMON, *SMALL[recipe], f"log_path={log_path}", *more]


def rows(log_path: Path) -> list[dict[str, float]]:
    """The metrics of each step, without the clock."""
    metrics = load(log_path).metrics
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in metrics]


def weights(log_path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(log_path.glob("checkpoints/**/final/*.safetensors"))]


def config_of(recipe: str, log_path: Path) -> Any:
    assert main([*words_of(recipe, log_path)]) == 0
    return load(log_path).config_as(MODULES[recipe].Config)


@pytest.mark.parametrize("recipe", slow_but(["math_rl", "dpo"], MODULES))
def test_it_runs_three_steps_without_a_network_and_its_directory_says_of_what(recipe: str, tmp_path: Path) -> None:
    log_path = tmp_path / "run"
    assert main(words_of(recipe, log_path)) == 0
    record = load(log_path)
    assert [row["step"] for row in record.metrics] == [0, 1, 2, 3]  # the last one has the final evaluation
    workflow: Workflow = MODULES[recipe].WORKFLOW
    times = [name for name in record.metrics[1] if name.startswith("time/")]
    before_the_row = [name for name in times if ":" not in name and not name.startswith("time/engine/")]
    stages = [place.stage.name for place in workflow.stages]
    assert {name.removeprefix("time/") for name in before_the_row} - {"step", "total"} <= set(stages)
    assert len(before_the_row) >= 6
    described = json.loads((log_path / "workflow.json").read_text())
    assert [row["stage"] for row in described["stages"]] == stages
    assert described["workflow"] == workflow.name
    assert weights(log_path) != []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MODULES)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_would_have_been(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_conformance` has it of all recipes; here it is moved too."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(words_of(recipe, whole)) == 0

    @stage
    def dies(step: int) -> None:
        if step == 2:
            raise RuntimeError("power cut")

    module = MODULES[recipe]
    with monkeypatch.context() as patched:
        patched.setattr(module, "WORKFLOW", module.WORKFLOW.insert_after("log_step", dies))
        assert main(words_of(recipe, killed)) == 1
    assert len(rows(killed)) == 3
    moved = killed.rename(tmp_path / "moved")
    assert main(["resume", str(moved), "eval_every=2", "threads=None"]) == 0
    assert rows(moved) == rows(whole)
    assert weights(moved) == weights(whole) != []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_makes_no_call_and_writes_nothing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stovetop.backends.open_service", None)  # to open one would be an error
    assert main([*words_of(recipe, tmp_path / "run"), "--dry-run"]) == 0
    assert "The stages: load_" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_field_of_its_config_is_read(recipe: str) -> None:
    module = MODULES[recipe]
    checked = module.WORKFLOW.check(module.Config(), {"service": ServiceClient, "run": Run})
    assert (checked.problems, checked.unread) == ((), ())
    assert issubclass(module.Config, RunConfig)
    of_run = {field.name for field in fields(BaseConfig)}
    assert set(checked.config_fields) | of_run == {field.name for field in fields(module.Config)}


def test_the_published_defaults_are_kept() -> None:
    supervised, rl, preference = sl_basic.Config(), rl_basic.Config(), dpo.Config()
    assert (supervised.dataset, supervised.learning_rate, supervised.lr_schedule) == ("no_robots", 2e-4, "linear")
    assert (supervised.num_epochs, supervised.batch_size, supervised.max_length) == (1, 128, 32768)
    assert (supervised.eval_every, supervised.lora_rank) == (8, 32)
    assert (rl.dataset, rl.learning_rate, rl.groups_per_batch, rl.group_size, rl.max_tokens) == (
        "gsm8k", 4e-5, 128, 16, 256,
    )  # fmt: skip
    assert (rl.loss_fn, rl.temperature, rl.num_substeps, rl.max_steps_off_policy) == ("importance_sampling", 1.0, 1, 0)
    assert (preference.model_name, preference.dataset) == ("meta-llama/Llama-3.2-1B", "hhh")
    assert (preference.learning_rate, preference.dpo_beta, preference.batch_size) == (1e-5, 0.1, 256)
    assert (preference.num_epochs, preference.reference_model_name) == (1, None)
    for config in (supervised, rl, preference):
        assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.95, 1e-8)


# ---- the flat loops --------------------------------------------------------------------------------------------------


def test_sl_basic_is_sl_loop(tmp_path: Path) -> None:
    own = [word for word in COMMON if not word.startswith("max_steps")]
    more = ["dataset=sample:chats", "batch_size=4", "learning_rate=0.1", "eval_every=2", "epochs=1", "max_length=None"]
    for recipe in ("sl_basic", "sl_loop"):
        assert main(["run", recipe, *own, *more, f"log_path={tmp_path / recipe}"]) == 0
    assert rows(tmp_path / "sl_basic") == rows(tmp_path / "sl_loop")
    assert weights(tmp_path / "sl_basic") == weights(tmp_path / "sl_loop") != []


@pytest.mark.slow  # its workflow alone is, in kitchen/test_reinforcement
def test_rl_basic_on_policy_is_rl_loop_in_every_metric_that_this_has(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"question": f"q{i}", "answer": "e"}) + "\n" for i in range(10)))
    more = [f"dataset={problems}", "test_size=2", "groups_per_batch=2", "group_size=6", "max_tokens=3",
            "learning_rate=0.5", "eval_every=2", "remove_constant_reward_groups=True"]  # fmt: skip
    for recipe, grading in (("rl_basic", ["answers=exact"]), ("rl_loop", [])):
        assert main(["run", recipe, *COMMON, *more, *grading, f"log_path={tmp_path / recipe}"]) == 0
    flat = rows(tmp_path / "rl_loop")
    found = rows(tmp_path / "rl_basic")
    assert [{name: row[name] for name in of_flat} for row, of_flat in zip(found, flat, strict=True)] == flat
    assert weights(tmp_path / "rl_basic") == weights(tmp_path / "rl_loop") != []


# ---- data ------------------------------------------------------------------------------------------------------------


def test_answers_are_boxed_mathematics_unless_they_are_exact(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "How many?", "answer": "Two.\\n#### 2"}\n{"question": "q", "answer": "3"}\n')
    config = rl_basic.Config(
        dataset=str(file), test_size=0, groups_per_batch=1, base_url="recording", log_path=str(tmp_path / "run")
    )
    rl_basic.check(config)
    file.write_text('{"question": "How many?", "answer": "Two.\\n#### "}\n{"question": "q", "answer": "3"}\n')
    with pytest.raises(InvalidRequest, match=r"row \d has no result behind ####"):
        rl_basic.check(config)
    rl_basic.check(replace(config, answers="exact"))


def test_no_word_that_the_preset_of_rl_basic_is_tested_on_is_one_that_it_learns_from() -> None:
    small = rl_basic.PRESETS["small"]
    assert small.test_dataset is not None
    seen, held_out = (problems_from_rows(load_rows(name)) for name in (small.dataset, small.test_dataset))
    words: list[set[str]] = []
    for posed in (seen, held_out):
        questions = [problem.question for problem, _ in posed]
        assert [" ".join(reversed(question.split())) for question in questions] == [
            each.problem.answer for each in posed
        ]
        assert len(set(questions)) == len(questions)
        words.append({word for question in questions for word in question.split()})
    assert words[0].isdisjoint(words[1])


@pytest.mark.parametrize("sample", slow_but(1, ["hhh", "helpsteer3", "ultrafeedback"]))
def test_each_named_comparison_set_has_a_sample_that_trains(sample: str, tmp_path: Path) -> None:
    words = ["run", "dpo", *COMMON, f"dataset=sample:{sample}", "batch_size=2", f"log_path={tmp_path / 'run'}"]
    assert main(words) == 0
    assert "test/accuracy" in rows(tmp_path / "run")[0]


def test_held_out_pairs_are_measured_against_the_same_reference(tmp_path: Path) -> None:
    assert main(words_of("dpo", tmp_path / "run")) == 0
    first, *_, last = rows(tmp_path / "run")
    assert first["test/dpo_loss"] == pytest.approx(0.693147, abs=1e-5)  # ln 2: the policy is the reference
    assert last["test/dpo_loss"] < first["test/dpo_loss"]


def test_a_preference_loss_that_is_none_is_refused_before_anything_runs() -> None:
    @stage(writes="preference_loss")
    def name_a_loss(dpo_beta: float) -> str:
        return "dpo"

    ports = {"service": ServiceClient, "run": Run}
    [problem, *_] = dpo.WORKFLOW.replace("make_preference_loss", name_a_loss).check(dpo.Config(), ports).problems
    assert "'preference_loss'" in problem
    assert dpo.WORKFLOW.describe().notes == ()  # all types are known


@pytest.mark.slow
def test_the_preset_of_dpo_learns_the_rule_of_its_comparisons(tmp_path: Path) -> None:
    """A bigram model can: how the two answers begin tells them apart."""
    small = replace(dpo.PRESETS["small"], base_url="recording", model_name="any/model", learning_rate=0.05)
    small = replace(small, log_path=str(tmp_path / "run"))
    dpo.check(small)
    asyncio.run(dpo.main(small))
    found = rows(tmp_path / "run")
    assert found[0]["test/margin"] == 0.0
    assert found[-1]["test/accuracy"] > 0.9


def test_a_stage_that_fails_is_named_and_the_service_is_closed(tmp_path: Path) -> None:
    config = sl_basic.Config(dataset="nofile.jsonl", log_path=str(tmp_path / "run"))
    with recording.open_service(config.log_path) as service, pytest.raises(StageFailed, match="'load_named_chats'"):
        asyncio.run(sl_basic.train(config, service))


# ---- describe, resume, runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_describe_has_every_stage_with_its_place_every_port_and_every_field(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = MODULES[recipe]
    assert main(["describe", recipe, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in described["stages"]] == [place.stage.name for place in module.WORKFLOW.stages]
    for row in described["stages"]:
        assert row["doc"]
        assert re.search(r"def|@stage", Path(row["file"]).read_text().splitlines()[row["line"] - 1])
    assert set(described["ports"]) == {"service", "run"}
    assert "init_session" in described["ports"]["service"]
    by_name = {field["name"]: field for field in described["fields"]}
    assert list(by_name) == [field.name for field in config_fields(module.Config)]
    assert by_name["learning_rate"]["read_by"] == ["make_optimizer"]
    assert by_name["save_every"]["may_change"] == "always"
    assert by_name["log_path"]["meaning"] == "the run directory; again: it goes on"
    assert by_name["threads"]["accepts"].startswith("an integer from 1 to 1024")
    assert main(["describe", recipe]) == 0
    said = capsys.readouterr().out
    assert all(f"    {name}  (stovetop/" in said for name in (row["stage"] for row in described["stages"]))
    assert "  service: init_session" in said
    assert f"  log_path: str = runs/{recipe}\n" in said


@pytest.mark.parametrize(
    ("words", "named"),
    slow_but(
        2,
        [
            (["learning_rate=0.5"], "learning_rate: 0.1 -> 0.5"),
            (["log_path=runs/other"], "leave log_path and behavior_if_exists out"),
            (["num_epochs=2"], r"num_epochs: 1 -> 2 \(it may change while lr_schedule=constant only\)"),
            (["saev_every=1"], "'save_every'"),
            (["save_every=-1"], "save_every"),
            (["behavior_if_exists=delete"], "leave log_path and behavior_if_exists out"),
        ],
    ),
)
def test_a_resumed_run_refuses_what_would_change_it(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of("sl_basic", tmp_path / "run")) == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    capsys.readouterr()
    try:
        code = main(["resume", str(tmp_path / "run"), *words])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert re.search(named, capsys.readouterr().err)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_fewer_steps_than_a_run_has_behind_it_are_refused_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @stage
    def dies(step: int) -> None:
        if step == 2:
            raise RuntimeError("power cut")

    more = ["lr_schedule=constant", "batch_size=24", "num_epochs=4", "max_steps=None", "save_every=1"]
    with monkeypatch.context() as patched:
        patched.setattr(sl_basic, "WORKFLOW", sl_basic.WORKFLOW.insert_after("log_step", dies))
        assert main(words_of("sl_basic", tmp_path / "run", *more)) == 1
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert len(rows(tmp_path / "run")) == 3
    for word, code in (("max_steps=1", 2), ("num_epochs=1", 1)):  # how many steps an epoch has is known when it runs
        capsys.readouterr()
        assert main(["resume", str(tmp_path / "run"), word]) == code
        assert "has trained 2 batches, and cannot end after 1; ask for 2 or more" in capsys.readouterr().err
        assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert main(["resume", str(tmp_path / "run"), "max_steps=3"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["max_steps"] == 3


@pytest.mark.slow  # test_sl_loop has a shorter one
def test_a_finished_run_is_made_longer_by_resume(tmp_path: Path) -> None:
    more = ["lr_schedule=constant", "num_epochs=2"]
    assert main(words_of("sl_basic", tmp_path / "whole", *more, "max_steps=5")) == 0
    assert main(words_of("sl_basic", tmp_path / "run", *more)) == 0
    assert main(["resume", str(tmp_path / "run"), "max_steps=5"]) == 0
    ours, of_whole = (
        [{key: value for key, value in row.items() if key != "progress"} for row in rows(tmp_path / name)]
        for name in ("run", "whole")
    )
    assert ours == of_whole  # of another share of the whole, and else the same
    assert len(ours) == 6


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, "there is no run in this folder"),
        ('{"class": "mine:Config", "config": {}}', "begun by a program of its own, with mine:Config"),
        ('{"class": "stovetop.recipes.dpo:Config", "config": {"beta": 1}}', "did you mean 'dpo_beta'|unknown field"),
    ],
)
def test_what_resume_cannot_go_on_with_is_said(
    config: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["resume", str(tmp_path)]) == 2
    assert re.search(named, capsys.readouterr().err)


def test_runs_lists_those_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words_of("dpo", tmp_path / "deep" / "mine")) == 0
    capsys.readouterr()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    path = str(tmp_path / "deep" / "mine")
    [listed] = json.loads(capsys.readouterr().out)
    shown = {name: listed[name] for name in ("recipe", "state", "num_done", "num_steps", "run")}
    assert shown == {"recipe": "dpo", "state": "complete", "num_done": 3, "num_steps": 3, "run": path}
    assert {"dpo_loss", "accuracy", "margin"} <= listed["values"].keys()
    assert main(["runs", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_a_workflow_is_checked_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sl_basic, "WORKFLOW", sl_basic.WORKFLOW.remove("make_optimizer"))
    assert main(words_of("sl_basic", tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "stage 'schedule' reads 'optimizer', and nobody writes it before" in said
    assert "config field 'learning_rate' is set to 0.1, and no stage reads it" in said
    assert not (tmp_path / "run").exists()


def test_describing_and_listing_load_no_model_library() -> None:
    program = """
import sys
from stovetop.cli import main
for words in (["describe", "dpo"], ["describe", "rl_basic", "--json"], ["runs", "/"][:1]):
    main(words)
print({"torch", "transformers"} & set(sys.modules), file=sys.stderr)
"""
    done = run_python("-c", program)
    assert done.stderr.strip().splitlines()[-1] == "set()"

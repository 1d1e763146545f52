"""The recipes of distillation, run as they are from the command line, on a fake model: a teacher that is trained first,
a student that learns from its own answers or from the teacher's, several teachers; going on, and what is refused."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kitchen.test_supervised import rows, weights
from stovetop.checkpoints import get_last_checkpoint
from stovetop.cli import main
from stovetop.cli.configs import config_fields
from stovetop.client import ServiceClient
from stovetop.kitchen import Finished, RunConfig, stage
from stovetop.recipes import distill_composite, on_policy_distillation
from stovetop.runs import Run, load

COMMON = ["base_url=recording", "model=any/model", "renderer_name=role_colon", "max_tokens=6", "lora_rank=4",
          "learning_rate=0.1", "teacher_learning_rate=0.3", "teacher_batch_size=16", "teacher_num_epochs=2",
          "test_size=8", "group_size=2", "eval_every=2", "save_every=2"]  # fmt: skip
ONE = ["teacher_model_name=any/model", "dataset=sample:tickets", "teacher_dataset=sample:tickets", "groups_per_batch=4"]
TWO = [*ONE[:-1], "groups_per_batch=2", "second_dataset=sample:sorting", "second_teacher_dataset=sample:sorting",
       "second_teacher_model_name=any/model", "second_groups_per_batch=3"]  # fmt: skip
WORDS = {
    "on_policy": ["on_policy_distillation", *COMMON, *ONE],
    "off_policy": ["on_policy_distillation", *COMMON[:-3], "eval_every=2", "save_every=2", *ONE, "mode=off_policy"],
    "composite": ["distill_composite", *COMMON, *TWO],
}
MODULES: dict[str, Any] = {
    "on_policy": on_policy_distillation,
    "off_policy": on_policy_distillation,
    "composite": distill_composite,
}
STUDENTS = {"on_policy": "2_on_policy", "off_policy": "3_off_policy", "composite": "3_student"}
KINDS = list(STUDENTS)


def run(kind: str, log_path: Path, *more: str) -> int:
    return main(["run", *WORDS[kind], "max_steps=3", f"log_path={log_path}", *more])


def outcome(kind: str, log_path: Path) -> list[object]:
    """What every phase has come to, without the clock."""
    folders = sorted(each for each in log_path.iterdir() if each.is_dir())
    assert folders[-1].name == STUDENTS[kind]
    return [(each.name, rows(each), weights(each)) for each in folders]


def config_of(kind: str, folder: Path, *more: str) -> Any:
    assert run(kind, folder / "config", "max_steps=1", *more) == 0
    return load(folder / "config").config_as(MODULES[kind].Config)


def final_weights(record: Any) -> str:
    """Of a phase."""
    final = get_last_checkpoint(record.path)
    assert final is not None
    return str(final.sampler_path)


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "composite" else [pytest.mark.slow]) for kind in KINDS]
)
def test_a_teacher_is_trained_and_then_its_student(kind: str, tmp_path: Path) -> None:
    assert run(kind, tmp_path / "run") == 0
    phases = [load(folder) for folder in sorted((tmp_path / "run").iterdir()) if folder.is_dir()]
    *teachers, student = phases
    for teacher in teachers:
        losses = teacher.series("test/nll").values
        assert losses[-1] < losses[0]
    assert [row["step"] for row in student.metrics] == [0, 1, 2, 3]
    assert [row["step"] for row in student.metrics if "test/teacher_kl" in row] == [0, 2, 3]
    config: Mapping[str, Any] = json.loads((student.path / "config.json").read_text())["config"]
    taught = [config[f"{nth}teacher_checkpoint_path"] for nth in ("", "second_")[: len(teachers)]]
    assert taught == list(map(final_weights, teachers))


@pytest.mark.slow
def test_the_distance_to_each_teacher_is_in_the_row(tmp_path: Path) -> None:
    assert run("composite", tmp_path / "run") == 0
    found = rows(tmp_path / "run" / STUDENTS["composite"])
    names = {f"{where}teacher_kl{which}" for where in ("", "test/") for which in ("", "/dataset_0", "/dataset_1")}
    assert names <= set(found[0])
    assert found[0]["env/sample:tickets/total_episodes"] == 2 * 2
    assert found[0]["env/sample:sorting/total_episodes"] == 3 * 2


# ---- going on --------------------------------------------------------------------------------------------------------


def dies_in(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @stage
    def dies(step: int) -> None:
        if step == 1:
            raise RuntimeError("power cut")

    dying = [
        replace(phase, workflow=phase.workflow.insert_after("log_step", dies)) if phase.name == name else phase
        for phase in module.PHASES
    ]
    monkeypatch.setattr(module, "PHASES", tuple(dying))


@pytest.mark.slow  # test_conformance has short ones
@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("on_policy", "teacher"),
        ("on_policy", "on_policy"),
        ("off_policy", "off_policy"),
        ("composite", "second_teacher"),
        ("composite", "student"),
    ],
)
def test_a_run_that_is_killed_in_any_phase_and_resumed_is_the_run_that_would_have_been(
    kind: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(kind, tmp_path / "whole") == 0
    with monkeypatch.context() as patched:
        dies_in(MODULES[kind], phase, patched)
        assert run(kind, tmp_path / "killed") == 1
    assert main(["resume", str(tmp_path / "killed")]) == 0
    assert outcome(kind, tmp_path / "killed") == outcome(kind, tmp_path / "whole")


@pytest.mark.slow
def test_the_student_may_be_made_longer_in_either_mode(tmp_path: Path) -> None:
    for kind in ("on_policy", "off_policy"):
        assert run(kind, tmp_path / kind) == 0
        assert main(["resume", str(tmp_path / kind), "max_steps=4"]) == 0
        assert [row["step"] for row in rows(tmp_path / kind / STUDENTS[kind])] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on_policy", "composite"])
def test_a_teacher_that_is_given_is_not_trained(kind: str, tmp_path: Path) -> None:
    assert run(kind, tmp_path / "run") == 0
    folders = sorted(each for each in (tmp_path / "run").iterdir() if each.is_dir())
    given = [final_weights(load(folder)) for folder in folders[:-1]]
    words = [f"{nth}teacher_checkpoint_path={path}" for nth, path in zip(("", "second_"), given, strict=False)]
    assert run(kind, tmp_path / "given", *words) == 0
    assert [each.name for each in (tmp_path / "given").iterdir() if each.is_dir()] == [STUDENTS[kind]]
    assert outcome(kind, tmp_path / "given") == outcome(kind, tmp_path / "run")[-1:]


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_the_published_defaults_are_kept() -> None:
    one, several = on_policy_distillation.Config(), distill_composite.Config()
    assert (one.model_name, one.teacher_model_name) == ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B")
    assert (one.dataset, one.groups_per_batch, one.mode) == ("deepmath", 1024, "on_policy")
    assert several.model_name == "Qwen/Qwen3.5-9B"
    assert (several.dataset, several.teacher_model_name) == ("deepmath", "Qwen/Qwen3.6-27B")
    assert (several.second_dataset, several.second_teacher_model_name) == ("tulu3", "Qwen/Qwen3.5-397B-A17B")
    assert (several.groups_per_batch, several.second_groups_per_batch) == (512, 512)
    for config in (one, several):
        assert (config.learning_rate, config.lora_rank, config.group_size, config.max_tokens) == (1e-4, 128, 4, 4096)
        assert (config.kl_penalty_coef, config.kl_discount_factor, config.temperature) == (1.0, 0.0, 1.0)
        assert (config.loss_fn, config.num_substeps, config.eval_every, config.save_every) == (
            "importance_sampling", 1, 20, 20,
        )  # fmt: skip
        assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.95, 1e-8)
        assert config.max_prompt_tokens == 1024


@pytest.mark.parametrize("module", [on_policy_distillation, distill_composite])
def test_every_field_that_a_students_phase_has_is_read_by_it(module: Any) -> None:
    of_run = {field.name for field in fields(RunConfig)}
    for phase in module.PHASES:
        checked = phase.workflow.check(phase.config_class, {"service": ServiceClient, "run": Run})
        assert (checked.problems, checked.unread) == ((), ())
        assert set(checked.config_fields) | of_run == {field.name for field in fields(phase.config_class)}


def test_fields_that_both_recipes_have_say_the_same() -> None:
    """The same comment, which is their meaning."""
    said = [
        {each.name: (each.meaning, each.accepts) for each in config_fields(recipe.Config)}
        for recipe in (on_policy_distillation, distill_composite)
    ]
    shared = said[0].keys() & said[1].keys() - {"log_path"}
    assert {name: said[0][name] for name in shared} == {name: said[1][name] for name in shared}


def done(*names: str) -> dict[str, Finished]:
    return {name: Finished(name, {"state_path": f"{name}/state", "sampler_path": f"{name}/weights"}) for name in names}


def test_only_the_students_of_the_mode_is_run() -> None:
    config = on_policy_distillation.Config(mode="off_policy")
    assert on_policy_distillation.teacher(config, {}) is None  # the published one is there
    assert on_policy_distillation.on_policy(config, {}) is None
    own = on_policy_distillation.off_policy(config, done("teacher"))
    assert own is not None
    assert own.teacher_checkpoint_path == "teacher/weights"
    assert own.load_checkpoint_path is None


def test_a_trained_teacher_teaches_its_own_data_set() -> None:
    config = distill_composite.Config(second_teacher_dataset="sample:chats", teacher_checkpoint_path="given")
    assert distill_composite.first_teacher(config, {}) is None
    second = distill_composite.second_teacher(config, {})
    assert second is not None
    assert (second.model_name, second.dataset) == ("Qwen/Qwen3.5-397B-A17B", "sample:chats")
    student = distill_composite.student(config, done("second_teacher"))
    assert (student.teacher_checkpoint_path, student.second_teacher_checkpoint_path) == (
        "given", "second_teacher/weights",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words", "named"),
    [
        ("on_policy", ["group_size=0"], "group_size"),
        ("on_policy", ["kl_penalty_coef=0"], "kl_penalty_coef"),
        ("on_policy", ["temperature=0"], "temperature"),
        ("on_policy", ["learning_rate=-1"], "learning_rate"),
        ("on_policy", ["max_steps=0"], "max_steps"),
        ("on_policy", ["seed=-1"], "seed"),
        ("on_policy", ["mode=both"], "mode"),
        ("on_policy", ["loss_fn=cross_entrpy"], "cross_entropy"),
        ("on_policy", ["loss_fn=cross_entropy"], "loss_fn must be .*cross_entropy needs weights"),
        ("on_policy", ["learning_rate=auto"], "learning_rate"),
        ("on_policy", ["group_size=0", "renderer_name=qwen33"], "group_size.*renderer_name"),
        ("on_policy", ["teacher_dataset=nowhere.jsonl"], "nowhere.jsonl"),
        ("on_policy", ["dataset=depmath"], "deepmath"),
        ("on_policy", ["teacher_checkpoint_path=nowhere", "base_url=local"], "teacher_checkpoint_path|any/model"),
        ("off_policy", ["group_size=2"], r"mode=off_policy.*leave these at their defaults: \['group_size'\]"),
        ("composite", ["second_dataset=sample:tickets"], "second_dataset must be another"),
        ("composite", ["second_groups_per_batch=0"], "second_groups_per_batch"),
        ("composite", ["second_teacher_dataset=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_begun(
    kind: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(kind, tmp_path / "run", *words, "--dry-run")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    assert code == 2
    assert re.search(named, " ".join(capsys.readouterr().err.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_shows_every_phase_and_writes_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stovetop.backends.open_service", None)  # to open one would be an error
    assert run(kind, tmp_path / "run", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"Phase {STUDENTS[kind]}, in {tmp_path}/run/{STUDENTS[kind]}:" in said
    assert "teacher: weights, will exist" in said
    assert list(tmp_path.iterdir()) == []

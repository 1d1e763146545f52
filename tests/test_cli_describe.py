"""describe and report: of recipes, of workflows by themselves, of recipes of one's own; and how wide they write."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from costly import slow_but
from stovetop.cli import main
from stovetop.cli.describe import inputs_of, recipe_as_text, workflow_as_text
from stovetop.cli.loading import load_recipe
from stovetop.cli.tables import text_width
from stovetop.kitchen.workflows import list_workflows
from stovetop.recipes import RECIPES
from stovetop.runs import load, open_run


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a recipe of one's own is added to."""
    monkeypatch.setattr(sys, "path", [*sys.path])


SMALL = ["base_url=recording", "model=any/model", "renderer_name=role_colon", "dataset=sample:chats", "batch_size=10"]


@pytest.mark.parametrize("name", list_workflows())
def test_a_workflow_by_itself_says_what_its_config_needs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", name, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["workflow"] == name
    stages = described["stages"]
    assert [row["stage"] for row in stages] == [place.stage.name for place in list_workflows()[name].stages]
    for row in stages:
        assert {name: type(value) for name, value in row.items()} == {
            "stage": str, "where": str, "reads": list, "optional": list, "writes": list, "doc": str, "file": str,
            "line": int,
        }  # fmt: skip
        assert row["doc"].endswith("."), row
    inputs = {each["name"]: each for each in described["inputs"]}
    assert inputs["learning_rate"] == {
        "name": "learning_rate",
        "type": "float | Literal['auto']",
        "default": "",
        "read_by": ["make_optimizer"],
    }
    assert inputs["lora_rank"]["default"] == "32"
    assert inputs["model_name"]["read_by"] == ["choose_adapter", "make_optimizer"]
    assert {"service", "run"} == set(described["ports"])
    needed = {name for name, each in inputs.items() if each["default"] == ""}
    assert not {"data_D", "training_client", "row", "step", "policy", "service", "run"} & needed
    assert main(["describe", name.replace("_", "-")]) == 0
    said = capsys.readouterr().out
    assert "  learning_rate: float | Literal['auto']\n      read by make_optimizer\n" in said
    assert "  lora_rank: int = 32\n" in said


def test_what_a_loop_takes_its_depth_from_has_no_default() -> None:
    inputs = inputs_of(list_workflows()["reinforcement"])
    assert inputs["max_steps_off_policy"].default == ""
    assert inputs["max_steps_off_policy"].read_by[-1] == "the loop"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_described_fits_the_terminal(name: str, width: int) -> None:
    """But for commands, and for values and paths that one may have to type: these stay whole."""
    lines = recipe_as_text(load_recipe(name), width=width).splitlines()
    long = [line for line in lines if len(line) > width and " " in line.strip() and not line.startswith("    stovetop")]
    assert [line for line in long if not line.strip().startswith(("behavior_if_exists:", "without a network"))] == []
    assert len(lines) > 20


def test_a_workflow_fits_a_terminal_of_eighty_columns() -> None:
    for workflow in list_workflows().values():
        lines = workflow_as_text(workflow, width=80).splitlines()
        assert [line for line in lines if len(line) > 80 and "(stovetop/" not in line and "Literal" not in line] == []


def test_lines_are_as_wide_as_the_terminal_and_no_wider_than_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_width() == 120  # of a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, width in ((80, 80), (300, 120)):
        monkeypatch.setattr("shutil.get_terminal_size", lambda columns=columns: os.terminal_size((columns, 24)))
        assert text_width() == width


def test_a_table_in_a_pipe_has_one_line_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ("a_long_name_of_a_folder_" * 5) / "run"
    assert main(["run", "sl_basic", *SMALL, f"log_path={folder}"]) == 0
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "sl_basic" in line]
    words = row.split()
    assert (words[:5], words[-1]) == (["sl_basic", "complete", "2", "of", "2"], str(folder))


@dataclass(frozen=True)
class Some:
    """A config."""


@pytest.mark.parametrize(
    ("file", "damage"),
    slow_but(
        2,
        [
            ("metrics.jsonl", b"words\n"),
            ("workflow.json", b'{"phases": 3}'),
            ("checkpoints.jsonl", b"{}\n"),
            ("workflow.json", b"words"),
            ("workflow.json", b"[]"),
            ("workflow.json", b'{"phases": [{"file": null}]}'),
        ],
    ),
)
def test_a_damaged_run_hides_no_other_and_its_report_names_the_file(
    file: str, damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        with open_run(tmp_path / name, Some(), console=False):
            pass
    (tmp_path / "a" / file).write_bytes(damage)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["state"], Path(each["run"]).name) for each in listed] == [("damaged", "a"), ("stopped", "b")]
    assert f"/a/{file}" in listed[0]["reason"]
    assert main(["report", str(tmp_path / "a")]) == 1
    assert f"/a/{file}" in capsys.readouterr().err


# ---- report ----------------------------------------------------------------------------------------------------------


def test_a_report_has_every_metric_every_checkpoint_and_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "sl_basic", *SMALL, f"log_path={tmp_path / 'run'}", "learning_rate=0.1", "save_every=1"]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["recipe"], report["state"], report["num_rows"]) == ("sl_basic", "complete", 3)
    metrics = {metric.pop("metric"): metric for metric in report["metrics"]}
    values = load(tmp_path / "run").series("train_mean_nll").values
    assert metrics["train_mean_nll"] == {
        "first": values[0],
        "last": values[-1],
        "lowest": min(values),
        "highest": max(values),
        "mean": pytest.approx(sum(values) / len(values)),
        "num_steps": 2,
    }
    assert [checkpoint["name"] for checkpoint in report["checkpoints"]] == ["000001", "final"]
    assert "loss.png" in report["files"]
    assert main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "sl_basic, complete, 3 rows of metrics" in said
    assert "train_mean_nll" in said
    assert "checkpoint final: /" in said


def test_a_report_of_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no run in this folder" in capsys.readouterr().err


# ---- recipes of one's own --------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    size: int = 3  # of it

async def main(config):
    print("size", config.size)
"""


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("nowhere.py", None, "there is no such file"),
        ("json.py", OWN, "another module has this name"),
        ("half_a_recipe.py", "Config = 3\n", "a recipe has a dataclass `Config`"),
        ("borrowed.py", "from stovetop.recipes.sl_basic import Config, main\n", "a recipe has a dataclass `Config`"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(
    file: str, text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / file).write_text(text)
    assert main(["run", str(tmp_path / file)]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert file in said


def test_a_file_of_ones_own_is_run_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_recipe_of_a_test.py").write_text(OWN)
    assert main(["run", str(tmp_path / "own_recipe_of_a_test.py"), "size=4"]) == 0
    assert main(["describe", str(tmp_path / "own_recipe_of_a_test.py")]) == 0
    assert capsys.readouterr().out.splitlines()[:1] == ["size 4"]

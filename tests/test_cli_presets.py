"""Presets: configs by name in a recipe's file, which `run` begins with and `describe` prints. `own` is a recipe of
these tests, as a file of the user's own and as one of the table."""

import json
import sys
from pathlib import Path

import pytest

from stovetop.cli import main
from stovetop.recipes import RECIPES, Recipe
from stovetop.stored_configs import read_config

OWN = '''
"""Opens a run."""

from dataclasses import dataclass, field

from stovetop.runs import load, open_run
from stovetop.tracking.configs import MAY_CHANGE


@dataclass(frozen=True, kw_only=True)
class Config:
    dataset: str = "hhh"  # what to learn from
    batch_size: int = 256  # a step
    log_path: str = field(default="runs/own", metadata=MAY_CHANGE)  # where
    behavior_if_exists: str = field(default="resume", metadata=MAY_CHANGE)  # of a run that is there


async def main(config: Config) -> None:
    with open_run(config.log_path, config, console=False) as run:
        run.log_metrics({"batch_size": config.batch_size}, len(load(run.path).metrics))


PRESETS = {
    "small": Config(dataset="sample:hhh", batch_size=8, log_path="runs/own_small"),
    "two_cores": Config(batch_size=2),
}
'''


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe as a file; it is `own` in the table too."""
    (tmp_path / "own_preset_recipe.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_preset_recipe", raising=False)
    monkeypatch.setitem(RECIPES, "own", Recipe("own_preset_recipe", "Opens a run"))
    return "own_preset_recipe.py"


def stored(folder: str) -> dict[str, object]:
    return dict(read_config(Path(folder)).config)


@pytest.mark.parametrize("name", ["own", "own_preset_recipe.py"])
def test_a_run_begins_with_its_preset_and_fields_on_the_command_line_win(name: str) -> None:
    assert main(["run", f"{name}:small", "batch_size=3"]) == 0
    own = {"dataset": "sample:hhh", "batch_size": 3, "log_path": "runs/own_small", "behavior_if_exists": "resume"}
    assert stored("runs/own_small") == own
    assert main(["run", f"{name}:two-cores"]) == 0
    assert stored("runs/own")["batch_size"] == 2


def test_the_config_in_its_folder_is_all_that_a_run_of_a_preset_needs_to_go_on() -> None:
    assert main(["run", "own:small"]) == 0
    before = stored("runs/own_small")
    Path("runs/own_small").rename("moved")
    assert main(["resume", "moved"]) == 0
    assert stored("moved") == {**before, "log_path": str(Path("moved").resolve())}
    assert [row["batch_size"] for row in map(json.loads, Path("moved/metrics.jsonl").read_text().splitlines())] == [
        8,
        8,
    ]


def test_another_preset_does_not_go_on_with_the_run_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "own:small"]) == 0
    assert main(["run", "own:two_cores", "log_path=runs/own_small"]) == 1
    assert "batch_size: 8 -> 2" in capsys.readouterr().err


def test_a_dry_run_prints_the_config_of_the_preset_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "own:small", "--dry-run", "batch_size=5"]) == 0
    said = capsys.readouterr().out
    assert "  dataset=sample:hhh\n  log_path=runs/own_small\n  batch_size=5\n" in said
    assert not Path("runs").exists()


def test_help_has_the_values_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["run", "own:small", "--help"])
    said = capsys.readouterr().out
    assert "stovetop run own:small" in said
    assert "(default: sample:hhh)" in said


def test_describe_prints_the_config_of_a_preset_and_what_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "own:small"]) == 0
    said = capsys.readouterr().out
    assert "  batch_size: int = 8 (default 256)\n" in said
    assert "  behavior_if_exists: str = resume\n" in said
    assert main(["describe", "own:small", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["recipe"], described["preset"]) == ("own", "small")
    assert described["config"]["dataset"] == "sample:hhh"


def test_describe_lists_the_presets_of_a_recipe_with_what_each_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "own"]) == 0
    said = capsys.readouterr().out
    assert "The preset 'small' sets dataset=sample:hhh log_path=runs/own_small batch_size=8\n" in said
    assert main(["describe", "own", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["presets"]["two_cores"]["batch_size"] == 2
    assert "config" not in described


def test_the_list_names_presets_and_workflows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["own"] == {
        "recipe": "own", "summary": "Opens a run", "workflow": [], "presets": ["small", "two_cores"]
    }  # fmt: skip
    assert rows["dpo"]["workflow"] == ["preference"]
    assert main(["list"]) == 0
    assert "own:small, own:two_cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "own:smal"], "unknown preset of own 'smal'; did you mean 'small'? known: small, two_cores"),
        (["run", "own_preset_recipe.py:smal"], "did you mean 'small'?"),
        (["describe", "own:smal"], "unknown preset of own 'smal'; did you mean 'small'?"),
        (["run", "onw:small"], "unknown recipe 'onw'; did you mean 'own'?"),
        (["describe", "onw:small"], "unknown recipe 'onw'; did you mean 'own'?"),
        (["run", "sort_digits_demo:small"], "sort_digits_demo has no presets; leave the name of one out: 'small'"),
        (["describe", "reinforcement:small"], "unknown recipe 'reinforcement'"),
        (["run", "own:"], "unknown preset of own ''; known: small, two_cores"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("small", "3"), ("quite small", "Config()")])
def test_presets_that_are_no_configs_are_refused_by_name(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = f"wrong_preset_recipe_{len(name)}"
    Path(f"{recipe}.py").write_text(OWN[: OWN.index("PRESETS")] + f"PRESETS = {{{name!r}: {value}}}\n")
    assert main(["describe", f"{recipe}.py"]) == 2
    assert f"PRESETS of {recipe} has configs of its own class by name" in (said := capsys.readouterr().err)
    assert f"{name!r}: {value.removesuffix(')')}" in said


def test_where_the_recipes_own_data_or_model_cannot_be_had_the_preset_is_the_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = "\n\ndef check(config):\n    raise InvalidRequest(f'there is no such data set: {config.dataset!r}')\n"
    own = OWN.replace("from stovetop.runs", "from stovetop.errors import InvalidRequest\nfrom stovetop.runs")
    Path("next_step_recipe.py").write_text(own + check)
    assert main(["run", "next_step_recipe.py"]) == 2
    named = "Without a network and a large model: stovetop run next_step_recipe.py:small\n"
    assert f"no such data set: 'hhh'\n{named}" in capsys.readouterr().err
    assert main(["run", "next_step_recipe.py", "dataset=mine"]) == main(["run", "next_step_recipe.py:small"]) == 2
    assert "Without a network" not in capsys.readouterr().err
    assert not Path("runs").exists()

"""The command line: what is understood, what is said, and the exit codes. `toy` is a recipe of these tests."""

import inspect
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import tiny
from processes import ctrl_c_is_heard, run_python
from stovetop.backends import local
from stovetop.cli import as_flags, config_fields, load_recipe, main
from stovetop.recipes import RECIPES, Recipe
from stovetop.types import AdamParams

TOY = '''
"""Counts to ten.

Nothing is trained."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stovetop.errors import Diverged, InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Config:
    model_name: str = "smollm2"  # a folder, or the name of a fetched model
    num_epochs: int = 1  # passes over the rows
    learning_rate: float = 1e-4  # peak
    limit: int | None = None
    shuffle: bool = True  # the rows
    then: Literal["finish", "diverge", "interrupt", "terminate", "crash"] = "finish"  # how it ends
    log_path: Path = Path("runs/toy")  # where the run lies

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise InvalidRequest(f"num_epochs must be positive: {self.num_epochs}")


async def main(config: Config) -> None:
    match config.then:
        case "finish":
            print("ran", config)
        case "diverge":
            raise Diverged("the loss", 3, float("nan"))
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
            await asyncio.sleep(10)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10)
        case "crash":
            raise ZeroDivisionError("a bug")
'''


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_recipe.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_recipe", raising=False)
    monkeypatch.setitem(RECIPES, "toy", Recipe("toy_recipe", "Counts to ten"))


def code_of(*words: str) -> int:
    """The exit code of a command, however it leaves."""
    try:
        return main(words)
    except SystemExit as left:
        return int(left.code or 0)


# ---- run -----------------------------------------------------------------------------------------------------------


def test_run_passes_fields_in_either_form_to_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "--learning-rate", "-3e-4", "num_epochs=2", "--limit=3", "shuffle=False") == 0
    said = capsys.readouterr().out
    assert "num_epochs=2, learning_rate=-0.0003, limit=3, shuffle=False, then='finish'" in said


def test_model_and_epochs_are_short_for_the_fields_of_longer_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "model=mine", "--epochs", "4") == 0
    assert "Config(model_name='mine', num_epochs=4," in capsys.readouterr().out


def test_an_alias_is_used_only_where_the_config_has_its_field() -> None:
    words = ["reference_model=a", "--epochs=2"]
    assert as_flags(words, {"reference_model_name"}) == ["--reference_model_name=a", "--epochs=2"]
    assert as_flags(words, {"reference_model", "reference_model_name", "epochs", "num_epochs"}) == [
        "--reference_model=a",
        "--epochs=2",
    ]


def test_a_value_that_looks_like_an_assignment_stays_a_value() -> None:
    assert as_flags(["--system-prompt", "a=b", "n=c=d", "x"], {"system_prompt", "n"}) == [
        "--system_prompt",
        "a=b",
        "--n=c=d",
        "x",
    ]


def test_a_dry_run_prints_the_config_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "epochs=2", "--dry-run", "then=crash") == 0
    said = capsys.readouterr().out
    assert "  num_epochs=2\n" in said
    assert "  log_path=runs/toy\n" in said


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["rnu", "toy"], "'run'"),
        (["run", "tyo"], "'toy'"),
        (["run", "toy", "num_epohcs=2"], "--num_epochs"),
        (["run", "toy", "--lerning-rate", "2"], "--learning_rate"),
        (["describe", "tyo"], "'toy'"),
        (["fetch", "smolm2"], "'smollm2'"),
    ],
)
def test_a_misspelt_name_is_a_usage_error_that_names_the_nearest(
    words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*words) == 2
    assert nearest in capsys.readouterr().err


@pytest.mark.parametrize("word", ["num_epochs=two", "num_epochs=0", "then=never", "stray", "--num_epochs"])
def test_a_bad_value_is_a_usage_error_that_names_the_field(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", word) == 2
    assert word.partition("=")[0].strip("-") in capsys.readouterr().err


def test_a_failed_run_says_why_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "then=diverge") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the loss is not finite at step 3: nan.")
    assert said.count("\n") == 1


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "then=diverge", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err
    assert code_of("--debug", "run", "tyo") == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with ctrl_c_is_heard():
        assert code_of("run", "toy", "then=interrupt", "log_path=my runs") == 130
    assert "stovetop run toy then=interrupt 'log_path=my runs'\n" in capsys.readouterr().err


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_does_what_ctrl_c_does_also_where_that_is_ignored(
    of_sigint: Callable[..., object] | signal.Handlers, capsys: pytest.CaptureFixture[str]
) -> None:
    of_sigterm = signal.getsignal(signal.SIGTERM)
    with ctrl_c_is_heard():
        signal.signal(signal.SIGINT, of_sigint)
        assert code_of("run", "toy", "then=terminate") == 143
    assert "Interrupted. To go on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is of_sigterm


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["run", "toy", "then=crash"])


# ---- list, describe, help ------------------------------------------------------------------------------------------


def test_list_shows_every_recipe_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("list") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in RECIPES)
    assert code_of("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"recipe": "toy", "summary": "Counts to ten"} in rows
    assert [row["recipe"] for row in rows] == list(RECIPES)


def test_describe_takes_the_meaning_of_a_field_from_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("describe", "toy", "--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described["description"] == "Counts to ten.\n\nNothing is trained."
    fields = {field["name"]: field for field in described["fields"]}
    assert fields["num_epochs"] == {
        "name": "num_epochs",
        "type": "int",
        "default": "1",
        "meaning": "passes over the rows",
    }
    assert fields["limit"] == {"name": "limit", "type": "int | None", "default": "None", "meaning": ""}
    assert code_of("describe", "toy") == 0
    assert "passes over the rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "worth_reading"),
    [
        ([], "Exit codes"),
        (["--help"], "Exit codes"),
        (["run"], "Counts to ten"),
        (["run", "--help"], "field=value"),
        (["run", "toy", "--help"], "passes over the rows (default: 1)"),
        (["list", "--help"], "recipes"),
        (["describe", "--help"], "toy"),
        (["chat", "--help"], "checkpoint"),
        (["export", "--help"], "PEFT"),
        (["fetch", "--help"], "SmolLM2-135M-Instruct, 93 MB, Apache-2.0"),
    ],
)
def test_help_is_worth_reading(words: list[str], worth_reading: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(*words) == 0
    assert worth_reading in capsys.readouterr().out


def test_export_says_what_was_merged_and_what_rounding_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny.save_model(tmp_path / "base", tiny.llama(tie_word_embeddings=True).to(torch.bfloat16))
    with local.open_service(storage=tmp_path, threads=1) as service:
        trainer = service.create_lora_training_client(str(base), rank=2, seed=0)
        trainer.forward_backward([tiny.datum(tiny.tokens(9, 0))], "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=1e-2))
        path = trainer.save_weights_for_sampler("mine").result().path
    assert code_of("export", path, str(tmp_path / "merged")) == 0
    said = capsys.readouterr().out
    assert "15 linears merged and stored in bfloat16" in said
    assert "a head of its own" in said
    assert said.endswith(f"{tmp_path / 'merged'}\n")
    assert code_of("export", path, str(tmp_path / "merged")) == 1


def test_help_imports_nothing_heavy() -> None:
    program = """
import sys
from stovetop.cli import main
for words in ([], ["run"], ["list", "--json"]):
    main(words)
print({"torch", "transformers", "pydantic", "tyro", "rich", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""
    done = run_python("-c", program, check=True)
    assert done.stderr == "set()\n"


def test_no_comment_on_a_field_is_lost_in_the_help_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RECIPES:
        comments = inspect.getsource(load_recipe(name).Config).count("  # ")
        assert sum(field.meaning != "" for field in config_fields(load_recipe(name).Config)) == comments, name
        assert code_of("run", name, "--help") == code_of("describe", name) == 0

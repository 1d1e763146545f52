"""The command line: what is understood, what is said, and the exit codes. `toy` is a recipe of these tests."""

import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from costly import slow_but
from engine import tiny
from processes import ctrl_c_is_heard, run_python
from stovetop.backends import local
from stovetop.cli import main
from stovetop.cli.configs import as_flags, config_fields
from stovetop.cli.field_names import FieldNames
from stovetop.cli.loading import load_recipe
from stovetop.durable import append_row
from stovetop.recipes import RECIPES, Recipe
from stovetop.run_folder import mark
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


def test_of_a_field_given_twice_the_last_value_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "--num-epochs", "5", "epochs=3", "num_epochs=2") == 0
    assert "num_epochs=2," in capsys.readouterr().out


def test_model_and_epochs_are_short_for_the_fields_of_longer_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("run", "toy", "model=mine", "--epochs", "4") == 0
    assert "Config(model_name='mine', num_epochs=4," in capsys.readouterr().out


def test_an_alias_is_used_only_where_the_config_has_its_field() -> None:
    words = ["reference_model=a", "--epochs=2"]
    one, both = FieldNames({"reference_model_name"}), FieldNames({"reference_model", "reference_model_name", "epochs"})
    assert as_flags(words, one.aliases) == ["--reference_model_name=a", "--epochs=2"]
    assert as_flags(words, both.aliases) == ["--reference_model=a", "--epochs=2"]


def test_a_value_that_looks_like_an_assignment_stays_a_value() -> None:
    assert as_flags(["--system-prompt", "a=b", "n=c=d", "x"], {}) == [
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
        (["run", "toy", "num_epohcs=2"], "unknown field 'num_epohcs'; did you mean 'num_epochs'?"),
        (["run", "toy", "--lerning-rate", "2"], "'learning_rate'"),
        (["run", "toy", "modle=mine"], "did you mean 'model'?"),
        (["run", "toy", "--dryrun"], "unknown field 'dryrun'; did you mean '--dry-run'? `stovetop run toy --help`"),
        (["run", "toy", "--dry_run"], "did you mean '--dry-run'?"),
        (["run", "toy", "--debgu"], "did you mean '--debug'?"),
        (["describe", "tyo"], "'toy'"),
        (["describe", "reinforcment"], "'reinforcement'"),
        (["run", "toy.p"], "'toy'"),
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


# ---- what is known without a model ----------------------------------------------------------------------------------

NO_RUNS: list[tuple[str, str, str]] = [
    ("sl_loop", "dataset=nofile.jsonl", "no such file"),
    ("sl_loop", "dataset=sample:chat", "sample:chats|'chats'"),
    ("sl_loop", "test_dataset=nofile.jsonl", "no such file"),
    ("sl_loop", "test_size=-1", "test_size"),
    ("sl_loop", "test_size=99", "test_size must leave a row to train on"),
    ("sl_loop", "model=smolm2", "did you mean 'HuggingFaceTB|unknown base_model 'smolm2'"),
    ("sl_loop", "load_checkpoint_path=/nowhere", "load_checkpoint_path is no folder"),
    ("sl_loop", "renderer_name=chat_templte", "'chat_template'"),
    ("sl_loop", "train_on_what=all_the_rest", "all_user_and_system_messages"),
    ("sl_loop", "max_length=1", "max_length"),
    ("sl_loop", "learning_rate=-3", "learning_rate"),
    ("sl_loop", "learning_rate=nan", "learning_rate"),
    ("sl_loop", "learning_rate=0", "learning_rate must be a finite number above 0, or 'auto': 0.0"),
    ("sl_basic", "learning_rate=inf", "learning_rate must be a finite number above 0"),
    ("dpo", "learning_rate=auto", "no published learning-rate formula .* give a learning_rate"),
    ("sl_loop", "learning_rate=auto", "no published learning-rate formula"),
    (
        "rl_basic",
        "group_size=1 epochs=two modle=x dataset=nofile.jsonl load_checkpoint_path=/nowhere",
        "5 things are wrong: - unknown field 'modle'; did you mean 'model'?.*"
        "- num_epochs must be an integer of at least 1: 'two' - Config.group_size must be an integer of at least 2: 1"
        ".*- there is no such file.*'nofile.jsonl' - load_checkpoint_path is no folder",
    ),
    (
        "sl_loop",
        "renderer_name=none trackers=post dataset=nope test_dataset=neither model=nope load_checkpoint_path=/nowhere",
        "6 things are wrong: - unknown renderer_name 'none'.* - unknown tracker 'post'.* - unknown dataset 'nope'.*"
        " - unknown dataset 'neither'.* - unknown base_model 'nope'.* - load_checkpoint_path is no folder",
    ),
    (
        "rl_basic",
        "loss_fn=nope loss_fn_config.beta=1 dataset=nope answers=exact",
        "2 things are wrong: - unknown loss_fn 'nope'.* - unknown dataset 'nope'",
    ),
    ("sl_basic", "dataset=sample:tulu3 and more", "field=value or --field value: 'and'"),
    ("sl_basic", "--seed 3 more max_steps=-1", "2 things .* value: 'more' - Config.max_steps must be"),
    ("sl_basic", "load_checkpoint_path=model", "load_checkpoint_path: the checkpoint has no readable manifest.json"),
    ("sl_loop", "test_dataset=sample:chats", "trained on and would be held out too.*'sample:chats'"),
    ("sl_loop", "lr_schedule=sine", "'cosine'"),
    ("sl_loop", "warmup_steps=-1", "warmup_steps"),
    ("sl_loop", "warmup_steps=99", "warmup_steps must be at most 20, the number of steps: 99"),
    ("sl_loop", "num_epochs=0", "num_epochs"),
    ("sl_loop", "batch_size=0", "batch_size"),
    ("sl_loop", "lora_rank=0", "lora_rank"),
    ("sl_loop", "lora_rank=65537", "lora_rank"),
    ("sl_loop", "base_url=locl", "unknown base_url 'locl'; did you mean 'local'"),
    ("rl_loop", "base_url=https://:1", "must be an address such as http://127.0.0.1:8765"),
    ("sl_loop", "seed=-1", "seed"),
    ("sl_loop", "adam_beta1=1", "adam_beta1"),
    ("sl_loop", "adam_beta2=-0.1", "adam_beta2"),
    ("sl_loop", "adam_eps=inf", "adam_eps"),
    ("sl_loop", "eval_every=-1", "eval_every"),
    ("sl_loop", "save_every=-2", "save_every"),
    ("sl_loop", "log_path=", "log_path is empty"),
    ("sl_loop", "log_path=.", "the current folder"),
    ("sl_loop", "behavior_if_exists=keep", "'resume'"),
    ("rl_loop", "dataset=sample:chats test_size=4", "needs 'answer'"),
    ("rl_loop", "groups_per_batch=0", "groups_per_batch"),
    ("rl_loop", "group_size=1", "group_size"),
    ("rl_loop", "max_tokens=0", "max_tokens"),
    ("rl_loop", "temperature=0", "temperature"),
    ("rl_loop", "max_steps=0", "max_steps"),
    ("rl_loop", "max_steps=-1", "max_steps"),
    ("rl_loop", "loss_fn=nope", "importance_sampling"),
    ("rl_loop", "loss_fn=cross_entropy", "cross_entropy needs weights, which rollouts do not have"),
    ("sl_basic", "dataset=sample:no_robot", "'sample:no_robots'|'no_robots'"),
    ("sl_basic", "dataset=no_robot", "did you mean 'no_robots'"),
    ("sl_basic", "test_dataset=sample:chat", "did you mean 'chats'"),
    ("rl_basic", "dataset=gsm8", "did you mean 'gsm8k'"),
    ("dpo", "dataset=hh", "did you mean 'hhh'"),
    ("dpo", "dataset=sample:ultrafeedbak", "did you mean 'ultrafeedback'"),
    ("sl_basic", "warmup_steps=6", "warmup_steps must be at most 5, the number of steps: 6"),
    ("sl_basic", "threads=0", "threads"),
    ("sl_basic", "grad_clip_norm=-1", "grad_clip_norm"),
    ("sl_basic", "load_checkpoint_path=/nowhere", "load_checkpoint_path is no folder"),
    ("rl_basic", "groups_per_batch=0", "groups_per_batch"),
    ("rl_basic", "group_size=0", "group_size must be an integer of at least 2: 0"),
    ("rl_basic", "loss_fn=gspo", "loss_fn must be importance_sampling or ppo or cispo or dro; gspo needs sequence_rat"),
    ("rl_basic", "dataset=", "dataset"),
    ("rl_basic", "model=", "base_model"),
    ("rl_basic", "save_every=-1 eval_every=-2 seed=-3", "Config.seed .* Config.eval_every .* Config.save_every"),
    ("rl_basic", "max_steps_off_policy=-1", "max_steps_off_policy"),
    ("rl_basic", "answers=boxd", "'boxed'"),
    ("rl_basic", "loss_fn=nope", "importance_sampling"),
    ("dpo", "dpo_beta=0", "dpo_beta"),
    ("dpo", "reference_model=nope", "unknown base_model 'nope'"),
    ("sort_digits_demo", "num_test_problems=65", "num_test_problems"),
    ("sort_digits_demo", "rl_steps=0", "rl_steps"),
    ("sort_digits_demo", "model=nope", "unknown base_model"),
    ("sort_digits_demo", "log_path=..", "that the current folder is in"),
]


# Of the recipes whose own data are on a hub: what they run on without a network.
SMALL = {
    "sl_basic": ["dataset=sample:no_robots", "batch_size=4"],
    "rl_basic": ["dataset=sample:gsm8k", "test_size=8", "groups_per_batch=4", "group_size=4"],
    "dpo": ["dataset=sample:hhh", "batch_size=2"],
}


@pytest.mark.parametrize(("recipe", "word", "named"), NO_RUNS)
def test_a_dry_run_finds_all_that_can_be_known_without_a_model(
    recipe: str,
    word: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    words = ["run", recipe, f"model={model}", "--dry-run", *SMALL.get(recipe, [])]
    assert code_of(*words) == 0
    assert not (tmp_path / "runs").exists()
    capsys.readouterr()
    assert code_of(*words, *word.split()) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(named, said), said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "toy_recipe.py"]


def test_a_dry_run_finds_a_folder_that_is_no_run_or_a_run_of_another_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = [
        "run",
        "sl_loop",
        "base_url=recording",
        f"log_path={tmp_path}/run",
        "renderer_name=role_colon",
        "epochs=1",
    ]
    assert code_of(*sample) == 0
    assert code_of(*sample, "--dry-run") == code_of(*sample, "--dry-run", "save_every=3") == 0
    capsys.readouterr()
    assert code_of(*sample, "--dry-run", "learning_rate=1e-3") == 2
    assert "learning_rate: 0.0002 -> 0.001" in capsys.readouterr().err
    assert code_of(*sample[:3], f"log_path={tmp_path}", "--dry-run") == 2
    assert "it holds run, toy_recipe.py, and no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "code"),
    slow_but(1, [("load_checkpoint_path=/nowhere", 1), ("dataset=nofile.jsonl", 2), ("model=nowhere/none", 2)]),
)
def test_the_corrected_command_runs_where_a_mistaken_one_failed(
    wrong: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "sl_loop", f"log_path={tmp_path}/run", "renderer_name=role_colon", "epochs=1", "save_every=1"]
    backend = [] if wrong.startswith("model") else ["base_url=recording"]
    assert code_of(*words, *backend, wrong) == code
    assert (tmp_path / "run").exists() == (code == 1)  # where a mistake is seen before the run, nothing is written
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert code_of(*words, "base_url=recording", "behavior_if_exists=raise") == 0


@pytest.mark.parametrize("value", ["all_tokens", "ALL_TOKENS", "All_Tokens"])
def test_a_choice_is_accepted_as_it_is_printed_and_by_its_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ([f"train_on_what={value}"], [f"--train-on-what={value}"], ["--train_on_what", value]):
        assert code_of("run", "sl_loop", "--dry-run", "base_url=recording", *form) == 0
        assert "  train_on_what=all_tokens\n" in capsys.readouterr().out


def test_describe_says_what_is_accepted_and_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("describe", "sl_loop", "--json") == 0
    fields = {field["name"]: field for field in json.loads(capsys.readouterr().out)["fields"]}
    for choice in fields["train_on_what"]["accepts"].removeprefix("one of ").split(", "):
        assert code_of("run", "sl_loop", "--dry-run", "base_url=recording", f"train_on_what={choice}") == 0
    assert fields["batch_size"]["accepts"] == "an integer of at least 1"
    assert fields["batch_size"]["type"] == "int"
    assert fields["save_every"]["may_change"] == "always"
    assert fields["num_epochs"]["may_change"] == "while lr_schedule=constant"
    assert fields["learning_rate"]["may_change"] == ""
    capsys.readouterr()
    assert code_of("describe", "sl_loop") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "A run that goes on may have another value of: log_path," in said
    assert "num_epochs (while lr_schedule=constant)" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["show", "m", "sample:chats", "--limit", "-1"], "--limit: must be an integer of at least 1: '-1'"),
        (["show", "m", "sample:chats", "--limit", "two"], "--limit"),
        (["chat", "--max-tokens", "0"], "--max-tokens: must be an integer of at least 1: '0'"),
        (["chat", "--temperature", "-1"], "--temperature: must be a number of at least 0: '-1'"),
        (["chat", "--temperature", "nan"], "--temperature"),
    ],
)
def test_a_number_that_makes_no_sense_is_a_usage_error(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(*words) == 2
    assert named in capsys.readouterr().err


# ---- list, describe, help ------------------------------------------------------------------------------------------


def test_list_shows_every_recipe_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("list") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in RECIPES)
    assert code_of("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"recipe": "toy", "summary": "Counts to ten", "workflow": [], "presets": []} in rows
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
        "accepts": "",
        "may_change": "",
    }
    assert (fields["limit"]["type"], fields["limit"]["default"]) == ("int | None", "None")
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
        (["resume", "--help"], "from its last checkpoint"),
        (["runs", "--help"], "default: runs"),
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


@pytest.mark.parametrize("words", [["chat"], ["export"]])
def test_where_a_checkpoint_is_wanted_a_run_is_its_last(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    mark(run)
    more = [str(tmp_path / "merged")] if words == ["export"] else []
    assert code_of(*words, str(run), *more) == 1
    assert "this run has no checkpoint yet" in capsys.readouterr().err
    append_row(run / "checkpoints.jsonl", {"name": "000002", "batch": 2, "state_path": "/states/000002"})
    assert code_of(*words, str(run), *more) == 1
    assert "/states/000002" in capsys.readouterr().err


def test_an_unknown_renderer_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("chat", "no/model", "--renderer", "chat_templte") == 2
    assert "did you mean 'chat_template'" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    program = """
import subprocess
import sys
from stovetop.cli import main
for words in ([], ["run"], ["list", "--json"]):
    main(words)
print({"torch", "transformers", "pydantic", "tyro", "rich", "matplotlib"} & set(sys.modules), file=sys.stderr)
"""
    done = run_python("-c", program, check=True)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize("name", slow_but(2, RECIPES))
def test_no_comment_on_a_field_is_lost_in_the_help_of_a_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = inspect.getsource(load_recipe(name).Config)
    commented = set(re.findall(r"^    (\w+): .*  # ", own, re.MULTILINE))
    assert len(commented) == own.count("  # ")
    assert commented <= {field.name for field in config_fields(load_recipe(name).Config) if field.meaning}
    assert code_of("run", name, "--help") == code_of("describe", name) == 0


@pytest.mark.parametrize("words", slow_but(1, [["list"], ["describe", "sl_loop"], ["--help"]]))
def test_a_reader_that_has_enough_ends_a_command_without_a_word(words: list[str]) -> None:
    program = ["-m", "stovetop", *words]
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        try:
            assert process.stderr.read() == b""
            assert process.wait(timeout=30) == 1
        finally:
            process.kill()


def test_no_value_that_one_may_have_to_type_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "sl_loop"]) == 0
    assert "…" not in capsys.readouterr().out

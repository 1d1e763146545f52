"""Chats by name, with problems to solve now and then: what `sl_basic` does, and a second evaluation. The conformance
tests of workflow recipes are in test_workflow_recipes.py."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from stovetop.backends import recording
from stovetop.cli import main
from stovetop.datasets import load_rows
from stovetop.errors import InvalidRequest, StageFailed, UnknownName
from stovetop.evaluation.rows import read_rows
from stovetop.recipes import chat_sl, sl_basic
from stovetop.runs import load

WORDS = [
    "base_url=recording", "model=any/model", "renderer_name=role_colon", "dataset=sample:no_robots", "batch_size=4",
    "learning_rate=0.1",
]  # fmt: skip
EVALS = ["inline_evals=sample:gsm8k", "max_tokens=4"]
OF_STEP_0 = {
    "step", "epoch", "progress", "learning_rate", "num_sequences", "num_tokens", "num_loss_tokens", "train_mean_nll",
    "test/nll", "time/get_batch", "time/step", "time/evaluate", "time/total",
}  # fmt: skip


def run_in(folder: Path, *more: str) -> Sequence[Mapping[str, float]]:
    assert main(["run", "chat_sl", *WORDS, f"log_path={folder}", *more]) == 0
    return load(folder).metrics


@pytest.mark.slow
def test_training_and_evaluation_share_one_row_a_step(tmp_path: Path) -> None:
    first, *_ = run_in(tmp_path / "run", "max_steps=2", "save_every=1")
    assert first.keys() >= OF_STEP_0 | {"time/save_checkpoint"}


def test_several_sets_are_evaluated_and_report_their_standard_errors(tmp_path: Path) -> None:
    first, *_ = run_in(
        tmp_path / "run", "inline_evals=sample:gsm8k sample:no_robots[:3]", "max_tokens=4", "max_steps=1"
    )
    names = {name for name in first if name.startswith("inline/")}
    assert names >= {"inline/gsm8k/pass@1", "inline/gsm8k/pass@1/stderr", "inline/no_robots/nll"}
    assert (tmp_path / "run" / "data.json").read_text().count("inline ") == 2


def test_problems_are_solved_before_training_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    rows = run_in(tmp_path / "run", *EVALS, "max_steps=5", "infrequent_eval_every=3", "eval_every=2")
    assert [row["step"] for row in rows if "inline/gsm8k/pass@1" in row] == [0, 3, 5]
    assert [row["step"] for row in rows if "test/nll" in row] == [0, 2, 4, 5]
    kept = sorted(file.relative_to(tmp_path / "run").as_posix() for file in tmp_path.glob("run/evaluations/*/*.jsonl"))
    assert kept == [f"evaluations/00000{step}_inline/gsm8k.jsonl" for step in (0, 3, 5)]
    assert len(read_rows(tmp_path / "run/evaluations/000003_inline", "gsm8k")) == len(load_rows("sample:gsm8k"))


@pytest.mark.slow
def test_what_is_learnt_is_the_same_with_and_without_inline_evaluation_and_in_sl_basic(tmp_path: Path) -> None:
    run_in(tmp_path / "with", *EVALS, "max_steps=3", "infrequent_eval_every=1")
    run_in(tmp_path / "without", "max_steps=3")
    assert main(["run", "sl_basic", *WORDS, f"log_path={tmp_path / 'basic'}", "max_steps=3"]) == 0
    of_run = [
        [file.read_bytes() for file in sorted((tmp_path / name).glob("checkpoints/**/final/*.safetensors"))]
        for name in ("with", "without", "basic")
    ]
    assert of_run[0] == of_run[1] == of_run[2] != []


def test_held_out_loss_falls_by_a_third(tmp_path: Path) -> None:
    rows = run_in(tmp_path / "run", "num_epochs=3", "learning_rate=0.5", "test_size=6")
    assert rows[-1]["test/nll"] < rows[0]["test/nll"] * 2 / 3


def test_a_file_of_chats_is_a_data_set_too(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "e"}] for n in range(6)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat, "source": "mine"}) + "\n" for chat in chats))
    rows = run_in(tmp_path / "run", f"dataset={file}", "test_size=2")
    assert [row["num_sequences"] for row in rows if "num_sequences" in row] == [4]
    file.write_text('{"prompt": "no messages"}\n')
    assert main(["run", "chat_sl", *WORDS, f"dataset={file}", f"log_path={tmp_path / 'run'}", "--dry-run"]) == 2


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"inline_evals": "gsm9k"}, UnknownName, "did you mean 'gsm8k'"),
        ({"inline_evals": "inspect"}, UnknownName, "inspect"),
        ({"inline_evals": "gsm8k:rows.jsonl"}, InvalidRequest, "its answer has no result: 1"),
        ({"inline_evals": "sample:gsm8k pairwise:sample:chats"}, InvalidRequest, "no judge to evaluate with.*'chats'"),
        ({"dataset": "tulu4"}, UnknownName, "tulu4"),
    ],
)
def test_what_cannot_be_evaluated_or_trained_on_is_refused_before_anything_runs(
    changed: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "How many?", "answer": "Two.\\n#### "}\n')
    config = chat_sl.Config(dataset="sample:no_robots", batch_size=4, base_url="recording", log_path="run")
    with pytest.raises(error, match=said):
        chat_sl.check(replace(config, **changed))
    with pytest.raises(InvalidRequest, match="temperature"):
        replace(config, temperature=-0.1)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_before_training(tmp_path: Path) -> None:
    config = chat_sl.Config(
        dataset="sample:no_robots", batch_size=4, inline_evals="sample:gsm8k", renderer_name="role_colon",
        model_name="any/model", max_tokens=10**6, log_path=str(tmp_path / "run"),
    )  # fmt: skip
    with recording.open_service(config.log_path) as service, pytest.raises(StageFailed, match="lower max_tokens"):
        asyncio.run(chat_sl.train(config, service))
    assert load(config.log_path).metrics == []


def test_its_defaults_are_published_and_its_fields_are_those_of_sl_basic_with_the_same_meaning() -> None:
    config = chat_sl.Config()
    assert (config.model_name, config.dataset, config.learning_rate) == ("Qwen/Qwen3.5-9B-Base", "no_robots", 1e-4)
    assert (config.lr_schedule, config.num_epochs, config.lora_rank) == ("linear", 1, 32)
    assert (config.save_every, config.eval_every, config.infrequent_eval_every) == (20, 10, 100)
    assert (config.batch_size, config.max_length) == (256, 16384)
    assert (config.inline_evals, config.max_tokens, config.temperature) == (None, 1000, 0.6)
    more = {"inline_evals", "infrequent_eval_every", "max_tokens", "temperature"}
    assert {each.name for each in fields(config)} == {each.name for each in fields(sl_basic.Config)} | more

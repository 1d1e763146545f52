"""Prompt distillation on the recording backend: two phases, each also alone; what the student learns, and without what;
a kill; what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stovetop.checkpoints import get_last_checkpoint
from stovetop.cli import main
from stovetop.datasets import load_chats
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.kitchen import stage
from stovetop.kitchen.phases import plan_phases
from stovetop.recipes import prompt_distillation
from stovetop.recipes.prompt_distillation import PHASES, Config, check
from stovetop.runs import load

COMMON = ["base_url=recording", "model=any/model", "renderer_name=chat_template"]
OWN = [
    "dataset=texts.txt", r"answer_pattern=(?s)^\s*(\S)", "max_tokens=2", "batch_size=4", "test_size=4",
    "learning_rate=0.5", "num_epochs=2", "eval_every=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("".join(f"text {n}\n" for n in range(16)))


def run_in(folder: str, *more: str) -> int:
    return main(["run", "prompt_distillation", *COMMON, *OWN, f"log_path={folder}", *more])


def student_rows(folder: str, phase: str = "2_student") -> list[dict[str, float]]:
    rows = load(Path(folder) / phase).metrics
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def weights(folder: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted(Path(folder).glob("2_student/checkpoints/**/final/*.safetensors"))]


def teacher_that_says_x() -> str:
    """A checkpoint that has learnt to answer x to everything."""
    chat = {"messages": [{"role": "user", "content": "text"}, {"role": "assistant", "content": "x"}]}
    Path("x.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    words = ["dataset=x.jsonl", "test_size=0", "batch_size=8", "num_epochs=20", "learning_rate=1", "log_path=teacher"]
    assert main(["run", "sl_basic", *COMMON, *words]) == 0
    last = get_last_checkpoint("teacher")
    assert last is not None
    assert last.sampler_path is not None
    return last.sampler_path


def test_the_chats_lack_the_prompt_and_the_student_agrees_with_the_teacher_on_texts_that_are_held_out() -> None:
    teacher = teacher_that_says_x()
    assert run_in("run", f"teacher_checkpoint_path={teacher}", "num_epochs=8", "temperature=0") == 0
    chats = load_chats("run/1_answers/chats.jsonl")
    assert sorted(str(chat[0]["content"]) for chat in chats) == sorted(f"text {n}" for n in range(16))
    assert [chat[1]["content"] for chat in chats] == ["x"] * 16
    assert "Devanagari" not in Path("run/1_answers/chats.jsonl").read_text()
    first, *_, last = student_rows("run")
    assert (first["agreement/env/all/correct"], last["agreement/env/all/correct"]) == (0.0, 1.0)
    assert last["test/nll"] < first["test/nll"] / 3


@pytest.mark.slow
def test_each_phase_alone_comes_to_the_same_as_both_together() -> None:
    assert run_in("whole") == 0
    assert run_in("parts", "run_training=False") == 0
    assert not Path("parts/2_student").exists()
    assert run_in("parts") == 0
    given = [*COMMON, *(word for word in OWN if not word.startswith("dataset"))]
    words = ["file_path=whole/1_answers/chats.jsonl", "log_path=given"]
    assert main(["run", "prompt_distillation", *given, *words]) == 0
    assert not Path("given/1_answers").exists()
    assert student_rows("whole") == student_rows("parts") == student_rows("given")
    assert weights("whole") == weights("parts") == weights("given") != []


@pytest.mark.slow  # as test_conformance has it of all recipes
def test_a_run_that_is_killed_in_either_phase_goes_on_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in("whole", "save_every=1") == 0

    @stage
    def dies(texts: list[str] | None = None, step: int = 2) -> None:
        if step == 2:
            raise RuntimeError("power cut")

    for index, place in ((0, "write_answers"), (1, "await_optim_step")):
        phases = list(PHASES)
        phases[index] = replace(phases[index], workflow=phases[index].workflow.insert_before(place, dies))
        with monkeypatch.context() as patched:
            patched.setattr(prompt_distillation, "PHASES", phases)
            assert run_in("killed", "save_every=1") == 1
    assert main(["resume", "killed"]) == 0
    assert (student_rows("killed"), weights("killed")) == (student_rows("whole"), weights("whole"))


def test_a_prompt_that_has_changed_since_the_answers_were_made_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = Path("prompt.txt")
    prompt.write_text("Say x: {text}")
    words = ["prompt=prompt.txt", "max_steps=1"]
    assert run_in("run", *words, "run_training=False") == 0
    prompt.write_text("Say y: {text}")
    for more in (["--dry-run"], []):
        assert run_in("run", *words, *more) == 2
        assert "prompt rows of prompt.txt: 1 (" in capsys.readouterr().err
    prompt.write_text("Say x: {text}")
    assert run_in("run", *words, "--dry-run") == 0


def test_texts_whose_answer_does_not_match_are_left_out_and_counted() -> None:
    assert run_in("run", "answer_pattern=^([ -~])", "temperature=1", "run_training=False") == 0
    [counted] = [event.values for event in load("run/1_answers").events if event.name == "answers.complete"]
    assert counted["num_chats"] == len(load_chats("run/1_answers/chats.jsonl"))
    assert 0 < counted["num_chats"] < 16
    assert counted["num_texts"] == 16 == counted["num_chats"] + counted["num_unmatched"]
    assert run_in("other", "answer_pattern=(no answer like this)") == 1
    assert not Path("other/1_answers/chats.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"dataset": "multilingual.txt"}, InvalidRequest, "no such file"),
        ({"prompt": "rule"}, UnknownName, "did you mean 'rules'"),
        ({"file_path": "nothing.jsonl"}, InvalidRequest, "no such file"),
        ({"test_size": 16}, InvalidRequest, "test_size must leave a row"),
        ({"renderer_name": "role_colin"}, UnknownName, "role_colon"),
        ({"answer_pattern": "x"}, InvalidRequest, "needs a group"),
        ({"temperature": -1.0}, InvalidRequest, "temperature"),
        ({"num_epochs": 0}, InvalidRequest, "num_epochs"),
    ],
)
def test_a_bad_config_is_refused_before_anything_is_asked(
    changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    config = Config(dataset="texts.txt", batch_size=4, test_size=4, base_url="recording")
    check(config)
    with pytest.raises(error, match=said):
        check(replace(config, **changed))
    assert list(Path().iterdir()) == [Path("texts.txt")]


def test_a_dry_run_shows_both_phases_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_in("run", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "run/1_answers: chats.jsonl, will exist\n" in said
    assert "write_answers" in said
    assert list(Path().iterdir()) == [Path("texts.txt")]


def test_the_published_defaults_are_kept() -> None:
    config = Config()
    assert (config.num_epochs, config.learning_rate, config.eval_every, config.save_every) == (4, 1e-4, 5, 20)
    assert (config.model_name, config.dataset, config.prompt) == ("Qwen/Qwen3.6-35B-A3B", "multilingual.txt", "rules")
    assert (config.batch_size, config.lora_rank, config.max_length, config.lr_schedule) == (128, 32, 32768, "linear")
    assert (config.temperature, config.max_tokens) == (0.15, 1000)


def test_every_field_reaches_a_phase() -> None:
    config = Config(file_path=None)
    own = [planned.config for planned in plan_phases(PHASES, config)]
    reached = {name for each in own if each is not None for name in vars(each)}
    assert set(vars(config)) - reached == {"file_path", "run_training"}

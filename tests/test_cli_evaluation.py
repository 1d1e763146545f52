"""stovetop eval, on the fake model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stovetop.checkpoint_users import is_being_read
from stovetop.checkpoints import load_checkpoints_file
from stovetop.cli import main
from stovetop.cli.weights import weights_of
from stovetop.errors import CheckpointError, InvalidRequest, UnknownName

FAKE = ["some/model", "--base-url", "recording", "--renderer", "role_colon", "--max-tokens", "4"]
SETS = ["--on", "sample:gsm8k[:3]", "sample:no_robots[:2]"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["eval", *FAKE, *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["eval", *words]) == 2
    return capsys.readouterr().err


def test_a_table_has_each_metric_with_its_standard_error(capsys: pytest.CaptureFixture[str]):
    said = evaluated(capsys, *SETS)
    table = [line.split() for line in said.splitlines()]
    rows = {(line[0], line[1]): line[2:] for line in table if len(line) > 6}
    assert rows["gsm8k", "pass@1"][:5] == ["0.000", "0.000", "0.000", "to", "0.000"]
    assert rows["no_robots", "nll"][-3:] == ["2", "2", "-"]
    assert "gsm8k: none are right, so the standard error says nothing; with 95 % confidence pass@1 is below 1" in said
    assert said.splitlines()[-1] == "rows and results: evaluations/some-model"


def test_programs_get_one_object_which_is_in_the_folder_too(capsys: pytest.CaptureFixture[str]):
    asked = ["--samples", "2", "--k", "1", "2", "--seeds", "3", "4", "--out", "here", "--json"]
    found = json.loads(evaluated(capsys, *SETS, *asked))
    gsm8k, chats = found["sets"]
    assert gsm8k["metrics"].keys() == {"pass@1", "pass@2", "format", "cut_off"}
    assert gsm8k["metrics"]["pass@1"].keys() == {"value", "stderr", "interval"}
    assert (gsm8k["num_examples"], gsm8k["num_samples"], list(gsm8k["by_seed"])) == (3, 12, ["3", "4"])
    assert (gsm8k["settings"]["temperature"], gsm8k["settings"]["max_tokens"]) == (1.0, 4)
    assert (chats["num_samples"], list(chats["by_seed"])) == (2, ["3"])  # reading is the same with every seed
    assert json.loads(Path("here/results.json").read_text()) == found


def test_the_same_command_measures_nothing_twice_and_a_larger_limit_only_what_is_new(
    capsys: pytest.CaptureFixture[str],
):
    rows = Path("evaluations/some-model/gsm8k.jsonl")
    evaluated(capsys, "--on", "sample:gsm8k", "--limit", "2")
    first = rows.read_bytes()
    evaluated(capsys, "--on", "sample:gsm8k", "--limit", "2")
    assert rows.read_bytes() == first
    evaluated(capsys, "--on", "sample:gsm8k", "--limit", "4")
    assert rows.read_bytes().startswith(first)
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()] == ["0", "1", "2", "3"]


def test_two_evaluations_are_compared_on_the_examples_that_both_have(capsys: pytest.CaptureFixture[str]):
    evaluated(capsys, "--on", "sample:gsm8k[:3]", "--out", "a")
    said = evaluated(capsys, "--on", "sample:gsm8k[:2]", "--out", "b", "--against", "a")
    assert "gsm8k: correct is +0 ± 0 above the other's, on 2 examples" in said
    assert "--against has no rows of gsm8k" in refused(
        capsys, *FAKE, "--on", "sample:gsm8k[:2]", "--out", "c", "--against", "nowhere"
    )


def test_labels_are_reported_one_by_one(capsys: pytest.CaptureFixture[str]):
    rows = [{"question": f"Is {letter} a vowel?", "answer": "yes" if letter in "ae" else "no"} for letter in "abcde"]
    Path("vowels.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    [found] = json.loads(evaluated(capsys, "--on", "labels:vowels.jsonl", "--json"))["sets"]
    assert found["set"] == "vowels"
    assert {label["label"]: label["num_expected"] for label in found["labels"]} == {"(none)": 0, "no": 3, "yes": 2}
    assert sum(cell["number"] for cell in found["confusion"]) == 5
    said = evaluated(capsys, "--on", "labels:vowels.jsonl")
    assert "vowels, by label:" in said
    assert "no taken for (none): 3" in said


def test_a_judge_compares_answers(capsys: pytest.CaptureFixture[str]):
    shutil.copy(Path(__file__).parents[1] / "src/stovetop/samples/no_robots.jsonl", "asked.jsonl")
    assert "pairwise needs --judge" in refused(capsys, *FAKE, "--on", "pairwise:asked.jsonl[:2]")
    [found] = json.loads(evaluated(capsys, "--on", "pairwise:asked.jsonl[:2]", "--judge", "a/judge", "--json"))["sets"]
    assert found["judge"]["num_asked"] == 4
    assert found["metrics"].keys() == {"win_rate"}
    assert found["settings"]["judge"] == "a/judge"
    assert "had no verdict: ties" in evaluated(
        capsys, "--on", "pairwise:asked.jsonl[:2]", "--judge", "a/judge", "--out", "again"
    )


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(capsys: pytest.CaptureFixture[str]):
    said = evaluated(capsys, *SETS, "--dry-run")
    assert "gsm8k: 3 examples, 1 samples, 1 seeds; 0 of 3 rows are in evaluations/some-model/gsm8k.jsonl" in said
    assert list(Path().iterdir()) == []
    evaluated(capsys, *SETS)
    assert "3 of 3 rows are in" in evaluated(capsys, *SETS, "--dry-run")


def test_all_that_is_wrong_is_said_at_once_and_nothing_is_written(capsys: pytest.CaptureFixture[str]):
    words = ["--on", "gsm9k", "none.jsonl", "--k", "3", "--seeds", "1", "1", "--renderer", "rolecolon"]
    said = refused(capsys, "some/model", "--base-url", "recording", *words)
    for part in ("did you mean 'gsm8k'", "no such file", "k in 1..1", "--seeds must be different", "'role_colon'"):
        assert part in said
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--seeds", "0", "1", "--temperature", "0"], "at temperature 0 every seed gives the same answers"),
        (["--samples", "2", "--temperature", "0"], "at temperature 0 all 2 samples"),
        (["--base-url", "htp://x"], "htp://x"),
        (["--out", "file"], "--out must be a folder, and there is a file: 'file'"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    Path("file").write_text("")
    assert why in refused(capsys, *FAKE, "--on", "sample:gsm8k[:1]", *words)


def test_rows_of_another_evaluation_are_refused_before_a_model_is_asked(capsys: pytest.CaptureFixture[str]):
    evaluated(capsys, "--on", "sample:gsm8k[:1]")
    assert "max_tokens was 4 and is 5" in refused(capsys, *FAKE, "--on", "sample:gsm8k[:1]", "--max-tokens", "5")
    assert "renderer was 'role_colon' and is 'llama3'" in refused(
        capsys, *FAKE, "--on", "sample:gsm8k[:1]", "--renderer", "llama3"
    )
    Path("evaluations/some-model/gsm8k.json").write_text("{")
    assert "gsm8k.json cannot be read" in refused(capsys, *FAKE, "--on", "sample:gsm8k[:1]")


# ---- which weights ---------------------------------------------------------------------------------------------------


def test_a_run_is_its_last_checkpoint_and_a_row_is_its_path(capsys: pytest.CaptureFixture[str]):
    trained = ["run", "sl_loop", "base_url=recording", "renderer_name=role_colon", "epochs=1", "log_path=runs/mine"]
    assert main(trained) == 0
    last = load_checkpoints_file("runs/mine")[-1]
    assert last.sampler_path is not None
    assert weights_of("runs/mine") == (last.sampler_path, None, "mine-final")
    assert weights_of(str(last.sampler_path), "recording").model_path == last.sampler_path


def test_a_run_is_evaluated_with_the_renderer_that_it_was_trained_with(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "sl_loop", "base_url=recording", "renderer_name=role_colon", "epochs=1"]) == 0
    path = str(load_checkpoints_file("runs/sl_loop")[-1].sampler_path)
    for place, more in (("runs/sl_loop", []), (path, []), (path, ["--renderer", "chat_template"])):
        capsys.readouterr()
        words = [place, "--base-url", "recording", "--on", "sample:no_robots[:1]", "--json", "--out", f"{len(more)}"]
        assert main(["eval", *words, *more]) == 0
        (measured,) = json.loads(capsys.readouterr().out)["sets"]
        assert measured["settings"]["renderer"] == (more[-1] if more else "role_colon")


def test_a_run_that_is_misspelt_is_not_taken_for_a_model(capsys: pytest.CaptureFixture[str]):
    Path("runs").mkdir()
    assert "`stovetop runs runs` lists the runs there: 'runs/nope'" in refused(
        capsys, "runs/nope", "--on", "sample:gsm8k[:1]"
    )


def test_while_it_is_evaluated_a_checkpoint_is_not_deleted_by_its_run(monkeypatch: pytest.MonkeyPatch):
    assert main(["run", "sl_loop", "base_url=recording", "renderer_name=role_colon", "epochs=1"]) == 0
    path = str(load_checkpoints_file("runs/sl_loop")[-1].sampler_path)
    were_read: list[bool] = []
    monkeypatch.setattr("stovetop.cli.evaluation.show_report", lambda *_, **__: were_read.append(is_being_read(path)))
    assert main(["eval", "runs/sl_loop", *FAKE[1:], "--on", "sample:no_robots[:1]"]) == 0
    assert were_read == [True]
    assert not is_being_read(path)


def test_other_words_are_models_and_paths_of_a_service(tmp_path: Path):
    path = "tinker://abc/sampler_weights/final"
    assert weights_of(path, "recording") == (path, None, "sampler_weights-final")
    assert weights_of("Qwen/Qwen3-8B", "recording") == (None, "Qwen/Qwen3-8B", "Qwen-Qwen3-8B")
    with pytest.raises(CheckpointError, match="neither a model nor a checkpoint nor a run"):
        weights_of(str(tmp_path))
    with pytest.raises(UnknownName, match="stovetop fetch smollm2"):
        weights_of("smolm2")
    (tmp_path / "stovetop-run.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="this run has no checkpoint yet"):
        weights_of(str(tmp_path))


# ---- kills -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from functools import partial
from pathlib import Path

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.evaluation.example_set import Reported, evaluate
from stovetop.evaluation.problems import ProblemSet
from stovetop.evaluation.rows import open_rows
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import answer_builders

folder, wait = Path(sys.argv[1]), sys.argv[2] == "slow"
renderer = ChatTemplateRenderer(ByteTokenizer())
rows = [{"question": f"Spell {number}", "answer": "x"} for number in range(200)]
builders = dict(zip(map(str, range(200)), answer_builders(rows, renderer, 2)))
problems = ProblemSet("spelling", builders, renderer.tokenizer, 3, Reported(correct="correct"), 1.0)
done = []


def hear(row):
    done.append(row)
    if len(done) == 10:
        print("under way", flush=True)


with recording.open_service(folder / "service", latency_s=0.5 if wait else 0) as service:
    client = service.create_sampling_client(base_model="some/model").result()
    asyncio.run(evaluate(problems, client, file=open_rows(folder, "spelling", {"seed": 1}), on_row=hear))
    asyncio.run(asyncio.sleep(60 if wait else 0))
"""


@pytest.mark.slow
def test_an_evaluation_that_is_killed_goes_on_and_has_the_rows_of_one_that_was_not(
    tmp_path: Path, kill_after: Callable[..., str]
):
    from processes import run_python
    from stovetop.evaluation.rows import read_rows

    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    for seconds in (0.0, 0.1):
        kill_after(script, [str(tmp_path / "killed"), "slow"], seconds)
    assert len(read_rows(tmp_path / "killed", "spelling")) >= 20
    for folder in ("killed", "whole"):
        run_python(str(script), str(tmp_path / folder), "fast", check=True)
    killed, whole = (read_rows(tmp_path / folder, "spelling") for folder in ("killed", "whole"))
    assert sorted(killed, key=lambda row: int(row.id)) == sorted(whole, key=lambda row: int(row.id))
    assert len(killed) == 200

"""Sweeps: which runs there are, several of them at once, and the table of what they came to."""

import json
import logging
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costly import slow_but
from engine import tiny
from stovetop.cli import main
from stovetop.errors import InvalidRequest
from stovetop.recipes import sl_basic
from stovetop.runs import load
from stovetop.saved_states import describe
from stovetop.sweeps.points import Choice, Range, draw_points, grid, name_of, parse_values
from stovetop.sweeps.results import Result, Results, Row, results_of
from stovetop.sweeps.running import read_sweep

RECORDING = ("base_url=recording", "model=any/model", "renderer_name=role_colon", "max_steps=2")
RATES = ("1e-3", "1e-2", "1e-1")


def sweep(folder: Path, *words: str, recipe: str = "sl_basic:small") -> int:
    return main(["sweep", recipe, *RECORDING, f"folder={folder}", *words])


# ---- points ----------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination_once() -> None:
    points = grid({"a": Choice(("1", "2")), "seed": Choice(("0", "1", "2"))})
    assert [tuple(point.values()) for point in points] == [(a, seed) for a in "12" for seed in "012"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", None),
        ("1e-4,3e-4", Choice(("1e-4", "3e-4"))),
        ("linear, constant", Choice(("linear", "constant"))),
        ("1e-5..1e-3", Range(1e-5, 1e-3, is_whole=False)),
        ("4..16", Range(4, 16, is_whole=True)),
        ("../data", None),
    ],
)
def test_values_are_read_from_a_word(text: str, values: object) -> None:
    assert parse_values("field", text) == values


@pytest.mark.parametrize("text", ["1,", "1,1", ",", "3..1", "1..1"])
def test_values_that_make_no_sense_are_refused_by_the_name_of_their_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="field: "):
        parse_values("field", text)


@given(st.floats(1e-6, 1e3), st.floats(1.001, 1e6), st.integers(0, 100))
def test_what_is_drawn_lies_within_its_range(low: float, factor: float, seed: int) -> None:
    values = Range(low, low * factor, is_whole=False)
    drawn = float(values.draw(random.Random(seed)))
    assert low * (1 - 1e-3) <= drawn <= low * factor * (1 + 1e-3)  # four digits


def test_a_wide_range_is_drawn_from_by_its_logarithm() -> None:
    drawn = [float(Range(1e-5, 1e-1, is_whole=False).draw(random.Random(seed))) for seed in range(400)]
    counts, _ = np.histogram(np.log10(drawn), bins=4, range=(-5, -1))
    assert min(counts) > 60


def test_a_longer_search_begins_with_the_points_of_a_shorter_one_and_each_has_every_seed() -> None:
    fields = {"rate": Range(1e-5, 1e-3, is_whole=False), "size": Choice(("4", "8")), "seed": Choice(("0", "1"))}
    longer = draw_points(fields, 8)
    assert draw_points(fields, 3) == longer[:6]
    assert len({name_of(point) for point in longer}) == 16
    assert [point["seed"] for point in longer] == ["0", "1"] * 8


def test_a_search_ends_where_there_are_no_further_points() -> None:
    assert len(draw_points({"size": Choice(("4", "8"))}, 10**6)) == 2


def test_names_of_folders_are_safe_and_differ() -> None:
    points = [{"dataset": "a/b"}, {"dataset": "a_b"}, {"dataset": "x" * 300}, {"dataset": "x" * 301}, {"rate": "1e-3"}]
    names = [name_of(point) for point in points]
    assert len(set(names)) == len(points)
    assert all("/" not in name and len(name) < 140 for name in names)
    assert names[-1] == "rate=1e-3"


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    assert sweep(folder, f"learning_rate={','.join(RATES)}", "seed=0,1", "at_once=3") == 0
    return folder


@pytest.mark.parametrize("index", slow_but([4], range(6)))
def test_runs_side_by_side_have_the_rows_of_each_alone(swept: Path, tmp_path: Path, index: int) -> None:
    run, point = list(read_sweep(swept).folders(swept).items())[index]
    alone = tmp_path / run.name
    words = [f"{field}={value}" for field, value in point.items()]
    assert main(["run", "sl_basic:small", *RECORDING, *words, f"log_path={alone}"]) == 0
    assert rows(run) == rows(alone)


def rows(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in load(folder).metrics
    ]


def test_each_run_has_the_words_that_were_said_in_its_own_course(swept: Path) -> None:
    logs = [run / "logs.log" for run in read_sweep(swept).folders(swept)]
    assert [log.read_text().count("steps an epoch") for log in logs] == [1] * 6
    assert logging.getLogger("stovetop").level == logging.NOTSET


def test_the_table_has_the_best_first_with_its_spread_over_seeds(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(swept), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["goal"]) == ("test/nll", "min")
    assert [point["point"]["learning_rate"] for point in report["points"]] == ["1e-1", "1e-2", "1e-3"]
    for point in report["points"]:
        assert point["mean"] == pytest.approx(np.mean(point["values"]))
        assert point["stderr"] == pytest.approx(np.std(point["values"], ddof=1) / 2**0.5)


def test_the_page_has_the_table_and_the_curves_of_the_best_runs(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(swept), "--to", str(tmp_path / "page.html")]) == 0
    assert "1e-1" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert page.index("<td>1e-1</td>") < page.index("<td>1e-2</td>")
    assert "data:image/png;base64," in page
    assert page.count('<article class="run">') == 6
    assert main(["report", str(swept), "--markdown"]) == 0
    assert "| 1e-1 |" in capsys.readouterr().out


def test_the_best_runs_come_first_and_those_without_a_value_last() -> None:
    runs = [
        Result({"seed": str(seed)}, Path(str(seed)), value) for seed, value in enumerate((2.0, None, 1.0, math.nan))
    ]
    results = Results("x", is_less_better=True, rows=[], results=runs)
    assert [result.value for result in results.best_first()][:2] == [1.0, 2.0]
    assert Results("x", is_less_better=False, rows=[], results=runs).best_first()[0].value == 2.0


@pytest.mark.slow
def test_the_same_command_goes_on_and_further_values_are_added(swept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(swept, folder)
    kept = {run: rows(run) for run in read_sweep(folder).folders(folder)}
    shutil.rmtree(folder / "learning_rate=1e-3,seed=1")  # as if it had been interrupted before this one
    assert sweep(folder, "learning_rate=1e-3,3e-1", "seed=0,1", "at_once=2") == 0
    asked = read_sweep(folder)
    assert len(asked.points) == 8
    assert {run: rows(run) for run in kept} == kept
    assert results_of(folder, asked).rows[0].point == {"learning_rate": "3e-1"}


def test_a_run_that_is_complete_is_not_opened_again(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(swept, folder)
    events = [(run / "events.jsonl").read_bytes() for run in read_sweep(folder).folders(folder)]
    for at_once in ("1", "2"):
        assert sweep(folder, f"learning_rate={','.join(RATES)}", "seed=0,1", f"at_once={at_once}") == 0
    assert [(run / "events.jsonl").read_bytes() for run in read_sweep(folder).folders(folder)] == events
    assert "seed=0 is complete" in capsys.readouterr().out


def test_a_run_that_fails_fails_alone_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = sl_basic.train

    async def fails(config: sl_basic.Config, service: object) -> None:
        if config.seed == 1:
            raise InvalidRequest("no such thing")
        await train(config, service)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(sl_basic, "train", fails)
        assert sweep(tmp_path / "s", "seed=0,1", "at_once=2") == 1
    seen = capsys.readouterr()
    assert "1 of 2 runs have failed" in seen.err
    assert "seed=1: no such thing" in seen.err
    assert "1 of 2" in seen.out  # the table
    assert sweep(tmp_path / "s", "seed=0,1", "at_once=2") == 0


@pytest.mark.parametrize("at_once", slow_but(1, [2, 1]))
def test_recipes_of_several_phases_are_swept_too(tmp_path: Path, at_once: int) -> None:
    words = ("seed=0,1", "max_steps=1", "num_games=8", "dtype=None", f"at_once={at_once}")  # the fake has no dtype
    words = (*words, "groups_per_batch=2", "group_size=2", "test_size=1")
    assert sweep(tmp_path / "s", *words, recipe="guess_number:small") == 0
    results = results_of(tmp_path / "s", read_sweep(tmp_path / "s"))
    assert results.metric == "test/env/all/reward/total"
    assert len(results.rows[0].values) == 2


@pytest.mark.slow
def test_runs_of_a_real_engine_side_by_side_come_to_the_bits_of_each_alone(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", tiny.llama(0))
    words = (f"model={model}", "base_url=local", "deterministic=True", "threads=1", "max_steps=2", "eval_every=0")
    words = (*words, "train_unembed=False", "lora_rank=4", "batch_size=4", "renderer_name=role_colon")
    assert main(["sweep", "sl_basic:small", *words, "seed=0,1,2", "at_once=3", f"folder={tmp_path / 's'}"]) == 0
    for seed in (0, 2):
        alone = tmp_path / f"alone{seed}"
        assert main(["run", "sl_basic:small", *words, f"seed={seed}", f"log_path={alone}"]) == 0
        assert rows(tmp_path / "s" / f"seed={seed}") == rows(alone)
        assert digests(tmp_path / "s" / f"seed={seed}") == digests(alone)


def digests(run: Path) -> list[object]:
    """Of the files of the final state."""
    (folder,) = (run / "checkpoints").glob("*/weights/final")
    assert describe(folder).with_optimizer
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    return [files[name] for name in sorted(files) if name.endswith(".safetensors")]


def test_where_no_run_comes_to_a_step_it_says_why_each_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path / "s", "seed=0,1", f"load_checkpoint_path={tmp_path / 'none'}") == 1
    seen = capsys.readouterr()
    assert "2 of 2 runs have failed" in seen.err
    assert seen.err.count(str(tmp_path / "none")) == 2
    assert "there is no table: no run of this sweep has logged a step yet" in seen.out


def test_a_damaged_run_has_no_value_and_hides_no_other(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(swept, folder)
    (folder / "learning_rate=1e-3,seed=1" / "metrics.jsonl").write_text('garbage\n{"step": 1}\n')
    assert main(["report", str(folder)]) == 1
    seen = capsys.readouterr()
    assert "1 of 2" in seen.out
    assert "learning_rate=1e-3,seed=1" in seen.err
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("change", [{"points": []}, {"points": 5}, {"points": [1]}, {"points": [{}]}, {"recipe": None}])
def test_a_damaged_sweep_is_refused_with_the_next_step(
    swept: Path, tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = json.loads((swept / "sweep.json").read_bytes())
    (tmp_path / "sweep.json").write_text(json.dumps(asked | change))
    assert main(["report", str(tmp_path)]) == 2
    assert sweep(tmp_path, "seed=0,1") == 1
    assert capsys.readouterr().err.count("remove it, and give the command again") == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "a field with several values"),
        (("learning_rate=1e-4..1e-3",), "draw=20"),
        (("learning_rate=1e-4,1e-3", "at_once=0"), "at_once must be a whole number, 1 or more: '0'"),
        (("learning_rate=1e-4,x",), "learning_rate must be a finite number above 0"),
        (("learning_rat=1e-4,1e-3",), "did you mean 'learning_rate'"),
        (("log_path=a,b",), "folder="),
        (("seed=0,1", "goal=less"), "goal must be min or max"),
        (("seed=0,1", "draw=3"), "fields other than the seed"),
        (("model=any/a,any/b", "at_once=2"), "differ in model_name"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    tmp_path: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path / "s", *words) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_another_sweep_in_the_folder_is_refused(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(swept, "batch_size=2,4") == 1
    assert "there is another sweep in this folder, its fields" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("mine")
    assert sweep(tmp_path, "seed=0,1") == 1
    assert "a sweep needs a folder of its own" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path / "s", "seed=0,1", "--learning-rate", "1e-4,1e-3", "--dry-run") == 0
    assert "seed=1,learning_rate=1e-3" in capsys.readouterr().out
    assert not (tmp_path / "s").exists()


def test_a_metric_that_no_run_has_is_refused_with_those_there_are(
    swept: Path,
) -> None:
    with pytest.raises(InvalidRequest, match="test/nll"):
        results_of(swept, read_sweep(swept), "test/nl")


def test_the_standard_error_is_that_of_the_mean() -> None:
    row = Row({}, [1.0, 2.0, 3.0, 4.0], 4)
    assert row.mean == 2.5
    assert row.stderr == pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2)
    assert np.isnan(Row({}, [1.0], 2).stderr)


@pytest.mark.slow
def test_a_recipe_may_be_named_with_a_dash(swept: Path) -> None:
    words = (f"learning_rate={','.join(RATES)}", "seed=0,1", "at_once=3")
    assert sweep(swept, *words, recipe="sl-basic:small") == 0

"""The proof of learning: what becomes of its figures, and that it goes on where it stopped. What the presets learn is
no matter of a test. `toy` is a recipe of these tests."""

import argparse
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from stovetop.cli.loading import load_recipe, presets_of
from stovetop.durable import append_row, read_rows
from stovetop.recipes import RECIPES, Recipe

FOLDER = Path(__file__).parents[2] / "benchmarks"
TOY = """
from dataclasses import dataclass, replace

from stovetop.runs import open_run


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 0  # of all
    log_path: str = "runs/toy"  # where


async def main(config: Config) -> None:
    with open_run(config.log_path, config, console=False):
        pass


async def measure(folder, seed):
    await main(replace(PRESETS["small"], seed=seed, log_path=str(folder)))
    return {"before": 3.0, "after": 1.0 + seed, "num_held_out": 8.0}


PRESETS = {"small": Config()}
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_proof_recipe.py").write_text(TOY)
    monkeypatch.delitem(sys.modules, "toy_proof_recipe", raising=False)
    monkeypatch.setitem(RECIPES, "toy", Recipe("toy_proof_recipe", "Learns by itself"))
    import recipe_proofs

    class ToyProof(recipe_proofs.Proof):
        def function(self) -> recipe_proofs.Measure:
            import toy_proof_recipe  # pyright: ignore[reportMissingImports]  written above

            return toy_proof_recipe.measure

    monkeypatch.setitem(recipe_proofs.PROOFS, "toy:small", ToyProof("", "loss", recipe_proofs.LOSS_FALLS))


def script() -> ModuleType:
    """benchmarks/recipes.py, under a name of its own: tests/recipes is `recipes` here."""
    spec = spec_from_file_location("recipes_script", FOLDER / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_in_this_process(preset: str, seed: int, options: argparse.Namespace) -> None:
    recipes = script()
    row = recipes.measure_here(preset, seed, options.folder / preset / str(seed), threads=1)
    append_row(options.results, row._asdict())


def test_what_is_measured_is_kept_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = script()
    results = tmp_path / "results.jsonl"
    options = argparse.Namespace(only=["toy:small"], seeds=[0, 2], folder=tmp_path, results=results)
    recipes.run_all(options, measure_in_this_process)
    rows = read_rows(results)
    assert [(row["seed"], row["numbers"]["after"]) for row in rows] == [(0, 1.0), (2, 3.0)]
    assert all(0 < row["run_s"] < row["whole_s"] for row in rows)
    with results.open("a") as file:
        file.write('{"preset": "toy:small", "seed": 1, "num')  # killed as it was written
    recipes.run_all(argparse.Namespace(**vars(options) | {"seeds": [0, 1, 2]}), measure_in_this_process)
    assert [row["seed"] for row in read_rows(results)] == [0, 2, 1]


def test_the_table_says_which_seed_misses_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = script()
    options = argparse.Namespace(only=["toy:small"], seeds=[0, 2], folder=tmp_path, results=tmp_path / "results.jsonl")
    recipes.run_all(options, measure_in_this_process)
    words = ["--table", "--markdown", "--only", "toy:small", "--folder", str(tmp_path)]
    capsys.readouterr()
    assert recipes.main([*words, "--seeds", "0"]) == 0
    assert "| toy:small | loss | 3 | 1 | num_held_out 8 | 0.0 of 5 | yes |" in capsys.readouterr().out
    assert recipes.main(words) == 1
    assert "| 3, 3 | 1, 3 | num_held_out 8, 8 | 0.0, 0.0 of 5 | no. seed 2: the loss falls by a third or more |" in (
        capsys.readouterr().out
    )


def test_a_preset_that_was_changed_is_measured_again(tmp_path: Path) -> None:
    recipes = script()
    options = argparse.Namespace(only=["toy:small"], seeds=[0], folder=tmp_path, results=tmp_path / "results.jsonl")
    recipes.run_all(options, measure_in_this_process)
    [row] = read_rows(options.results)
    options.results.write_text(json.dumps({**row, "config": {**row["config"], "seed": 3}}) + "\n")
    assert recipes.measured(options.results, ["toy:small"], [0]) == {}


@pytest.mark.parametrize(
    ("thresholds", "numbers", "num_missed"),
    [
        ("LOSS_FALLS", {"before": 3.0, "after": 2.0}, 0),
        ("LOSS_FALLS", {"before": 3.0, "after": 2.1}, 1),
        ("SOLVES_MORE", {"before": 0.1, "after": 0.4, "best_constant": 0.1}, 0),
        ("SOLVES_MORE", {"before": 0.1, "after": 0.2, "best_constant": 0.2}, 2),
        ("PLAYS_BETTER", {"before": 0.3, "after": 0.6, "turns_before": 9.0, "turns_after": 7.0}, 0),
        ("PLAYS_BETTER", {"before": 0.3, "after": 0.4, "turns_before": 7.0, "turns_after": 7.0}, 3),
        ("PREFERS", {"before": 0.5, "after": 0.8, "reference_unchanged": 1.0}, 0),
        ("PREFERS", {"before": 0.7, "after": 0.7, "reference_unchanged": 0.0}, 3),
        ("WINS", {"before": 0.5, "after": 0.6, "reward_accuracy_after": 0.8}, 0),
        ("AGREES", {"before": 0.6, "after": 0.7}, 2),
        ("KL_HALVES", {"before": 1.0, "after": 0.5}, 0),
        ("EACH_KL_HALVES", {"before/a": 1.0, "after/a": 0.5, "before/b": 1.0, "after/b": 0.4}, 0),
        ("EACH_KL_HALVES", {"before/a": 1.0, "after/a": 0.5, "before/b": 1.0, "after/b": 0.6}, 1),
        ("EACH_KL_HALVES", {"before/a": 1.0, "after/a": 0.5}, 1),
    ],
)
def test_a_threshold_is_met_or_missed(thresholds: str, numbers: dict[str, float], num_missed: int) -> None:
    import recipe_proofs

    proof = recipe_proofs.Proof("", "", vars(recipe_proofs)[thresholds])
    assert len(proof.misses(numbers)) == num_missed


def test_the_best_constant_answer_is_the_one_that_most_problems_share() -> None:
    from recipe_proofs.measuring import best_constant

    assert best_constant(["4", "5", "4", "6"]) == 0.5
    assert best_constant(["4", "4.0", "5"], lambda one, other: float(one) == float(other)) == 2 / 3


def test_every_preset_has_its_proof() -> None:
    import recipe_proofs

    presets = {f"{name}:{preset}" for name in RECIPES for preset in presets_of(load_recipe(name))}
    assert set(recipe_proofs.PROOFS) == presets
    for proof in recipe_proofs.PROOFS.values():
        assert proof.function()

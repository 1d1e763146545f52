"""Each of the smaller benchmarks runs at its smallest size. Their figures are no matter of a test."""

from pathlib import Path

import pytest

from engine import tiny
from processes import run_python

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_saving_is_measured_beside_a_sample_and_before_a_step(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    words = ["--model", str(model), "--rounds", "1", "--tokens", "16", "--rank", "2"]
    done = run_python(str(FOLDER / "saving.py"), *words, check=True)
    for measure in ("longest step, beside a save", "save step, beside a save", "optimizer's step, behind a save"):
        assert measure in done.stdout


@pytest.mark.slow
def test_each_renderer_is_measured_on_chats_that_it_can_train_on() -> None:
    done = run_python(str(FOLDER / "renderers.py"), "--conversations", "8", "--rounds", "1", check=True)
    for family in ("Qwen3", "Llama 3", "DeepSeek", "Kimi", "gpt-oss"):
        assert family in done.stdout


@pytest.mark.slow
def test_what_a_batch_of_rollouts_costs_is_measured() -> None:
    done = run_python(str(FOLDER / "rl_data.py"), "--groups", "4", check=False)  # so small that noise decides
    assert "at most 2 times np.asarray" in done.stdout


def test_each_benchmark_says_how_to_run_it() -> None:
    programs = [path for path in sorted(FOLDER.glob("*.py")) if 'if __name__ == "__main__"' in path.read_text()]
    assert len(programs) >= 8
    for path in programs:
        assert f"python benchmarks/{path.name}" in path.read_text(), path.name


@pytest.mark.slow
def test_what_workflows_bring_and_cost_is_measured(tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model")
    words = ["--size", "smoke", "--threads", "1", "--model", str(model), "--only", "overlap", "ready", "sl", "sl_cpu"]
    done = run_python(str(FOLDER / "workflows.py"), *words, check=True, limit_s=240)
    for row in ("overlap, rl, depth 1", "groups as they are ready", "sl_basic, against sl_loop: the model"):
        assert row in done.stdout

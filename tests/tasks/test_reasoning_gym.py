"""Problems that another package makes and scores."""

import asyncio
from pathlib import Path

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.cli import main
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import GradeError, InvalidRequest, UnknownName
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.process_pool import WorkerPool
from stovetop.runs import load
from stovetop.tasks.reasoning_gym import GymEnv, GymScorer, GymTask, builders, load_gym, read_answer

RENDERER = ChatTemplateRenderer(ByteTokenizer())
SUMS = "reasoning_gym:chain_sum,max_terms=2,max_digits=1"


def test_a_task_is_made_with_its_options_and_nothing_is_in_both_parts():
    found = load_gym(f"{SUMS}[:40]", test_size=8, seed=3)
    assert found.task == GymTask("chain_sum", (("max_terms", 2), ("max_digits", 1)), 3, 48)
    loaded = found.loaded
    assert len(loaded.test) == 8
    assert len(loaded.train) + loaded.num_left_out == 40
    questions = [{str(row["question"]) for row in part} for part in (loaded.train, loaded.test)]
    assert not questions[0] & questions[1]
    assert load_gym(f"{SUMS}[:40]", test_size=8, seed=3).loaded == loaded
    assert load_gym(f"{SUMS}[:40]", test_size=8, seed=4).loaded.sources != loaded.sources
    assert len(load_gym("reasoning_gym:chain_sum").loaded.train) == 1000


@pytest.mark.parametrize(
    ("dataset", "error", "why"),
    [
        ("reasoning_gym:chain_sums", UnknownName, "did you mean 'chain_sum'"),
        ("reasoning_gym:", InvalidRequest, "a task is named reasoning_gym:NAME"),
        ("reasoning_gym:chain_sum,terms=2", UnknownName, "option of chain_sum 'terms'"),
        ("reasoning_gym:chain_sum,seed=2", UnknownName, "option of chain_sum 'seed'"),
        ("reasoning_gym:chain_sum,min_terms=0", InvalidRequest, "min_terms must be positive"),
        ("reasoning_gym:n_queens", InvalidRequest, r"calls eval\(\), with which a policy might run any program"),
        ("reasoning_gym:puzzle24", InvalidRequest, r"calls parse_expr\(\)"),
    ],
)
def test_a_task_that_cannot_be_had_is_refused(dataset: str, error: type[Exception], why: str):
    with pytest.raises(error, match=why):
        load_gym(dataset)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("<answer>4</answer>", "4"), ("<answer>1</answer>, no: <answer>\n2 </answer>.", "2"), ("4", None)],
)
def test_an_answer_is_between_the_last_tags(text: str, answer: str | None):
    assert read_answer(text) == answer


def test_the_reward_is_the_score_of_the_task_and_less_without_its_tags():
    asked: list[str] = []

    def score(task: GymTask, index: int, answer: str) -> float:
        asked.append(answer)
        return 0.5 if answer == "half" else float(answer == "7")

    def rewarded(text: str) -> tuple[float, dict[str, float]]:
        [stop] = RENDERER.get_stop_sequences()
        assert isinstance(stop, int)
        tokens = [*RENDERER.tokenizer.encode(text, add_special_tokens=False), stop]
        env = GymEnv(GymTask("chain_sum"), 0, "3 + 4 =", score, RENDERER)
        result = asyncio.run(env.step(TokensWithLogprobs(tokens, None)))
        return result.reward, dict(result.metrics)

    assert rewarded("<answer>7</answer>") == (1, {"score": 1, "correct": 1, "format": 1})
    assert rewarded(" 7 ") == (pytest.approx(0.9), {"score": 1, "correct": 1, "format": 0})
    assert rewarded("<answer>half</answer>") == (0.5, {"score": 0.5, "correct": 0, "format": 1})
    assert asked == ["7", "7", "half"]


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused():
    found = load_gym(f"{SUMS}[:2]")
    with pytest.raises(InvalidRequest, match="leaves 5 beside max_tokens"):
        builders(found.loaded.train, found.task, RENDERER, 1, lambda task, index, answer: 0.0, max_prompt_tokens=5)


@pytest.mark.slow
def test_the_scorer_of_the_task_scores_in_a_process():
    """Seconds: each process imports the package."""
    found = load_gym(f"{SUMS}[:3]")
    with WorkerPool(1) as pool:
        scorer = GymScorer(pool, timeout_s=20.0)
        for row in found.loaded.train:
            answer, index = str(row["answer"]), int(str(row["index"]))
            assert scorer.score(found.task, index, answer) == 1
            assert scorer.score(found.task, index, "none") == 0
        with pytest.raises(GradeError, match="breaks on a right answer, of problem 0"):
            scorer.score(GymTask("chain_sum", (("no_such_option", 1),)), 0, "1")


@pytest.mark.slow
def test_a_model_trains_on_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seconds: scores come from processes."""
    monkeypatch.chdir(tmp_path)
    words = ["base_url=recording", "model=any/model", "renderer_name=role_colon", f"env={SUMS}[:64]", "log_path=run",
             "test_size=4", "groups_per_batch=8", "group_size=8", "max_tokens=2", "max_steps=4", "num_epochs=4",
             "learning_rate=0.5"]  # fmt: skip
    assert main(["run", "math_rl", *words]) == 0
    rows = load("run").metrics
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert {"env/all/score", "env/all/correct", "env/all/format"} <= rows[0].keys()
    assert "test/env/all/score" in rows[-1]
    assert main(["run", "math_rl", "env=reasoning_gym:chain_sums", "--dry-run"]) == 2

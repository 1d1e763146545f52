"""Mathematics by name: what each data set is, what a penalty does, and that a model learns."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from stovetop.backends import recording
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.client import ServiceClient
from stovetop.errors import InvalidRequest
from stovetop.kitchen.edits import as_ppo, as_ready
from stovetop.recipes import math_rl
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.runs import Run, load
from stovetop.tasks import math
from stovetop.tasks.math_grading import extract_last_number, grade_number
from stovetop.tasks.math_sets import load_math

RENDERER = ChatTemplateRenderer(ByteTokenizer())


def test_arithmetic_is_every_sum_once_and_nothing_is_in_both_parts() -> None:
    loaded, form, few_shot = load_math("arithmetic", test_size=64, seed=3)
    assert (len(loaded.train), len(loaded.test)) == (101 * 101 - 64, 64)
    questions = [str(row["question"]) for row in (*loaded.train, *loaded.test)]
    assert len(set(questions)) == 101 * 101
    assert {"question": "What is 17 + 4?", "answer": "21"} in [*loaded.train, *loaded.test]
    assert (form, few_shot) == (math.NUMBER, True)
    with_own_test, *_ = load_math("arithmetic", "sample:arithmetic", seed=3)
    assert (len(with_own_test.train), len(with_own_test.test)) == (101 * 101, 64)
    assert load_math("arithmetic", test_size=64, seed=3).loaded == loaded


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", "12"), ("7 + 5 = 12.", "12"), ("7 + 5", "5"), ("1,200", "1200"), ("-3", "-3"), ("none", None), ("", None)],
)
def test_the_last_whole_number_of_a_text_is_its_answer(text: str, number: str | None) -> None:
    assert extract_last_number(text) == number


def test_a_sum_that_is_repeated_is_no_answer_to_it() -> None:
    problem = math.problem_of_row({"question": "What is 4 + 5?", "answer": "9"}, grade_number, form=math.NUMBER)
    assert problem.get_question() == "What is 4 + 5?"
    assert [problem.check_answer(text) for text in ("9", "It is 9.", "4 + 5", "10", "")] == [True, True, False, False,
                                                                                              False]  # fmt: skip
    assert [problem.check_format(text) for text in ("9", "nine")] == [True, False]


@pytest.mark.parametrize("dataset", ["gsm8k", "math", "polaris", "deepmath"])
def test_a_named_data_set_is_answered_in_a_box_and_its_sample_runs_dry(dataset: str, tmp_path: Path) -> None:
    loaded, form, few_shot = load_math(f"sample:{dataset}", test_size=2)
    assert form == math.BOXED
    assert few_shot  # a sample is problems of one's own; by its name the data set decides
    config = math_rl.Config(dataset=f"sample:{dataset}", test_size=2, groups_per_batch=2, base_url="recording",
                            log_path=str(tmp_path / "run"))  # fmt: skip
    math_rl.check(config)
    with pytest.raises(InvalidRequest, match="warmup_steps must be at most"):
        math_rl.check(replace(config, warmup_steps=len(loaded.train)))


def test_the_sample_of_compared_numbers_asks_each_pair_once_and_names_the_larger() -> None:
    loaded, *_ = load_math("sample:compared_numbers", test_size=64, seed=3, answers="number")
    rows = [*loaded.train, *loaded.test]
    pairs = [re.findall(r"\d+", str(row["question"])) for row in rows]
    assert len({frozenset(pair) for pair in pairs}) == len(rows)
    right = [math.problem_of_row(row, grade_number, form=math.NUMBER).reference for row in rows]
    assert right == [max(pair, key=int) for pair in pairs]
    assert 0.4 < sum(pair[0] == answer for pair, answer in zip(pairs, right, strict=True)) / len(rows) < 0.6


def test_a_chat_begins_with_a_solved_example_of_the_same_form_or_with_none() -> None:
    row = {"question": "What is 1 + 1?", "answer": "2"}

    def prompt(form: math.AnswerForm, few_shot: bool) -> str:
        [builder] = math.builders([row], RENDERER, 2, grade_number, form=form, few_shot=few_shot)
        [env, _] = asyncio.run(builder.make_envs())
        observation, _ = asyncio.run(env.initial_observation())
        return ByteTokenizer().decode(observation.to_ints())

    assert "What is 4 + 5?" in prompt(math.NUMBER, few_shot=True)
    assert "strawberry" in prompt(math.BOXED, few_shot=True)
    assert "strawberry" not in prompt(math.BOXED, few_shot=False)


def test_polaris_and_deepmath_are_usually_trained_on_without_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"problem": "p", "question": "q", "answer": "1", "final_answer": "1"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    usual = {name: load_math(f"{name}:rows.jsonl").few_shot for name in ("polaris", "deepmath")}
    assert usual == {"polaris": False, "deepmath": False}


PROBLEMS = [{"question": f"q{i}", "answer": "7"} for i in range(10)]


def small_config(folder: Path, **changed: object) -> math_rl.Config:
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    config = math_rl.Config(
        dataset=str(data),
        answers="number",
        few_shot=False,
        test_size=2,
        model_name="any/model",
        renderer_name="role_colon",
        groups_per_batch=4,
        group_size=16,
        max_tokens=1,
        learning_rate=2.0,
        num_epochs=5,
        eval_every=0,
        save_every=0,
        log_path=str(folder / "run"),
    )
    return replace(config, **changed)


@pytest.mark.slow
def test_a_model_learns_on_the_recording_backend(tmp_path: Path) -> None:
    """The one answer that there is: a bigram model cannot tell problems apart."""
    config = small_config(tmp_path)
    with recording.open_service(config.log_path) as service:
        asyncio.run(math_rl.train(config, service))
    rows = load(config.log_path).metrics
    assert not any("kl_policy_base" in row for row in rows)  # what has no penalty is not measured
    correct = [row["env/all/correct"] for row in rows if "env/all/correct" in row]
    assert sum(correct[:2]) / 2 < 0.3
    assert sum(correct[-2:]) / 2 > 0.8


@pytest.mark.slow
def test_a_penalty_measures_the_distance_to_the_start_and_holds_the_model_there(tmp_path: Path) -> None:
    def distance(name: str, coef: float) -> float:
        config = small_config(tmp_path, kl_penalty_coef=coef, max_steps=5, log_path=str(tmp_path / name))
        with recording.open_service(config.log_path) as service:
            asyncio.run(math_rl.train(config, service))
        return load(config.log_path).metrics[4]["kl_policy_base"]

    assert 0 < abs(distance("strong", 10.0)) < abs(distance("weak", 0.001))


def test_its_workflow_takes_the_edits_of_reinforcement_learning() -> None:
    ports = {"service": ServiceClient, "run": Run}
    assert as_ppo(math_rl.WORKFLOW).check(math_rl.Config(), ports).problems == ()
    ready = as_ready(math_rl.WORKFLOW.remove("compute_post_kl"))
    assert ready.check(math_rl.Config(kl_penalty_coef=0.1, max_steps_off_policy=2), ports).problems == ()


def test_the_published_defaults_are_kept() -> None:
    config = math_rl.Config()
    assert (config.dataset, config.model_name) == ("arithmetic", "Qwen/Qwen3.5-9B")
    assert (config.group_size, config.groups_per_batch, config.learning_rate, config.max_tokens) == (4, 100, 1e-5, 5)
    assert (config.kl_penalty_coef, config.num_substeps, config.max_steps_off_policy) == (0.0, 1, 0)
    assert (config.eval_every, config.save_every, config.lora_rank, config.temperature) == (20, 20, 32, 1.0)

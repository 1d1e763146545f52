import asyncio
import pickle
import re
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.datasets import load_rows
from stovetop.errors import EnvError, GradeError, InvalidRequest
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import ProblemEnv
from stovetop.rl.rollouts import do_single_rollout
from stovetop.tasks import TASKS, task_builders
from stovetop.tasks.math import FEW_SHOT, MathProblem, builders, dataset, held_out_builders, problem_of_row
from stovetop.tasks.math_grading import Verdict, extract_boxed, extract_gsm_answer, grade_here
from stovetop.types import ModelInput

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)
PROBLEM = MathProblem("What is a half?", r"\frac{1}{2}", grade_here)


def reward(text: str, problem: MathProblem = PROBLEM) -> float:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]

    async def says(model_input: ModelInput, stop: object, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop")

    env = ProblemEnv(problem, RENDERER, slow_checks=True)
    return asyncio.run(do_single_rollout(says, env)).transitions[0].reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"It is \boxed{0.5}.", 1.0),
        (r"It is \boxed{2}.", 0.0),
        ("It is 0.5.", -0.1),
        (r"\boxed{2} or \boxed{1/2}", 1.0),
    ],
)
def test_the_reward_is_that_of_the_last_box(text: str, expected: float):
    assert reward(text) == expected


def test_a_broken_grader_is_an_error_and_never_a_reward():
    def broken(given: str, reference: str) -> Verdict:
        raise OSError("no grader")

    with pytest.raises(EnvError, match="no grader") as raised:
        reward(r"\boxed{2}", MathProblem("?", "1", broken))
    assert isinstance(raised.value.__cause__, GradeError)


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"question": "?", "answer": "1 + 1 = 2\n#### 2"}, "2"),
        ({"problem": "?", "solution": r"so \boxed{\frac{1}{2}}"}, r"\frac{1}{2}"),
        ({"problem": "?", "answer": "7", "solution": r"\boxed{8}"}, "7"),
        ({"question": "?", "final_answer": "9", "r1_solution": "long"}, "9"),
    ],
)
def test_rows_come_in_the_schemas_of_the_known_datasets(row: dict[str, object], reference: str):
    problem = problem_of_row(row, grade_here)
    assert (problem.question, problem.get_reference_answer()) == ("?", reference)


@pytest.mark.parametrize("row", [{"question": "?"}, {"answer": "2"}, {"question": "?", "answer": "####"}])
def test_a_row_without_a_question_or_a_result_is_refused_by_its_name(row: dict[str, object]):
    with pytest.raises(InvalidRequest, match="row 0"):
        builders([row], RENDERER, 1, grade_here)


def test_problems_come_from_files_of_the_hub_on_disk(tmp_path: Path):
    rows = [{"question": f"{n} + {n} = ?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    for source in (tmp_path, tmp_path / "train-00000-of-00001.parquet"):
        [batch] = [dataset(RENDERER, grade_here, str(source), groups_per_batch=4).get_batch(0)]
        problems = [group.env_thunk.args[0] for group in batch]
        assert {(one.question, one.reference) for one in problems} == {(f"{n} + {n} = ?", str(2 * n)) for n in range(4)}


def test_the_results_of_the_sample_are_those_of_its_last_steps():
    rows = load_rows("sample:gsm8k")
    assert len(rows) == 24
    for row in rows:
        result = extract_gsm_answer(str(row["answer"]))
        assert result is not None
        assert result.replace(",", "") in str(row["answer"]).rpartition("####")[0].replace(",", ""), row
        for left, right in re.findall(r"((?:[\d.,]+ [-+*/] )+[\d.,]+) = \$?(-?[\d.,]*\d)", str(row["answer"])):
            assert eval(left.replace(",", "")) == float(right.replace(",", "")), row


def test_a_problem_asks_for_a_box_after_a_solved_example_if_told_so():
    rows = load_rows("sample:gsm8k")[:1]
    [plain], [shown] = (builders(rows, RENDERER, 1, grade_here, few_shot=few_shot) for few_shot in (False, True))

    def prompt(builder: object) -> str:
        [env] = asyncio.run(builder.make_envs())
        return TOKENIZER.decode(asyncio.run(env.initial_observation())[0].to_ints())

    assert prompt(plain).count("boxed") == 1
    assert "strawberry" in prompt(shown)
    assert extract_boxed(str(FEW_SHOT[1]["content"])) == str("strawberry".count("r"))


def test_the_problems_held_out_of_the_sample_are_not_trained_on():
    def questions(groups: object) -> set[str]:
        return {group.env_thunk.args[0].question for group in groups}

    batches = dataset(RENDERER, grade_here, groups_per_batch=16)
    assert len(batches) == 1
    assert len(questions(held_out_builders(RENDERER))) == 8
    assert not questions(held_out_builders(RENDERER)) & questions(batches.get_batch(0))


def test_a_problem_pickles():
    problem = pickle.loads(pickle.dumps(partial(ProblemEnv, PROBLEM)))
    assert problem.args[0] == PROBLEM


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_the_table_has_held_out_problems_that_can_be_played(name: str):
    [env, *_] = asyncio.run(task_builders(name, RENDERER)[0].make_envs())
    observation, _ = asyncio.run(env.initial_observation())
    assert observation.length > 0

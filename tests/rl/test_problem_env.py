import asyncio
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import StopCondition, TokensWithLogprobs
from stovetop.errors import EnvError, GradeError, InvalidRequest
from stovetop.renderers import get_renderer
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.rl.problem_env import (
    ExactAnswer,
    ProblemDataset,
    ProblemEnv,
    ProblemGroupBuilder,
    Truncated,
    answer_builders,
)
from stovetop.rl.rollouts import do_group_rollout, do_single_rollout
from stovetop.rl.types import StepResult
from stovetop.types import ModelInput, StopReason

TOKENIZER = ByteTokenizer()
RENDERER = ChatTemplateRenderer(TOKENIZER)
END = TOKENIZER.eos_token_id


def answer(text: str, stop_reason: StopReason = "stop", *, ends: bool = True) -> TokensWithLogprobs:
    tokens = [*TOKENIZER.encode(text, add_special_tokens=False), *([END] if ends else [])]
    return TokensWithLogprobs(tokens, [-1.0] * len(tokens), stop_reason)


async def says_yes(
    model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
) -> TokensWithLogprobs:
    return answer("yes!")


@dataclass(frozen=True)
class Shout:
    """Right when it says yes (by `right`, if given), well-formed when it is loud."""

    right: Callable[[str], bool] = lambda text: "yes" in text.lower()

    def get_question(self) -> str:
        return "Is it?"

    def check_answer(self, text: str) -> bool:
        return self.right(text)

    def check_format(self, text: str) -> bool:
        return text.endswith("!")

    def get_reference_answer(self) -> str:
        return "Yes!"


def graded(action: TokensWithLogprobs, **options: object) -> StepResult:
    return asyncio.run(ProblemEnv(Shout(), RENDERER, **options).step(action))


@pytest.mark.parametrize(
    ("text", "reward", "correct", "well_formed"),
    [("yes!", 1.0, 1, 1), ("yes", 0.9, 1, 0), ("no!", 0.0, 0, 1), ("no", -0.1, 0, 0)],
)
def test_reward_is_for_the_answer_less_a_little_for_bad_format(
    text: str, reward: float, correct: int, well_formed: int
):
    result = graded(answer(text))
    assert result.reward == pytest.approx(reward)
    assert result.metrics == {"format": well_formed, "correct": correct}
    assert result.episode_done


@pytest.mark.parametrize(("truncated", "reward"), [("graded", 1.0), ("bad_format", 0.9), ("wrong", -0.1)])
@pytest.mark.parametrize(
    "action", [answer("yes!", "length", ends=False), answer("yes!", ends=False), answer("yes!", "length")]
)
def test_an_answer_that_was_cut_off_is_graded_as_the_environment_says(
    action: TokensWithLogprobs, truncated: Truncated, reward: float
):
    assert graded(action, truncated=truncated).reward == pytest.approx(reward)


def test_an_episode_whose_only_answer_was_cut_off_ended_by_the_limit_of_tokens():
    assert graded(answer("yes!", "length", ends=False)).stop_reason == "max_tokens"
    assert graded(answer("yes!")).stop_reason == "completed"


ROLE_COLON = RoleColonRenderer(TOKENIZER)  # ends a turn by "\n\nUser:", which a base model may do by end-of-text


@pytest.mark.parametrize(
    ("text", "stopped", "ended_by_text_end", "either_will_do"),
    [("yes!", 1.0, 0.9, 1.0), ("yes", 0.9, 0.9, 0.9), ("no!", 0.0, -0.1, 0.0), ("no", -0.1, -0.1, -0.1)],
)
def test_format_asks_for_the_stop_sequence_unless_the_end_of_text_will_do(
    text: str, stopped: float, ended_by_text_end: float, either_will_do: float
):
    def reward(action: TokensWithLogprobs, **options: bool) -> float:
        return asyncio.run(ProblemEnv(Shout(), ROLE_COLON, **options).step(action)).reward

    stop_sequence = answer(f" {text}\n\nUser:", ends=False)
    assert reward(stop_sequence) == pytest.approx(stopped)
    assert reward(answer(f" {text}")) == pytest.approx(ended_by_text_end)
    assert reward(stop_sequence, require_stop_sequence_for_format=False) == pytest.approx(stopped)
    assert reward(answer(f" {text}"), require_stop_sequence_for_format=False) == pytest.approx(either_will_do)


@pytest.mark.parametrize("truncated", ["graded", "bad_format", "wrong"])
def test_the_end_of_text_is_no_truncation(truncated: Truncated):
    result = asyncio.run(ProblemEnv(Shout(), ROLE_COLON, truncated=truncated).step(answer(" yes!")))
    assert result.metrics == {"format": 0.0, "correct": 1.0}


def test_a_truncated_answer_fails_the_format_check_by_default():
    assert graded(answer("yes!", "length", ends=False)).metrics == {"format": 0.0, "correct": 1.0}


def test_the_coefficient_is_what_bad_format_costs():
    assert graded(answer("yes"), format_coef=0.5).reward == 0.5


def test_the_prompt_is_the_prefix_and_the_question_and_the_renderer_says_what_stops_an_answer():
    env = ProblemEnv(Shout(), RENDERER, [{"role": "system", "content": "Be loud."}])
    observation, stop = asyncio.run(env.initial_observation())
    assert TOKENIZER.decode(observation.to_ints()) == (
        "<|im_start|>system\nBe loud.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert stop == RENDERER.get_stop_sequences()


def test_an_object_with_the_four_methods_runs_a_rollout_with_any_renderer():
    async def loud(
        model_input: ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        assert stop == ["\n\nUser:"]
        tokens = TOKENIZER.encode(" Yes!\n\nUser:", add_special_tokens=False)
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "stop")

    trajectory = asyncio.run(do_single_rollout(loud, ProblemEnv(Shout(), RoleColonRenderer(TOKENIZER))))
    assert [turn.reward for turn in trajectory.transitions] == [1.0]


def test_a_grader_that_breaks_is_an_error_and_never_a_wrong_answer():
    with pytest.raises(EnvError) as raised:
        asyncio.run(do_single_rollout(says_yes, ProblemEnv(Shout(right=lambda text: 1 / 0 > 1), RENDERER)))
    assert isinstance(raised.value.__cause__, GradeError)
    assert "Shout could not grade the answer 'yes!'" in str(raised.value)


@pytest.mark.parametrize("stop_reason", ["length", "stop"])
def test_what_is_thought_is_not_graded_also_where_the_thought_was_cut_off(stop_reason: StopReason):
    renderer = get_renderer("qwen3", TOKENIZER)

    def grade(text: str) -> StepResult:
        return asyncio.run(ProblemEnv(Shout(), renderer).step(answer(text, stop_reason, ends=stop_reason == "stop")))

    assert grade("<think>\nIs it yes!").metrics == {"format": 0.0, "correct": 0.0}
    assert grade("<think>\nIs it yes?\n</think>\n\nno").metrics["correct"] == 0.0
    assert grade("<think>\nno?\n</think>\n\nyes!").metrics["correct"] == 1.0


@pytest.mark.parametrize("verdict", [None, math.nan, 0.5, "yes"])
def test_a_check_that_returns_no_truth_value_is_a_broken_grader(verdict: object):
    with pytest.raises(GradeError, match="must return True or False"):
        asyncio.run(ProblemEnv(Shout(right=lambda text: verdict), RENDERER).step(answer("yes!")))


def test_numpy_says_true_and_false_too():
    env = ProblemEnv(Shout(right=lambda text: np.bool_(True)), RENDERER)
    assert asyncio.run(env.step(answer("yes!"))).metrics == {"format": 1.0, "correct": 1.0}


def test_a_builder_makes_as_many_environments_as_asked_and_tags_them_with_its_dataset():
    builder = ProblemGroupBuilder(partial(ProblemEnv, Shout(), RENDERER), num_envs=3)
    group = asyncio.run(do_group_rollout(builder, says_yes))
    assert list(group.final_rewards_G) == [0.0] * 3
    assert group.get_total_rewards() == [1.0] * 3
    assert builder.logging_tags() == ["problems"]


def test_builders_pickle():
    [builder] = answer_builders([{"question": "2 + 2?", "answer": "4"}], RENDERER, 2)
    copy = pickle.loads(pickle.dumps(builder))
    [env, _] = asyncio.run(copy.make_envs())
    assert asyncio.run(env.initial_observation()) == asyncio.run(builder.env_thunk().initial_observation())


# ---- rows --------------------------------------------------------------------------------------------------------


def test_a_row_asks_a_question_or_is_a_chat_that_ends_with_one():
    shown = [{"role": "user", "content": "1 1"}, {"role": "assistant", "content": "2"}]
    chat = [{"role": "system", "content": "Add."}, *shown, {"role": "user", "content": "2 2"}]
    builders = answer_builders(
        [{"question": "2 + 2?", "answer": "4"}, {"messages": chat, "answer": "4", "level": 1}], RENDERER, 1
    )
    prompts = [asyncio.run(builder.env_thunk().initial_observation())[0].to_ints() for builder in builders]
    assert [TOKENIZER.decode(prompt) for prompt in prompts] == [
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2 2<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (answer("4"), 1.0),
        (answer(" 4"), 0.0),
        (answer("4\n"), 0.0),
        (answer("4."), 0.0),
        (answer("5"), 0.0),
        (answer(""), 0.0),
        (answer("4", "length", ends=False), 0.0),
    ],
)
def test_only_the_exact_answer_that_ends_by_itself_is_rewarded(action: TokensWithLogprobs, reward: float):
    [builder] = answer_builders([{"question": "2 + 2?", "answer": "4"}], RENDERER, 1)
    assert asyncio.run(builder.env_thunk().step(action)).reward == reward


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "2 + 2?"}, "row 1 needs 'answer'"),
        ({"question": "2 + 2?", "answer": 4}, "row 1 needs 'answer'.*: 4"),
        ({"answer": "4"}, r"row 1 needs 'question'.*\['answer'\]"),
        ({"question": "q", "messages": [{"role": "user", "content": "q"}], "answer": "4"}, "row 1 needs .* not both"),
        ({"messages": [], "answer": "4"}, "row 1: messages must end with the user's question"),
        ({"messages": [{"role": "assistant", "content": "q"}], "answer": "4"}, r"row 1.*roles: \['assistant'\]"),
        ({"messages": [{"role": "user"}], "answer": "4"}, "row 1, message 0 lacks 'content'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_by_its_index(row: dict[str, object], complaint: str):
    with pytest.raises(InvalidRequest, match=complaint):
        answer_builders([{"question": "2 + 2?", "answer": "4"}, row], RENDERER, 1)


def test_an_exact_answer_is_its_own_reference():
    problem = ExactAnswer("2 + 2?", "4")
    assert problem.get_reference_answer() == "4"
    assert problem.check_answer(problem.get_reference_answer())
    assert problem.check_format("anything")


# ---- datasets ----------------------------------------------------------------------------------------------------


def test_a_dataset_uses_every_problem_once_an_epoch_in_an_order_that_depends_on_the_seed():
    rows = [{"question": str(number), "answer": str(number)} for number in range(6)]
    builders = answer_builders(rows, RENDERER, 2)

    def order(seed: int) -> list[int]:
        dataset = ProblemDataset(builders, 2, seed=seed)
        return [builders.index(builder) for index in range(len(dataset)) for builder in dataset.get_batch(index)]

    assert len(ProblemDataset(builders, 2, num_epochs=3)) == 9
    assert sorted(order(0)) == list(range(6))
    assert order(0) == order(0) != order(1)

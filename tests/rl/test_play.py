import asyncio
import io

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest
from stovetop.renderers import get_renderer
from stovetop.rl.message_env import EnvFromMessageEnv
from stovetop.rl.play import play_w_env, read_answer
from stovetop.rl.types import Trajectory
from stovetop.tasks.guess_number import GuessNumberEnv

TOKENIZER = ByteTokenizer()


def play(typed: str, renderer: str = "role_colon") -> tuple[Trajectory, list[str]]:
    shown: list[str] = []
    env = EnvFromMessageEnv(GuessNumberEnv(number=300), get_renderer(renderer, TOKENIZER))
    return asyncio.run(play_w_env(env, TOKENIZER, io.StringIO(typed).readline, shown.append)), shown


@pytest.mark.parametrize("renderer", ["role_colon", "chat_template"])
def test_a_person_plays_to_the_end_and_sees_what_is_new_each_rewards_and_a_summary(renderer: str):
    trajectory, shown = play("512\n\n\n300\n\n\n", renderer)
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 1.0]
    rules, first_reward, hint, second_reward, summary = shown
    assert "from 0 to 1023" in rules
    assert first_reward == "reward 0, parse_error 0"
    assert "Mine is lower." in hint
    assert "from 0 to 1023" not in hint
    assert second_reward == "reward 1, parse_error 0, hit 1, malformed 0, guesses 2"
    assert summary == "The episode is over: completed. Turns: 2, total reward: 1"


def test_an_answer_of_several_lines_ends_with_two_blank_ones_or_with_the_input():
    lines = io.StringIO("one\n\ntwo\n\n\nthree\n").readline
    assert read_answer(lines) == "one\n\ntwo"
    assert read_answer(lines) == "three"
    with pytest.raises(InvalidRequest, match="the input ended before the episode did"):
        read_answer(lines)
    assert read_answer(io.StringIO("\n\n").readline) == ""

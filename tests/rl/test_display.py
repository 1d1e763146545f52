import re

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.rl.display import format_trajectory
from stovetop.rl.types import Trajectory, Transition
from stovetop.types import EncodedTextChunk, ImageChunk, ModelInput

GREEN, YELLOW, RED, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def turn(observed: bytes, said: bytes, reward: float = 0.0, *, trainable: bool = True) -> Transition:
    action = TokensWithLogprobs(list(said), [-1.0] * len(said))
    return Transition(ModelInput.from_ints(observed), action, reward, False, {"guess": 2}, trainable)


def shown(*turns: Transition, advantage: object = None) -> str:
    return format_trajectory(Trajectory(turns, ModelInput.empty()), ByteTokenizer(), advantage)


def test_a_turn_shows_only_what_is_new_in_it():
    text = shown(turn(b"Hi.", b"yo"), turn(b"Hi.yo So?", b"no", 1.0))
    assert re.sub(r"\x1b\[\d+m", "", text) == (
        "---- turn 1: reward 0, guess 2\nHi.yo\n"
        "---- turn 2: reward 1, guess 2\n So?no\n"
        "---- completed, 2 turns, rewards 1"
    )


def test_an_observation_that_begins_anew_is_shown_whole():
    assert "begins anew\n" + YELLOW + "New" in shown(turn(b"Hi.", b"yo"), turn(b"New", b"no"))


@pytest.mark.parametrize(
    ("advantage", "colours"), [(-0.5, [RED, RED]), ([0.5, -1], [GREEN, RED]), (None, [YELLOW, GREEN])]
)
def test_the_colour_of_an_action_is_the_sign_of_its_advantage_or_else_of_its_reward(
    advantage: object, colours: list[str]
):
    text = shown(turn(b"a", b"XX"), turn(b"aXXb", b"YY", 1.0), advantage=advantage)
    assert f"{colours[0]}XX{RESET}" in text
    assert f"{colours[1]}YY{RESET}" in text


def test_what_is_not_trained_is_yellow():
    assert f"{YELLOW}XX{RESET}" in shown(turn(b"a", b"XX", 1.0, trainable=False))


def test_a_character_of_several_tokens_appears_whole_and_an_image_is_named():
    seen = ModelInput([EncodedTextChunk("厨房".encode()), ImageChunk(b"", "png", 5), EncodedTextChunk(b"?")])
    text = shown(Transition(seen, TokensWithLogprobs(list(b"A"), [-1.0]), 1.0, True))
    assert f"{YELLOW}厨房{RESET}<png of 5 tokens>{YELLOW}?{RESET}{GREEN}A{RESET}" in text

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest
from stovetop.renderers.display import colorize_example, format_colorized
from stovetop.types import Datum, ModelInput

GREEN, YELLOW, RED, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


def test_the_colour_says_the_sign_of_the_weight():
    text = format_colorized(list(b"abcd"), [0, 1, 0.5, -1], ByteTokenizer())
    assert text == f"{YELLOW}a{RESET}{GREEN}bc{RESET}{RED}d{RESET}"


def test_a_character_of_several_tokens_appears_whole():
    assert format_colorized(list("厨房".encode()), [1.0] * 6, ByteTokenizer()) == f"{GREEN}厨房{RESET}"


def test_tokens_and_weights_of_different_length_are_refused():
    with pytest.raises(InvalidRequest, match="2 and 1"):
        format_colorized([1, 2], [1.0], ByteTokenizer())


def test_an_example_is_shown_whole_and_its_first_token_is_never_trained():
    datum = Datum(ModelInput.from_ints(b"hi!"), {"target_tokens": list(b"i!?"), "weights": [0.0, 1.0, 1.0]})
    assert colorize_example(datum, ByteTokenizer()) == f"{YELLOW}hi{RESET}{GREEN}!?{RESET}"


def test_an_example_can_show_its_advantages():
    datum = Datum(ModelInput.from_ints(b"hi"), {"target_tokens": list(b"i!"), "advantages": [-1.0, 2.0]})
    assert colorize_example(datum, ByteTokenizer(), key="advantages") == f"{YELLOW}h{RESET}{RED}i{RESET}{GREEN}!{RESET}"
    with pytest.raises(InvalidRequest, match="'weights'"):
        colorize_example(datum, ByteTokenizer())

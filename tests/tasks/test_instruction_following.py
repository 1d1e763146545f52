"""The rules are the authors', from a package; what is tested is that each is asked about the right thing."""

import asyncio

import pytest

from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.completers import TokensWithLogprobs
from stovetop.errors import GradeError
from stovetop.named_data import LeftOut
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tasks import instruction_following
from stovetop.tasks.instruction_following import (
    InstructedPrompt,
    Instruction,
    InstructionEnv,
    followed,
    parse_instructions,
)

ROW = {
    "key": 1000,
    "prompt": "Write two words, without a comma.",
    "instruction_id_list": ["en:punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"relation": "at least", "num_words": 2, "num_sentences": None}],
}


def prompt() -> InstructedPrompt:
    parsed = parse_instructions(ROW)
    assert isinstance(parsed, InstructedPrompt)
    return parsed


def test_a_row_has_an_instruction_for_each_rule_without_the_language_and_nulls():
    assert prompt() == InstructedPrompt(
        "1000",
        "Write two words, without a comma.",
        (
            Instruction("punctuation:no_comma", {}),
            Instruction("length_constraints:number_words", {"relation": "at least", "num_words": 2}),
        ),
    )


@pytest.mark.parametrize(
    ("answer", "strict", "loose"),
    [
        ("hello world", 2, 2),
        ("hello, world", 1, 1),
        ("hello", 1, 1),
        ("", 0, 0),
        (" \n", 0, 0),
        ("Sure, here it is:\nhello world", 1, 2),  # leniently, without its first line
    ],
)
def test_how_many_instructions_an_answer_follows(answer: str, strict: int, loose: int):
    assert followed(answer, prompt()) == (strict, loose)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": " "}, "no prompt"),
        ({"kwargs": [{}]}, "not one object of kwargs for each"),
        ({"instruction_id_list": [], "kwargs": []}, "not one object of kwargs for each"),
        ({"instruction_id_list": ["punctuation:no_comma", "made:up"]}, "a rule that IFEval does not have"),
    ],
)
def test_a_row_of_no_use_is_left_out_with_the_reason(change: dict[str, object], why: str):
    parsed = parse_instructions(ROW | change)  # pyright: ignore[reportArgumentType]  a row of JSON
    assert isinstance(parsed, LeftOut)
    assert why in parsed.reason


def test_rules_that_need_data_of_nltk_are_left_out_without_it(monkeypatch: pytest.MonkeyPatch):
    counts_sentences = {
        **ROW,
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "at least", "num_sentences": 1}],
    }
    monkeypatch.setattr(instruction_following, "SENTENCE_DATA", "tokenizers/of_no_language/")
    parsed = parse_instructions(counts_sentences)
    assert isinstance(parsed, LeftOut)
    assert "python -m nltk.downloader punkt_tab" in parsed.reason


def test_which_language_a_text_is_in_is_decided_alike_every_time():
    asked = InstructedPrompt("1", "p", (Instruction("language:response_language", {"language": "en"}),))
    text = "ok no si la ja"  # which langdetect without a seed takes now for one, now for another
    assert len({followed(text, asked) for _ in range(10)}) == 1


def test_a_rule_that_breaks_is_no_wrong_answer():
    broken = InstructedPrompt("7", "p", (Instruction("length_constraints:number_words", {"relation": "about"}),))
    with pytest.raises(GradeError, match="the rules of prompt 7 cannot be checked"):
        followed("some words", broken)


def test_the_reward_is_the_share_of_instructions_that_are_followed():
    renderer = ChatTemplateRenderer(ByteTokenizer())
    [stop] = renderer.get_stop_sequences()
    assert isinstance(stop, int)
    said = [*renderer.tokenizer.encode("hello, world", add_special_tokens=False), stop]
    env = InstructionEnv(prompt(), renderer)
    result = asyncio.run(env.step(TokensWithLogprobs(said, None)))
    assert result.reward == 0.5
    assert result.metrics == {
        "correct": 0, "correct_loose": 0, "followed": 1, "followed_loose": 1, "instructions": 2,
    }  # fmt: skip

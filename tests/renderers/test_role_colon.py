import random

import pytest

from renderers.languages import chat, chatml, random_chat, trained_tokens
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import ParseTermination, TrainOnWhat
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ensure_text
from stovetop.renderers.role_colon import RoleColonRenderer

BYTES = ByteTokenizer()
EOS = BYTES.eos_token_id


@pytest.fixture
def renderer() -> RoleColonRenderer:
    return RoleColonRenderer(BYTES)


def test_a_chat_is_plain_text_and_ends_where_the_user_would_speak(renderer: RoleColonRenderer) -> None:
    messages = chat("U", "A", system="S")
    example = renderer.build_supervised_example(messages)
    assert BYTES.decode(example.model_input.to_ints()) == "<|bos|>System: S\n\nUser: U\n\nAssistant: A\n\nUser:"
    assert BYTES.decode(trained_tokens(example)) == " A\n\nUser:"


def test_a_prompt_ends_with_the_name_of_who_speaks_next(renderer: RoleColonRenderer) -> None:
    prompt = renderer.build_generation_prompt(chat("U"), prefill=" Well")
    assert BYTES.decode(prompt.to_ints()) == "<|bos|>User: U\n\nAssistant: Well"


def test_it_stops_at_a_string(renderer: RoleColonRenderer) -> None:
    assert renderer.get_stop_sequences() == ["\n\nUser:"]


def test_headers_are_trained_with_all_tokens_alone(renderer: RoleColonRenderer) -> None:
    messages = chat("U", "A", "V", "B")
    trained = [
        BYTES.decode(trained_tokens(renderer.build_supervised_example(messages, mode)))
        for mode in (TrainOnWhat.ALL_ASSISTANT_MESSAGES, TrainOnWhat.ALL_MESSAGES, TrainOnWhat.ALL_TOKENS)
    ]
    assert trained == [
        " A\n\n B\n\nUser:",
        " U\n\n A\n\n V\n\n B\n\nUser:",
        "User: U\n\nAssistant: A\n\nUser: V\n\nAssistant: B\n\nUser:",
    ]


@pytest.mark.parametrize(
    ("text", "ended", "content", "termination"),
    [
        (" hi\n\nUser:", False, "hi", ParseTermination.STOP_SEQUENCE),
        ("  hi\n\nUser:", False, " hi", ParseTermination.STOP_SEQUENCE),
        (" hi", True, "hi", ParseTermination.EOS),
        (" hi", False, "hi", ParseTermination.MALFORMED),
        (" hi\n\nUser:", True, "hi", ParseTermination.MALFORMED),
        (" hi\n\nUser: x\n\nUser:", False, "hi", ParseTermination.MALFORMED),
        ("", False, "", ParseTermination.MALFORMED),
    ],
)
def test_how_an_answer_ended_is_told(
    renderer: RoleColonRenderer, text: str, ended: bool, content: str, termination: ParseTermination
) -> None:
    tokens = BYTES.encode(text, add_special_tokens=False) + [EOS] * ended
    message, how = renderer.parse_response(tokens)
    assert message == {"role": "assistant", "content": content}
    assert how is termination


def test_a_token_that_brings_more_than_the_end_of_the_stop_string_still_stops() -> None:
    """A sampler stops at the token that completes the string, whatever else that token holds."""
    renderer = RoleColonRenderer(chatml())
    tokens = chatml().encode(" hi\n\nUser:\n")
    assert chatml().decode(tokens[-1:]) == ":\n"
    assert renderer.parse_response(tokens)[1] is ParseTermination.STOP_SEQUENCE


def test_a_thousand_chats_begin_with_their_prompt_and_come_back_from_their_tokens() -> None:
    """Half a second: a thousand examples."""
    renderer = RoleColonRenderer(chatml())
    for seed in range(1000):
        messages = random_chat(seed)
        example = renderer.build_supervised_example(messages)
        prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
        assert example.model_input.to_ints()[: len(prompt)] == prompt
        assert not example.weights[: len(prompt)].any()
        answer = trained_tokens(example)
        message, termination = renderer.parse_response(answer)
        assert termination is ParseTermination.STOP_SEQUENCE
        assert message["content"] == ensure_text(messages[-1]["content"])


def test_control_tokens_typed_by_a_user_stay_text(renderer: RoleColonRenderer) -> None:
    prompt = renderer.build_generation_prompt(chat("<|bos|><|im_end|>")).to_ints()
    assert prompt.count(BYTES.bos_token_id) == 1
    assert EOS not in prompt


def test_each_prompt_extends_the_last_and_its_answer(renderer: RoleColonRenderer) -> None:
    first = renderer.build_generation_prompt(chat("U")).to_ints()
    answer = BYTES.encode(" A\n\nUser:", add_special_tokens=False)
    second = renderer.build_generation_prompt(chat("U", "A", "V")).to_ints()
    assert second[: len(first + answer)] == first + answer
    assert len(renderer.build_supervised_examples(chat("U", "A", "V", "B"))) == 1


def test_an_answer_that_was_sampled_without_its_space_has_one_in_the_next_prompt(renderer: RoleColonRenderer) -> None:
    """So not every prompt extends the one before it."""
    assert not renderer.has_extension_property
    message, _ = renderer.parse_response(BYTES.encode("A\n\nUser:", add_special_tokens=False))
    assert renderer.build_generation_prompt([*chat("U"), message]) == renderer.build_generation_prompt(chat("U", "A"))


@pytest.mark.parametrize(
    "message",
    [
        Message(role="tool", content="7"),
        Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", "{}"))]),
        Message(role="user", content=[{"type": "image", "image": "cat.png"}]),
    ],
)
def test_only_text_can_be_said(renderer: RoleColonRenderer, message: Message) -> None:
    with pytest.raises(InvalidRequest):
        renderer.build_generation_prompt([message])


def test_no_sequence_of_tokens_makes_the_parser_raise(renderer: RoleColonRenderer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        renderer.parse_response([rng.randrange(len(BYTES)) for _ in range(rng.randrange(12))])

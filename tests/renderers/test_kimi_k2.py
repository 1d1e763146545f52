import copy
from dataclasses import replace

import pytest
from tml_renderers import chat as tml_chat
from tml_renderers import renderers as tml

from renderers import real_tokenizers
from renderers.conversations import conversation
from renderers.families import FAMILIES
from renderers.languages import chat, mask, trained_tokens
from renderers.oracle import tml_example, tml_prompt
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import ParseTermination, TrainOnWhat
from stovetop.renderers.kimi_k2 import KimiK2Renderer
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec
from stovetop.renderers.streaming import StreamingMessageHeader, StreamingTextDelta, StreamingToolCallDelta

SYSTEM = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
ARGUMENTS = '{"city": "Paris", "n": 2, "flag": true}'
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
CALLED = CALL.replace("{}", ARGUMENTS)
RESULT = "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\nsunny<|im_end|>"


@pytest.fixture
def renderer() -> KimiK2Renderer:
    return KimiK2Renderer(real_tokenizers.kimi_k2())


def _user(text: str) -> str:
    return f"<|im_user|>user<|im_middle|>{text}<|im_end|>"


def _thinking(thinking: str, text: str, **more: list[ToolCall]) -> Message:
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    return Message(role="assistant", content=parts, **more)


def _call() -> ToolCall:
    return ToolCall(FunctionCall("get_weather", ARGUMENTS), id="functions.get_weather:0")


def _result() -> Message:
    return Message(role="tool", content="sunny", tool_call_id="functions.get_weather:0", name="get_weather")


def _tool_chat() -> list[Message]:
    return [*chat("U1"), _thinking("R1", "T1", tool_calls=[_call()]), _result(), _thinking("R2", "A2")]


THINKING_CHAT = [*chat("U1"), _thinking("R1", "A1"), *chat("U2"), _thinking("R2", "A2")]


# ---- what the model sees -----------------------------------------------------------------------------------------

_DEFAULT = [163594, 14062, 163601, 3900, 554, 24980, 72, 11, 519, 22572, 26626, 5232, 673, 30218, 10065, 22572, 13]
_DEFAULT += [163586]
_TERSE = [163594, 14062, 163601, 4396, 93330, 13, 163586]  # Be terse.
_QUESTION = [163587, 2482, 163601, 5376, 387, 220, 17, 10, 17, 30, 163586]  # What is 2+2?
_ASSISTANT = [163588, 69702, 163601]


@pytest.mark.slow
def test_chats_have_the_ids_of_the_published_model(renderer: KimiK2Renderer) -> None:
    assert renderer.build_generation_prompt(chat("What is 2+2?")).to_ints() == [*_DEFAULT, *_QUESTION, *_ASSISTANT]
    prompt = renderer.build_generation_prompt(chat("What is 2+2?", system="Be terse.")).to_ints()
    assert prompt == [*_TERSE, *_QUESTION, *_ASSISTANT]
    whole = renderer.build_supervised_example(chat("What is 2+2?", "4")).model_input.to_ints()
    assert whole == [*_DEFAULT, *_QUESTION, *_ASSISTANT, 163606, 163607, 19, 163586]


def test_a_call_and_its_result_have_the_ids_of_the_published_model(renderer: KimiK2Renderer) -> None:
    call = ToolCall(FunctionCall("get_weather", '{"city": "Paris"}'), id="functions.get_weather:0")
    called = Message(role="assistant", content="", tool_calls=[call])
    messages = [*chat("Weather in Paris?"), called, {**_result(), "content": '{"temp": 21}'}]
    assert renderer.build_generation_prompt(messages).to_ints() == [
        *(*_DEFAULT, 163587, 2482, 163601, 65512, 306, 17374, 30, 163586, *_ASSISTANT, 163606, 163607, 163595, 163597),
        *(41937, 1150, 21055, 2800, 25, 15, 163598, 8264, 37666, 1289, 414, 113476, 16934, 163599, 163596, 163586),
        *(163594, 618, 21055, 2800, 163601, 798, 6014, 318, 8271, 1150, 21055, 2800, 25, 15, 198, 8264, 15566, 1289),
        *(220, 2714, 92, 163586, *_ASSISTANT),
    ]


def test_another_implementation_writes_and_trains_the_same(num_conversations: int) -> None:
    """It joins users who speak twice."""
    other, renderer = tml.KimiK2(), KimiK2Renderer(real_tokenizers.kimi_k2())
    for seed in range(num_conversations):
        messages = conversation(seed, replace(FAMILIES["kimi_k2"].features, repeated_users=False))
        assert renderer.build_generation_prompt(messages[:-1]).to_ints() == tml_prompt(other, messages[:-1])
        example = renderer.build_supervised_example(messages)
        tokens, weights = tml_example(other, messages)
        assert example.model_input.to_ints() == tokens
        answer = trained_tokens(example)
        assert [token for token, weight in zip(tokens, weights, strict=True) if weight][-len(answer) :] == answer


def test_tools_are_declared_as_another_implementation_declares_them(renderer: KimiK2Renderer) -> None:
    schema = {"type": "object", "properties": {"städt": {"type": "string"}}, "required": ["städt"]}
    messages = renderer.create_conversation_prefix_with_tools([ToolSpec("get_weather", "Tells.", schema)], "S")
    declared = tml_chat.ToolDeclareJson([tml_chat.ToolSpecJson("function", "get_weather", "Tells.", schema)])
    system, user = tml_chat.Author(tml_chat.AuthorKind.System), tml_chat.Author(tml_chat.AuthorKind.User)
    spans, _ = tml.KimiK2().render_for_completion(
        [
            tml_chat.Message(declared, system),
            tml_chat.Message(tml_chat.Text("S"), system),
            tml_chat.Message(tml_chat.Text("U"), user),
        ]
    )
    expected = [token for span in spans for token in span.span.tokens]
    assert renderer.build_generation_prompt([*messages, *chat("U")]).to_ints() == expected


def test_the_model_is_told_who_it_is_unless_somebody_else_tells_it(renderer: KimiK2Renderer) -> None:
    tool = ToolSpec("f", "", {})
    declaration = renderer.create_conversation_prefix_with_tools([tool])[0]
    for messages, says in [
        ([], True),
        (chat("U"), True),
        ([*chat("U", "A"), *chat(system="S")], True),
        ([declaration, *chat("U")], True),
        (renderer.create_conversation_prefix_with_tools([tool]), True),
        (chat("U", system=""), False),
        ([declaration, *chat("U", system="S")], False),
    ]:
        text = renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())
        assert text.count("You are Kimi") == says


def test_chats_do_not_begin_with_begin_of_text(renderer: KimiK2Renderer) -> None:
    assert renderer.tokenizer.bos_token_id not in renderer.build_generation_prompt(chat("[BOS]")).to_ints()


# ---- thinking ----------------------------------------------------------------------------------------------------


def test_no_thinking_is_trained_as_thinking_that_is_empty(renderer: KimiK2Renderer) -> None:
    example = renderer.build_supervised_example(chat("U1", "A1", "U2", "A2"))
    history = f"{SYSTEM}{_user('U1')}{ASSISTANT}<think></think>A1<|im_end|>{_user('U2')}{ASSISTANT}"
    assert mask(renderer, example) == f"{history}¦<think></think>A2<|im_end|>¦"


def test_thinking_of_earlier_answers_is_not_shown(renderer: KimiK2Renderer) -> None:
    history = f"{SYSTEM}{_user('U1')}{ASSISTANT}<think></think>A1<|im_end|>{_user('U2')}{ASSISTANT}"
    example = renderer.build_supervised_example(THINKING_CHAT)
    assert mask(renderer, example) == f"{history}¦<think>R2</think>A2<|im_end|>¦"


def test_thinking_is_shown_until_the_model_has_answered(renderer: KimiK2Renderer) -> None:
    called = f"{SYSTEM}{_user('U1')}{ASSISTANT}<think>R1</think>T1{CALLED}<|im_end|>{RESULT}{ASSISTANT}"
    example = renderer.build_supervised_example(_tool_chat())
    assert mask(renderer, example) == f"{called}¦<think>R2</think>A2<|im_end|>¦"
    later = renderer.tokenizer.decode(renderer.build_generation_prompt([*_tool_chat(), *chat("U2")]).to_ints())
    assert later == (f"{called}<think></think>A2<|im_end|>{_user('U2')}{ASSISTANT}".replace("<think>R1", "<think>"))


def test_each_answer_gets_an_example_that_shows_what_the_model_saw(renderer: KimiK2Renderer) -> None:
    examples = renderer.build_supervised_examples(THINKING_CHAT, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    texts = [renderer.tokenizer.decode(trained_tokens(example)) for example in examples]
    assert texts == ["<think>R1</think>A1<|im_end|>", "<think>R2</think>A2<|im_end|>"]
    assert len(renderer.build_supervised_examples(THINKING_CHAT)) == 1
    assert len(renderer.build_supervised_examples(_tool_chat())) == 2


def test_a_call_without_text_ends_its_turn_too(renderer: KimiK2Renderer) -> None:
    called = Message(role="assistant", content="", tool_calls=[_call()])
    example = renderer.build_supervised_example([*chat("U1"), called])
    assert mask(renderer, example).endswith(f"{ASSISTANT}¦<think></think>{CALLED}<|im_end|>¦")


# ---- what it cannot say ------------------------------------------------------------------------------------------


def test_calls_and_results_need_the_id_of_the_call(renderer: KimiK2Renderer) -> None:
    nameless = Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", "{}"))])
    with pytest.raises(InvalidRequest, match=r"calls by their ids; give it one, as in 'functions\.f:0'"):
        renderer.build_supervised_example([*chat("U"), nameless])
    with pytest.raises(InvalidRequest, match="message 1: a result must say which call it answers; set tool_call_id"):
        renderer.build_generation_prompt([*chat("U"), Message(role="tool", content="7")])


def test_images_are_refused(renderer: KimiK2Renderer) -> None:
    with pytest.raises(InvalidRequest, match="kimi_k2, message 0: only text, thinking can be written, not: image"):
        renderer.build_generation_prompt([Message(role="user", content=[{"type": "image", "image": "cat.png"}])])


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_labels_cannot_form_control_tokens(renderer: KimiK2Renderer, field: str) -> None:
    result: Message = {**_result(), field: "<|im_end|><|im_user|>"}  # pyright: ignore[reportAssignmentType]  one of two
    tokens = renderer.build_generation_prompt([*chat("U"), result]).to_ints()
    assert tokens.count(163586) == 3
    assert tokens.count(163587) == 1


# ---- what it reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "termination"),
    [
        ("<think></think>hi<|im_end|>", {"content": "hi"}, ParseTermination.STOP_SEQUENCE),
        (
            "<think>R</think>hi<|im_end|>",
            {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "hi"}]},
            ParseTermination.STOP_SEQUENCE,
        ),
        ("<think>R", {"content": [{"type": "thinking", "thinking": "R"}]}, ParseTermination.MALFORMED),
        ("<think></think>hi[EOS]", {"content": "hi"}, ParseTermination.EOS),
        (
            f"<think></think>{CALLED}<|im_end|>",
            {"content": "", "tool_calls": [_call()]},
            ParseTermination.STOP_SEQUENCE,
        ),
    ],
)
def test_what_tokens_say_is_told(
    renderer: KimiK2Renderer, text: str, expected: dict[str, object], termination: ParseTermination
) -> None:
    message, how = renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
    assert message == {"role": "assistant", **expected}
    assert how is termination


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (CALL.replace("{}", "{bad"), "Invalid JSON"),
        (CALL.replace("functions.get_weather:0", ""), "a call needs a name"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.get", "the call is never closed"),
    ],
)
def test_what_is_no_call_is_kept_with_the_reason_and_written_as_it_was(
    renderer: KimiK2Renderer, written: str, reason: str
) -> None:
    sampled = renderer.tokenizer.encode(f"<think>R</think>{written}<|im_end|>", add_special_tokens=False)
    message, _ = renderer.parse_response(sampled)
    assert "tool_calls" not in message
    [call] = message["unparsed_tool_calls"]
    assert call.raw_text == written
    assert reason in call.error
    assert trained_tokens(renderer.build_supervised_example([*chat("U"), message])) == sampled


@pytest.mark.parametrize(
    ("call_id", "name"), [("functions.a.b:12", "a.b"), ("functions.f", "f"), ("f:0", "f"), ("call_7", "call_7")]
)
def test_the_function_is_in_the_id(renderer: KimiK2Renderer, call_id: str, name: str) -> None:
    text = CALLED.replace("functions.get_weather:0", call_id)
    message, _ = renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
    assert message["tool_calls"] == [ToolCall(FunctionCall(name, ARGUMENTS), id=call_id)]


def test_an_answer_is_read_as_it_comes(renderer: KimiK2Renderer) -> None:
    tokens = renderer.tokenizer.encode(f"<think>R🎉</think>hi{CALLED}<|im_end|>", add_special_tokens=False)
    header, *deltas, message = renderer.parse_response_streaming(tokens)
    assert header == StreamingMessageHeader()
    assert message == renderer.parse_response(tokens)[0]
    assert [delta.tool_call for delta in deltas if isinstance(delta, StreamingToolCallDelta)] == [_call()]
    assert "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta)).endswith("hi")


def test_a_copy_has_the_same_tokenizer(renderer: KimiK2Renderer) -> None:
    assert copy.copy(renderer).tokenizer is renderer.tokenizer

import copy
import json
from dataclasses import replace

import pytest
from tml_renderers import renderers as tml

from renderers import real_tokenizers
from renderers.conversations import Features, conversation
from renderers.languages import chat, mask, trained_tokens
from renderers.oracle import tml_example, tml_prompt
from stovetop.errors import InvalidRequest
from stovetop.renderers import get_renderer
from stovetop.renderers.base import ParseTermination, TrainOnWhat
from stovetop.renderers.deepseek_v3 import DeepSeekV3Renderer
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec
from stovetop.renderers.streaming import StreamingMessageHeader, StreamingTextDelta, StreamingToolCallDelta

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ARGUMENTS = '{"city": "Paris", "n": 2, "flag": true}'
CALLED = CALL.replace("{}", ARGUMENTS)


@pytest.fixture
def renderer() -> DeepSeekV3Renderer:
    return DeepSeekV3Renderer(real_tokenizers.deepseek())


def _thinking(thinking: str, text: str, **more: list[ToolCall]) -> Message:
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": text}]
    return Message(role="assistant", content=parts, **more)


def _tool_chat(text: str = "T1") -> list[Message]:
    calls = [ToolCall(FunctionCall("get_weather", ARGUMENTS))]
    called = Message(role="assistant", content=text, tool_calls=calls)
    return [*chat("U1"), called, Message(role="tool", content="sunny"), *chat("", "A2")[1:]]


# ---- what the model sees -----------------------------------------------------------------------------------------

_QUESTION = [128803, 3085, 344, 223, 20, 13, 20, 33]  # What is 2+2?
_ANSWER = [128804, 128799]
_TERSE = [7153, 259, 10935, 16]  # Be terse.
_WEATHER = [128803, 58565, 295, 11111, 33]  # Weather in Paris?
_CALL = [128806, 128808, 1133, 65, 50219, 128814, 24313, 37399, 3362, 582, 51119, 62773, 128809, 128807]
_RESULT = [128812, 24313, 26343, 3362, 223, 1602, 95, 128813]


def test_chats_have_the_ids_of_the_published_model(renderer: DeepSeekV3Renderer) -> None:
    prompt = renderer.build_generation_prompt(chat("What is 2+2?", system="Be terse.")).to_ints()
    assert prompt == [0, *_TERSE, *_QUESTION, *_ANSWER]
    whole = renderer.build_supervised_example(chat("What is 2+2?", "4")).model_input.to_ints()
    assert whole == [0, *_QUESTION, *_ANSWER, 22, 1]
    turns = renderer.build_generation_prompt(chat("Hi", "Hello!", "Bye")).to_ints()
    assert turns == [0, 128803, 23166, *_ANSWER, 19923, 3, 1, 128803, 4546, 71, *_ANSWER]


def test_a_call_and_its_result_have_the_ids_of_the_published_model(renderer: DeepSeekV3Renderer) -> None:
    call = ToolCall(FunctionCall("get_weather", '{"city": "Paris"}'))
    messages = [
        *chat("Weather in Paris?"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content='{"temp": 21}'),
    ]
    assert renderer.build_generation_prompt(messages).to_ints() == [0, *_WEATHER, *_ANSWER, *_CALL, 1, *_RESULT]


def test_another_implementation_writes_the_same(num_conversations: int) -> None:
    """It writes the values of arguments in ASCII, ends a turn between text and calls, joins users who speak twice."""
    other, tokenizer = tml.DeepSeekV31(), real_tokenizers.deepseek()
    renderer = get_renderer("deepseekv3_disable_thinking", tokenizer)
    for seed in range(num_conversations):
        features = Features(thinking=False, text_beside_calls=False, repeated_users=False)
        messages = [_in_ascii(message) for message in conversation(seed, features)]
        assert renderer.build_generation_prompt(messages[:-1]).to_ints() == tml_prompt(other, messages[:-1])
        example = renderer.build_supervised_example(messages)
        tokens, weights = tml_example(other, messages)
        assert example.model_input.to_ints() == tokens
        answer = trained_tokens(example)
        assert [token for token, weight in zip(tokens, weights, strict=True) if weight][-len(answer) :] == answer


def _in_ascii(message: Message) -> Message:
    """With the values of arguments in ASCII."""
    if "tool_calls" not in message:
        return message
    calls = [
        replace(call.function, arguments="{" + ", ".join(f'"{key}": {json.dumps(value)}' for key, value in said) + "}")
        for call in message["tool_calls"]
        if (said := json.loads(call.function.arguments).items())
    ]
    return {**message, "tool_calls": [ToolCall(called) for called in calls]}


def test_what_the_system_says_stands_first_and_nothing_is_dropped(renderer: DeepSeekV3Renderer) -> None:
    messages = [*chat("U1", "A1", system="S1"), *chat("U2", "A2", system="S2")]
    expected = f"{BOS}S1\n\nS2<｜User｜>U1<｜Assistant｜></think>A1{EOS}<｜User｜>U2<｜Assistant｜></think>¦A2{EOS}¦"
    assert mask(renderer, renderer.build_supervised_example(messages)) == expected


def test_the_system_may_be_a_user() -> None:
    renderer = get_renderer("deepseekv3", real_tokenizers.deepseek(), system_role_as_user=True)
    messages = [*chat("U1", "A1", system="S1"), *chat(system="S2")]
    prompt = renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())
    assert prompt == f"{BOS}<｜User｜>S1<｜User｜>U1<｜Assistant｜></think>A1{EOS}<｜User｜>S2<｜Assistant｜></think>"


def test_only_an_answer_to_a_user_has_a_header(renderer: DeepSeekV3Renderer) -> None:
    example = renderer.build_supervised_example(_tool_chat(), TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert mask(renderer, example) == (
        f"{BOS}<｜User｜>U1<｜Assistant｜></think>¦T1{CALLED}{EOS}¦"
        f"<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>¦A2{EOS}¦"
    )


def test_a_call_without_text_ends_its_turn_too(renderer: DeepSeekV3Renderer) -> None:
    example = renderer.build_supervised_example(_tool_chat("")[:2])
    assert mask(renderer, example) == f"{BOS}<｜User｜>U1<｜Assistant｜></think>¦{CALLED}{EOS}¦"


def test_thinking_of_earlier_turns_is_not_written(renderer: DeepSeekV3Renderer) -> None:
    expected = f"{BOS}<｜User｜>U1<｜Assistant｜></think>A1{EOS}<｜User｜>U2<｜Assistant｜></think>¦A2{EOS}¦"
    for first in (_thinking("R1", "A1"), chat("", "R1</think>A1")[1], chat("", "<think>R1</think>A1")[1]):
        messages = [*chat("U1"), first, *chat("U2", "A2")]
        assert mask(renderer, renderer.build_supervised_example(messages)) == expected


@pytest.mark.parametrize("answer", [_thinking("R", "A"), chat("", "R</think>A")[1], chat("", "<think>R</think>A")[1]])
def test_an_answer_is_not_trained_without_the_thinking_that_it_has(
    renderer: DeepSeekV3Renderer, answer: Message
) -> None:
    messages = [*chat("U"), answer]
    assert renderer.build_generation_prompt(messages)
    with pytest.raises(InvalidRequest, match=r"deepseekv3 writes no thinking.* remove the thinking: message 1"):
        renderer.build_supervised_example(messages)


def test_the_callers_message_is_not_given_the_tag_that_the_prompt_has(renderer: DeepSeekV3Renderer) -> None:
    messages = chat("U", "hi")
    renderer.build_supervised_example(messages)
    assert messages == chat("U", "hi")


def test_the_last_word_must_be_the_assistants_even_where_it_is_the_systems(renderer: DeepSeekV3Renderer) -> None:
    with pytest.raises(InvalidRequest, match="its roles are: user, assistant, system"):
        renderer.build_supervised_example([*chat("U", "A"), *chat(system="S")])


def test_one_example_is_enough(renderer: DeepSeekV3Renderer) -> None:
    assert len(renderer.build_supervised_examples(_tool_chat())) == 1


# ---- tools -------------------------------------------------------------------------------------------------------


def test_tools_are_declared_behind_the_system_prompt(renderer: DeepSeekV3Renderer) -> None:
    tool = ToolSpec("get_weather", "Tells <｜User｜> the weather.", {"type": "object", "properties": {}})
    messages = renderer.create_conversation_prefix_with_tools([tool], "S")
    tokens = renderer.build_generation_prompt([*messages, *chat("U")]).to_ints()
    text = renderer.tokenizer.decode(tokens)
    assert text.startswith(
        f"{BOS}S\n\n## Tools\nYou have access to the following tools:\n\n### get_weather\n"
        'Description: Tells <｜User｜> the weather.\n\nParameters: {"type": "object", "properties": {}}\n\nIMPORTANT: '
    )
    assert text.endswith("without separators or spaces\n<｜User｜>U<｜Assistant｜></think>")
    controls = [token for token in tokens if token in renderer.tokenizer.get_added_vocab().values()]
    assert controls == [0, 128806, 128808, 128814, 128809, 128807, 128803, 128804, 128799]


# ---- what it reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "termination"),
    [
        (f"hi{EOS}", {"content": "hi"}, ParseTermination.STOP_SEQUENCE),
        ("hi", {"content": "hi"}, ParseTermination.MALFORMED),
        (f"hi{EOS}ho{EOS}", {"content": "hi"}, ParseTermination.MALFORMED),
        (
            f"R</think>hi{EOS}",
            {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "hi"}]},
            ParseTermination.STOP_SEQUENCE,
        ),
        (
            f"T{CALLED}{EOS}",
            {"content": "T", "tool_calls": [ToolCall(FunctionCall("get_weather", ARGUMENTS))]},
            ParseTermination.STOP_SEQUENCE,
        ),
    ],
)
def test_what_tokens_say_is_told(
    renderer: DeepSeekV3Renderer, text: str, expected: dict[str, object], termination: ParseTermination
) -> None:
    message, how = renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
    assert message == {"role": "assistant", **expected}
    assert how is termination


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (CALL.replace("{}", "{bad"), "Invalid JSON"),
        (CALL.replace("{}", "[1]"), "arguments must be a JSON object"),
        (CALL.replace("get_weather", ""), "a call needs a name"),
        (CALL.replace("<｜tool▁sep｜>", ""), "a call is <｜tool▁call▁begin｜>, its name"),
        (CALL.replace("<｜tool▁call▁end｜>", ""), "a section holds calls that end with"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_wea", "the call is never closed"),
    ],
)
def test_what_is_no_call_is_kept_with_the_reason_and_written_as_it_was(
    renderer: DeepSeekV3Renderer, written: str, reason: str
) -> None:
    sampled = renderer.tokenizer.encode(f"T{written}{EOS}", add_special_tokens=False)
    message, termination = renderer.parse_response(sampled)
    assert termination is ParseTermination.STOP_SEQUENCE
    assert "tool_calls" not in message
    [call] = message["unparsed_tool_calls"]
    assert call.raw_text == written
    assert reason in call.error
    assert trained_tokens(renderer.build_supervised_example([*chat("U"), message])) == sampled


def test_a_call_beside_one_that_failed_is_still_a_call(renderer: DeepSeekV3Renderer) -> None:
    good, bad = (CALL.replace("{}", arguments) for arguments in (ARGUMENTS, "{bad"))
    both = good.removesuffix("<｜tool▁calls▁end｜>") + bad.removeprefix("<｜tool▁calls▁begin｜>")
    message, _ = renderer.parse_response(renderer.tokenizer.encode(both + EOS, add_special_tokens=False))
    assert message["tool_calls"] == [ToolCall(FunctionCall("get_weather", ARGUMENTS))]
    assert [call.raw_text for call in message["unparsed_tool_calls"]] == [bad]


def test_arguments_that_are_no_json_cannot_be_written(renderer: DeepSeekV3Renderer) -> None:
    called = Message(role="assistant", content="", tool_calls=[ToolCall(FunctionCall("f", "{bad"))])
    with pytest.raises(InvalidRequest, match="deepseekv3, message 1: a tool call cannot be written: Invalid JSON"):
        renderer.build_supervised_example([*chat("U"), called])


def test_images_are_refused(renderer: DeepSeekV3Renderer) -> None:
    with pytest.raises(InvalidRequest, match="deepseekv3, message 0: only text, thinking can be written, not: image"):
        renderer.build_generation_prompt([Message(role="user", content=[{"type": "image", "image": "cat.png"}])])


def test_an_answer_is_read_as_it_comes(renderer: DeepSeekV3Renderer) -> None:
    tokens = renderer.tokenizer.encode(f"R🎉</think>hi{CALLED}{EOS}", add_special_tokens=False)
    header, *deltas, message = renderer.parse_response_streaming(tokens)
    assert header == StreamingMessageHeader()
    assert message == renderer.parse_response(tokens)[0]
    assert [delta.tool_call for delta in deltas if isinstance(delta, StreamingToolCallDelta)] == [
        ToolCall(FunctionCall("get_weather", ARGUMENTS))
    ]
    assert "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta)).endswith("hi")


def test_a_copy_has_the_same_options() -> None:
    renderer = DeepSeekV3Renderer(real_tokenizers.deepseek(), system_role_as_user=True)
    assert copy.copy(renderer).system_role_as_user

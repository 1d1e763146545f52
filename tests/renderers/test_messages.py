from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.messages import (
    FunctionCall,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    check_messages,
    ensure_list,
    ensure_text,
    get_text_content,
    get_thinking,
    message_from_json,
    remove_thinking,
    to_openai_message,
    tool_call_from_json,
)

TEXT = TextPart(type="text", text="yes")
THINKING = ThinkingPart(type="thinking", thinking="hm")
IMAGE = ImagePart(type="image", image="https://example.org/cat.png")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_text_is_a_string_or_a_single_text_part() -> None:
    assert ensure_text("yes") == ensure_text([TEXT]) == "yes"
    with pytest.raises(InvalidRequest, match=r"\['text', 'image'\]"):
        ensure_text([TEXT, IMAGE])


def test_a_string_is_a_list_of_one_text_part_and_an_empty_one_of_none() -> None:
    assert ensure_list("yes") == ensure_list([TEXT]) == [TEXT]
    assert ensure_list("") == []


def test_text_thinking_and_images_are_told_apart() -> None:
    message = Message(role="assistant", content=[THINKING, TEXT, IMAGE, TEXT])
    assert get_text_content(message) == "yesyes"
    assert get_thinking(message) == "hm"
    assert remove_thinking(message["content"]) == [TEXT, IMAGE, TEXT]
    assert message["content"] == [THINKING, TEXT, IMAGE, TEXT]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (
            {"role": "user", "content": "q", "contents": "q"},
            "unknown field of message 1 'contents'; did you mean 'content'",
        ),
        ({"role": "user"}, "message 1 lacks 'content'"),
        ({"content": "q"}, "message 1 lacks 'role'"),
        ({"role": "usr", "content": "q"}, "unknown role of message 1 'usr'; did you mean 'user'"),
        ({"role": "user", "content": 7}, "message 1: content must be a string or a list of parts: 7"),
        ({"role": "user", "content": ["q"]}, "message 1: content part 0 must be an object"),
        ({"role": "user", "content": [{"type": "txt"}]}, "unknown type of message 1: content part 0 'txt'"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 1: content part 0: text must be a string: None"),
        ({"role": "user", "content": [{"type": "text", "text": "q", "image": "i"}]}, "content part 0 'image'"),
        ({"role": "user", "content": "q", "trainable": 1}, "message 1: trainable must be a bool: 1"),
        ({"role": "user", "content": "q", "name": 1}, "message 1: name must be a str: 1"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "message 1: tool_calls must hold ToolCall values"),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_index_and_field(message: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_messages([{"role": "user", "content": "fine"}, message])
    assert complaint in str(refused.value)


def test_a_message_from_json_may_carry_nulls_and_tool_calls_as_objects() -> None:
    data = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}
    message = message_from_json(data)
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(FunctionCall("f", '{"x": 1}'), id="1")],
    }
    assert data["tool_calls"] == [CALL]


def test_a_message_goes_out_in_the_public_format() -> None:
    thought = Message(
        role="assistant",
        content=[{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}],
        tool_calls=[ToolCall(FunctionCall("f", '{"x": 1}'), id="1")],
    )
    assert to_openai_message(thought) == {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "R",
        "tool_calls": [{"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    seen = Message(role="user", content=[{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}])
    assert to_openai_message(seen)["content"] == [
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": "?"},
    ]
    told = Message(role="tool", content="7", tool_call_id="1", name="f")
    assert to_openai_message(told) == told
    assert message_from_json(to_openai_message(told)) == told


@pytest.mark.parametrize("data", [None, "hello", ["role"], {"role": "user", "content": None}])
def test_what_is_no_message_is_refused_by_where_it_stands(data: object) -> None:
    with pytest.raises(InvalidRequest, match=r"chats.jsonl, line 3"):
        message_from_json(data, "chats.jsonl, line 3")


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "arguments": [1]}},
        {"function": {"name": "f", "arguments": "{}"}, "type": "code"},
        {"function": {"name": "f", "arguments": "{}"}, "index": 0},
        {"function": {"name": "f", "arguments": "{}", "strict": True}},
    ],
)
def test_what_is_no_tool_call_is_refused(data: object) -> None:
    with pytest.raises(InvalidRequest):
        tool_call_from_json(data)


def test_arguments_that_are_not_json_are_data_not_an_error() -> None:
    assert ToolCall(FunctionCall("f", "{not json")).function.arguments == "{not json"


def test_a_tool_call_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ToolCall(FunctionCall("f", "{}")).id = "2"  # pyright: ignore[reportAttributeAccessIssue]  the point of the test


def test_a_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'tool_calls'"):
        message_from_json({"role": "assistant", "content": "", "tool_call": []})

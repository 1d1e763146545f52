"""Messages from JSON, in our own form and in the public chat format."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.messages import (
    FunctionCall,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    check_messages,
    message_from_json,
    to_openai_message,
)

PIXEL = "data:image/png;base64,iVBORw0KGgo="


@given(text=st.text(), thinking=st.text(), arguments=st.sampled_from(["{}", '{"x": [1, null]}']), calls=st.booleans())
def test_the_public_format_is_read_as_it_is_written(text: str, thinking: str, arguments: str, calls: bool) -> None:
    parts = [TextPart(type="text", text=text)] if text else []
    content = [ThinkingPart(type="thinking", thinking=thinking), *parts] if thinking else text
    message = Message(role="assistant", content=content)
    if calls:
        message["tool_calls"] = [ToolCall(FunctionCall("f", arguments), "id")]
    assert message_from_json(to_openai_message(message)) == message


def test_arguments_may_be_an_object() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Zürich", "n": None}}, "id": None}
    message = message_from_json({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [ToolCall(FunctionCall("f", '{"city": "Zürich", "n": null}'))],
    }


def test_null_is_absent_in_messages_parts_and_calls() -> None:
    parts = [{"type": "thinking", "thinking": "R", "text": None}, {"type": "text", "text": "A", "thinking": None}]
    row = {"role": "assistant", "content": parts, "tool_calls": None, "name": None, "reasoning_content": None}
    assert message_from_json(row) == {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}],
    }


def test_a_developer_is_the_system() -> None:
    assert message_from_json({"role": "developer", "content": "S"}) == {"role": "system", "content": "S"}


@pytest.mark.parametrize("image", [{"url": PIXEL}, {"url": PIXEL, "detail": "low"}, PIXEL])
def test_an_image_of_the_public_format_is_an_image(image: object) -> None:
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "what?"}]
    assert message_from_json({"role": "user", "content": content})["content"] == [
        {"type": "image", "image": PIXEL},
        {"type": "text", "text": "what?"},
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://e.org/a.png"}}]}, "e.org"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 3}]}, "image_url must be a data: URI.*: 3"),
        ({"role": "user", "content": ["hi"]}, "content part 0 must be an object"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls must be a list of objects: 5"),
        ({"role": "assistant", "tool_calls": [5]}, "a tool call must be an object"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "an object or JSON text",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]}, "name is a string"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}, "name and arguments"),
        (
            {"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f", "arguments": "{}"}}]},
            "id of a tool",
        ),
        ({"role": "assistant", "content": "a", "reasoning_content": 3}, "reasoning_content is the text.*: 3"),
        ({"role": "user", "content": "a", "reasoning_content": "r"}, "reasoning_content is the text of an assistant"),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}], "reasoning_content": "r"},
            "thinking twice",
        ),
        ({"role": "assistant", "content": None}, "lacks 'content'"),
        (3, "must be an object with role and content: 3"),
    ],
)
def test_what_is_no_message_is_named(row: object, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"line 7.*{complaint}"):
        message_from_json(row, "rows.jsonl, line 7")


@pytest.mark.parametrize("kind", [["text"], {}, 3])
def test_a_kind_of_part_that_is_no_string_is_named(kind: object) -> None:
    message = {"role": "user", "content": [{"type": kind, "text": "x"}]}
    with pytest.raises(UnknownName, match="unknown type of message: content part 0"):
        message_from_json(message)
    with pytest.raises(UnknownName, match="unknown type of message 0: content part 0"):
        check_messages([cast(Message, message)])


def test_an_unknown_kind_of_part_is_named() -> None:
    with pytest.raises(UnknownName, match="unknown type of message: content part 0 'audio'"):
        message_from_json({"role": "user", "content": [{"type": "audio", "audio": "x"}]})

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, UnparsedToolCall
from stovetop.renderers.tool_calls import DEEPSEEK, HARMONY, KIMI, DecodedCalls, TaggedJson, require_objects

QWEN = TaggedJson()
NAMES = st.text("abcXYZ_-.09é", min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(lambda value: json.dumps(value))
CALLS = st.lists(st.builds(lambda *call: ToolCall(FunctionCall(*call)), NAMES, ARGUMENTS), min_size=1, max_size=3)


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(FunctionCall(name, arguments))


def test_several_calls_stand_on_lines_of_their_own() -> None:
    calls = [call("f", '{"x": 1}'), call("g", "{}")]
    blocks = (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert QWEN.encode(calls, has_text=False) == blocks
    assert QWEN.encode(calls, has_text=True) == "\n" + blocks


@given(CALLS, st.text("ab\n é", max_size=6))
def test_calls_and_the_text_before_them_come_back(calls: list[ToolCall], text: str) -> None:
    decoded = QWEN.decode(text + QWEN.encode(calls, has_text=bool(text)))
    assert decoded == DecodedCalls(text, tuple(calls))


@given(CALLS, st.text("ab\n é", max_size=6))
def test_calls_in_sections_and_the_text_before_them_come_back(calls: list[ToolCall], text: str) -> None:
    numbered = [replace(call, id=f"functions.{call.function.name}:{index}") for index, call in enumerate(calls)]
    assert DEEPSEEK.decode(text + DEEPSEEK.encode(calls, has_text=bool(text))) == DecodedCalls(text, tuple(calls))
    assert KIMI.decode(text + KIMI.encode(numbered, has_text=bool(text))) == DecodedCalls(text, tuple(numbered))


@given(CALLS)
def test_calls_on_channels_come_back(calls: list[ToolCall]) -> None:
    for call in calls:
        header, _, arguments = HARMONY.encode(call).partition(HARMONY.message)
        assert HARMONY.decode(header, arguments, is_ended=True) == call
        assert HARMONY.decode(header, arguments, is_ended=False) == UnparsedToolCall(
            HARMONY.encode(call), "the call is never ended"
        )
    assert HARMONY.decode("<|channel|>final", "hi", is_ended=True) is None


def test_arguments_stay_as_the_model_wrote_them() -> None:
    spaced = '<tool_call>\n{"name": "f", "arguments": {"a":1,  "é": "\\u00e9"} }\n</tool_call>'
    [found] = QWEN.decode(spaced).tool_calls
    assert found.function.arguments.strip() == '{"a":1,  "é": "\\u00e9"}'


def test_keys_in_another_order_make_the_same_call() -> None:
    [found] = QWEN.decode('<tool_call>{"arguments": {"a": "b"}, "name": "f", "id": 3}</tool_call>').tool_calls
    assert found == call("f", '{"a": "b"}')


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ("{bad json", "Invalid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', "needs a name: None"),
        ('{"name": "", "arguments": {}}', "needs a name: ''"),
        ('{"name": "\\ud800", "arguments": {}}', "needs a name"),
        ('{"name": "f"}', "arguments must be a JSON object: null"),
        ('{"name": "f", "arguments": "{}"}', 'arguments must be a JSON object: "{}"'),
        ("[" * 100_000, "Invalid JSON"),
    ],
)
def test_what_is_no_call_says_why_and_what_was_written(inside: str, reason: str) -> None:
    block = f"<tool_call>\n{inside}\n</tool_call>"
    decoded = QWEN.decode(f"T\n{block}")
    assert decoded.text == "T"
    assert decoded.tool_calls == ()
    [unparsed] = decoded.unparsed_tool_calls
    assert unparsed.raw_text == block
    assert reason in unparsed.error


def test_a_call_that_is_never_closed_is_none() -> None:
    decoded = QWEN.decode('ok\n<tool_call>\n{"name": "f"')
    assert decoded.text == "ok"
    assert decoded.unparsed_tool_calls == (
        UnparsedToolCall('<tool_call>\n{"name": "f"', "the call is never closed: </tool_call> is missing"),
    )


@given(st.text('<>/tool_call{}"name:argumets,\n ', max_size=60) | st.text())
def test_decoding_never_raises(text: str) -> None:
    assert isinstance(QWEN.decode(text), DecodedCalls)


def test_a_call_that_no_model_could_have_made_is_not_written() -> None:
    message = Message(role="assistant", content="", tool_calls=[call("f", "not json")])
    with pytest.raises(InvalidRequest, match="message 3: a tool call cannot be written: Invalid JSON"):
        require_objects(message, "message 3")

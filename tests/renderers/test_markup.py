import random
from collections.abc import Callable, Sequence

import pytest

from renderers import real_tokenizers
from renderers.languages import chatml
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.renderers.base import ParseTermination
from stovetop.renderers.markup import Markup, parse_marked_response, stream_marked_response
from stovetop.renderers.messages import (
    FunctionCall,
    Message,
    ToolCall,
    UnparsedToolCall,
    get_text_content,
    get_thinking,
)
from stovetop.renderers.streaming import (
    MessageDelta,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    StreamingToolCallDelta,
    Utf8TokenDecoder,
)
from stovetop.renderers.tool_calls import TaggedJson
from stovetop.tokenizer import SafeEncoder
from stovetop.tokenizing import Tokenizer

FRAMED = Markup(calls=TaggedJson(), framed=True)
BARE = Markup(calls=TaggedJson())
TAGS = " ".join(FRAMED.tags)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
PARSED_CALL = ToolCall(FunctionCall("f", '{"x": 1}'))

MakeTokenizer = Callable[[], Tokenizer]

# One tokenizer has tokens for the tags, the others spell them out: in pieces of a word, and byte by byte.
TOKENIZERS: list[MakeTokenizer] = [real_tokenizers.qwen3, chatml, ByteTokenizer]


def read(rendered: str, markup: Markup = FRAMED, tokenizer: MakeTokenizer = TOKENIZERS[0]) -> Message:
    encoder = SafeEncoder.of(tokenizer(), template=TAGS)
    message, _ = parse_marked_response(encoder.encode(rendered), encoder, markup, [])
    return message


def streamed(rendered: str, markup: Markup = FRAMED, tokenizer: MakeTokenizer = TOKENIZERS[0]) -> list[MessageDelta]:
    encoder = SafeEncoder.of(tokenizer(), template=TAGS)
    return list(stream_marked_response(iter(encoder.encode(rendered)), encoder, markup, []))


def said(content: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"type": kind, kind: text} for kind, text in content]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["tokens", "spelled", "bytes"])
@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ("hi", "hi"),
        ("", ""),
        ("<think>\nR\n</think>\n\nhi", [("thinking", "R"), ("text", "hi")]),
        ("<think>\n\n</think>\n\nhi", "hi"),
        ("<think>\nR", [("thinking", "R")]),  # cut off
        ("R\n</think>\n\nhi", [("thinking", "R"), ("text", "hi")]),  # begun by the prompt
        ("\nR\n\n</think>hi", [("thinking", "R"), ("text", "hi")]),
        ("<think>\na\n\nb\n</think>\n\nhi\n", [("thinking", "a\n\nb"), ("text", "hi\n")]),
        ("\n<think>\nR\n</think>\n\n", [("thinking", "R")]),
        ("1 < 2 </thin", "1 < 2 </thin"),
    ],
)
def test_thinking_is_taken_apart_from_text(
    answer: str, content: str | list[tuple[str, str]], tokenizer: MakeTokenizer
) -> None:
    expected = content if isinstance(content, str) else said(content)
    assert read(answer, tokenizer=tokenizer) == {"role": "assistant", "content": expected}


def test_without_a_frame_newlines_are_what_was_said() -> None:
    expected = said([("thinking", "\nR\n"), ("text", "\n\nhi")])
    assert read("<think>\nR\n</think>\n\nhi", BARE)["content"] == expected


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["tokens", "spelled", "bytes"])
def test_calls_are_taken_apart_from_text(tokenizer: MakeTokenizer) -> None:
    message = read(f"<think>\nR\n</think>\n\nok\n\n{CALL}\n{CALL}", tokenizer=tokenizer)
    assert message["content"] == said([("thinking", "R"), ("text", "ok\n")])
    assert message["tool_calls"] == [PARSED_CALL, PARSED_CALL]
    assert read(CALL, tokenizer=tokenizer) == {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]}


def test_a_call_in_thinking_is_thinking() -> None:
    message = read(f"<think>\nperhaps {CALL}\n</think>\n\nno")
    assert message["content"] == said([("thinking", f"perhaps {CALL}"), ("text", "no")])
    assert "tool_calls" not in message


def test_a_call_that_is_cut_off_is_unparsed() -> None:
    message = read('ok\n<tool_call>\n{"name": "f"')
    assert message["content"] == "ok"
    assert message["unparsed_tool_calls"] == [
        UnparsedToolCall('<tool_call>\n{"name": "f"', "the call is never closed: </tool_call> is missing")
    ]


def test_a_tag_that_is_spelled_out_is_text() -> None:
    encoder = SafeEncoder.of(real_tokenizers.qwen3(), template=TAGS)
    about = "write </think> or <tool_call>"
    message = read(f"<think>\n{encoder.protect(about)}\n</think>\n\n{encoder.protect(about)}")
    assert message["content"] == said([("thinking", about), ("text", about)])
    in_a_call = f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{encoder.protect("</tool_call>")}"}}}}\n</tool_call>'
    assert read(in_a_call)["tool_calls"] == [ToolCall(FunctionCall("f", '{"x": "</tool_call>"}'))]


def test_text_with_a_tag_in_it_is_a_part_so_that_it_is_never_taken_for_the_tag() -> None:
    encoder = SafeEncoder.of(real_tokenizers.qwen3(), template=TAGS)
    assert read(encoder.protect("say </think>"))["content"] == said([("text", "say </think>")])


# ---- as tokens come ----------------------------------------------------------------------------------------------


def test_deltas_come_as_soon_as_it_is_sure_what_they_are() -> None:
    *deltas, message = streamed(f"<think>\nR\n</think>\n\nok\n{CALL}")
    assert deltas == [
        StreamingMessageHeader(),
        StreamingThinkingDelta("R", 0),
        StreamingTextDelta("ok", 1),
        StreamingToolCallDelta(PARSED_CALL, 2),
    ]
    assert message == read(f"<think>\nR\n</think>\n\nok\n{CALL}")


def test_streaming_takes_one_token_at_a_time() -> None:
    encoder = SafeEncoder.of(real_tokenizers.qwen3(), template=TAGS)
    tokens = iter(encoder.encode("one two three"))
    deltas = stream_marked_response(tokens, encoder, FRAMED, [])
    assert next(deltas) == StreamingMessageHeader()
    assert next(deltas) == StreamingTextDelta("one", 0)
    assert len(list(tokens)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["tokens", "spelled", "bytes"])
@pytest.mark.parametrize("markup", [FRAMED, BARE], ids=["framed", "bare"])
def test_deltas_add_up_to_the_message(tokenizer: MakeTokenizer, markup: Markup) -> None:
    pieces = [*FRAMED.tags, "\n", "\n\n", "a", "é", "🎉", "<", "</think", '{"name": "f", "arguments": {}}', CALL]
    for seed in range(150):
        rng = random.Random(seed)
        answer = "".join(rng.choice(pieces) for _ in range(rng.randrange(10)))
        first, *deltas, message = streamed(answer, markup, tokenizer)
        assert first == StreamingMessageHeader()
        assert message == read(answer, markup, tokenizer)
        assert isinstance(message, dict)
        thinking = "".join(delta.thinking for delta in deltas if isinstance(delta, StreamingThinkingDelta))
        text = "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta))
        calls = [delta.tool_call for delta in deltas if isinstance(delta, StreamingToolCallDelta)]
        if thinking or not get_thinking(message):  # else the prompt would have begun it
            assert (thinking, text) == (get_thinking(message), get_text_content(message)), answer
        in_order = [*message.get("tool_calls", []), *message.get("unparsed_tool_calls", [])]
        assert sorted(map(repr, calls)) == sorted(map(repr, in_order))
        indices = [delta.content_index for delta in deltas if not isinstance(delta, StreamingMessageHeader | dict)]
        assert indices == sorted(indices)


def test_streaming_stops_at_the_stop_token_and_ends_with_what_the_parser_says() -> None:
    tokenizer = real_tokenizers.qwen3()
    encoder = SafeEncoder.of(tokenizer, template=TAGS)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = [*encoder.encode("hi"), stop, *encoder.encode("more")]
    assert list(stream_marked_response(tokens, encoder, FRAMED, [stop]))[-1] == {"role": "assistant", "content": "hi"}
    assert parse_marked_response(tokens, encoder, FRAMED, [stop])[1] is ParseTermination.MALFORMED


def test_an_end_of_text_token_is_streamed_only_if_it_is_not_the_end() -> None:
    tokenizer = chatml()
    encoder = SafeEncoder.of(tokenizer, template=TAGS)
    end = "<|im_end|>"
    for answer, text in ((f"hi{end}", "hi"), (f"hi{end}{end}", f"hi{end}{end}"), (f"h{end}i", f"h{end}i")):
        *deltas, message = streamed(answer, tokenizer=chatml)
        assert "".join(delta.text for delta in deltas if isinstance(delta, StreamingTextDelta)) == text
        assert message == parse_marked_response(encoder.encode(answer), encoder, FRAMED, [])[0]
        assert message == {"role": "assistant", "content": text}


def test_a_character_is_held_back_until_it_is_complete() -> None:
    decoder = Utf8TokenDecoder(ByteTokenizer())
    assert [decoder.feed(byte) for byte in "é🎉a".encode()] == ["", "é", "", "", "", "🎉", "a"]
    assert [decoder.feed(byte) for byte in "🎉".encode()[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    decoder = Utf8TokenDecoder(ByteTokenizer())
    assert "".join(decoder.feed(0xFF) for _ in range(16)) == "\ufffd" * 16

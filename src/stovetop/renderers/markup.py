"""Answers in which tags mark thinking and tool calls: taken apart, whole or as tokens come, by one reader. Which tags
there are is data; what they look like within a call is in `tool_calls`.

A tag counts when it is the control token, or, where the tokenizer has no such token, when it is spelled out. A control
token that is spelled out is text: `</think>` in an answer about templates ends no thinking.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby, takewhile
from typing import NamedTuple

from stovetop.renderers.base import ParseTermination, split_at_stop
from stovetop.renderers.messages import (
    ContentPart,
    FunctionCall,
    Message,
    TextPart,
    ThinkingPart,
    ToolCall,
    UnparsedToolCall,
)
from stovetop.renderers.streaming import (
    ContentDelta,
    MessageDelta,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    StreamingToolCallDelta,
    Utf8TokenDecoder,
)
from stovetop.renderers.tool_calls import ToolCallFormat
from stovetop.tokenizer import SafeEncoder

THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True, slots=True)
class Markup:
    """What a family marks in an answer. Its thinking is `framed` where newlines around it, and between it and the
    answer, are layout: `<think>\\nR\\n</think>\\n\\nA`."""

    calls: ToolCallFormat | None
    framed: bool = False
    exactly: bool = False  # just these newlines are layout; further ones are part of what is said

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of the family: those of thinking and of calls."""
        return (THINK, END_THINK) + (() if self.calls is None else (self.calls.opening, self.calls.closing))


def parse_marked_response(
    tokens: Sequence[int], encoder: SafeEncoder, markup: Markup, stop_tokens: Sequence[int]
) -> tuple[Message, ParseTermination]:
    """What sampled tokens say, as far as they go. Content is a string, or, after thinking, parts. Thinking that was
    begun by the prompt, and so is only closed here, is found; a call that is cut off is an unparsed one."""
    answer, termination = split_at_stop(tokens, encoder.tokenizer, stop_tokens)
    reader = AnswerReader(markup, encoder)
    controls = encoder.control_tokens
    for is_control, run in groupby(answer, key=controls.__contains__):
        tokens = list(run)
        if is_control:
            for token in tokens:
                _drain(reader.control(controls[token]))
        else:
            _drain(reader.text(encoder.tokenizer.decode(tokens)))
    _drain(reader.close())
    return reader.message(), termination


def stream_marked_response(
    tokens: Iterable[int], encoder: SafeEncoder, markup: Markup, stop_tokens: Sequence[int]
) -> Iterator[MessageDelta]:
    """The same, as tokens come. Thinking that the prompt had begun arrives as text, and is thinking in the message."""
    yield StreamingMessageHeader()
    reader = AnswerReader(markup, encoder)
    decoder = Utf8TokenDecoder(encoder.tokenizer)
    seen: list[int] = []
    num_read = 0  # an end-of-text token waits to see whether it is the end
    for token in takewhile(lambda token: token not in stop_tokens, tokens):
        seen.append(token)
        if token != encoder.tokenizer.eos_token_id:
            yield from _read(seen[num_read:], reader, decoder)
            num_read = len(seen)
    answer, _ = split_at_stop(seen, encoder.tokenizer, stop_tokens)
    yield from _read(answer[num_read:], reader, decoder)
    yield from reader.text(decoder.flush())
    yield from reader.close()
    message, _ = parse_marked_response(seen, encoder, markup, stop_tokens)
    yield message


def _read(tokens: Iterable[int], reader: "AnswerReader", decoder: Utf8TokenDecoder) -> Iterator[ContentDelta]:
    controls = reader.encoder.control_tokens
    for token in tokens:
        if token in controls:
            yield from reader.text(decoder.flush())
            yield from reader.control(controls[token])
        else:
            yield from reader.text(decoder.feed(token))


def _drain(deltas: Iterator[ContentDelta]) -> None:
    for _ in deltas:
        pass


class _Mode(Enum):
    TEXT = auto()
    THINKING = auto()
    CALLS = auto()


class _Piece(NamedTuple):
    text: str
    is_control: bool


@dataclass(slots=True)
class AnswerReader:
    """Takes an answer apart, piece by piece. What may turn out to be layout is held back."""

    markup: Markup
    encoder: SafeEncoder
    _mode: _Mode = _Mode.TEXT
    _thinking: str = ""
    _text: str = ""
    _calls: list[ToolCall] = field(default_factory=list[ToolCall])
    _unparsed: list[UnparsedToolCall] = field(default_factory=list[UnparsedToolCall])
    _block: list[_Piece] = field(default_factory=list[_Piece])  # of calls, while it is open
    _spelled: tuple[str, ...] = ()  # tags that are no control tokens
    _unscanned: str = ""  # may begin one of these
    _skips_newlines: float = 0  # how many of those behind a tag
    _held: str = ""  # newlines that belong to the next tag, if one follows
    _index: int = -1
    _shown: _Mode = _Mode.CALLS  # the kind of the last delta

    def __post_init__(self) -> None:
        self._spelled = tuple(tag for tag in self.markup.tags if not self.encoder.find_controls(tag))

    def text(self, text: str) -> Iterator[ContentDelta]:
        """Ordinary text; tags that the tokenizer has no token for are found in it."""
        self._unscanned += text
        while found := _first_of(self._spelled, self._unscanned):
            before, _, self._unscanned = self._unscanned.partition(found)
            yield from self._plain(before)
            yield from self._tag(found)
        end = len(self._unscanned) - _length_of_begun_tag(self._spelled, self._unscanned)
        ready, self._unscanned = self._unscanned[:end], self._unscanned[end:]
        yield from self._plain(ready)

    def control(self, control: str) -> Iterator[ContentDelta]:
        """A control token."""
        ready, self._unscanned = self._unscanned, ""
        yield from self._plain(ready)
        if control in self.markup.tags:
            yield from self._tag(control)
        else:
            yield from self._plain(control, is_control=True)

    def close(self) -> Iterator[ContentDelta]:
        """There is no more. Thinking that is still open was thinking; calls that are, were none."""
        ready, self._unscanned = self._unscanned, ""
        yield from self._plain(ready)
        match self._mode:
            case _Mode.CALLS:
                yield from self._end_block()
            case _Mode.TEXT:
                yield from self._show(self._held)
            case _Mode.THINKING:
                pass
        self._held = ""

    def message(self) -> Message:
        """What was read so far. Content is a string, or parts where there is thinking or a tag in the text."""
        parts: list[ContentPart] = []
        if self._thinking:
            parts.append(ThinkingPart(type="thinking", thinking=self._thinking))
        if self._text:
            parts.append(TextPart(type="text", text=self._text))
        holds_tags = any(tag in self._text for tag in self.markup.tags)  # in a plain string they would be tags again
        message = Message(role="assistant", content=parts if self._thinking or holds_tags else self._text)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._unparsed:
            message["unparsed_tool_calls"] = self._unparsed
        return message

    # ---- tags ------------------------------------------------------------------------------------------------------

    def _tag(self, tag: str) -> Iterator[ContentDelta]:
        calls = self.markup.calls
        if self._mode is _Mode.CALLS:
            self._block.append(_Piece(tag, is_control=True))
            if calls is not None and tag == calls.closing:
                yield from self._end_block()
        elif self._mode is _Mode.THINKING and tag == END_THINK:
            self._enter(_Mode.TEXT)
        elif self._mode is _Mode.TEXT and tag == THINK and self._is_untouched():
            self._enter(_Mode.THINKING)
        elif self._mode is _Mode.TEXT and tag == END_THINK and self._could_be_thinking():
            self._turn_text_into_thinking()
            self._enter(_Mode.TEXT)
        elif self._mode is _Mode.TEXT and calls is not None and tag == calls.opening:
            self._enter(_Mode.CALLS)
            self._block.append(_Piece(tag, is_control=True))
        else:
            yield from self._plain(tag, is_control=True)

    def _enter(self, mode: _Mode) -> None:
        self._mode = mode
        self._held = ""
        self._skips_newlines = 0
        if self.markup.framed and mode is not _Mode.CALLS:
            self._skips_newlines = math.inf if not self.markup.exactly else 1 if mode is _Mode.THINKING else 2

    def _is_untouched(self) -> bool:
        return not (self._thinking or self._text or self._calls or self._unparsed)

    def _could_be_thinking(self) -> bool:
        """Whether the prompt may have begun the thinking of which this is the end."""
        return not (self._thinking or self._calls or self._unparsed)

    def _turn_text_into_thinking(self) -> None:
        text = self._text + self._held
        self._thinking, self._text = text.strip("\n") if self.markup.framed else text, ""

    def _end_block(self) -> Iterator[ContentDelta]:
        """Decodes a block of calls, in which what is spelled out is kept apart from control tokens."""
        assert self.markup.calls is not None
        runs = groupby(self._block, key=lambda piece: piece.is_control)
        texts = (("".join(piece.text for piece in run), is_control) for is_control, run in runs)
        block = "".join(text if is_control else self.encoder.protect(text) for text, is_control in texts)
        decoded = self.markup.calls.decode(block)
        calls = [_unprotected(call, self.encoder) for call in decoded.tool_calls]
        unparsed = [
            UnparsedToolCall(self.encoder.unprotect(call.raw_text), self.encoder.unprotect(call.error))
            for call in decoded.unparsed_tool_calls
        ]
        self._calls += calls
        self._unparsed += unparsed
        self._block.clear()
        self._mode = _Mode.TEXT
        for call in [*calls, *unparsed]:
            self._index, self._shown = self._index + 1, _Mode.CALLS
            yield StreamingToolCallDelta(call, self._index)

    # ---- text ------------------------------------------------------------------------------------------------------

    def _plain(self, text: str, *, is_control: bool = False) -> Iterator[ContentDelta]:
        if self._mode is _Mode.CALLS:
            self._block.append(_Piece(text, is_control))
            return
        while self._skips_newlines and text.startswith("\n"):
            text = text[1:]
            self._skips_newlines -= 1
        if not text:
            return
        self._skips_newlines = 0
        text = self._held + text
        end = len(text) - self._length_of_layout(text)
        self._held = text[end:]
        yield from self._show(text[:end])

    def _length_of_layout(self, text: str) -> int:
        """How much at the end of `text` belongs to a tag, should one follow."""
        if self._mode is _Mode.THINKING:
            num_newlines = len(text) - len(text.rstrip("\n")) if self.markup.framed else 0
            return min(num_newlines, 1) if self.markup.exactly else num_newlines
        separator = "" if self.markup.calls is None else self.markup.calls.separator
        return len(separator) if text.endswith(separator) else 0

    def _show(self, text: str) -> Iterator[ContentDelta]:
        if not text:
            return
        if self._shown is not self._mode:
            self._index, self._shown = self._index + 1, self._mode
        if self._mode is _Mode.THINKING:
            self._thinking += text
            yield StreamingThinkingDelta(text, self._index)
        else:
            self._text += text
            yield StreamingTextDelta(text, self._index)


def _unprotected(call: ToolCall, encoder: SafeEncoder) -> ToolCall:
    name, arguments = encoder.unprotect(call.function.name), encoder.unprotect(call.function.arguments)
    return ToolCall(FunctionCall(name, arguments), None if call.id is None else encoder.unprotect(call.id))


def _first_of(tags: Sequence[str], text: str) -> str:
    """The tag that comes first in `text`; empty without any."""
    found = [(text.index(tag), tag) for tag in tags if tag in text]
    return min(found)[1] if found else ""


def _length_of_begun_tag(tags: Sequence[str], text: str) -> int:
    """The length of the longest end of `text` with which a tag begins."""
    lengths = (length for tag in tags for length in range(1, len(tag)) if text.endswith(tag[:length]))
    return max(lengths, default=0)


# ---- written -----------------------------------------------------------------------------------------------------


def written_calls(message: Message, encoder: SafeEncoder, call_format: ToolCallFormat, *, has_text: bool) -> str:
    """The calls of a message as they follow its text, if it `has_text`. Those that failed to be calls come last, as the
    model wrote them."""
    written = call_format.encode([protected_call(call, encoder) for call in message.get("tool_calls", ())], has_text)
    for call in message.get("unparsed_tool_calls", ()):
        separator = call_format.separator if has_text or written else ""
        written += separator + encoder.protect_own(call.raw_text)
    return written


def protected_call(call: ToolCall, encoder: SafeEncoder) -> ToolCall:
    """The call with its texts as `SafeEncoder.protect` leaves them, so that no control token comes out of them."""
    name, arguments = encoder.protect(call.function.name), encoder.protect(call.function.arguments)
    return ToolCall(FunctionCall(name, arguments), None if call.id is None else encoder.protect(call.id))

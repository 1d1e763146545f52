"""Answers as their tokens come: what arrives, and characters that several tokens spell. How the text of a family is
taken apart is in `markup`.
"""

from dataclasses import dataclass

from stovetop.renderers.messages import Message, Role, ToolCall, UnparsedToolCall
from stovetop.tokenizing import Tokenizer


@dataclass(frozen=True, slots=True)
class StreamingMessageHeader:
    """Comes first."""

    role: Role = "assistant"


@dataclass(frozen=True, slots=True)
class StreamingTextDelta:
    """More text. `content_index` counts the stretches of one kind: text, thinking, a tool call."""

    text: str
    content_index: int


@dataclass(frozen=True, slots=True)
class StreamingThinkingDelta:
    """More thinking. `content_index` counts the parts of the message: it grows where their kind changes."""

    thinking: str
    content_index: int


@dataclass(frozen=True, slots=True)
class StreamingToolCallDelta:
    """A call, once it is complete, or what should have been one."""

    tool_call: ToolCall | UnparsedToolCall
    content_index: int


ContentDelta = StreamingTextDelta | StreamingThinkingDelta | StreamingToolCallDelta
MessageDelta = StreamingMessageHeader | ContentDelta | Message  # the whole message comes last

_MAX_PENDING = 8  # tokens; a character has four bytes at most, so what is longer is none


class Utf8TokenDecoder:
    """Text of tokens that come one by one. A character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """The text that a token completes: nothing while a character is unfinished, for at most eight tokens."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left, complete or not."""
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        self._pending.clear()
        return text

"""Answers as server-sent events. An answer that comes in pieces (`drawing.comes_in_pieces`) is told as it is drawn, as
far as its renderer can tell what a part of it says; any other is told at once when it is there.

The record of an answer is committed before its last event, the one with the reason why it ended. A client that goes
away ends the drawing with the piece that is under way, and nothing is kept of its answer.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stovetop.concurrency import in_thread
from stovetop.errors import InvalidRequest, StovetopError
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, TextPart, ThinkingPart, ToolCall, get_thinking
from stovetop.renderers.streaming import (
    MessageDelta,
    StreamingMessageHeader,
    StreamingTextDelta,
    StreamingThinkingDelta,
    StreamingToolCallDelta,
)
from stovetop.server.openai import logprobs
from stovetop.server.openai.answers import call_as_json, chat_finish, completion_choice, head, said_in, usage
from stovetop.server.openai.drawing import Choice, Drawn, Job, Shown, text_of

log = logging.getLogger(__name__)

Delta = Mapping[str, Any]  # of a message, as the protocol has it
Next = Callable[[Iterator[Any]], Awaitable[Any]]  # the next of an iterator that waits, None behind its last
Keep = Callable[[Sequence[Choice]], Awaitable[None]]
Refused = Callable[[Exception], Mapping[str, Any]]  # an error as it is written


def event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def guarded(events: AsyncIterator[bytes], refused: Refused) -> AsyncIterator[bytes]:
    """An answer that fails half-way ends with an event that says so, and without the one that ends a whole answer."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        if not isinstance(error, StovetopError):
            log.exception("an answer that was streamed failed")
        yield event(refused(error))


# ---- chats ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ChatDeltas:
    """What a message says, in deltas of the protocol: from those of a renderer, and at the end from the whole message,
    of which what was told already is left out."""

    stops: Sequence[str]
    said: dict[str, Any] = field(default_factory=dict[str, Any])  # of the whole message
    _text: str = ""  # that was told
    _thinking: str = ""
    _num_calls: int = 0
    _shown: Shown = field(init=False)
    _thought: Shown = field(init=False)

    def __post_init__(self) -> None:
        self._shown, self._thought = Shown(self.stops), Shown(self.stops)

    def feed(self, delta: MessageDelta) -> Iterator[Delta]:
        match delta:
            case StreamingMessageHeader():
                pass
            case StreamingTextDelta(text):
                yield from self._tell_text(self._shown.feed(text))
            case StreamingThinkingDelta(thinking):
                yield from self._tell_thinking(self._thought.feed(thinking))
            case StreamingToolCallDelta(ToolCall() as call):
                yield from self._tell_call(call_as_json(call))
            case StreamingToolCallDelta():
                pass  # no call after all: it is part of the content, which the whole message has
            case message:
                yield from self._tell_rest(message)

    def _tell_thinking(self, thinking: str) -> Iterator[Delta]:
        if thinking:
            self._thinking += thinking
            yield {"reasoning_content": thinking}

    def _tell_text(self, text: str) -> Iterator[Delta]:
        if text:
            self._text += text
            yield {"content": text}

    def _tell_call(self, call: dict[str, Any]) -> Iterator[Delta]:
        self.said.setdefault("tool_calls", []).append(call)
        yield {"tool_calls": [{"index": self._num_calls, **call}]}
        self._num_calls += 1

    def _tell_rest(self, message: Message) -> Iterator[Delta]:
        whole = said_in(message, self.stops)
        thinking, content = whole.get("reasoning_content") or "", whole["content"] or ""
        if thinking.startswith(self._thinking):
            yield from self._tell_thinking(thinking.removeprefix(self._thinking))
        if content.startswith(self._text):
            yield from self._tell_text(content.removeprefix(self._text))
        for call in whole.get("tool_calls", [])[self._num_calls :]:
            yield from self._tell_call(call)


def deltas_of(renderer: Renderer, tokens: Iterable[int]) -> Iterator[MessageDelta]:
    """What a renderer reads from tokens as they come. One that cannot say what a part of an answer means may still know
    of no thinking and no calls: then an answer is its text."""
    if not renderer.supports_streaming and _reads_text_alone(renderer):
        yield from _text_deltas(renderer, tokens)
    else:
        yield from renderer.parse_response_streaming(tokens)


def _reads_text_alone(renderer: Renderer) -> bool:
    """Asked by a chat with thinking in it: whether that is refused, or not found again in what the family writes."""
    thought = Message(
        role="assistant", content=[ThinkingPart(type="thinking", thinking="r"), TextPart(type="text", text="a")]
    )
    try:
        example = renderer.build_supervised_example([Message(role="user", content="q"), thought])
    except InvalidRequest:
        return True
    tokens = [token for token, weight in zip(example.model_input.to_ints(), example.weights, strict=True) if weight]
    message, _ = renderer.parse_response(tokens)
    return not get_thinking(message)


def _text_deltas(renderer: Renderer, tokens: Iterable[int]) -> Iterator[MessageDelta]:
    """White space and what could be the beginning of the end wait, for the renderer may take them off."""
    stops = [item for item in renderer.get_stop_sequences() if isinstance(item, str)]
    so_far: list[int] = []
    told = ""
    yield StreamingMessageHeader()
    for token in tokens:
        so_far.append(token)
        message, _ = renderer.parse_response(so_far)
        content = message["content"] if isinstance(message["content"], str) else ""
        shown = Shown(stops).feed(content.rstrip("\ufffd")).rstrip()
        if shown.startswith(told) and shown != told:
            yield StreamingTextDelta(shown.removeprefix(told), 0)
            told = shown
    message, _ = renderer.parse_response(so_far)
    yield message


@dataclass(frozen=True, slots=True, eq=False)
class ChatStream:
    """One chat that is streamed."""

    job: Job
    renderer: Renderer
    stops: Sequence[str]
    with_usage: bool

    def _chunk(self, index: int, delta: Delta, finish: str | None = None, told: object = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": told}
        more = {"usage": None} if self.with_usage else {}
        return event({**head(self.job, "chat.completion.chunk"), "choices": [choice], **more})

    def _last(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        if self.with_usage:
            yield event({**head(self.job, "chat.completion.chunk"), "choices": [], "usage": usage(self.job, choices)})
        yield DONE

    async def whole(self, drawn: Drawn, keep: Keep) -> AsyncIterator[bytes]:
        await keep(drawn.choices)
        for index, choice in enumerate(drawn.choices):
            for each in await in_thread(partial(self._chunks, index, choice)):
                yield each
        for each in self._last(drawn.choices):
            yield each

    def _chunks(self, index: int, choice: Choice) -> list[bytes]:
        """Of a whole answer. Takes a moment for a long one: not for an event loop."""
        message, _ = self.renderer.parse_response(choice.tokens)
        deltas = ChatDeltas(self.stops)
        chunks = [self._chunk(index, delta) for delta in ({"role": "assistant", "content": ""}, *deltas.feed(message))]
        told = logprobs.of_chat(choice, self.job.tokenizer) if self.job.with_logprobs else None
        return [*chunks, self._chunk(index, {}, chat_finish(choice.stop_reason, deltas.said), told)]

    async def in_pieces(
        self, choice: Choice, tokens: Iterator[int], keep: Keep, following: Next
    ) -> AsyncIterator[bytes]:
        yield self._chunk(0, {"role": "assistant", "content": ""})
        read, deltas, num_told = deltas_of(self.renderer, tokens), ChatDeltas(self.stops), 0
        while (found := await following(read)) is not None:
            for delta in deltas.feed(found):
                told, num_told = self._told(choice, num_told)
                yield self._chunk(0, delta, told=told)
        await keep([choice])
        told, _ = self._told(choice, num_told)
        yield self._chunk(0, {}, chat_finish(choice.stop_reason, deltas.said), told)
        for each in self._last([choice]):
            yield each

    def _told(self, choice: Choice, first: int) -> tuple[object, int]:
        """The logprobs of the tokens that were drawn since."""
        if not self.job.with_logprobs:
            return None, first
        return logprobs.of_chat(choice, self.job.tokenizer, first), len(choice.logprobs_T)


# ---- texts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class CompletionStream:
    """One text that is continued, streamed."""

    job: Job
    stops: Sequence[str]
    with_usage: bool

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        more = {"usage": None} if self.with_usage else {}
        return event({**head(self.job, "text_completion"), "choices": [choice], **more})

    def _last(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        if self.with_usage:
            yield event({**head(self.job, "text_completion"), "choices": [], "usage": usage(self.job, choices)})
        yield DONE

    async def whole(self, drawn: Drawn, keep: Keep) -> AsyncIterator[bytes]:
        await keep(drawn.choices)
        for index, _ in enumerate(drawn.choices):
            choice = await in_thread(partial(completion_choice, self.job, drawn, index, self.stops))
            yield self._chunk(choice)
        for each in self._last(drawn.choices):
            yield each

    async def in_pieces(
        self, choice: Choice, tokens: Iterator[int], keep: Keep, following: Next
    ) -> AsyncIterator[bytes]:
        texts, told = self._texts(tokens), ""
        while (text := await following(texts)) is not None:
            yield self._chunk({"index": 0, "text": text, "finish_reason": None, "logprobs": None})
            told += text
        await keep([choice])
        yield await in_thread(lambda: self._end(choice, told))
        for each in self._last([choice]):
            yield each

    def _texts(self, tokens: Iterator[int]) -> Iterator[str]:
        """What can be told by now, piece by piece; takes a moment for each. The last token waits for the next one: it
        may be the one that ended the answer, and no text."""
        so_far: list[int] = []
        told = ""
        for token in tokens:
            shown = Shown(self.stops).feed(self.job.tokenizer.decode(so_far).rstrip("\ufffd"))
            if shown.startswith(told) and shown != told:
                yield shown.removeprefix(told)
                told = shown
            so_far.append(token)

    def _end(self, choice: Choice, told: str) -> bytes:
        rest = text_of(choice, self.job.tokenizer, self.stops).removeprefix(told)
        of_tokens = logprobs.of_completion(choice, self.job.tokenizer) if self.job.with_logprobs else None
        return self._chunk({"index": 0, "text": rest, "finish_reason": choice.stop_reason, "logprobs": of_tokens})

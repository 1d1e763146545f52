"""How tool calls look in the text of a model: each shape that families use, as a pure encoder and decoder. What runs a
call is in `tools`; which shape a family uses, in its file.

What a model writes may be no call at all. That is data for whoever grades the message, never an exception: the text as
it was written, and why it is no call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, ToolSpec, UnparsedToolCall


@dataclass(frozen=True, slots=True)
class DecodedCalls:
    """A text taken apart: what is no call, the calls, and what should have been calls."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    unparsed_tool_calls: tuple[UnparsedToolCall, ...] = ()


class ToolCallFormat(Protocol):
    """One shape. `decode(encode(calls, has_text=False))` gives the calls back; ids only if the shape writes them."""

    @property
    def opening(self) -> str:
        """What begins a block of calls."""
        ...

    @property
    def closing(self) -> str:
        """What ends it."""
        ...

    @property
    def separator(self) -> str:
        """What stands between the text of a message and its first block; empty or one character."""
        ...

    def encode(self, calls: Sequence[ToolCall], has_text: bool) -> str:
        """The calls as they follow the text of a message, if it `has_text`."""
        ...

    def decode(self, text: str) -> DecodedCalls:
        """The calls in a text, and the text without them. What is no call, or is cut off, is an UnparsedToolCall with
        the reason."""
        ...


# ---- what all shapes share -----------------------------------------------------------------------------------------


def blocks_decoded(call_format: ToolCallFormat, text: str, decode_block: "DecodeBlock") -> DecodedCalls:
    """Cuts `text` at its blocks of calls, and decodes what is in each. A block that is never closed is no call."""
    outside: list[str] = []
    found: list[ToolCall | UnparsedToolCall] = []
    position = 0
    while (start := text.find(call_format.opening, position)) >= 0:
        outside.append(text[position:start].removesuffix(call_format.separator))
        inside = start + len(call_format.opening)
        end = text.find(call_format.closing, inside)
        if end < 0:
            found.append(UnparsedToolCall(text[start:], f"the call is never closed: {call_format.closing} is missing"))
            position = len(text)
            break
        position = end + len(call_format.closing)
        found += decode_block(text[inside:end], text[start:position])
    outside.append(text[position:])
    return DecodedCalls(
        "".join(outside),
        tuple(call for call in found if isinstance(call, ToolCall)),
        tuple(call for call in found if isinstance(call, UnparsedToolCall)),
    )


class DecodeBlock(Protocol):
    """How a family reads what is between its tags."""

    def __call__(self, inside: str, raw_text: str) -> Sequence[ToolCall | UnparsedToolCall]:
        """The calls of one block, given what it holds and, for the record, all of it."""
        ...


def parsed_call(name: str, arguments: str, raw_text: str, call_id: str | None = None) -> ToolCall | UnparsedToolCall:
    """A call whose arguments are a JSON object, kept as the model wrote it; else the reason why it is none."""
    reason = "a call needs a name" if not name else why_no_object(arguments)
    return UnparsedToolCall(raw_text, reason) if reason else ToolCall(FunctionCall(name, arguments), call_id)


def why_no_object(arguments: str) -> str:
    """Why a text is not a JSON object; empty if it is one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return f"Invalid JSON: {error}"
    return "" if isinstance(value, dict) else f"arguments must be a JSON object: {arguments}"


def require_objects(message: Message, where: str) -> None:
    """Refuses a message with a call that the model could not have made."""
    for call in message.get("tool_calls", ()):
        if reason := why_no_object(call.function.arguments):
            raise InvalidRequest(f"{where}: a tool call cannot be written: {reason}: {call}")


def tool_to_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool as the public chat format describes it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


# ---- Qwen ----------------------------------------------------------------------------------------------------------

_AS_WRITTEN = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\])*)"\s*,\s*"arguments"\s*:\s*(.*)\}\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """`<tool_call>`, a JSON object with name and arguments on a line of its own, `</tool_call>`; a block for each call.
    Calls have no ids."""

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    separator: str = "\n"

    def encode(self, calls: Sequence[ToolCall], has_text: bool) -> str:
        blocks = [
            f'{self.opening}\n{{"name": "{function.name}", "arguments": {function.arguments}}}\n{self.closing}'
            for function in (call.function for call in calls)
        ]
        return (self.separator if has_text and blocks else "") + self.separator.join(blocks)

    def decode(self, text: str) -> DecodedCalls:
        return blocks_decoded(self, text, _decode_tagged)


def _decode_tagged(inside: str, raw_text: str) -> list[ToolCall | UnparsedToolCall]:
    try:
        value = json.loads(inside)
    except (ValueError, RecursionError) as error:
        return [UnparsedToolCall(raw_text, f"Invalid JSON: {error}")]
    if not isinstance(value, dict):
        return [UnparsedToolCall(raw_text, "a call must be a JSON object with name and arguments")]
    call = cast(Mapping[str, object], value)
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name or not name.isprintable():
        return [UnparsedToolCall(raw_text, f"a call needs a name: {name!r}")]
    if not isinstance(arguments, dict):
        return [UnparsedToolCall(raw_text, f"arguments must be a JSON object: {json.dumps(arguments)}")]
    as_written = _AS_WRITTEN.fullmatch(inside)
    if as_written and as_written[1] == name and not why_no_object(as_written[2].rstrip()):
        return [ToolCall(FunctionCall(name, as_written[2]))]
    return [ToolCall(FunctionCall(name, json.dumps(arguments)))]


# ---- DeepSeek and Kimi ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sections:
    """One section for all calls, each of which is a head and its arguments between tags. The head is the name of the
    function, or an id that holds it: `functions.get_weather:0`."""

    opening: str
    closing: str
    begin_call: str
    begin_arguments: str
    end_call: str
    head_is_id: bool
    separator: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of a section, in the order they are written."""
        return (self.opening, self.begin_call, self.begin_arguments, self.end_call, self.closing)

    def encode(self, calls: Sequence[ToolCall], has_text: bool) -> str:
        written = [
            f"{self.begin_call}{self._head(call)}{self.begin_arguments}{call.function.arguments}{self.end_call}"
            for call in calls
        ]
        return f"{self.opening}{''.join(written)}{self.closing}" if calls else ""

    def decode(self, text: str) -> DecodedCalls:
        return blocks_decoded(self, text, self._decode_section)

    def _head(self, call: ToolCall) -> str:
        if not self.head_is_id:
            return call.function.name
        if call.id is None:
            raise InvalidRequest(f"this family tells calls by their ids; give it one, as in 'functions.f:0': {call}")
        return call.id

    def _decode_section(self, inside: str, raw_text: str) -> list[ToolCall | UnparsedToolCall]:
        *calls, rest = inside.split(self.end_call)
        decoded = [self._decode_call(call, f"{self.opening}{call}{self.end_call}{self.closing}") for call in calls]
        if rest or not calls:
            reason = f"a section holds calls that end with {self.end_call}, and nothing else"
            decoded.append(UnparsedToolCall(f"{self.opening}{rest}{self.closing}", reason))
        return decoded

    def _decode_call(self, call: str, raw_text: str) -> ToolCall | UnparsedToolCall:
        before, _, said = call.partition(self.begin_call)
        head, found, arguments = said.partition(self.begin_arguments)
        if before or not found:
            return UnparsedToolCall(raw_text, f"a call is {self.begin_call}, its name, {self.begin_arguments}, JSON")
        if self.head_is_id:
            return parsed_call(_name_in(head), arguments, raw_text, call_id=head)
        return parsed_call(head, arguments, raw_text)


def _name_in(call_id: str) -> str:
    name, _, index = call_id.removeprefix("functions.").rpartition(":")
    return name if name and index.isdecimal() else call_id.removeprefix("functions.")


DEEPSEEK = Sections(
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    begin_call="<｜tool▁call▁begin｜>",
    begin_arguments="<｜tool▁sep｜>",
    end_call="<｜tool▁call▁end｜>",
    head_is_id=False,
)
KIMI = Sections(
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    begin_call="<|tool_call_begin|>",
    begin_arguments="<|tool_call_argument_begin|>",
    end_call="<|tool_call_end|>",
    head_is_id=True,
)


# ---- gpt-oss -------------------------------------------------------------------------------------------------------

_RECIPIENT = re.compile(r" to=(functions\.)?([^\s<]*)")


@dataclass(frozen=True, slots=True)
class Channels:
    """A message of its own for each call: ` to=functions.get_weather`, the channel, what the arguments are written in,
    and the arguments. Calls have no ids."""

    channel: str
    message: str

    def encode(self, call: ToolCall) -> str:
        """What follows the assistant's name, without what ends the message."""
        return f" to=functions.{call.function.name}{self.channel}commentary json{self.message}{call.function.arguments}"

    def decode(self, header: str, arguments: str | None, *, is_ended: bool) -> ToolCall | UnparsedToolCall | None:
        """A message as a call; None if it is to nobody. Without arguments, its header was cut off."""
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            return None
        raw_text = header if arguments is None else f"{header}{self.message}{arguments}"
        if arguments is None or not is_ended:
            return UnparsedToolCall(raw_text, "the call is never ended")
        if not recipient[1]:
            return UnparsedToolCall(raw_text, f"only functions can be called: {recipient[2]!r}")
        return parsed_call(recipient[2], arguments, raw_text)


HARMONY = Channels(channel="<|channel|>", message="<|message|>")

"""What people and models say to each other: messages, their parts, tool calls; checks of them and a few questions to
ask. How a message becomes tokens is a renderer's business.

A *chat* is a list of messages. Messages are plain dicts, so that they can be written down as they are in JSON; nothing
in this package ever changes one that it was given.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict, cast, get_args

from stovetop.errors import InvalidRequest, UnknownName

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


class TextPart(TypedDict):
    """What is said."""

    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    """Reasoning that comes before an answer."""

    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict):
    """What is seen."""

    type: Literal["image"]
    image: str  # a data: URI or the path of a file; `images.image_part` makes one


ContentPart = TextPart | ThinkingPart | ImagePart
Content = str | list[ContentPart]

_PART_FIELDS = {"text": "text", "thinking": "thinking", "image": "image"}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Which function, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str

    def __post_init__(self) -> None:
        for name, value in (("name", self.name), ("arguments", self.arguments)):
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  rows of a file come in here
                raise InvalidRequest(f"FunctionCall.{name} must be a string (arguments: JSON text): {value!r}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant message makes."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class UnparsedToolCall:
    """What looked like a tool call and was none: data, for whoever grades the message."""

    raw_text: str
    error: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as it is described to a model."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema


class Message(TypedDict):
    """One turn of a chat. `trainable` is for `TrainOnWhat.CUSTOMIZED`; `tool_call_id` and `name` say which call a tool
    message answers."""

    role: Role
    content: Content
    tool_calls: NotRequired[list[ToolCall]]
    unparsed_tool_calls: NotRequired[list[UnparsedToolCall]]
    trainable: NotRequired[bool]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


_OPTIONAL_FIELDS: dict[str, type] = {
    "tool_calls": list,
    "unparsed_tool_calls": list,
    "trainable": bool,
    "tool_call_id": str,
    "name": str,
}


# ---- questions to a message --------------------------------------------------------------------------------------


def ensure_text(content: Content) -> str:
    """The text of content that is text and nothing else."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and (part := content[0])["type"] == "text":
        return part["text"]
    raise InvalidRequest(f"content must be text alone here; its parts are: {[part['type'] for part in content]}")


def ensure_list(content: Content) -> list[ContentPart]:
    """The parts of content; a string is one text part, an empty one none."""
    if isinstance(content, str):
        return [TextPart(type="text", text=content)] if content else []
    return list(content)


def get_text_content(message: Message) -> str:
    """All the text of a message, without its thinking and its images."""
    if isinstance(message["content"], str):
        return message["content"]
    return "".join(part["text"] for part in ensure_list(message["content"]) if part["type"] == "text")


def get_thinking(message: Message) -> str:
    """All the thinking of a message."""
    return "".join(part["thinking"] for part in ensure_list(message["content"]) if part["type"] == "thinking")


def remove_thinking(content: Content) -> Content:
    """The same content without its thinking parts."""
    if isinstance(content, str):
        return content
    return [part for part in content if part["type"] != "thinking"]


def last_answer_index(messages: Sequence[Message]) -> int:
    """Of the last assistant message that calls no tool; -1 without one."""
    return max(
        (
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and not calls_tools(message)
        ),
        default=-1,
    )


def calls_tools(message: Message) -> bool:
    """Or means to: a call that failed to be one counts."""
    return bool(message.get("tool_calls") or message.get("unparsed_tool_calls"))


def to_openai_message(message: Message) -> dict[str, object]:
    """The message in the public chat format, where thinking is `reasoning_content`; `message_from_json` reads it."""
    shown: dict[str, object] = {"role": message["role"], "content": _to_openai_content(message["content"])}
    if thinking := get_thinking(message):
        shown["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
                **({} if call.id is None else {"id": call.id}),
            }
            for call in calls
        ]
    labels = {"tool_call_id": message.get("tool_call_id"), "name": message.get("name")}
    return shown | {key: label for key, label in labels.items() if label is not None}


def _to_openai_content(content: Content) -> str | list[dict[str, object]]:
    parts = ensure_list(content)
    if not any(part["type"] == "image" for part in parts):
        return "".join(part["text"] for part in parts if part["type"] == "text")
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": part["image"]}}
        for part in parts
        if part["type"] != "thinking"
    ]


# ---- checks ------------------------------------------------------------------------------------------------------


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what is not a chat, naming the message's index and the field."""
    for index, message in enumerate(messages):
        _check_message(message, f"message {index}")


def require_kinds(message: Message, kinds: Collection[str], where: str) -> None:
    """Refuses content of a kind that a family has no words for; all have some for text. `where` names the family and
    the message."""
    if isinstance(message["content"], str):
        return
    other = {part["type"] for part in ensure_list(message["content"])}.difference(kinds)
    if other:
        raise InvalidRequest(f"{where}: only {', '.join(kinds)} can be written, not: {', '.join(sorted(other))}")


def message_from_json(data: object, where: str = "message") -> Message:
    """A message from what a JSON parser gives, in our form or in the public chat format: tool calls as objects, their
    arguments as an object or as JSON text; thinking as `reasoning_content`; images as `image_url` parts that hold data:
    URIs; the role `developer`, which is `system`. A null field counts as absent, and content may be where the message
    thinks or calls tools. `where` names the message in errors."""
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content: {data!r:.200}")
    fields = _present(cast(Mapping[Any, Any], data))
    if fields.get("role") == "developer":
        fields["role"] = "system"
    if "tool_calls" in fields:
        calls = fields["tool_calls"]
        if not isinstance(calls, list):
            raise InvalidRequest(f"{where}: tool_calls must be a list of objects: {calls!r:.200}")
        fields["tool_calls"] = [tool_call_from_json(call, where) for call in cast(list[object], calls)]
        if not calls:
            del fields["tool_calls"]
    if isinstance(fields.get("content"), list):
        parts = enumerate(cast(list[object], fields["content"]))
        fields["content"] = [_part_from_json(part, f"{where}: content part {index}") for index, part in parts]
    if "reasoning_content" in fields:
        _take_reasoning(fields, where)
    if fields.get("tool_calls"):
        fields.setdefault("content", "")
    _check_message(fields, where)
    return cast(Message, fields)


def messages_from_json(data: Sequence[object], where: str) -> list[Message]:
    """The messages of a chat, each as `message_from_json` reads it. `where` names the chat in errors."""
    return [message_from_json(message, f"{where}, message {index}") for index, message in enumerate(data)]


def _present(data: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def _take_reasoning(fields: dict[str, Any], where: str) -> None:
    """Puts `reasoning_content` before the content, as a thinking part."""
    thinking, content = fields.pop("reasoning_content"), fields.get("content", "")
    if not isinstance(thinking, str) or fields.get("role") != "assistant":
        raise InvalidRequest(f"{where}: reasoning_content is the text of an assistant's thinking: {thinking!r:.200}")
    parts = ensure_list(content) if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRequest(f"{where}: content must be a string or a list of parts: {content!r:.200}")
    if any(part["type"] == "thinking" for part in cast(list[ContentPart], parts)):
        raise InvalidRequest(f"{where} has thinking twice, as reasoning_content and as a part of the content")
    if thinking:
        fields["content"] = [ThinkingPart(type="thinking", thinking=thinking), *cast(list[ContentPart], parts)]
    else:
        fields["content"] = content


def _part_from_json(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{where} must be an object with a type: {data!r:.200}")
    part = _present(cast(Mapping[Any, Any], data))
    if part.get("type") != "image_url":
        if str(part.get("type")) not in _PART_FIELDS:
            raise UnknownName(f"type of {where}", str(part.get("type")), [*_PART_FIELDS, "image_url"])
        return part
    image: object = part.get("image_url")
    url: object = cast(Mapping[str, object], image).get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or not url.startswith("data:"):
        raise InvalidRequest(
            f"{where}: image_url must be a data: URI, as nothing is downloaded here; download the image, and pass "
            f"images.image_part(its bytes): {url!r:.100}"
        )
    return {"type": "image", "image": url}


def tool_call_from_json(data: object, where: str = "tool call") -> ToolCall:
    """`{"function": {"name": ..., "arguments": ...}, "id"?: ..., "type"?: "function"}`, and nothing else in it. The
    arguments are JSON text, or an object."""
    if isinstance(data, ToolCall):
        return data
    call = _object(_nulls_left_out(data), f"{where}: a tool call", allowed=("function", "id", "type"))
    function = _nulls_left_out(call.get("function"))
    function = _object(function, f"{where}: tool_calls.function", allowed=("name", "arguments"))
    missing = [name for name in ("name", "arguments") if name not in function]
    if missing or call.get("type", "function") != "function":
        raise InvalidRequest(f"{where}: a tool call has a type of 'function', a name and arguments: {data!r:.200}")
    arguments: object = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name: object = function["name"]
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequest(
            f"{where}: a tool call's name is a string, its arguments an object or JSON text: {data!r:.200}"
        )
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequest(f"{where}: the id of a tool call must be a string: {call['id']!r}")
    return ToolCall(FunctionCall(name, arguments), call.get("id"))


def _nulls_left_out(data: object) -> object:
    return _present(cast(Mapping[Any, Any], data)) if isinstance(data, Mapping) else data


def _check_message(message: Mapping[str, Any], where: str) -> None:
    if len(message) == 2 and isinstance(message.get("content"), str) and message.get("role") in ROLES:
        return  # what most messages are, and the fastest way to know
    for key in message:
        if key not in Message.__annotations__:
            raise UnknownName(f"field of {where}", key, Message.__annotations__)
    for key in ("role", "content"):
        if key not in message:
            raise InvalidRequest(f"{where} lacks {key!r}; it has {sorted(message)}")
    if message["role"] not in ROLES:
        raise UnknownName(f"role of {where}", str(message["role"]), ROLES)
    _check_content(message["content"], where)
    for key, kind in _OPTIONAL_FIELDS.items():
        if key in message and not isinstance(message[key], kind):
            raise InvalidRequest(f"{where}: {key} must be a {kind.__name__}: {message[key]!r}")
    for key, kind in (("tool_calls", ToolCall), ("unparsed_tool_calls", UnparsedToolCall)):
        for call in message.get(key, ()):
            if not isinstance(call, kind):
                raise InvalidRequest(f"{where}: {key} must hold {kind.__name__} values: {call!r}")


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: content must be a string or a list of parts: {content!r}")
    for index, part in enumerate(cast(list[object], content)):
        what = f"{where}: content part {index}"
        kind = str(_object(part, what, allowed=("type", *_PART_FIELDS.values())).get("type"))
        if kind not in _PART_FIELDS:
            raise UnknownName(f"type of {what}", kind, _PART_FIELDS)
        field = _PART_FIELDS[kind]
        value = _object(part, what, allowed=("type", field)).get(field)
        if not isinstance(value, str):
            raise InvalidRequest(f"{what}: {field} must be a string: {value!r}")


def _object(data: object, what: str, *, allowed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{what} must be an object with {', '.join(allowed)}: {data!r}")
    fields = cast(Mapping[str, Any], data)
    for key in fields:
        if key not in allowed:
            raise UnknownName(f"field of {what}", key, allowed)
    return fields

"""A chat on a page: each message with its role, thinking, tool calls, results and images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stovetop.renderers.messages import Message
from stovetop.tracking.page import asset, templates


@dataclass(frozen=True, slots=True)
class ConversationFormatter:
    """Something to log: `logtree.log_formatter(ConversationFormatter(messages))`. An environment that logs the chat
    that it shows has its rollouts shown as this chat, and not as bare text."""

    messages: Sequence[Message]

    def to_html(self) -> str:
        return templates().get_template("chat.html").render(messages=chat_to_json(self.messages))

    def get_css(self) -> str:
        return asset("chat.css")

    def to_data(self) -> dict[str, Any]:
        return {"type": "conversation", "messages": chat_to_json(self.messages)}


def chat_to_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As a JSON file holds it, in our own form: nothing is lost."""
    return [_message_to_json(message) for message in messages]


def _message_to_json(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = dict(message)
    for key in ("tool_calls", "unparsed_tool_calls"):
        if key in data:
            data[key] = [call if isinstance(call, Mapping) else asdict(call) for call in data[key]]
    return data

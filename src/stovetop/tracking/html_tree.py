"""A tree of HTML elements, texts and things with HTML of their own: as HTML, and as JSON and back. Text in it is
escaped when it becomes HTML. `logtree` makes such trees.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol, cast

from stovetop.renderers.messages import message_from_json
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.page import visible


class Formatter(Protocol):
    """Something with HTML of its own. It escapes what it did not write itself."""

    def to_html(self) -> str: ...
    def get_css(self) -> str:
        """What its HTML needs; on a page it is there once, however many of its kind there are."""
        ...

    def to_data(self) -> dict[str, Any] | None:
        """The same as JSON, with a "type"; None where there is no such form."""
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """HTML that goes onto the page as it is."""

    html: str


@dataclass(slots=True)
class Node:
    """An element. Text among its children is escaped when the page is written."""

    tag: str
    attrs: dict[str, str] = field(default_factory=dict[str, str])
    children: "list[Child]" = field(default_factory=lambda: cast("list[Child]", []))


Child = Node | Formatter | Raw | str


def to_html(children: Sequence[Child]) -> str:
    """The elements and texts in order."""
    return "".join(_html_of(child) for child in children)


def _html_of(child: Child) -> str:
    match child:
        case str():
            return escape(visible(child))
        case Raw(html):
            return html
        case Node(tag, attrs, children):
            words = "".join(f' {name}="{escape(visible(value))}"' for name, value in attrs.items())
            return f"<{tag}{words}>{to_html(children)}</{tag}>"
        case _:
            return child.to_html()


def to_data(children: Sequence[Child]) -> list[Any]:
    """The same as JSON: elements as objects, texts as strings, and what a formatter says of itself."""
    return [_data_of(child) for child in children]


def _data_of(child: Child) -> Any:
    match child:
        case str():
            return child
        case Raw(html):
            return {"type": "html", "html": html}
        case Node(tag, attrs, children):
            return {"tag": tag, **({"attrs": attrs} if attrs else {}), "children": to_data(children)}
        case _:
            data = child.to_data()
            return {"type": "html", "html": child.to_html()} if data is None else data


_TABLE = ("table", "caption", "thead", "tbody", "tr", "td", "th")
_TAGS = {"section", "div", "p", "h1", "h2", "h3", "h4", "h5", "h6", "details", "summary", "pre", *_TABLE}


def from_data(data: Sequence[Any]) -> list[Child]:
    """The tree again of what `to_data` gave, which may come from a file: elements that this module makes, without
    their attributes, chats, and all else as its text."""
    return [_child_of(each) for each in data]


def _child_of(data: Any) -> Child:
    match data:
        case str():
            return data
        case {"tag": str(tag), "children": [*children]} if tag in _TAGS:
            return Node(tag, {}, from_data(children))
        case {"type": "conversation", "messages": [*messages]}:
            return ConversationFormatter([message_from_json(message) for message in messages])
        case {"type": "html", "html": str(html)}:
            return Node("pre", {}, [html])
        case _:
            return Node("pre", {}, [json.dumps(data)])


def formatters(children: Sequence[Child]) -> Iterator[Formatter]:
    """All of them, in the order of the page."""
    for child in children:
        match child:
            case Node():
                yield from formatters(child.children)
            case str() | Raw():
                pass
            case _:
                yield child

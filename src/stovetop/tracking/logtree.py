"""A log as a tree that becomes one HTML page: headings, text, tables, chats, nested as the program is.

    with logtree.init_trace("step 3", path="step_3.html"):
        with logtree.scope_header("group 0"):
            logtree.log_text("whatever it says is escaped")
            logtree.table([{"reward": 1.0, "tokens": 12}])

Each asyncio task logs into the scope that it was started in: tasks that run at the same time do not disturb each other.
Where no trace was begun, or within `scope_disable`, every function here does nothing. What is logged within `collected`
is kept for whoever opened that: so the notes of an environment come to its rollout.
"""

import inspect
import json
import re
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, overload

from stovetop.durable import make_folders, write_file, writing
from stovetop.errors import InvalidRequest
from stovetop.tracking.html_tree import Child, Formatter, Node, Raw, formatters, to_data, to_html
from stovetop.tracking.page import html_page

P = ParamSpec("P")
R = TypeVar("R")


# ---- a trace ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trace:
    """A tree that becomes a page."""

    title: str
    path: Path | None
    root: Node = field(default_factory=lambda: Node("section"))

    def get_html(self) -> str:
        """The whole page."""
        css = dict.fromkeys(each.get_css() for each in formatters(self.root.children))
        return html_page(self.title, to_html(self.root.children), css="\n".join(css))

    def to_dict(self) -> dict[str, Any]:
        """The tree as JSON."""
        return {"title": self.title, "children": to_data(self.root.children)}

    def write(self) -> None:
        """Puts the page, and the tree beside it as JSON, where the trace has its path."""
        if self.path is not None:
            with writing(self.path):
                make_folders(self.path.parent)
            write_file(self.path, self.get_html().encode())
            write_file(self.path.with_suffix(".json"), json.dumps(self.to_dict()).encode())


# ---- where a task logs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    container: Node
    level: int = 1  # of the heading above
    is_on: bool = True


_OFF = _Place(Node("div"), is_on=False)
_TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
_PLACE: ContextVar[_Place | None] = ContextVar("logtree_place", default=None)


@contextmanager
def _at(place: _Place) -> Generator[None]:
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


def _place() -> _Place | None:
    """None where nothing is logged."""
    place = _PLACE.get()
    return place if place is not None and place.is_on else None


def _append(child: Child) -> None:
    if (place := _place()) is not None:
        place.container.children.append(child)


@contextmanager
def _within(outer: Node, container: Node, *, deeper: bool = False) -> Generator[None]:
    """Logs `outer`; what is logged inside goes to `container`, which is it or lies in it."""
    if (place := _place()) is None:
        yield
        return
    place.container.children.append(outer)
    with _at(_Place(container, min(6, place.level + 1) if deeper else place.level)):
        yield


@contextmanager
def init_trace(title: str, path: str | Path | None = None, *, write_on_error: bool = True) -> Generator[Trace]:
    """Begins a tree. When it is left, the page is written to `path`, and the tree as JSON beside it; without a path
    nothing is. What is raised inside is logged with its traceback, and the page written unless that is not wanted."""
    trace = Trace(title, None if path is None else Path(path).expanduser())
    token = _TRACE.set(trace)
    try:
        with _at(_Place(trace.root)):
            try:
                yield trace
            except BaseException as error:
                _append(_exception(error))
                if write_on_error:
                    trace.write()
                raise
        trace.write()
    finally:
        _TRACE.reset(token)


def flush_trace() -> bool:
    """Writes the page as far as it is; returns whether there is one to write."""
    trace = _TRACE.get()
    if trace is None or trace.path is None:
        return False
    trace.write()
    return True


@contextmanager
def collected() -> Generator[list[Child]]:
    """Gives what is logged inside, in order, also where no trace was begun. A trace that there is has it too."""
    place, own = _PLACE.get(), Node("div")
    if place is not None and not place.is_on:
        yield own.children
        return
    if place is not None:
        place.container.children.append(own)
    with _at(_Place(own, 1 if place is None else place.level)):
        yield own.children


def _exception(error: BaseException) -> Node:
    lines = "".join(traceback.format_exception(error))
    summary = Node("summary", {}, [f"{type(error).__name__}: {error}"])
    return Node("details", {"class": "exception", "open": "open"}, [summary, Node("pre", {}, [lines])])


# ---- scopes ----------------------------------------------------------------------------------------------------------


@contextmanager
def scope_header(title: str, **attrs: object) -> Generator[None]:
    """A heading with a section below it; headings inside are one level deeper."""
    place = _place()
    level = 2 if place is None else min(6, place.level + 1)
    section = Node("section", _attributes(attrs), [Node(f"h{level}", {}, [title])])
    with _within(section, section, deeper=True):
        yield


@overload
def scope_header_decorator(title: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def scope_header_decorator(title: Callable[P, R]) -> Callable[P, R]: ...
def scope_header_decorator(title: Any) -> Any:
    """A function, or a coroutine, that logs within a heading: its name, or `@scope_header_decorator("title")`."""
    return partial(_headed, title) if isinstance(title, str) else _headed(title.__name__, title)


def _headed(title: str, function: Callable[P, R]) -> Callable[P, R]:
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            with scope_header(title):
                return await cast("Awaitable[Any]", function(*args, **kwargs))

        return cast("Callable[P, R]", awaited)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with scope_header(title):
            return function(*args, **kwargs)

    return called


@contextmanager
def scope_div(**attrs: object) -> Generator[None]:
    """`scope_div(class_="grading", data__step=3)` is <div class="grading" data-step="3">."""
    div = Node("div", _attributes(attrs))
    with _within(div, div):
        yield


@contextmanager
def scope_details(summary: str) -> Generator[None]:
    """What is logged inside is folded up; a click on the summary unfolds it."""
    body = Node("div")
    with _within(Node("details", {}, [Node("summary", {}, [summary]), body]), body):
        yield


@contextmanager
def scope_disable() -> Generator[None]:
    """Nothing inside is logged."""
    with _at(_OFF):
        yield


@contextmanager
def optional_enable_logging(enable: bool) -> Generator[None]:
    """`scope_disable`, unless `enable`."""
    if enable:
        yield
    else:
        with scope_disable():
            yield


def _attributes(attrs: Mapping[str, object]) -> dict[str, str]:
    named = {name.removesuffix("_").replace("__", "-"): str(value) for name, value in attrs.items()}
    for name in named:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise InvalidRequest(f"the name of an attribute has lower-case letters, digits and -: {name!r}")
    return named


# ---- what is logged --------------------------------------------------------------------------------------------------


def log_text(text: str, *, div_class: str | None = None) -> None:
    """A paragraph."""
    _append(Node("p", {}, [text]) if div_class is None else Node("div", {"class": div_class}, [text]))


def log_html(html: str, *, div_class: str | None = None) -> None:
    """HTML that goes onto the page as it is: never what a model or a user wrote."""
    _append(Raw(html) if div_class is None else Node("div", {"class": div_class}, [Raw(html)]))


def log_formatter(formatter: Formatter) -> None:
    """Such as `chats.ConversationFormatter(messages)`."""
    _append(formatter)


def header(text: str, *, level: int | None = None) -> None:
    """A heading without a section of its own. `level` is 1 to 6; None: one below the heading above."""
    place = _place()
    if level is not None and not 1 <= level <= 6:
        raise InvalidRequest(f"a heading has a level of 1 to 6: {level}")
    _append(Node(f"h{level or min(6, (place.level if place else 1) + 1)}", {}, [text]))


def details(text: str, *, summary: str = "Details", pre: bool = True) -> None:
    """A text that is folded up; with `pre`, its lines stay as they are."""
    _append(Node("details", {}, [Node("summary", {}, [summary]), Node("pre" if pre else "p", {}, [text])]))


def table(rows: Sequence[Mapping[str, object]] | Sequence[Sequence[object]], *, caption: str | None = None) -> None:
    """Rows by the names of their columns, which are those of all rows together; or the heads first, then rows."""
    if isinstance(rows, Mapping):
        raise InvalidRequest("a table is a list of rows; table_from_dict and table_from_dict_of_lists take mappings")
    if rows and all(isinstance(row, Mapping) for row in rows):
        named = cast("Sequence[Mapping[str, object]]", rows)
        heads = list(dict.fromkeys(name for row in named for name in row))
        _table(heads, [[row.get(name, "") for name in heads] for row in named], caption)
    elif rows:
        first, *others = cast("Sequence[Sequence[object]]", rows)
        _table(first, others, caption)


def table_from_dict(
    data: Mapping[Any, object],
    *,
    caption: str | None = None,
    key_header: str = "key",
    value_header: str = "value",
    sort_by: str | None = None,
) -> None:
    """A row for each key; in the order of keys or of values with sort_by="key" or "value"."""
    if sort_by not in (None, "key", "value"):
        raise InvalidRequest(f"sort_by is 'key' or 'value': {sort_by!r}")
    pairs = list(data.items())
    if sort_by is not None:
        pairs.sort(key=lambda pair: cast(Any, pair[0 if sort_by == "key" else 1]))
    _table([key_header, value_header], pairs, caption)


def table_from_dict_of_lists(
    columns: Mapping[str, Sequence[object]], *, caption: str | None = None, order: Sequence[str] | None = None
) -> None:
    """Columns by name, equally long."""
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidRequest(f"the columns of a table are equally long: {lengths}")
    heads = list(columns if order is None else order)
    _table(heads, list(zip(*(columns[name] for name in heads), strict=True)), caption)


def _table(heads: Sequence[object], rows: Sequence[Sequence[object]], caption: str | None) -> None:
    if _place() is None:
        return
    above: list[Child] = [] if caption is None else [Node("caption", {}, [caption])]
    body = [Node("tr", {}, [Node("td", {}, [_cell(value)]) for value in row]) for row in rows]
    head = Node("thead", {}, [Node("tr", {}, [Node("th", {}, [str(name)]) for name in heads])])
    _append(Node("table", {}, [*above, head, Node("tbody", {}, [*body])]))


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""The log as a tree: what comes onto the page, in which scope, and that nothing is a tag that was a text."""

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import FunctionCall, Message, ToolCall, UnparsedToolCall
from stovetop.tracking import logtree
from stovetop.tracking.chats import ConversationFormatter
from stovetop.tracking.html_tree import to_html

PIXEL = "data:image/png;base64,iVBORw0KGgo="


class Outline(HTMLParser):
    """The texts below a page's <main>, each after the tags that it lies in: "section/h2: title"."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.lines: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and "main" in self.stack:
            self.lines.append(f"{'/'.join(self.stack[self.stack.index('main') + 1 :])}: {data.strip()}")


def page(trace: logtree.Trace) -> list[str]:
    return Outline(trace.get_html()).lines


def test_scopes_nest_and_headings_go_deeper_with_them() -> None:
    with logtree.init_trace("a trace") as trace:
        with logtree.scope_header("outer"):
            logtree.log_text("first")
            with logtree.scope_header("inner", class_="x", data__step=3):
                logtree.header("below")
                logtree.log_text("second", div_class="boxed")
        logtree.header("flat", level=4)
    assert page(trace) == [
        "h1: a trace",
        "section/h2: outer",
        "section/p: first",
        "section/section/h3: inner",
        "section/section/h4: below",
        "section/section/div: second",
        "h4: flat",
    ]
    assert '<section class="x" data-step="3">' in trace.get_html()


def test_tables_details_and_divs() -> None:
    with logtree.init_trace("t") as trace:
        logtree.table([{"a": 1, "b": 0.123456789}, {"b": "two"}], caption="rows")
        logtree.table([["x", "y"], [1, 2]])
        logtree.table([])
        logtree.table_from_dict({"b": 1, "a": 2}, sort_by="key")
        logtree.table_from_dict_of_lists({"left": [1], "right": [2]}, order=["right", "left"])
        with logtree.scope_details("more"), logtree.scope_div(class_="in"):
            logtree.details("line\nline", summary="text")
    texts = [line.rpartition("/")[2] for line in page(trace)]
    assert texts == [
        "h1: t", "caption: rows", "th: a", "th: b", "td: 1", "td: 0.123457", "td: two",
        "th: x", "th: y", "td: 1", "td: 2", "th: key", "th: value", "td: a", "td: 2", "td: b", "td: 1",
        "th: right", "th: left", "td: 2", "td: 1", "summary: more", "summary: text", "pre: line\nline",
    ]  # fmt: skip


def test_tasks_that_run_at_once_log_into_their_own_scopes() -> None:
    async def worker(name: str) -> None:
        with logtree.scope_header(name):
            for number in range(3):
                await asyncio.sleep(0)
                logtree.log_text(f"{name}{number}")

    async def main() -> logtree.Trace:
        with logtree.init_trace("t") as trace:
            async with asyncio.TaskGroup() as group:
                for name in "abc":
                    group.create_task(worker(name))
        return trace

    sections = asyncio.run(main()).to_dict()["children"]
    assert [each["tag"] for each in sections] == ["section"] * 3
    told = {each["children"][0]["children"][0]: [p["children"][0] for p in each["children"][1:]] for each in sections}
    assert told == {name: [f"{name}{number}" for number in range(3)] for name in "abc"}


def test_functions_and_coroutines_log_below_their_names() -> None:
    @logtree.scope_header_decorator
    def grade(number: int) -> int:
        logtree.log_text("graded")
        return number

    @logtree.scope_header_decorator("Playing")
    async def play(number: int) -> int:
        logtree.log_text("played")
        return number

    assert (grade(1), asyncio.run(play(2))) == (1, 2)
    with logtree.init_trace("t") as trace:
        assert (grade(1), asyncio.run(play(2))) == (1, 2)
    expected = ["section/h2: grade", "section/p: graded", "section/h2: Playing", "section/p: played"]
    assert page(trace)[1:] == expected


def test_what_is_raised_is_on_the_page_with_its_traceback_unless_that_is_not_wanted(tmp_path: Path) -> None:
    def fail(path: Path, write_on_error: bool) -> None:
        with logtree.init_trace("t", path, write_on_error=write_on_error), logtree.scope_header("work"):
            logtree.log_text("until here")
            raise RuntimeError("<broken>")

    for name, written in (("yes.html", True), ("no.html", False)):
        with pytest.raises(RuntimeError, match="<broken>"):
            fail(tmp_path / name, written)
        assert (tmp_path / name).exists() == written
    text = (tmp_path / "yes.html").read_text()
    assert all(words in text for words in ("until here", "RuntimeError: &lt;broken&gt;", "Traceback"))
    with logtree.init_trace("after") as trace:
        logtree.log_text("whole")
    assert page(trace) == ["h1: after", "p: whole"]


def test_without_a_trace_nothing_is_logged_and_nothing_is_written() -> None:
    with logtree.scope_header("x"), logtree.scope_div(class_="y"), logtree.scope_details("z"):
        logtree.log_text("text")
        logtree.log_html("<b>bold</b>")
        logtree.table([{"a": 1}])
        logtree.details("text")
        logtree.header("h")
    assert not logtree.flush_trace()


def test_a_scope_can_be_silenced() -> None:
    with logtree.init_trace("t") as trace:
        with logtree.scope_disable(), logtree.scope_header("hidden"):
            logtree.log_text("hidden")
            with logtree.collected() as kept:
                logtree.log_text("hidden")
        with logtree.optional_enable_logging(True):
            logtree.log_text("shown")
        with logtree.optional_enable_logging(False):
            logtree.log_text("hidden")
    assert kept == []
    assert page(trace) == ["h1: t", "p: shown"]


def test_what_is_collected_goes_to_the_trace_too_if_there_is_one() -> None:
    with logtree.collected() as kept:
        logtree.log_text("alone")
    assert to_html(kept) == "<p>alone</p>"
    with (
        logtree.init_trace("t") as trace,
        logtree.scope_header("h"),
        logtree.collected() as kept,
        logtree.scope_header("deep"),
    ):
        logtree.log_text("both")
    assert page(trace)[2:] == ["section/div/section/h3: deep", "section/div/section/p: both"]
    assert to_html(kept) == "<section><h3>deep</h3><p>both</p></section>"


def test_the_page_and_its_tree_are_files_and_can_be_written_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    with logtree.init_trace("t", path):
        logtree.log_text("one")
        assert logtree.flush_trace()
        assert "one" in path.read_text()
        logtree.log_text("two")
    assert "two" in path.read_text()
    tree = json.loads(path.with_suffix(".json").read_text())
    assert tree == {"title": "t", "children": [{"tag": "p", "children": ["one"]}, {"tag": "p", "children": ["two"]}]}


CHAT = [
    Message(role="system", content="be <b>brief</b>"),
    Message(role="user", content=[{"type": "text", "text": "see"}, {"type": "image", "image": PIXEL}]),
    Message(
        role="assistant",
        content=[{"type": "thinking", "thinking": "hm </pre><script>"}, {"type": "text", "text": "I call"}],
        tool_calls=[ToolCall(FunctionCall("look<", '{"a": "<i>"}'), "1")],
        unparsed_tool_calls=[UnparsedToolCall("<tool", "no <end>")],
    ),
    Message(role="tool", content="42", name="look", tool_call_id="1"),
]


def test_a_chat_has_its_roles_thinking_calls_results_and_images_and_its_css_once() -> None:
    with logtree.init_trace("t") as trace:
        logtree.log_formatter(ConversationFormatter(CHAT))
        logtree.log_formatter(ConversationFormatter(CHAT[:1]))
    html = trace.get_html()
    assert html.count(".message {") == 1
    assert page(trace)[1:] == [
        "div/b: system",
        "div/pre: be <b>brief</b>",
        "div/b: user",
        "div/pre: see",
        "div/b: assistant",
        "div/pre: hm </pre><script>",
        "div/pre: I call",
        'div/pre: look<({"a": "<i>"}) #1',
        "div/pre: <tool\nunreadable: no <end>",
        "div/b: tool look answers 1",
        "div/pre: 42",
        "div/b: system",
        "div/pre: be <b>brief</b>",
    ]
    assert html.count(f'src="{PIXEL}"') == 1
    assert trace.to_dict()["children"][0]["messages"][2]["tool_calls"][0]["function"]["name"] == "look<"


def test_wrong_use_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"1 to 6: 7"):
        logtree.header("x", level=7)
    with (
        pytest.raises(InvalidRequest, match="lower-case letters, digits and -: 'a b'"),
        logtree.scope_div(**{"a b": 1}),
    ):
        pass
    with pytest.raises(InvalidRequest, match="list of rows"):
        logtree.table({"a": 1})  # pyright: ignore[reportArgumentType]  what is refused
    with pytest.raises(InvalidRequest, match="equally long"):
        logtree.table_from_dict_of_lists({"a": [1], "b": []})
    with pytest.raises(InvalidRequest, match="'key' or 'value'"):
        logtree.table_from_dict({}, sort_by="size")

"""Pages of rollouts: what one reads without a script, what is drawn by it, how large they are, and that nothing a model
wrote is ever more than a text."""

import asyncio
import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import opened
from rollout_rows import long_rows, row, turn
from stovetop.tracking.page import html_page, visible
from stovetop.tracking.rollout_pages import Shown, pack, rollouts_fragment, rollouts_page
from stovetop.tracking.rollout_rows import Kind, RolloutRow

PIXEL = "data:image/png;base64,iVBORw0KGgo="
ALLOWED = {
    *("html", "head", "meta", "title", "style", "script", "body", "main", "section", "article", "div", "h1", "h2"),
    *("h3", "p", "pre", "b", "span", "code", "details", "summary", "table", "tr", "th", "td", "img"),
}
INJECTIONS = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1>",
    "<svg><script>window.hacked=1</script></svg>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<body onload=window.hacked=1>",
    "<details open ontoggle=window.hacked=1>",
    '" onmouseover="window.hacked=1',
    "' onfocus='window.hacked=1' autofocus='",
    "</pre><h1>not ours</h1>",
    "</title><script>window.hacked=1</script>",
    "</style><script>window.hacked=1</script>",
    "<style>body { display: none }</style>",
    '<div style="position:fixed;inset:0;background:url(https://example.com/x)">',
    "<link rel=stylesheet href=https://example.com/x.css>",
    "<meta http-equiv=refresh content='0;url=https://example.com'>",
    "<base href=https://example.com>",
    "<form action=https://example.com><input name=x autofocus onfocus=window.hacked=1>",
    "<a href=javascript:window.hacked=1>click</a>",
    "<object data='data:text/html,<script>parent.hacked=1</script>'></object>",
    "data:text/html,<script>window.hacked=1</script>",
    "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "&#60;script&#62;window.hacked=1&#60;/script&#62;",
    "{{ 7*7 }}{% raw %}{{ config }}",
    "<!-- --><script>window.hacked=1</script><!--",
    "]]><script>window.hacked=1</script><![CDATA[",
    "user\u202etxt.exe\u2066 hidden\u200b\u2069",
    "\x00<\x00script>\x1b[31mwindow.hacked=1",
    "<math><mtext></p><mglyph><style><img src=x onerror=window.hacked=1>",
    "<template shadowrootmode=open><script>window.hacked=1</script></template>",
    "\ud800<script>window.hacked=1</script>",
]


class Elements(HTMLParser):
    """The tags and attributes of a page, and its text without scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._last = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._last = tag

    def handle_endtag(self, tag: str) -> None:
        self._last = ""
        self.text += " " if tag in ("td", "th") else ""

    def handle_data(self, data: str) -> None:
        self.text += "" if self._last in ("script", "style") else data


def injected(text: str) -> RolloutRow:
    """Wherever a model, an environment or a user may write."""
    call = {"type": "function", "id": text, "function": {"name": text, "arguments": text}}
    return row(
        "x",
        split="train",
        prompt=text,
        tags=[text],
        stop_reason=text,
        metrics={text: 1.0},
        prompt_text=text,
        answer=text,
        chat=[
            {"role": "system", "content": text},
            {"role": text, "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": text}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": text}],
                "tool_calls": [call],
                "unparsed_tool_calls": [{"raw_text": text, "error": text}],
            },
            {"role": "tool", "content": text, "name": text, "tool_call_id": text},
        ],
        turns=[turn(logs={text: text})],
        notes=[text, {"tag": "p", "attrs": {"onclick": text}, "children": [text]}, {"type": "html", "html": text},
               {"tag": "script", "children": [text]}, {"type": text}],
        pieces=["what", " is", " 2+2?", text],
    )  # fmt: skip


@pytest.mark.parametrize("text", INJECTIONS)
def test_nothing_that_was_written_is_read_as_html(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fragment = rollouts_fragment([injected(text)], Shown(1, 1, text))
    monkeypatch.setattr("stovetop.tracking.rollout_pages.MAX_ELEMENTS", 0)
    plain = rollouts_fragment([injected(text)])
    for page in (html_page(text, fragment), html_page(text, plain)):
        elements = Elements(page)
        assert set(elements.tags) <= ALLOWED
        assert elements.tags.count("script") == page.count("<script") == 1
        for tag, name, value in elements.attributes:
            assert name in ("lang", "charset", "name", "content", "http-equiv", "class", "title", "alt", "src", "type")
            assert name != "src" or value.startswith("data:image/png;base64,"), (tag, value)
        assert visible(text).strip() in elements.text
        page.encode()
        assert not set(elements.text) & set("\x00\x1b\u202e\u2066\u2069\u200b")


def test_thirty_injections_are_tried() -> None:
    assert len(set(INJECTIONS)) >= 30


def test_a_group_is_its_prompt_once_and_its_answers_side_by_side_with_reward_parts_and_logs() -> None:
    turns = [turn(0.5, logs={"judge": "fine"}), turn(0.25, num_observed=9)]
    rows = [
        row("four", reward=1.0, final_reward=0.25, turns=turns),
        row("five", member=1, reward=-0.5, advantage=None, turns=[turn(stop_reason="length")]),
    ]
    text = Elements(rollouts_page("a run", rows, Shown(4, 16, "rollouts/000000_train.parquet"))).text
    words = " ".join(text.split())
    assert words.count("what is 2+2?") == 1
    for told in (
        "1 of 4 groups are shown, 2 of 16 rollouts; 14 are not. All are in rollouts/000000_train.parquet",
        "step 0, group 0: mean reward 0.25",
        "reward 1 no. 0 advantage 0.5 · completed · 1 tokens · correct 1 assistant four",
        "step ob_len ac_len reward 1 3 2 0.5 2 9 2 0.25 final 0.25 total 12 4 1 turn 1, judge: fine",
        "reward -0.5 no. 1 not trained on · completed · cut off · 1 tokens · correct 1 assistant five",
    ):
        assert told in words


def test_an_image_of_a_chat_is_shown_and_no_other_address_is_loaded() -> None:
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": uri} for uri in (PIXEL, "/tmp/x.png", "https://x/y.png")],
        },
        {"role": "assistant", "content": "seen"},
    ]
    elements = Elements(rollouts_page("t", [row(chat=chat)]))
    assert [value for _, name, value in elements.attributes if name == "src"] == [PIXEL]
    assert "an image that is not shown: https://x/y.png" in elements.text


def unpack(packed: str) -> dict[str, Any]:
    """As the script does."""
    data = zlib.decompress(base64.b64decode(packed))
    size = int.from_bytes(data[:4], "little")
    told, at = json.loads(data[4 : 4 + size]), 4 + size
    for name, length in told["lengths"].items():
        low, high = (np.frombuffer(data, kind, length, at + start) for kind, start in (("u1", 0), ("i1", length)))
        told[name] = (high.astype(int) * 256 + low).tolist()
        at += 2 * length
    return told


def test_the_tokens_are_packed_with_all_that_is_known_of_them() -> None:
    kinds = [Kind.OBSERVED, Kind.TRAINED, Kind.SAMPLED, Kind.TRAINED]
    packed = unpack(
        pack(
            row(
                pieces=["a", "b", "a\u202e", "a"],
                token_ids=[1, 2, 3, 1],
                kinds=[int(kind) for kind in kinds],
                logprobs=[-0.5, -1.25, None],
                trained_logprobs=[-0.5001, None, -3.0],
                advantages=[0.25, None, -2.0],
            )
        )
    )
    assert [packed["tokens"][number] for number in packed["which"]] == [[1, "a"], [2, "b"], [3, "a⟨U+202E⟩"], [1, "a"]]
    assert packed["kinds"] == [0, 1, 2, 1]
    assert packed["sampler"] == [-500, -1250, -32768]
    assert packed["mismatch"] == [-1, -32768, -32768]
    assert (packed["advantage"], packed["most"]) == ([125, -32768, -1000], 2.0)


@pytest.mark.slow
def test_two_hundred_rollouts_of_four_thousand_tokens_are_a_page_that_a_browser_opens() -> None:
    page = rollouts_page("large", long_rows(25, 8, 4096))
    assert len(page.encode()) < 12e6
    assert len(Elements(page).tags) < 20_000


def test_long_chats_are_plain_text_where_there_are_many() -> None:
    messages = [{"role": role, "content": "so it goes"} for _ in range(50) for role in ("user", "assistant")]
    rows = [row(group=n, chat=messages, turns=[turn()] * 50) for n in range(200)]
    page = rollouts_page("many", rows)
    assert len(Elements(page).tags) < 20_000
    assert page.count("so it goes") == 200 * 100


@pytest.mark.usefixtures("needs_browser")
def test_a_browser_draws_the_tokens_of_the_rollout_that_is_opened_and_runs_nothing_else(tmp_path: Path) -> None:
    rows = [row("one two three", advantages=[1.0, 0.0, -0.5], advantage=0.2), *map(injected, INJECTIONS)]
    file = tmp_path / "page.html"
    file.write_bytes(rollouts_page("rollouts", rows).encode())

    async def look() -> None:
        async with opened() as browser:
            await browser.open(file.as_uri(), width=420)
            assert await browser.value("document.querySelectorAll('.tokens .text').length") == 0
            assert await browser.value("document.documentElement.scrollWidth <= 420")
            await browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            await browser.until(f"document.querySelectorAll('.tokens .text').length == {len(rows)}")
            spans = "[...document.querySelectorAll('.tokens .text')][0].children"
            words = await browser.value(f"[...{spans}].map(each => each.textContent)")
            assert "".join(words) == "what is 2+2? one two three"
            colours = await browser.value(f"[...{spans}].map(each => each.style.backgroundColor)")
            assert colours[:3] == ["", "", ""]
            assert colours[3].startswith("rgba(40, 160, 80")
            assert colours[4] == ""
            assert colours[5].startswith("rgba(215, 60, 50")
            about = "token 3, id {}, trained, sampler -0.500, trainer -0.510, mismatch -0.0100, advantage 1.000"
            assert await browser.value(f"{spans}[3].dataset.about") == about.format(rows[0].token_ids[3])
            choose = "const chosen = document.querySelector('.tokens select'); chosen.value = '{}'; chosen.onchange;"
            for mode, colour in (("mismatch", "rgba(215, 60, 50"), ("sampler", "rgba(230, 140, 20")):
                await browser.value(f"{{ {choose.format(mode)} chosen.dispatchEvent(new Event('change')) }}")
                assert (await browser.value(f"{spans}[3].style.backgroundColor")).startswith(colour)
            assert await browser.value("window.hacked") is None
            assert browser.complaints == []

    asyncio.run(look())

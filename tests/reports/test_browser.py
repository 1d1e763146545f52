"""A report as a browser shows it: headless Chromium, which `.ci/run` installs where there is none."""

import asyncio
from pathlib import Path

import pytest

from browser import opened
from reports.made_runs import make_run
from stovetop.cli import main

OVER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
DRAWN = """[...document.querySelectorAll("figure svg[role]")]
    .filter((each) => each.getBoundingClientRect().height > 20).length"""
INK = 'getComputedStyle(document.querySelector("g.line path")).stroke'
POINT = """(() => {
    const svg = document.querySelector("figure.plot svg"), box = svg.getBoundingClientRect();
    const at = { clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    return document.querySelector("figure.plot output").textContent;
})()"""
ROLLOUTS = '[...document.querySelectorAll("#rollouts a")].map((each) => each.getAttribute("href"))'


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("needs_browser")
@pytest.mark.parametrize(
    ("width", "scheme", "ink"), [(1400, "light", "rgb(0, 114, 178)"), (420, "dark", "rgb(86, 180, 233)")]
)
def test_a_browser_shows_the_plots_and_the_rollouts(tmp_path: Path, width: int, scheme: str, ink: str) -> None:
    """A browser takes two seconds to start. That it complains of nothing says that the page's policy takes its script
    and its styles."""
    path = make_run(tmp_path / "run", 4)
    (path / "iteration_000003").mkdir()
    (path / "iteration_000003" / "train.html").write_text("a page")
    assert main(["report", str(path)]) == 0

    async def look() -> None:
        async with opened() as browser:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await browser.ask("Emulation.setEmulatedMedia", features=media)
            await browser.open((path / "report.html").as_uri(), width=width)
            assert await browser.value(DRAWN) == 3  # loss, accuracy, the last steps
            assert await browser.value(OVER) == 0
            assert await browser.value(INK) == ink
            assert await browser.value(POINT) in ("step 1\n1", "step 2\n0.6667")
            assert await browser.value(ROLLOUTS) == ["iteration_000003/train.html"]
            assert browser.complaints == []

    asyncio.run(look())

"""Pages that programs write are what the programs write."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    *("data", "events", "files", "from_tinker", "losses", "metrics", "recipes"),
    pytest.param("renderers", marks=pytest.mark.slow),  # every family's tokenizer: seconds, the first time
]


def maker(page: str) -> Any:
    """The program that writes this page."""
    return loaded(DOCS / f"make_{page}.py")


def loaded(file: Path) -> Any:
    """A program that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_up_to_date(page: str) -> None:
    assert maker(page).page() == (DOCS / f"{page}.md").read_text(encoding="utf-8"), f"run: python docs/make_{page}.py"


def test_every_program_that_writes_a_page_is_run_here() -> None:
    names = {page if isinstance(page, str) else page.values[0] for page in PAGES}
    assert {f"make_{name}.py" for name in names} == {file.name for file in DOCS.glob("make_*.py")}


def test_every_event_that_the_code_emits_has_a_meaning() -> None:
    events = maker("events")
    assert events.emitted().keys() == events.BY_NAME.keys()


@pytest.mark.parametrize(
    ("metric", "key"),
    [
        ("step", "step"),
        ("lag/max", "lag/<max or mean>"),
        ("test/nll", "test/nll"),
        ("test/env/all/correct", "test/<metric>"),
        ("env/gsm8k/reward/total", "env/<tag>/reward/total"),
        ("env/all/hit", "env/<tag>/<metric>"),
        ("inline/gsm8k/pass@1/stderr", "inline/<set>/<metric>/stderr"),
        ("dpo_loss", "<loss>_loss"),
        ("reward", None),
    ],
)
def test_a_metric_belongs_to_the_most_particular_row_of_its_table(metric: str, key: str | None) -> None:
    found = maker("metrics").key_of(metric)
    assert (found and found.key) == key


def test_the_site_has_every_page_in_its_order_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """What Sphinx is given; that it makes a site of it without a warning, `.ci/run` says."""
    build = loaded(DOCS / "site" / "build.py")
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")} - {"README"}
    ordered = [page for part in build.ORDER.values() for page in part]
    of_the_root = {name.removesuffix(".md") for name in build.OF_THE_ROOT.values()}
    assert sorted(ordered) == sorted(pages | of_the_root)
    build.write_sources(tmp_path)
    for page in tmp_path.glob("**/*.md"):
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"

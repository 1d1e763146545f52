"""Pages that programs write are what the programs write."""

import importlib.util
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
    spec = importlib.util.spec_from_file_location(f"make_{page}", DOCS / f"make_{page}.py")
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

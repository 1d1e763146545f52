"""Pages that programs write are what the programs write."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", [pytest.param("renderers", marks=pytest.mark.slow), "from_tinker", "recipes", "data"])
def test_a_page_is_up_to_date(page: str) -> None:
    """For renderers, every family's tokenizer: seconds, the first time that a process asks for them."""
    spec = importlib.util.spec_from_file_location(f"make_{page}", DOCS / f"make_{page}.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.page() == (DOCS / f"{page}.md").read_text(encoding="utf-8"), f"run: python docs/make_{page}.py"

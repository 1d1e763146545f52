"""Pages that programs write are what the programs write."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_renderers_is_up_to_date() -> None:
    """Every family's tokenizer: seconds, the first time that a process asks for them."""
    spec = importlib.util.spec_from_file_location("make_renderers", DOCS / "make_renderers.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.page() == (DOCS / "renderers.md").read_text(encoding="utf-8"), "run: python docs/make_renderers.py"

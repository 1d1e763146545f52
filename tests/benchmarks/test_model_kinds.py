"""The kinds of models that are tried by a script: that its page tells of all of them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_the_page_of_models_has_a_row_for_every_kind() -> None:
    import model_kinds
    from model_kind_table import KINDS, REFUSED

    page = (ROOT / "docs" / "models.md").read_text()
    right, refused = page.removeprefix(model_kinds.INTRODUCTION).split("## Refused")
    assert page.startswith(model_kinds.INTRODUCTION)
    for kind in KINDS:
        part = refused if kind in REFUSED else right
        rows = [row for row in part.splitlines() if row.startswith(f"| {kind.class_name} |")]
        assert any((kind.note or "as it is") in row for row in rows), (
            f"run: python benchmarks/model_kinds.py --write ({kind})"
        )
    assert len({kind.class_name for kind in KINDS}) > 60


@pytest.mark.parametrize("name", ["qwen2_moe with a short window", "phi3 with longrope", "stablelm with normed heads"])
def test_a_kind_comes_out_as_the_table_says(name: str) -> None:
    import model_kinds
    from model_kind_table import KINDS

    verdict = model_kinds.judge(next(kind for kind in KINDS if kind.name == name))
    assert verdict.is_as_expected, verdict.said

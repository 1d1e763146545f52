"""What holds of the recipes that pages show beyond what the pages say, and that pages and links are found; that pages
do what they say is test_pages.py."""

import re
from pathlib import Path

import pytest

from pages import DOCS, PAGES, ROOT, file_of, name_of, programs_of, work_in
from stovetop.cli import main
from stovetop.cli.loading import load_recipe
from stovetop.kitchen import Workflow
from stovetop.runs import load


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_in(tmp_path, monkeypatch)


def test_every_recipe_of_a_page_has_a_workflow_without_problems() -> None:
    recipes = [
        (name, program) for page in PAGES for program in programs_of(page) if (name := file_of(program)) is not None
    ]
    for name, program in recipes:
        Path(name).write_text(program)
        recipe = vars(load_recipe(name))
        workflows = [phase.workflow for phase in recipe["PHASES"]] if "PHASES" in recipe else [recipe["WORKFLOW"]]
        assert all(isinstance(workflow, Workflow) for workflow in workflows)
        assert len(program.splitlines()) < 85, "it does not fit a screen"
    assert len(recipes) >= 5


def test_every_page_of_the_documentation_is_listed_and_every_link_leads_somewhere() -> None:
    """From the README and from docs/README.md; what is listed on docs/workflows.md is found from there."""
    reached = {DOCS / "README.md"}
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            assert target.exists(), f"{name_of(page)}: {link}"
            if page.parent in (ROOT, DOCS) and page.name in ("README.md", "workflows.md"):
                reached.add(target)
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_a_recipe_of_ones_own_is_resumed_from_its_folder_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine,) = [program for program in programs_of(DOCS / "workflows.md") if file_of(program) == "mine.py"]
    (tmp_path / "mine.py").write_text(mine)
    assert main(["run", "mine.py", "base_url=recording", "model=any/model", "max_steps=2", "lr_schedule=constant"]) == 0
    assert main(["resume", "runs/mine", "max_steps=4"]) == 0
    assert [row["step"] for row in load("runs/mine").metrics] == [0, 1, 2, 3, 4]
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "elsewhere" / "mine.py")
    assert main(["resume", "runs/mine"]) == 2
    assert "mine:Config" in capsys.readouterr().err

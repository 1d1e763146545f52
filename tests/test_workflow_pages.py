"""What docs/verbs.md, docs/evaluation.md, docs/workflows.md and the pages beside it show, works as it is printed: their
programs run in order, what a page says they print is what they print, and their commands are done. A program whose
first line is `# name.py` is a file."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from stovetop.cli import main
from stovetop.cli.loading import load_recipe
from stovetop.kitchen import Workflow
from stovetop.runs import load

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / "verbs.md", DOCS / "evaluation.md", DOCS / "workflows.md", *sorted((DOCS / "workflows").glob("*.md"))]
PART = re.compile(r"^```(python|text)\n(.*?)^```$|^    (stovetop (?:[^\n]*\\\n)*[^\n]*)$", re.DOTALL | re.MULTILINE)


class Part(NamedTuple):
    """Of a page: a program, what it prints, or a command."""

    kind: str  # "python", "text", "command"
    content: str


def parts_of(page: Path) -> list[Part]:
    """All but prose, in order."""
    found = PART.finditer(page.read_text(encoding="utf-8"))
    return [Part(match[1] or "command", match[2] or match[3].replace("\\\n", " ")) for match in found]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for page in PAGES:
        for part in parts_of(page):
            if (name := file_of(part)) is not None:
                monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def file_of(part: Part) -> str | None:
    """The name of the file that a program is, if it is one."""
    first = re.match(r"# (\w+\.py)\n", part.content)
    return first[1] if first is not None and part.kind == "python" else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_about_workflows_does_what_it_says(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second or less: on a fake model."""
    names: dict[str, object] = {}
    printed: str | None = None
    for part in parts_of(page):
        if part.kind == "text":
            assert printed == part.content
            printed = None
            continue
        assert not printed, f"the page does not say that its program prints: {printed}"
        if part.kind == "command":
            assert main(shlex.split(part.content)[1:]) == 0, part.content
            capsys.readouterr()
        elif (name := file_of(part)) is not None:
            (tmp_path / name).write_text(part.content.partition("\n")[2])
        else:
            program = tmp_path / "program.py"
            program.write_text(part.content)
            names = runpy.run_path(str(program), {name: names[name] for name in names if not name.startswith("__")})
            printed = capsys.readouterr().out
    assert not printed


def test_every_recipe_of_a_page_has_a_workflow_without_problems(tmp_path: Path) -> None:
    recipes = [(name, part) for page in PAGES for part in parts_of(page) if (name := file_of(part)) is not None]
    for name, part in recipes:
        (tmp_path / name).write_text(part.content)
        recipe = vars(load_recipe(name))
        workflows = [phase.workflow for phase in recipe["PHASES"]] if "PHASES" in recipe else [recipe["WORKFLOW"]]
        assert all(isinstance(workflow, Workflow) for workflow in workflows)
        assert len(part.content.splitlines()) < 85, "it does not fit a screen"
    assert len(recipes) >= 5


def test_every_page_of_the_documentation_is_listed_and_every_link_leads_somewhere() -> None:
    """From the README and from docs/README.md; what is listed on docs/workflows.md is found from there."""
    pages = [DOCS.parent / "README.md", DOCS / "README.md", *PAGES]
    reached = {DOCS / "README.md"}
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            assert target.exists(), f"{page.name}: {link}"
            reached.add(target)
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_a_recipe_of_ones_own_is_resumed_from_its_folder_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine,) = [part for part in parts_of(DOCS / "workflows.md") if file_of(part) == "mine.py"]
    (tmp_path / "mine.py").write_text(mine.content)
    assert main(["run", "mine.py", "base_url=recording", "model=any/model", "max_steps=2", "lr_schedule=constant"]) == 0
    assert main(["resume", "runs/mine", "max_steps=4"]) == 0
    assert [row["step"] for row in load("runs/mine").metrics] == [0, 1, 2, 3, 4]
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "elsewhere" / "mine.py")
    assert main(["resume", "runs/mine"]) == 2
    assert "mine:Config" in capsys.readouterr().err

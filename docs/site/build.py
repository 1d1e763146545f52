"""Builds the site of the documentation, in build/site: `make docs`.

The pages of docs/ and of the project's root are copied, with links as a site needs them; the reference has a page for
each package, of the docstrings of its modules. Sphinx makes HTML of it (`conf.py`). Any warning is an error.
"""

import importlib
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

SITE = Path(__file__).parent
ROOT = SITE.parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build"

# In the order in which one would read them. A test says when a page is missing.
ORDER = {
    "Begin": ["overview", "first_hour", "verbs", "from_tinker", "from_trl", "glossary"],
    "Train": ["recipes", "data", "renderers", "rl", "hyperparameters", "resume", "sweeps"],
    "Look and measure": ["seeing_runs", "rollouts", "trackers", "evaluation", "graders"],
    "Methods of your own": [
        "workflows", "workflows/replace_a_logger", "workflows/insert_a_kl_stage", "workflows/stage_of_your_own",
        "workflows/reward_of_your_own", "workflows/new_method", "workflows/two_phases",
    ],
    "Serve": ["serving", "protocol", "openai", "models", "engine"],
    "Look up": ["losses", "metrics", "events", "files"],
    "Project": ["contributing", "changelog"],
}  # fmt: skip
OF_THE_ROOT = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

# Packages and modules for users, by the title of the page.
REFERENCE = {
    "Values, verbs and losses": ["types", "client", "futures", "losses", "errors", "tokenizer"],
    "A loop's help": ["checkpoints", "runs", "datasets", "lr_schedules", "hyperparams", "completers", "evaluators"],
    "renderers": ["renderers"],
    "supervised": ["supervised"],
    "rl": ["rl"],
    "preference": ["preference"],
    "distillation": ["distillation"],
    "evaluation": ["evaluation"],
    "tracking": ["tracking"],
    "kitchen": ["kitchen"],
}
HIDDEN = {"stovetop.kitchen.stage"}  # modules behind a function of the same name


def build(target: Path = BUILD) -> int:
    """Writes the site below `target`. Returns Sphinx's exit code."""
    from sphinx.cmd.build import main as sphinx  # of the extra docs

    source = target / "docs"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    write_sources(source)
    options = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(SITE)]
    return sphinx([*options, str(source), str(target / "site")])


def write_sources(source: Path) -> None:
    """The pages, the reference and the contents."""
    (source / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "LICENSE", source)
    for page in DOCS.rglob("*.md"):
        if page != DOCS / "README.md":
            _copy(page, source / page.relative_to(DOCS))
    for name, page in OF_THE_ROOT.items():
        _copy(ROOT / name, source / page)
    (source / "api").mkdir()
    for title, modules in REFERENCE.items():
        (source / "api" / f"{modules[0]}.md").write_text(_reference(title, modules), encoding="utf-8")
    (source / "index.md").write_text(_index(), encoding="utf-8")


def _copy(page: Path, target: Path) -> None:
    """With links to where pages and files are in the site."""

    def moved(link: re.Match[str]) -> str:
        place, hash_, part = link[1].partition("#")
        file = (page.parent / place).resolve()
        if file.parent == ROOT and file.name in OF_THE_ROOT:
            new = OF_THE_ROOT[file.name]
        elif file == DOCS / "README.md" or file == DOCS:
            new = "index.md"
        elif file.is_relative_to(DOCS):
            new = file.relative_to(DOCS).as_posix()
        else:
            new = file.relative_to(ROOT).as_posix()
        up = "../" * len(page.relative_to(DOCS).parents[1:]) if page.is_relative_to(DOCS) else ""
        return f"]({up}{new}{hash_}{part})"

    text = re.sub(r"\]\(([^)#:\s]+(?:#[^)]*)?)\)", moved, page.read_text(encoding="utf-8"))
    target.parent.mkdir(exist_ok=True)
    target.write_text(_with_titles(text), encoding="utf-8")


def _with_titles(text: str) -> str:
    """A link that is called by the name of its page's file gets the title of the page."""
    return re.sub(r"\[(?:docs/)?(?:workflows/)?[\w-]+\.md\](?=\([^:)]*\.md\))", "[]", text)


def _index() -> str:
    lines = _with_titles((DOCS / "README.md").read_text(encoding="utf-8")).splitlines()
    lines[0] = "# Stovetop"
    reference = [f"api/{modules[0]}" for modules in REFERENCE.values()]
    for caption, pages in {**ORDER, "Reference": reference}.items():
        lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
    return "\n".join(lines) + "\n"


def _reference(title: str, modules: list[str]) -> str:
    lines = [f"# {title}", ""]
    for name in modules:
        for module in _within(f"stovetop.{name}"):
            options = ["   :members:", *(["   :no-index:"] if module in HIDDEN else [])]
            lines += [f"## `{module}`", "", "```{eval-rst}", f".. automodule:: {module}", *options, "```", ""]
    return "\n".join(lines)


def _within(name: str) -> Iterator[str]:
    """The module, and those in it."""
    module = importlib.import_module(name)
    yield name
    for found in pkgutil.walk_packages(vars(module).get("__path__", []), f"{name}."):
        if not found.name.rpartition(".")[2].startswith("_"):
            yield found.name


if __name__ == "__main__":
    sys.exit(build())

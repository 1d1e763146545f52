"""Writes docs/recipes.md: the commands, and what `stovetop describe` says of the recipes that are workflows, without
the lines in their files. `tests/test_docs.py` compares it."""

from pathlib import Path

from stovetop.cli import HELP
from stovetop.cli.describe import recipe_as_text
from stovetop.cli.loading import load_recipe

PAGE = Path(__file__).parent / "recipes.md"
WORKFLOWS = ("sl_basic", "rl_basic", "dpo")
ABOVE = """\
# Commands and recipes

This page is written by `python docs/make_recipes.py`.

A run is a directory. `stovetop run` begins it or goes on with it, and wants the whole config each time; `stovetop
resume RUN` takes the config from the run. Another value of a field is taken where it does not change what is learnt;
`describe` lists those fields. `stovetop describe RECIPE --json` has all of this for programs, and `workflow.json` in a
run has the stages that ran.

"""


def page() -> str:
    """All of it."""
    parts = [ABOVE, _block(HELP)]
    for name in WORKFLOWS:
        parts += [f"\n## {name}\n\n", _block(recipe_as_text(load_recipe(name), places=False))]
    return "".join(parts)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Writes docs/recipes.md: the commands, and what `stovetop describe` says of the recipes that are workflows or rows of
them, with their presets, without the lines in their files. `tests/test_docs.py` compares it."""

from pathlib import Path

from stovetop.cli import HELP
from stovetop.cli.describe import recipe_as_text
from stovetop.cli.loading import load_recipe, workflow_names
from stovetop.recipes import RECIPES

PAGE = Path(__file__).parent / "recipes.md"
ABOVE = """\
# Commands and recipes

This page is written by `python docs/make_recipes.py`.

A run is a directory. `stovetop run` begins it or goes on with it, and wants the whole config each time; `stovetop
resume RUN` takes the config from the run. Another value of a field is taken where it does not change what is learnt;
`describe` lists those fields. `stovetop describe RECIPE --json` has all of this for programs, and `workflow.json` in a
run has the stages that ran.

A recipe's own config is the published one, with its model and its data set. A preset is another config to begin with:
`stovetop run RECIPE:PRESET field=value` runs it, with what is given in its place, and `stovetop describe RECIPE:PRESET`
prints it. `small` is a run that needs no network and learns in minutes on two cores. A file of your own has presets
too, FILE.py:PRESET, where it says `PRESETS = {"small": Config(...)}`.

A run keeps its last two checkpoints and the final one; the others are deleted once a new one is on the disk.
`keep_checkpoints=5` keeps more, `keep_checkpoints="2 lowest:test/nll"` also the one at which a metric was lowest
(`highest:` likewise; evaluate where a checkpoint is saved), `keep_checkpoints=all` all of them. What a checkpoint needs
stays with it (policies, the reference), and so does one that another run begins with, is taught or judged by: that run
notes it in `used_by.jsonl`, whose row may be removed by hand. `deleted.jsonl` says what was deleted. Of checkpoints at
a server a run deletes those that it has saved since it was begun or resumed. `stovetop runs --du` says what takes the
room, `stovetop prune RUN` frees it, also of what no row names: saved by hand, or by a process that was killed before it
wrote the row. Of the latter a run that goes on deletes by itself what it has saved again.

"""


def page() -> str:
    """All of it."""
    parts = [ABOVE, _block(HELP)]
    for name in RECIPES:
        if workflow_names(recipe := load_recipe(name)):
            parts += [f"\n## {name}\n\n", _block(recipe_as_text(recipe, places=False))]
    return "".join(parts)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

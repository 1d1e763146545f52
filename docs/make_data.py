"""Writes docs/data.md: which public data sets have a name, where their rows lie, what is held out, and what else a
config can say of its data.

    python docs/make_data.py

The tables are those of `tasks/`. A test fails when the page is not what this writes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stovetop.named_data import Published
from stovetop.tasks import chats, code, comparisons, problems, prompts

PAGE = Path(__file__).parent / "data.md"

INTRODUCTION = """\
# Data

Every recipe takes its data by one field, `dataset`, and what is held out by `test_dataset` or `test_size`:

| `dataset=` | what it is |
|---|---|
| `no_robots` | a public data set by its name, from its hub; it needs the extra `data` |
| `gsm8k:rows.jsonl`, `gsm8k:rows.parquet` | rows of the same form from a file; `test_size` of them are held out |
| `gsm8k:FOLDER` | the folder that the data set was downloaded to, with its splits |
| `sample:gsm8k` | a few rows of the same form, which the package ships: for tests and demonstrations |
| `rows.jsonl`, `rows.parquet`, `FOLDER`, `OWNER/NAME` | rows of the recipe's own form |
| `tulu3[:10000]` | the first 10,000 rows; those of a hub are streamed, and no more is downloaded |
| `no_robots+mine.jsonl` | all rows of both |
| `no_robots*2+tulu3` | two of the one for one of the other, until the rows of one are used up: none is there twice |

A path that exists is taken as it is, also with a `+` in it. Rows are named once: the same file in two places of
`dataset`, or in `dataset` and `test_dataset`, is refused, as are weights that leave nothing of a set. Every epoch has every row once, in an order of its own, and
its last batch may be short; before the first step the run says what that comes to:

```none
10 chats -> 10 datums -> 3 steps an epoch, the last with 2 chats
```

**Rows of no use** (an answer is empty, two answers are the same) are left out of a public data set, counted in the
event `dataset.load`, and logged by reason. In rows of the recipe's own form one such is an error that names its line.

**Data that has changed is noticed.** `data.json` in the run's folder has the SHA-256 of each file that is trained or
tested on, or the commit of a data set of a hub, with the number of rows. A run that goes on reads that commit again; if
a file has other rows now, the run is refused with both counts.

From Python: `stovetop.tasks.chats.load("no_robots")`, and likewise `comparisons`, `problems`, `prompts` and `code`; how
a recipe of your own uses them is said in `stovetop/named_data.py`.

## What has a name

None of these was read from its hub by us: our tests run without a network. Each row says where the form of its rows is
known from, and `tests/tasks/test_named_sets.py` has one of each. Where a hub has another form now, its rows are left
out with the reason; please tell us.
"""

KINDS: Mapping[str, tuple[str, Mapping[str, Published[Any]]]] = {
    "Chats": ("`sl_basic`, `chat_sl`, `sl_loop`", chats.CHATS),
    "Comparisons": ("`dpo`, `rlhf`", comparisons.COMPARISONS),
    "Problems": ("`rl_basic`, `math_rl`", problems.PROBLEMS),
    "Prompts": ("the distillations", prompts.PROMPTS),
    "Programming problems": ("`code_rl`", code.CODE),
}


def page() -> str:
    """The page as it should be."""
    return "\n".join([INTRODUCTION, *(line for kind in KINDS for line in _table(kind))])


def _table(kind: str) -> Iterator[str]:
    recipes, table = KINDS[kind]
    yield f"### {kind}: {recipes}\n"
    yield "| name | on the hub | held out | the form of its rows is known from |"
    yield "|---|---|---|---|"
    for name, entry in table.items():
        sources = ", ".join(dict.fromkeys(f"`{rows.source}`" for rows in entry.train))
        yield f"| `{name}` | {sources} | {_held_out(entry)} | {entry.schema} |"
    yield ""


def _held_out(entry: Published[Any]) -> str:
    if not entry.test:
        return "`test_size`" if entry.test_size is None else f"{entry.test_size}, the first of those shuffled by seed 0"
    other = [rows.source for rows in entry.test if rows.source != entry.train[0].source]
    name = f"`{other[0]}`" if other else f"its split {entry.test[0].split}"
    return name if entry.test_size is None else f"{entry.test_size} of {name}, shuffled by seed 0"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Text and tables for people. Text is as wide as the terminal; a table too, but in a pipe or a file it is as wide as
what is in it, one row a line."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 120  # of text in a file or a pipe
_WIDER_THAN_ANY_ROW = 100_000


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """The columns are those of the first row."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    first, *others = rows[0]
    table = Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    Console(width=None if sys.stdout.isatty() else _WIDER_THAN_ANY_ROW, highlight=False).print(table)


def text_width() -> int:
    """Of lines of text: that of the terminal, and no more than WIDTH."""
    return min(shutil.get_terminal_size().columns, WIDTH) if sys.stdout.isatty() else WIDTH


def filled(text: str, indent: str, width: int) -> list[str]:
    """Lines of at most this width; those that go on are indented by two more. Words are left whole."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )

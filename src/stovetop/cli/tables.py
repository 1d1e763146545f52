"""Text and tables for people. Text is as wide as the terminal; a table too, but in a pipe or a file it is as wide as
what is in it, one row a line."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120  # of text in a file or a pipe
_WIDER_THAN_ANY_ROW = 100_000


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """The columns are those of the first row."""
    _console().print(_table(rows))


def watch_table(rows_now: Callable[[], Sequence[Mapping[str, str]]], every_s: float) -> None:
    """Shows a table and renews it, until it is interrupted; in a pipe or a file it is printed again each time that it
    has changed."""
    from rich.live import Live

    console, shown = _console(), []
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            rows = [dict(row) for row in rows_now()]
            if live is not None:
                live.update(_table(rows), refresh=True)
            elif rows != shown:
                console.print(_table(rows))
            shown = rows
            time.sleep(every_s)


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDER_THAN_ANY_ROW, highlight=False)


def _table(rows: Sequence[Mapping[str, str]]) -> "Table":
    from rich import box
    from rich.markup import escape
    from rich.table import Column, Table

    first, *others = rows[0] if rows else ("nothing yet",)
    table = Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table


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

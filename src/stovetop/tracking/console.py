"""The reader of the stream that writes to a terminal: a table that grows by one row a step, and progress bars below it.

Where the output is not a terminal the rows are the same, without colour, and a bar becomes a plain line now and then.
"""

import io
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from stovetop.tracking.events import METRICS, TEXT, Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_PLAIN_LINE_EVERY_S = 30.0
_HEADER_EVERY_ROWS = 30
_BAR_WIDTH = 24
_IS_QUIET = ContextVar("is quiet", default=False)
_WIDTH_WITHOUT_NUMBERS = 76  # of a bar with its description, count and time


@contextmanager
def quiet() -> Generator[None]:
    """Within, in this task and in those that it makes, no run shows anything: several do not fit on one terminal."""
    token = _IS_QUIET.set(True)
    try:
        yield
    finally:
        _IS_QUIET.reset(token)


def open_console(*, shown: bool) -> "Console":
    """The terminal, or a console that shows nothing."""
    from rich.console import Console

    if not shown or _IS_QUIET.get():
        return Console(quiet=True, file=io.StringIO())
    return Console(width=None if sys.stdout.isatty() else 120)


class Bar:
    """Progress of one piece of work."""

    def __init__(self, completed: int, show: Callable[[int], None]) -> None:
        self._completed = completed
        self._show = show

    def advance(self, num: int = 1) -> None:
        self._completed += num
        self._show(self._completed)


class ConsoleSink:
    """`columns` are the metrics to show, in this order; without them, all that come, as far as the width allows: times
    and counts of steps behind the others."""

    def __init__(
        self, console: "Console", columns: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self.chosen = tuple(columns)
        self._clock = clock
        self._columns: tuple[str, ...] = ()  # those of the last header
        self._rows_since_header = 0
        self._numbers = ""  # the last ones, beside the bar
        self._live: Progress | None = None

    def receive(self, event: Event) -> None:
        if event.name == METRICS:
            self._show_row(event)
        elif event.name == TEXT:
            self._show_text(event.labels["title"], event.labels["text"])

    def log_handler(self) -> logging.Handler:
        """For words: they appear above the bar."""
        from rich.logging import RichHandler

        return RichHandler(console=self._console, show_time=False, show_path=False)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_logger_url(self) -> str | None:
        return None

    @contextmanager
    def progress(self, description: str, *, total: int, completed: int = 0) -> Generator[Bar]:
        """A bar while the body runs. Bars may be nested; an inner one goes when it is done."""
        if not self._console.is_terminal:
            yield Bar(completed, self._plain_lines(description, total, completed))
            return
        outer = self._live
        live = outer or self._start_live()
        task = live.add_task(description, total=total, completed=completed, numbers=self._numbers, rate="")
        began_s = self._clock()

        def show(now: int) -> None:
            rate = _rate((self._clock() - began_s) / max(1, now - completed))
            live.update(task, completed=now, rate=rate)

        try:
            yield Bar(completed, show)
        finally:
            if outer:
                live.remove_task(task)
            else:
                self._live = None
                live.stop()

    def _start_live(self) -> "Progress":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[numbers]}", style="cyan"),
            console=self._console,
            refresh_per_second=2,
        )
        self._live.start()
        return self._live

    def _plain_lines(self, description: str, total: int, began_at: int) -> Callable[[int], None]:
        began_s = last_s = self._clock()

        def show(completed: int) -> None:
            nonlocal last_s
            if self._clock() - last_s >= _PLAIN_LINE_EVERY_S:
                last_s = self._clock()
                step_s = (last_s - began_s) / max(1, completed - began_at)
                left = f"{step_s * (total - completed):.0f} s left"
                self._print(f"{description}: {completed}/{total}  {_rate(step_s)}  {left}  {self._numbers}".rstrip())

        return show

    def _show_row(self, event: Event) -> None:
        seen = (*self._columns, *(key for key in event.values if key not in self._columns))
        columns = self.chosen or tuple(sorted(seen, key=_says_little))
        if columns != self._columns or self._rows_since_header == _HEADER_EVERY_ROWS:
            self._columns = columns
            self._rows_since_header = 0
            self._print(self._fitting(["step", *short_names(columns)]), style="bold")
        cells = [format_number(event.values[key]) if key in event.values else "" for key in columns]
        self._print(self._fitting([str(event.step), *cells]))
        self._rows_since_header += 1
        self._numbers = _beside_bar(columns, event.values, self._console.width - _WIDTH_WITHOUT_NUMBERS)
        if self._live:
            for task in self._live.task_ids:
                self._live.update(task, numbers=self._numbers)

    def _fitting(self, cells: Sequence[str]) -> str:
        """One line of right-aligned cells, those that do not fit left out."""
        widths = [6, *(max(len(name), 9) + 2 for name in short_names(self._columns))]
        line = ""
        for cell, width in zip(cells, widths, strict=True):
            if len(line) + width > self._console.width:
                break
            line += cell.rjust(width)
        return line

    def _show_text(self, title: str, text: str) -> None:
        from rich.markdown import Markdown

        self._console.print()
        self._print(title, style="bold")
        self._console.print(Markdown(text))

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _rate(step_s: float) -> str:
    return f"{step_s:.2g} s each" if step_s < 10 else f"{step_s:.0f} s each"


def format_number(number: float) -> str:
    """Four significant digits, or all of an integer."""
    if isinstance(number, int):
        return str(number)
    if number != 0.0 and not 1e-3 <= abs(number) < 1e5:
        return f"{number:.2e}"
    return f"{number:#.4g}".rstrip(".")


def short_names(names: Sequence[str]) -> list[str]:
    """The last two components of each name, or all of it where two would read alike.

    short_names(["env/all/reward/total", "time/total"]) == ["reward/total", "time/total"]
    """
    short = ["/".join(name.split("/")[-2:]) for name in names]
    return [full if short.count(name) > 1 else name for full, name in zip(names, short, strict=True)]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Numbers to the right, words to the left."""
    cells = [[value if isinstance(value, str) else format_number(value) for value in row] for row in rows]
    is_number = [all(not isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    lines = [columns, ["---:" if number else "---" for number in is_number], *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _says_little(name: str) -> bool:
    """How a run goes is told by other numbers than these."""
    return name.startswith(("time/", "progress", "rollout_errors/"))


def _beside_bar(columns: Sequence[str], values: Mapping[str, float], width: int) -> str:
    """The first numbers, as many as fit."""
    line = ""
    for name, short in zip(columns, short_names(columns), strict=True):
        if name in values:
            longer = f"{line}  {short} {format_number(values[name])}".lstrip()
            if len(longer) > width:
                break
            line = longer
    return line

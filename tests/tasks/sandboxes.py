"""The sandbox that tests share; they are skipped where none can be made, with the reason. And which processes run."""

from contextlib import suppress
from functools import cache
from pathlib import Path

from stovetop.tasks.sandbox import BubblewrapSandbox, find_sandbox


@cache
def the_sandbox() -> BubblewrapSandbox:
    """Tried out once a process."""
    return find_sandbox()


def processes_with(mark: str) -> list[Path]:
    """The folders in /proc of those whose command line has the mark; its arguments have a "\\0" between them."""
    found: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found += [folder] if mark.encode() in (folder / "cmdline").read_bytes() else []
    return found

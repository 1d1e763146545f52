"""The sandbox that tests share; they are skipped where none can be made, with the reason."""

from functools import cache

from stovetop.tasks.sandbox import BubblewrapSandbox, find_sandbox


@cache
def the_sandbox() -> BubblewrapSandbox:
    """Tried out once a process."""
    return find_sandbox()

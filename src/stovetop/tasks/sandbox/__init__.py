"""Where programs run that a policy wrote: with no network, no files but their own, and limits on everything. `types`
says what a sandbox is, a small Protocol, for one of your own; `bubblewrap` makes one out of Linux namespaces.

    sandbox = find_sandbox()
    sandbox.run({"main.py": b"print(6 * 7)"}, ["python", "main.py"]).stdout
"""

from stovetop.tasks.sandbox.bubblewrap import BubblewrapSandbox, find_sandbox
from stovetop.tasks.sandbox.types import ANSWER_FD, DEFAULT_LIMITS, Completed, Ending, Limits, Sandbox

__all__ = [
    "ANSWER_FD",
    "DEFAULT_LIMITS",
    "BubblewrapSandbox",
    "Completed",
    "Ending",
    "Limits",
    "Sandbox",
    "find_sandbox",
]

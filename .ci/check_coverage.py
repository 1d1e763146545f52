"""Fails where the tests leave out too much: a package below the share of lines that is wanted of it, or a public
function of it of which no line is run. Reads what `pytest --cov --cov-report=json:FILE` writes.

    python .ci/check_coverage.py FILE
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("rl", "preference", "distillation", "kitchen")
LEAST_PERCENT = 90.0


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Every one, in a line."""
    for package in PACKAGES:
        files = {path: file for path, file in report["files"].items() if f"stovetop/{package}/" in path}
        num_lines = sum(file["summary"]["num_statements"] for file in files.values())
        num_run = sum(file["summary"]["covered_lines"] for file in files.values())
        if not num_lines:
            yield f"nothing of {package}/ was measured"
        elif num_run / num_lines * 100 < LEAST_PERCENT:
            yield f"{num_run / num_lines:.1%} of the lines of {package}/ are run by tests, less than {LEAST_PERCENT}%"
        for path, file in files.items():
            for name, function in file["functions"].items():
                summary = function["summary"]
                if is_public(name) and summary["num_statements"] and not summary["covered_lines"]:
                    yield f"no test runs a line of {name} in {path}"


def is_public(name: str) -> bool:
    """Of a function or method, `Class.method`; "" is what stands outside of functions."""
    parts = name.split(".")
    return name != "" and not any(part.startswith("_") and not part.endswith("__") for part in parts)


if __name__ == "__main__":
    found = list(problems(json.loads(Path(sys.argv[1]).read_text())))
    sys.exit("\n".join(found) if found else None)

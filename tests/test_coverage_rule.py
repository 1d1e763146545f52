"""What .ci/run wants of the tests: see .ci/check_coverage.py."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM = Path(__file__).parent.parent / ".ci" / "check_coverage.py"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_coverage", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(**covered_lines: int) -> dict[str, Any]:
    """One file of a hundred lines in each package, and of each name a function of ten."""
    functions = {
        name.replace("__of__", "."): {"summary": {"num_statements": 10, "covered_lines": lines}}
        for name, lines in covered_lines.items()
    }
    file = {"summary": {"num_statements": 100, "covered_lines": 95}, "functions": functions}
    return {"files": {f"src/stovetop/{package}/a.py": file for package in program().PACKAGES}}


def test_a_public_function_that_no_test_runs_and_a_package_below_the_share_are_named() -> None:
    problems = program().problems
    assert list(problems(report(used=1, _own=0, Class__of__method=10, _Class__of__method=0))) == []
    unused = list(problems(report(unused=0, Class__of____call__=0)))
    assert len(unused) == 8
    assert unused[:2] == [
        "no test runs a line of unused in src/stovetop/rl/a.py",
        "no test runs a line of Class.__call__ in src/stovetop/rl/a.py",
    ]
    low = report()
    low["files"]["src/stovetop/rl/a.py"] = {"summary": {"num_statements": 100, "covered_lines": 89}, "functions": {}}
    del low["files"]["src/stovetop/kitchen/a.py"]
    assert list(problems(low)) == [
        "89.0% of the lines of rl/ are run by tests, less than 90.0%",
        "nothing of kitchen/ was measured",
    ]

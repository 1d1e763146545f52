"""The benchmark for a card, on a CPU with tiny shapes: a lent card must not be the first place where it runs."""

from pathlib import Path

import pytest

from processes import run_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PROGRAM = """
import runpy, sys
sys.modules |= dict.fromkeys({"pydantic", "tyro", "rich", "matplotlib"})  # a bare machine has none of them
sys.argv = ["gpu.py", "--smoke"]
runpy.run_path(%r, run_name="__main__")
"""


@pytest.mark.slow
def test_every_line_is_filled_on_a_machine_with_torch_and_transformers_alone() -> None:
    import peft  # noqa: F401  what the benchmark compares with, in its own process

    done = run_python("-c", PROGRAM % str(SCRIPT))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("tiny  ")]
    assert len(lines) == 7
    measured = [line for line in lines if "tokens/s" in line]
    assert all(line.split()[-1].replace(".", "").isdigit() for line in measured)  # the ratio, and no note behind it

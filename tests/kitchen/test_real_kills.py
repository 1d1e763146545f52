"""Processes that are killed while a workflow runs in them, and runs on the engine of this machine: once they go on,
they are the run that would have been."""

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kitchen import local_modes, modes
from kitchen.modes import Killed, Mode, Outcome, kill_at_boundaries, outcome
from processes import LIMIT_S, started

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from kitchen.{module} import MODES

mode = MODES[sys.argv[1]]
config = mode.config(Path(sys.argv[2]))
print("under way", flush=True)
mode.train(config, seed=int(sys.argv[3]))
time.sleep(60)
"""


@dataclass(frozen=True)
class Whole:
    """A run that nothing stopped, and how long its steps took."""

    module: str
    name: str
    mode: Mode
    outcome: Outcome
    step_s: float

    @classmethod
    def of(cls, module: str, name: str, mode: Mode, folder: Path) -> "Whole":
        folder.mkdir(exist_ok=True)
        config = mode.config(folder)
        began_s = time.monotonic()
        mode.train(config)
        seconds, found = time.monotonic() - began_s, outcome(config.log_path)
        return cls(module, name, mode, found, seconds / len(found.rows))

    def assert_same_after_a_kill(self, number: int, folder: Path) -> None:
        """Killed a moment after one of its rows, and perhaps once more; then it goes on in this process."""
        folder.mkdir(exist_ok=True)
        generator = random.Random(f"{self.name} {number}")
        program = PROGRAM.format(tests=str(Path(__file__).parents[1]), module=self.module)
        for _ in range(generator.choice([1, 1, 2])):
            num_rows, seconds = generator.randrange(len(self.outcome.rows)), generator.uniform(0, self.step_s)
            with started("-c", program, self.name, str(folder), str(number)) as (process, _):
                while num_rows_in(folder / "run") < num_rows and process.poll() is None:
                    time.sleep(0.001)
                time.sleep(seconds)
                process.kill()
                errors = process.communicate(timeout=LIMIT_S)[1]
            assert process.returncode == -signal.SIGKILL, errors
        config = self.mode.config(folder)
        self.mode.train(config)
        assert outcome(config.log_path) == self.outcome


def num_rows_in(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module", params=modes.MODES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole.of("modes", request.param, modes.MODES[request.param], tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_process_that_is_killed_leaves_the_run_that_would_have_been(
    whole: Whole, number: int, tmp_path: Path
) -> None:
    """Two to four seconds: one or two interpreters are started."""
    whole.assert_same_after_a_kill(number, tmp_path)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_samples_ahead_leaves_the_run_that_would_have_been(tmp_path: Path) -> None:
    """The one of its kind that always runs."""
    name = "two steps ahead"
    whole = Whole.of("modes", name, modes.MODES[name], tmp_path / "whole")
    whole.assert_same_after_a_kill(7, tmp_path / "killed")


# ---- the engine of this machine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=local_modes.MODES)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return kill_at_boundaries(local_modes.MODES[request.param], tmp_path_factory.mktemp("killed"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_on_this_machine_a_run_killed_at_the_boundary_of_a_stage_is_the_run_that_would_have_been(
    killed: Killed, part: int
) -> None:
    """Fifteen seconds for each workflow: each copy loads the model."""
    copies = random.Random(0).sample(killed.copies, 36)
    for copy in copies[part::12]:
        killed.assert_same_after(copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", local_modes.MODES)
def test_on_this_machine_a_process_that_is_killed_leaves_the_run_that_would_have_been(
    name: str, tmp_path: Path
) -> None:
    """Half a minute on busy cores: interpreters that load torch are started."""
    whole = Whole.of("local_modes", name, local_modes.MODES[name], tmp_path / "whole")
    for number in range(2):
        whole.assert_same_after_a_kill(number, tmp_path / f"killed-{number}")

"""The thread that owns an engine, at its end."""

import subprocess
import sys
import threading
from typing import Any

import pytest

from stovetop.backends.engine_thread import EngineThread
from stovetop.engine import ops
from stovetop.errors import InvalidRequest


class Endless:
    """An engine that is never done."""

    def __init__(self) -> None:
        self.stepping = threading.Event()
        self.num_begun = self.num_ended = 0

    idle = False

    def submit(self, op: ops.Op) -> Any:
        raise AssertionError("nobody asks")

    def step(self) -> list[ops.Finished]:
        self.num_begun += 1
        self.stepping.set()
        threading.Event().wait(0.05)
        self.num_ended += 1
        return []


def test_when_the_interpreter_ends_the_step_that_runs_is_finished_and_no_other_begun() -> None:
    engine: Any = Endless()
    thread = EngineThread(lambda: engine, "endless")
    engine.stepping.wait()
    thread._stop_at_exit()  # pyright: ignore[reportPrivateUsage]  the interpreter calls it
    assert not thread._thread.is_alive()  # pyright: ignore[reportPrivateUsage]
    assert engine.num_begun == engine.num_ended > 0
    with pytest.raises(InvalidRequest, match="closed"):  # and nobody who asks now waits for ever
        thread.call("sample", object())  # pyright: ignore[reportArgumentType]  it gets no further


def test_a_script_that_ends_amid_work_ends_with_its_own_exit_code() -> None:
    script = (
        "import stovetop as st; client = st.ServiceClient('recording').create_lora_training_client('m').result()\n"
        "datum = st.Datum(st.ModelInput.from_ints([1, 2]), {'target_tokens': [2, 3], 'weights': [1.0, 1.0]})\n"
        "for _ in range(3000): client.forward_backward([datum] * 50, 'cross_entropy')\n"
        "raise SystemExit(7)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")

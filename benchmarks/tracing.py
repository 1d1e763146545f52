"""What it costs to know where the time goes: spans, the times of calls, and a whole run with and without a trace.

    python benchmarks/tracing.py [STEPS]

The run is on the recording backend, whose model takes no time: what is measured is the runner, the rollouts and the
files. Of a real model, whose steps take longer, the share is smaller still.
"""

import asyncio
import contextlib
import io
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stovetop.backends import recording
from stovetop.recipes import rl_basic
from stovetop.tracking.trace import scope_span, tracing
from stovetop.tracking.waiting import waiting_for

REPEATS, SPANS = 7, 20_000
LATENCY_S = 0.02  # of each call, about as long as a step of a tiny model takes


def seconds_of_a_span(waits: bool) -> float:
    """Of one, in a row of many, in time of the processor."""
    began_s = time.process_time()
    for number in range(SPANS):
        if waits:
            with waiting_for("group %s of %s", number, SPANS):
                pass
        else:
            with scope_span("a"):
                pass
    return (time.process_time() - began_s) / SPANS


class Took(NamedTuple):
    """A step, as the mean of a run."""

    wall_s: float
    processor_s: float


def step_of(folder: Path, num_steps: int, *, enable_trace: bool) -> Took:
    """Of a run of so many."""
    config = replace(
        rl_basic.PRESETS["small"], log_path=str(folder), max_steps=num_steps, enable_trace=enable_trace, eval_every=0
    )
    with recording.open_service(storage=folder, latency_s=LATENCY_S) as service:
        began = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            asyncio.run(rl_basic.train(config, service))
        return Took((time.perf_counter() - began[0]) / num_steps, (time.process_time() - began[1]) / num_steps)


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(
        f"off: scope_span {1e9 * seconds_of_a_span(False):.0f} ns, waiting_for {1e9 * seconds_of_a_span(True):.0f} ns"
    )
    with tempfile.TemporaryDirectory() as folder:
        with tracing(Path(folder)):
            print(f"on:  scope_span {1e6 * seconds_of_a_span(False):.1f} us, ", end="")
            print(f"waiting_for {1e6 * seconds_of_a_span(True):.1f} us")
        times: dict[bool, list[Took]] = {False: [], True: []}
        for number in range(REPEATS):  # in turns, so that what else the machine does meets both
            for enable_trace in (False, True):
                path = Path(folder) / f"{number}_{enable_trace}"
                times[enable_trace].append(step_of(path, num_steps, enable_trace=enable_trace))
    off, on = (Took(*map(statistics.median, zip(*times[each], strict=True))) for each in (False, True))
    print(
        f"a step of rl_basic:small: {1e3 * off.wall_s:.1f} ms without a trace, {1e3 * on.wall_s:.1f} ms with, of which"
    )
    print(f"of the processor {1e3 * off.processor_s:.1f} ms without, {1e3 * on.processor_s:.1f} ms with: ", end="")
    print(f"{(on.processor_s - off.processor_s) / off.wall_s:+.1%} of a step")


if __name__ == "__main__":
    main()

"""What another busy program costs: our speed beside it, by our speed alone.

    python benchmarks/busy.py                  # about five minutes on two cores
    python benchmarks/busy.py --fast           # without bit-equal sampler and trainer

Samples of eight rows and training steps of a few hundred tokens, with as many threads as torch takes: kept
(`threads=N`), and left to the engine (`threads=None`); alone, then beside one process that computes all the time on the
first processor. In the deterministic mode training keeps its number of threads. Wants a machine on which nothing else
runs.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

import torch
from rich.console import Console
from rich.table import Table

import stovetop as st

ROWS, TOKENS, LENGTHS = 8, 32, (30, 60, 90, 120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--fast", action="store_true", help="not in the deterministic mode")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    most = torch.get_num_threads()
    table = Table("threads", "work", "alone, tokens/s", "beside another", "share that is left")
    for says, threads in ((f"{most}, kept", most), ("left to the engine", None)):
        alone, beside = (speeds(options, threads, with_another=busy) for busy in (False, True))
        for work in alone:
            share = beside[work] / alone[work]
            table.add_row(says, work, f"{alone[work]:.1f}", f"{beside[work]:.1f}", f"{share:.2f}")
    Console(width=120).print(table)


def speeds(options: argparse.Namespace, threads: int | None, *, with_another: bool) -> dict[str, float]:
    """Tokens per second of each kind of work, the median of the rounds. The other program begins after a warm-up, and
    the first round, in which the engine may not have noticed it, does not count."""
    rng = random.Random(0)
    drawn = lambda number: [rng.randrange(1000, 40000) for _ in range(number)]  # noqa: E731
    settings = {"dtype": options.dtype, "threads": threads, "deterministic": False if options.fast else None}
    with (
        tempfile.TemporaryDirectory() as storage,
        st.ServiceClient("local", storage=storage, **settings) as service,
    ):
        trainer = service.create_lora_training_client(options.model, rank=32, seed=0, train_unembed=False).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        prompts = [st.ModelInput.from_ints(drawn(32)) for _ in range(ROWS)]
        data = [datum(drawn(length + 1)) for length in LENGTHS]

        def sample() -> None:
            params = st.SamplingParams(max_tokens=TOKENS, stop=[], seed=0)
            for result in [sampler.sample(prompt, 1, params) for prompt in prompts]:
                result.result()

        def train() -> None:
            trainer.forward_backward(data, "cross_entropy").result()

        work: dict[str, tuple[Callable[[], None], int]] = {
            "sample": (sample, ROWS * TOKENS),
            "train": (train, sum(LENGTHS)),
        }
        for run, _ in work.values():
            run()
        with another() if with_another else nullcontext():
            return {
                name: statistics.median([num_tokens / seconds(run) for _ in range(options.rounds + 1)][1:])
                for name, (run, num_tokens) in work.items()
            }


def datum(tokens: list[int]) -> st.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return st.Datum(st.ModelInput.from_ints(tokens[:-1]), inputs)


def seconds(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


@contextmanager
def another() -> Generator[None]:
    """A program that is busy on the first processor."""
    first = min(os.sched_getaffinity(0))
    program = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{first}}})\nwhile True: pass"]
    )
    try:
        yield
    finally:
        program.kill()
        program.wait()


if __name__ == "__main__":
    main()

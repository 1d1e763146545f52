"""What it costs to turn a batch of rollouts into data to train on: advantages, merging of turns, datums.

    python benchmarks/rl_data.py --json rl_data.json

The peer is `np.asarray` over the same numbers (the tokens, logprobs, advantages and mask of every datum, each a list):
what nobody gets around who has lists and needs arrays. Asked for are at most twice its time, at most 4.5 times as long
for four times the turns, and memory in proportion to the tokens. Every observation repeats the whole episode before it,
so what there is to read grows with the square of the turns. Times are CPU seconds of one process, the least of several.
"""

import argparse
import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from stovetop.completers import TokensWithLogprobs
from stovetop.rl.advantages import Advantage, compute_advantages
from stovetop.rl.data_processing import assemble_training_data
from stovetop.rl.types import Metrics, Trajectory, TrajectoryGroup, Transition
from stovetop.types import ModelInput

GROUP_SIZE = 16
NUM_OBSERVED = 16  # tokens of a turn that the environment adds
NUM_SAMPLED = 48  # tokens of a turn that the policy adds
NUM_REPEATS = 7


@dataclass(frozen=True)
class Row:
    groups: int
    turns: int
    tokens: int  # of all datums
    peer_s: float
    stovetop_s: float
    times_peer: float
    peak_bytes_per_token: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quarter = measure(arguments.groups // 4, turns=4)
    whole = measure(arguments.groups, turns=4)
    longer = measure(arguments.groups // 4, turns=16)
    held = {
        "at most 2 times np.asarray": whole.times_peer <= 2,
        "4 times the turns: at most 4.5 times as long": longer.stovetop_s <= 4.5 * quarter.stovetop_s,
        "4 times the groups: at most 4.5 times as long": whole.stovetop_s <= 4.5 * quarter.stovetop_s,
        "memory linear, within a tenth": max(whole.peak_bytes_per_token, longer.peak_bytes_per_token)
        <= 1.1 * quarter.peak_bytes_per_token,
    }
    table = Table("groups", "turns", "tokens", "np.asarray, s", "stovetop, s", "times", "peak bytes a token")
    for row in (quarter, whole, longer):
        measured = f"{row.peer_s:.3f}", f"{row.stovetop_s:.3f}", f"{row.times_peer:.2f}"
        table.add_row(str(row.groups), str(row.turns), f"{row.tokens:,}", *measured, f"{row.peak_bytes_per_token:.0f}")
    console = Console()
    console.print(table)
    for what, holds in held.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {what}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": list(map(asdict, (quarter, whole, longer))), "held": held}))
    return 0 if all(held.values()) else 1


def measure(num_groups: int, *, turns: int) -> Row:
    groups_P = make_groups(num_groups, turns)
    lists = [
        numbers
        for group, advantages_G in zip(groups_P, compute_advantages(groups_P), strict=True)
        for trajectory, advantage in zip(group.trajectories_G, advantages_G, strict=True)
        for numbers in lists_of(trajectory, advantage)
    ]
    num_tokens = sum(map(len, lists)) // 4
    peer_s, stovetop_s = fastest(
        lambda: [np.asarray(numbers) for numbers in lists],
        lambda: assemble_training_data(groups_P, compute_advantages(groups_P)),
    )
    tracemalloc.start()
    kept = assemble_training_data(groups_P, compute_advantages(groups_P))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return Row(num_groups, turns, num_tokens, peer_s, stovetop_s, stovetop_s / peer_s, peak_bytes / num_tokens)


def lists_of(
    trajectory: Trajectory, advantage: Advantage
) -> tuple[list[int], list[float], list[Advantage], list[float]]:
    """Tokens, logprobs, advantages and mask of an episode whose observations extend each other."""
    tokens: list[int] = []
    logprobs: list[float] = []
    advantages: list[Advantage] = []
    mask: list[float] = []
    for turn in trajectory.transitions:
        observed = turn.ob.to_ints()[len(tokens) :]
        tokens += [*observed, *turn.ac.tokens]
        logprobs += [*[0.0] * len(observed), *turn.ac.logprobs]
        advantages += [*[0.0] * len(observed), *[advantage] * len(turn.ac.tokens)]
        mask += [*[0.0] * len(observed), *[1.0] * len(turn.ac.tokens)]
    return tokens, logprobs, advantages, mask


def fastest(*works: Callable[[], object]) -> list[float]:
    """The least time of each. They take turns, so that what else the machine does slows all of them alike."""
    least_s = [math.inf] * len(works)
    for _ in range(NUM_REPEATS):
        for index, work in enumerate(works):
            gc.collect()
            began_s = time.process_time()
            work()
            least_s[index] = min(least_s[index], time.process_time() - began_s)
    return least_s


def make_groups(num_groups: int, num_turns: int) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(0)
    no_metrics: list[Metrics] = [{}] * GROUP_SIZE
    return [
        TrajectoryGroup([make_trajectory(rng, num_turns) for _ in range(GROUP_SIZE)], [0.0] * GROUP_SIZE, no_metrics)
        for _ in range(num_groups)
    ]


def make_trajectory(rng: np.random.Generator, num_turns: int) -> Trajectory:
    """Each observation is the episode so far, and more."""
    reward = float(rng.integers(2))
    shown: list[int] = []
    transitions: list[Transition] = []
    for turn in range(1, num_turns + 1):
        shown += rng.integers(1000, 100_000, NUM_OBSERVED).tolist()
        tokens: list[int] = rng.integers(1000, 100_000, NUM_SAMPLED).tolist()
        action = TokensWithLogprobs(tokens, (-rng.random(NUM_SAMPLED)).tolist())
        last = turn == num_turns
        transitions.append(Transition(ModelInput.from_ints(shown), action, reward if last else 0.0, last))
        shown += tokens
    return Trajectory(transitions, ModelInput.empty())


if __name__ == "__main__":
    raise SystemExit(main())

"""What every side of compare.py is given, and how its cost is taken. No side imports another; all import this."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

RANK, ALPHA = 32, 32
LEARNING_RATE = 1e-4
GROUP_SIZE = 8  # samples a prompt
DECODED_ROWS = (1, 8, 32)  # sequences that are drawn at once


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    rounds: int
    train_sequences: int
    train_lengths: tuple[int, int]  # shortest and longest
    equal_sequences: int
    equal_tokens: int  # prompt and continuation, each
    groups: int  # of the sampling measure
    grpo_groups: int  # fewer: the other side keeps logits and activations of every padded token
    prompt_tokens: int
    ragged_lengths: tuple[int, int]  # shortest and longest of the samples of a group
    batch_tokens: tuple[int, ...]  # sizes at which gap and time per token are taken
    adapter_sequences: int
    adapter_tokens: int
    long_prompts: tuple[int, ...]  # lengths of prompts with four answers each


SIZES = {
    "full": Size(3, 16, (30, 220), 32, 32, 8, 2, 200, (8, 128), (1024, 4096, 16384), 256, 24, (2048, 4096)),
    "quick": Size(1, 8, (30, 220), 32, 8, 1, 1, 100, (4, 32), (512, 2048), 32, 12, (1024,)),
    "smoke": Size(1, 3, (5, 9), 2, 3, 1, 1, 9, (2, 4), (128, 256), 32, 2, (64,)),
}


@dataclass(frozen=True, slots=True)
class Setting:
    model: Path
    dtype: str
    threads: int
    size: Size
    gguf: Path | None = None  # the same model, for llama.cpp

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def train_data(self, vocab_size: int) -> list[list[int]]:
        """Token ids of ragged sequences, in no order of length."""
        rng = self.rng()
        low, high = self.size.train_lengths
        lengths = np.linspace(low, high, self.size.train_sequences).astype(int)
        return [rng.integers(0, vocab_size, length).tolist() for length in rng.permutation(lengths)]

    def equal_prompts(self, vocab_size: int) -> list[list[int]]:
        return self.rng().integers(0, vocab_size, (self.size.equal_sequences, self.size.equal_tokens)).tolist()

    def group_lengths(self) -> list[int]:
        """Tokens to draw for each sample of a group."""
        low, high = self.size.ragged_lengths
        return self.rng().permutation(np.linspace(low, high, GROUP_SIZE).astype(int)).tolist()

    def prompts(self, encode: Callable[[str], list[int]], num_groups: int) -> list[str]:
        """Texts of about `prompt_tokens` tokens, one a group."""
        rng = self.rng()
        words = ["the", "sum", "of", "two", "numbers", "is", "a", "number", "and", "so", "on", "when", "you", "add"]
        texts = []
        for _ in range(num_groups):
            text = "Say"
            while len(encode(text)) < self.size.prompt_tokens:
                text += f" {rng.choice(words)}"
            texts.append(text)
        return texts


def reward(text: str) -> float:
    """Any cheap function will do."""
    return text.count("e") / (len(text) + 1)


Numbers = dict[str, float]


class Cost(NamedTuple):
    """Of the measured part alone. Tokens are trained or drawn ones; padding does not count."""

    seconds: float
    tokens_per_s: float
    peak_bytes: int  # what the process had at most, above what it held before


class Stopwatch:
    """From here to `stop`. The model is loaded and warm. Memory is the resident set, as Linux counts it."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self._before = _resident("VmRSS")
        self._began_s = time.perf_counter()

    def stop(self, num_tokens: int) -> Cost:
        seconds = time.perf_counter() - self._began_s
        return Cost(seconds, num_tokens / seconds, max(0, _resident("VmHWM") - self._before))


def measured(run: Callable[[], object], num_tokens: int) -> Cost:
    watch = Stopwatch()
    run()
    return watch.stop(num_tokens)


def decoding_speed(draw: Callable[[int], object], num_rows: int, num_tokens: int) -> float:
    """Tokens per second behind prompts that do not count: `draw` draws so many tokens for each row, and from its time
    for that many and two more its time for two is taken, each the shorter of two tries."""
    short_s, long_s = (
        min(measured(partial(draw, length), 1).seconds for _ in range(2)) for length in (2, 2 + num_tokens)
    )
    return num_rows * num_tokens / (long_s - short_s)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def num_trained(sequences: Sequence[Sequence[int]]) -> int:
    """Each token but the first is predicted."""
    return sum(len(sequence) - 1 for sequence in sequences)

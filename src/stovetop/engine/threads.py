# pyright: basic
"""How many threads to compute with, found by trying: more are not always faster, on a busy machine or where two
processors share one core.
"""

import time

import torch

from stovetop.engine.machine import available_cores

TOKENS, HIDDEN, INTERMEDIATE = 256, 576, 1536  # the linears of a small model: what most of the time goes into


def fastest_threads(seconds: float = 2.0) -> int:
    """The number of threads, a power of two or all there are, that did the same work most often. Torch keeps it."""
    available = available_cores()
    candidates = sorted({available, *(2**power for power in range(available.bit_length()) if 2**power <= available)})
    rates = {threads: _rate(threads, seconds / len(candidates)) for threads in candidates}
    fastest = max(rates, key=lambda threads: rates[threads])
    torch.set_num_threads(fastest)
    return fastest


def _rate(threads: int, seconds: float) -> float:
    """Rounds of work per second."""
    torch.set_num_threads(threads)
    x_TH = torch.randn(TOKENS, HIDDEN)
    up_IH, down_HI = torch.randn(INTERMEDIATE, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)
    rounds, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or rounds == 0:
        torch.nn.functional.linear(torch.nn.functional.linear(x_TH, up_IH), down_HI)
        rounds += 1
    return rounds / spent

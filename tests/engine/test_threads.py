"""The number of threads is found by trying."""

import pytest
import torch

from stovetop.engine import machine


def test_the_fastest_number_is_chosen_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    monkeypatch.setattr(machine, "_rate", lambda number, seconds: {1: 10.0, 2: 17.0, 4: 9.0}[number])
    try:
        assert machine.fastest_threads(seconds=1.0) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_trial_counts_work_per_second_on_so_many_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert machine._rate(1, 0.01) > 0  # pyright: ignore[reportPrivateUsage]  the measuring itself
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)

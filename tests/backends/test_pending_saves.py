"""Paths that are known before anything is there."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stovetop.backends.pending_saves import PendingSaves
from stovetop.errors import CheckpointNotFound, RunNotFound
from stovetop.futures import pending
from stovetop.saved_states import SavedState
from stovetop.types import LoraConfig


def state(rank: int) -> SavedState:
    return SavedState("base", "fingerprint", LoraConfig(rank=rank), with_optimizer=True)


def added(saves: PendingSaves, path: Path, rank: int = 4) -> "Future[Any]":
    future = pending()
    saves.add(path, state(rank), future)
    return future


def test_a_path_is_described_by_the_last_save_that_was_accepted_and_then_by_what_is_there(tmp_path: Path) -> None:
    saves = PendingSaves()
    first, second = added(saves, tmp_path / "a", 4), added(saves, tmp_path / "a", 5)
    assert saves.describe(tmp_path / "a") == state(5)
    assert saves.describe(tmp_path / "b" / ".." / "a") == state(5)
    second.set_exception(OSError("disk full"))
    assert saves.describe(tmp_path / "a") == state(4)
    first.set_result(None)
    with pytest.raises(CheckpointNotFound):
        saves.describe(tmp_path / "a")


def test_saves_are_found_by_any_folder_that_they_go_into(tmp_path: Path) -> None:
    saves = PendingSaves()
    a, b = added(saves, tmp_path / "run" / "a"), added(saves, tmp_path / "run2" / "b")
    assert saves.under(tmp_path / "run") == saves.under(tmp_path / "run" / "a") == [a]
    assert saves.under(tmp_path) == [a, b]
    assert saves.under(tmp_path / "run" / "a" / "deeper") == []


def test_what_is_read_waits_for_the_saves_that_were_accepted_before(tmp_path: Path) -> None:
    saves = PendingSaves()
    assert saves.then(tmp_path, lambda: "at once").result(0) == "at once"
    first, second = added(saves, tmp_path / "a"), added(saves, tmp_path / "b")
    calls: list[int] = []
    read = saves.then(tmp_path, lambda: calls.append(1) or len(calls))
    later = added(saves, tmp_path / "c")
    first.set_result(None)
    assert not read.done()
    second.set_exception(OSError("disk full"))
    assert read.result(0) == 1
    assert not later.done()


def test_what_reading_raises_comes_from_the_call_or_where_it_had_to_wait_from_the_future(tmp_path: Path) -> None:
    def read() -> None:
        raise RunNotFound("no run")

    saves = PendingSaves()
    with pytest.raises(RunNotFound):
        saves.then(tmp_path, read)
    save = added(saves, tmp_path / "a")
    future = saves.then(tmp_path, read)
    save.set_result(None)
    with pytest.raises(RunNotFound):
        future.result(0)

import errno
import os
import signal

import pytest

from stovetop.errors import WorkerDied
from stovetop.rl.forked import in_a_copy

SEEN: list[int] = []


def is_above(value: int, limit: int) -> bool:
    SEEN.append(value)
    return value > limit


def raises() -> bool:
    raise ValueError("no such number")


def dies() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


def test_a_question_is_answered_by_a_copy_and_changes_nothing_here() -> None:
    assert [in_a_copy(is_above, value, 3) for value in (4, 2)] == [True, False]
    assert SEEN == []


def test_what_is_raised_in_the_copy_is_said_here() -> None:
    with pytest.raises(RuntimeError, match="ValueError: no such number"):
        in_a_copy(raises)


def test_a_copy_that_ends_without_an_answer_is_told_from_one_that_answers() -> None:
    num_files = len(os.listdir("/dev/fd"))
    with pytest.raises(WorkerDied, match="dies"):
        in_a_copy(dies)
    assert len(os.listdir("/dev/fd")) == num_files


def test_no_file_stays_open_where_no_copy_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> int:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(os, "fork", refuses)
    num_files = len(os.listdir("/dev/fd"))
    with pytest.raises(BlockingIOError, match="too many processes"):
        in_a_copy(is_above, 4, 3)
    assert len(os.listdir("/dev/fd")) == num_files

"""The thread that writes snapshots: in order, one at a time, each answered once."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from stovetop.backends.callbacks import Callbacks
from stovetop.backends.endings import Crew
from stovetop.backends.snapshot_writer import MAX_WAITING, SnapshotWriter
from stovetop.errors import ServiceClosed

LIMIT_S = 30


class Slow:
    """A snapshot that is written when it may be, by `begun` and `go`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.error = error
        self.thread: str | None = None

    def write(self) -> None:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error


def new_writer(wake: Callable[[], object] = lambda: None) -> SnapshotWriter:
    crew = Crew()
    return SnapshotWriter("of this test", crew, Callbacks(crew).add, wake)


@pytest.fixture
def writer() -> Iterator[SnapshotWriter]:
    made = new_writer()
    yield made
    made.close()


def put(writer: SnapshotWriter, *snapshots: Slow) -> "list[Future[Any]]":
    """Each is answered by a future that holds what `done` was told."""
    answers: list[Future[Any]] = []
    for snapshot in snapshots:
        answer: Future[Any] = Future()
        writer.put(snapshot, answer.set_result)
        answers.append(answer)
    return answers


def free(*snapshots: Slow) -> None:
    for snapshot in snapshots:
        snapshot.go.set()


def test_snapshots_are_written_one_after_the_other_in_a_thread_of_their_own(writer: SnapshotWriter) -> None:
    first, second = Slow(), Slow()
    answers = put(writer, first, second)
    assert first.begun.wait(LIMIT_S)
    free(second)
    assert not second.begun.is_set()
    assert not answers[0].done()
    free(first)
    assert [answer.result(LIMIT_S) for answer in answers] == [None, None]
    assert first.thread == second.thread == "writer of this test"


def test_there_is_room_for_two_that_wait_besides_the_one_that_is_written(writer: SnapshotWriter) -> None:
    snapshots = [Slow() for _ in range(MAX_WAITING + 1)]
    assert writer.idle
    answers = []
    for snapshot in snapshots:
        assert writer.has_room
        answers += put(writer, snapshot)
    assert not writer.has_room
    free(snapshots[0])
    answers[0].result(LIMIT_S)
    assert writer.has_room
    assert not writer.idle
    free(*snapshots)
    answers[-1].result(LIMIT_S)
    assert writer.idle


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_what_a_write_raises_is_told_to_its_own_caller_and_the_next_is_written(
    writer: SnapshotWriter, error: BaseException
) -> None:
    failing, fine = Slow(error), Slow()
    free(failing, fine)
    answers = put(writer, failing, fine)
    assert [answer.result(LIMIT_S) for answer in answers] == [error, None]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_what_a_callback_raises_is_logged_and_the_next_is_written(
    writer: SnapshotWriter, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def done(_: BaseException | None) -> None:
        raise error

    first, second = Slow(), Slow()
    free(first, second)
    with caplog.at_level(logging.ERROR):
        writer.put(first, done)
        (answer,) = put(writer, second)
        assert answer.result(LIMIT_S) is None
    assert "after a save raised" in caplog.text


def test_close_writes_what_is_there() -> None:
    writer, snapshots = new_writer(), [Slow(), Slow()]
    answers = put(writer, *snapshots)
    threading.Timer(0.02, free, snapshots).start()
    writer.close()
    assert [answer.result(0) for answer in answers] == [None, None]


def test_drop_finishes_what_is_being_written_and_fails_the_rest_with_the_reason() -> None:
    writer, snapshots, reason = new_writer(), [Slow(), Slow(), Slow()], ServiceClosed("dropped")
    answers = put(writer, *snapshots)
    assert snapshots[0].begun.wait(LIMIT_S)
    threading.Timer(0.02, free, snapshots).start()
    writer.drop_waiting(reason)
    assert [answer.result(0) for answer in answers] == [None, reason, reason]
    assert snapshots[0].thread is not None
    assert not snapshots[1].begun.is_set()


def test_a_writer_that_never_wrote_ends_at_once() -> None:
    writer = new_writer()
    writer.close()
    writer.drop_waiting(ServiceClosed("dropped"))


def test_what_was_written_is_let_go_even_where_the_error_is_kept(writer: SnapshotWriter) -> None:
    errors: list[BaseException | None] = []
    for error in (None, OSError("disk full")):
        snapshot = Slow(error)
        free(snapshot)
        alive = weakref.ref(snapshot)
        (answer,) = put(writer, snapshot)
        errors.append(answer.result(LIMIT_S))
        del snapshot, answer
        writer.put(Done(), lambda _: None)
        (last,) = put(writer, done := Slow())
        free(done)
        last.result(LIMIT_S)
        assert alive() is None


class Done:
    """A snapshot that takes no time."""

    def write(self) -> None:
        pass


def test_one_who_waits_for_the_writer_to_be_idle_is_woken_when_it_is() -> None:
    """Woken before, he would look too early, and wait for ever."""
    seen: list[bool] = []
    writer = new_writer(lambda: seen.append(writer.idle))
    first, second = Slow(), Slow()
    put(writer, first, second)
    free(first, second)
    writer.close()
    assert seen == [False, True]


def test_a_wake_that_raises_is_tried_again_and_the_next_snapshot_is_written(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[int] = []

    def wake() -> None:
        woken.append(len(woken))
        if len(woken) == 1:
            raise MemoryError("injected")

    writer = new_writer(wake)
    first, second = Slow(), Slow()
    answers = put(writer, first, second)
    free(first, second)
    assert [answer.result(LIMIT_S) for answer in answers] == [None, None]
    writer.close()
    assert woken == [0, 1, 2]
    assert "one who waits for saves could not be woken" in caplog.text

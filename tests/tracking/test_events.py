import logging
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest
from stovetop.tracking.events import (
    CONFIG,
    METRICS,
    TEXT,
    Event,
    EventStream,
    Recorder,
    decode_number,
    encode_number,
    event_from_row,
    event_to_row,
)


def stream_and_recorder() -> tuple[EventStream, Recorder]:
    recorder = Recorder()
    return EventStream([recorder], clock=lambda: 12.5), recorder


def test_numbers_of_an_event_are_values_and_words_are_labels():
    stream, recorder = stream_and_recorder()
    stream.emit("training.step", step=3, loss=0.5, num_tokens=7, dataset="chats")
    assert recorder.events == [
        Event("training.step", 3, {"loss": 0.5, "num_tokens": 7}, {"dataset": "chats"}, time=12.5)
    ]


def test_the_methods_of_a_logger_make_events():
    stream, recorder = stream_and_recorder()
    stream.log_hparams({"lr": 1e-4, "model_name": "tiny", "adam": {"beta1": 0.9, "nesterov": False}, "tags": ["a"]})
    stream.log_metrics({"loss": 0.5}, 3)
    stream.log_long_text("answers", "7 2 5 -> 2 5 7")
    assert recorder.events == [
        Event(
            CONFIG,
            values={"lr": 1e-4, "adam.beta1": 0.9},
            labels={"model_name": "tiny", "adam.nesterov": "false", "tags": '["a"]'},
            time=12.5,
        ),
        Event(METRICS, 3, {"loss": 0.5}, time=12.5),
        Event(TEXT, labels={"title": "answers", "text": "7 2 5 -> 2 5 7"}, time=12.5),
    ]


@pytest.mark.parametrize("name", ["step", "Training.Step", "training step", "training."])
def test_an_event_is_named_with_a_dot_in_lower_case(name: str):
    with pytest.raises(InvalidRequest, match=r"training\.step"):
        Event(name)


def test_numbers_of_numpy_become_plain_ones():
    stream, recorder = stream_and_recorder()
    stream.log_metrics({"a": np.float32(0.5), "b": np.int64(3), "c": np.array(2.0), "d": True}, 0)
    assert [(value, type(value)) for value in recorder.events[0].values.values()] == [
        (0.5, float),
        (3, int),
        (2.0, float),
        (1, int),
    ]


@pytest.mark.parametrize("value", [None, [1, 2], np.zeros(2)])
def test_a_metric_that_is_no_number_is_refused_by_its_name(value: object):
    stream, _ = stream_and_recorder()
    metrics: Mapping[str, object] = {"loss": value}
    with pytest.raises(InvalidRequest, match="'loss' must be a number"):
        stream.log_metrics(metrics, 0)  # pyright: ignore[reportArgumentType]  that is the test


def test_a_metric_cannot_be_called_step():
    stream, _ = stream_and_recorder()
    with pytest.raises(InvalidRequest, match="rename"):
        stream.log_metrics({"step": 1}, 0)


class Broken:
    """A sink that takes nothing."""

    def receive(self, event: Event) -> None:
        raise ConnectionError("no route")

    def sync(self) -> None: ...
    def close(self) -> None: ...
    def get_logger_url(self) -> str | None:
        return "https://example.org/run/1"


def test_a_failing_sink_is_reported_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    before, after = Recorder(), Recorder()
    stream = EventStream([before, Broken(), after])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            stream.log_metrics({"loss": 1.0}, step)
        assert len(caplog.records) == 1
        stream.close()
    assert len(before.events) == len(after.events) == 3
    assert caplog.records[-1].getMessage() == "Broken failed 3 times in this run"


def test_a_failing_sink_of_the_record_stops_what_writes_to_it():
    other = Recorder()
    stream = EventStream([other], record=[Broken()])
    with pytest.raises(ConnectionError, match="no route"):
        stream.log_metrics({"loss": 1.0}, 0)
    assert other.events == []


def test_the_first_sink_that_has_an_address_gives_it():
    assert EventStream([Recorder(), Broken()]).get_logger_url() == "https://example.org/run/1"
    assert EventStream([Recorder()]).get_logger_url() is None


@given(st.floats())
def test_every_number_survives_json(number: float):
    assert np.array_equal(decode_number(encode_number(number)), number, equal_nan=True)


KEYS = st.sampled_from(["loss", "test/nll", "été", ""])


@given(
    st.builds(
        Event,
        name=st.just("training.step"),
        step=st.none() | st.integers(0),
        values=st.dictionaries(KEYS, st.floats(allow_nan=False)),
        labels=st.dictionaries(KEYS, KEYS),
        time=st.floats(0, 1e10),
    )
)
def test_every_event_survives_its_row(event: Event):
    assert event_from_row(event_to_row(event)) == event


def test_a_sink_is_attached_with_a_filter_and_detached_again() -> None:
    whole, steps, late = Recorder(), Recorder(), Recorder()
    stream = EventStream([whole])
    stream.attach(steps, lambda event: event.step is not None)
    stream.emit("stage.start", stage="a")
    stream.emit("training.step", step=1, loss=0.5)
    stream.attach(late)
    stream.detach(steps)
    stream.emit("training.step", step=2, loss=0.25)
    assert [event.step for event in whole.events] == [None, 1, 2]
    assert [event.step for event in steps.events] == [1]
    assert [event.step for event in late.events] == [2]
    with pytest.raises(InvalidRequest, match="not attached"):
        stream.detach(steps)


def test_a_filter_that_fails_is_reported_once_as_its_sink_is_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, other = Recorder(), Recorder()
    stream = EventStream([])
    stream.attach(other, lambda event: bool(1 / 0))
    stream.attach(whole)
    for step in range(3):
        stream.emit("training.step", step=step)
    stream.close()
    assert (len(whole.events), len(other.events)) == (3, 0)
    assert caplog.text.count("Recorder failed; the others go on") == 1
    assert "Recorder failed 3 times" in caplog.text

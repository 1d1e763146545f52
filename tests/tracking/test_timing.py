import pytest

from stovetop.tracking.timing import timed


def test_the_time_is_written_also_when_the_body_raises():
    metrics: dict[str, float] = {}
    with pytest.raises(KeyboardInterrupt), timed("step", metrics):
        raise KeyboardInterrupt
    assert list(metrics) == ["time/step"]
    assert 0 < metrics["time/step"] < 5


def test_a_key_that_is_timed_twice_adds_up():
    metrics = {"time/step": 100.0}
    with timed("step", metrics):
        pass
    assert 100 < metrics["time/step"] < 101

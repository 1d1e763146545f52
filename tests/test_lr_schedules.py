import pytest
from hypothesis import given
from hypothesis import strategies as st

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.lr_schedules import LRSchedule, compute_schedule_lr_multiplier

GOLDEN = {  # step of 100: linear, cosine
    0: (1.0, 1.0),
    25: (0.75, 0.8535533905932737),
    50: (0.5, 0.5),
    75: (0.25, 0.14644660940672627),
    99: (0.010000000000000009, 0.0002467198171342),
}


@pytest.mark.parametrize("step", GOLDEN)
def test_multipliers_equal_the_published_ones(step: int):
    linear, cosine = GOLDEN[step]
    assert compute_schedule_lr_multiplier("linear", step, 100) == linear
    assert compute_schedule_lr_multiplier("cosine", step, 100) == pytest.approx(cosine, rel=1e-9)
    assert compute_schedule_lr_multiplier("constant", step, 100) == 1


@given(
    schedule=st.sampled_from(["linear", "cosine", "constant"]),
    step=st.integers(0, 300),
    total=st.integers(0, 200),
    warmup=st.floats(0, 1),
)
def test_a_learning_rate_is_never_negative_and_never_above_the_peak(
    schedule: LRSchedule, step: int, total: int, warmup: float
):
    assert 0 <= compute_schedule_lr_multiplier(schedule, step, total, int(warmup * total)) <= 1


def test_a_run_of_no_steps_divides_nothing_by_zero():
    assert compute_schedule_lr_multiplier("linear", 0, 0) == 1
    assert compute_schedule_lr_multiplier("cosine", 3, 0) == pytest.approx(0)


def test_a_warm_up_rises_from_above_zero_to_the_peak_and_the_schedule_follows_it():
    multipliers = [compute_schedule_lr_multiplier("linear", step, 7, warmup_steps=3) for step in range(8)]
    assert multipliers == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_an_unknown_schedule_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match="'linear'"):
        compute_schedule_lr_multiplier("liner", 0, 10)  # pyright: ignore[reportArgumentType]  that is the test


@pytest.mark.parametrize(("step", "total", "warmup"), [(-1, 10, 0), (0, -1, 0), (0, 10, 11)])
def test_steps_outside_a_run_are_refused(step: int, total: int, warmup: int):
    with pytest.raises(InvalidRequest, match=f"warmup_steps={warmup}"):
        compute_schedule_lr_multiplier("constant", step, total, warmup)

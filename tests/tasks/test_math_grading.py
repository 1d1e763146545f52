"""The comparison itself is tested in this process, where it is quick; what hangs and breaks, in workers."""

import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest

from stovetop.errors import GradeError
from stovetop.rl.process_pool import WorkerPool
from stovetop.tasks.math_grading import (
    MathGrader,
    Verdict,
    extract_boxed,
    extract_gsm_answer,
    grade_here,
    normalize,
    prepare_worker,
    same_text_or_number,
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


# ---- where the answer stands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{ \text{if } \{x : x^{2} > 1\} }", r"\text{if } \{x : x^{2} > 1\}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\boxed{f(\boxed{3})}", "3"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", ""),
        ("5", None),
        (r"\boxed{5", None),
        (r"\boxed", None),
    ],
)
def test_an_answer_is_what_the_last_box_holds(text: str, answer: str | None):
    assert extract_boxed(text) == answer


def test_a_long_text_of_open_boxes_takes_no_time():
    start = time.monotonic()
    assert extract_boxed(r"\boxed{" * 20_000) is None
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("#### 1\n#### 1,200 \nbye", "1,200"),
        ("####", None),
        ("4", None),
    ],
)
def test_an_answer_of_gsm8k_follows_its_mark(text: str, answer: str | None):
    assert extract_gsm_answer(text) == answer


# ---- what is equal -----------------------------------------------------------------------------------------------

BY_TEXT_OR_NUMBER = [
    (r"1{,}000", "1000"),
    ("1,000,000", "1000000"),
    (r"11,\! 111", "11111"),
    (r"\$5.00", "5"),
    ("$5$", "5"),
    ("12.0", "12"),
    ("12.", "12"),
    ("+7", "7"),
    (".5", "0.50"),
    (r"90^\circ", "90"),
    (r"45^{\circ}", "45"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\left(1,2\right)", "(1,2)"),
    (r"\text{blue}", "blue"),
    ("1110_{4}", "1110_4"),
]

BY_ALGEBRA = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"-\frac{1}{2}", "-0.5"),
    ("0.333333", r"\frac13"),
    (r"3\frac{1}{2}", "3.5"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"2\cdot 3", "6"),
    (r"\binom{5}{2}", "10"),
    ("1+2x", "2x+1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x+1}{2}", r"\frac12 x+\frac12"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("x=5", "5"),
    ("5", "x=5"),
    (r"50\%", "50"),
    (r"5\text{ cm}", "5"),
    (r"(1, 2)", "(1,2)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"(-\infty,2]", r"(-\infty, 2]"),
    (r"x \le 3", r"x\leq 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"4.6 \times 10^{-24}", r"46 \times 10^{-25}"),
    ("Tuesday", r"\text{tuesday}"),
    (r"\text{(C)}", "C"),
]

DIFFERENT = [
    ("", "0"),
    ("1/2", "0.6"),
    ("0.3", r"\frac13"),
    ("1.5", "15"),
    ("1000", "1001"),
    ("2", "-2"),
    ("12", "1,2"),
    ("3,4", "3"),
    ("5 or 6", "5"),
    ("(1,2)", "(2,1)"),
    ("[0,1]", "[0,1)"),
    ("x=5", "x=6"),
    ("x+1", "x-1"),
    ("x", "X"),
    ("A", "B"),
    ("n", "5"),
    ("5", "hello"),
    (r"\text{Monday}", "Tuesday"),
    (r"\sqrt{2}", "2"),
    ("1110_4", "1110_8"),  # bases
    (r"0.56 = 66\%", r"0.56 = 56\%"),  # one side agrees
    (r"4.6 \times 10^{-24}", r"4.6 \times 10^{-25}"),  # equal to six places
    (r"c^{2}(\gamma^{2}-1) \sin ^{2} \theta", r"c^{2}(\gamma^{2}-2) \sin ^{2} \theta"),  # read as undefined
    (r"\hbar \omega(v+8 / 2)-\frac{E}{2}", r"\hbar \omega(v+1 / 2)-\frac{E}{2}"),  # read in part
    ("9" * 3000, "9"),
]


@pytest.mark.parametrize(("given", "reference"), BY_TEXT_OR_NUMBER)
def test_answers_that_differ_in_writing_only_are_equal_without_algebra(given: str, reference: str):
    assert same_text_or_number(given, reference) is True
    assert same_text_or_number(reference, given) is True


@pytest.mark.parametrize(("given", "reference"), BY_ALGEBRA)
def test_answers_of_the_same_value_are_equal_by_algebra(given: str, reference: str):
    assert same_text_or_number(given, reference) is None
    assert grade_here(given, reference).is_correct


@pytest.mark.parametrize(("given", "reference"), DIFFERENT)
def test_other_answers_are_wrong(given: str, reference: str):
    assert not grade_here(given, reference).is_correct


def test_every_answer_is_equal_to_itself():
    for answer in {answer for pair in [*BY_TEXT_OR_NUMBER, *BY_ALGEBRA, *DIFFERENT[1:-1]] for answer in pair}:
        assert same_text_or_number(answer, answer), answer


def test_what_is_normalized_stays_as_it_is():
    for answer in {answer for pair in [*BY_TEXT_OR_NUMBER, *BY_ALGEBRA, *DIFFERENT] for answer in pair}:
        assert normalize(normalize(answer)) == normalize(answer)


def test_a_verdict_is_no_truth_value():
    with pytest.raises(TypeError, match=r"ask \.is_correct"):
        bool(Verdict.WRONG)


# ---- in workers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, prepare=prepare_worker) as opened:
        yield opened


HANGS = "10^{10^{10}}"


def test_a_hanging_answer_costs_one_worker_and_is_undecided_on_any_thread(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
):
    grader = MathGrader(pool, timeout_s=0.8)
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.extend([grader.grade(HANGS, "7"), grader.grade("1/4", "0.25")]))
    thread.start()
    thread.join(timeout=60.0)
    assert verdicts == [Verdict.UNDECIDED, Verdict.CORRECT]
    assert grader.num_undecided == 1
    assert "undecided, which counts as wrong" in caplog.text


def test_an_answer_that_breaks_the_comparison_is_undecided(pool: WorkerPool):
    grader = MathGrader(pool, timeout_s=20.0)
    assert grader.grade("x^{" * 300, "7") is Verdict.UNDECIDED
    assert grader.grade(r"\frac{1}{2}", "1/2") is Verdict.CORRECT


def test_a_reference_that_cannot_be_compared_is_an_error_and_no_answer_is_wrong_for_it(pool: WorkerPool):
    with pytest.raises(GradeError, match=re.escape(f"the grader breaks on a reference answer: {HANGS!r}")):
        MathGrader(pool, timeout_s=0.5).grade("8", HANGS)


@pytest.fixture
def closed() -> WorkerPool:
    """A pool that carries out nothing."""
    pool = WorkerPool(1)
    pool.close()
    return pool


def test_a_grader_without_workers_is_an_error_and_no_answer_is_wrong_for_it(closed: WorkerPool):
    with pytest.raises(GradeError, match="this pool of worker processes is closed"):
        MathGrader(closed).grade("1/3", "0.25")


def test_answers_that_need_no_algebra_need_no_process(closed: WorkerPool):
    assert MathGrader(closed).grade("1,000", "1000") is Verdict.CORRECT
    assert MathGrader(closed).grade("1,001", "1000") is Verdict.WRONG

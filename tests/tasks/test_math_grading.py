"""The comparison itself is tested in this process, where it is quick; what hangs and breaks, in workers."""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stovetop.errors import GradeError, WorkerDied
from stovetop.rl.forked import in_a_copy
from stovetop.rl.process_pool import WorkerPool
from stovetop.tasks import math_grading
from stovetop.tasks.math_grading import (
    MAX_ANSWER_LENGTH,
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
    # thousands
    ("1,200", "1200"),
    ("1,000,000", "1000000"),
    (r"1{,}000", "1000"),
    (r"11,\! 111", "11111"),
    (r"1\,000", "1000"),
    ("1 000", "1000"),
    ("-12 345 678", "-12345678"),
    (r"2\ 500.5", "2,500.5"),
    ("10 000 dollars", "10000"),
    ("-1,200", "-1200"),
    (r"\$1{,}200.50", "1200.5"),
    # lists, points, intervals, sets: a comma in brackets separates
    ("(4,112)", "(4, 112)"),
    ("(4,112,5)", r"\left(4, 112, 5\right)"),
    ("(1{,}000, 2)", "(1000,2)"),
    ("[0,100]", "[0, 100]"),
    (r"(-\infty,100)", r"(-\infty, 100)"),
    (r"\{1,100\}", r"\lbrace 1, 100 \rbrace"),
    ("[1,000, 2,000]", "[1000,2000]"),
    (r"\{1,000, 2\}", r"\{1000,2\}"),
    ("(1, 1,000)", "(1, 1000)"),
    ("[1,100, 2]", "[1,100,2]"),
    (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
    ("4,112", "4, 112"),
    # numbers
    ("12.0", "12"),
    ("12.", "12"),
    ("+7", "7"),
    (".5", "0.50"),
    ("1e3", "1000"),
    ("1.5E-3", "0.0015"),
    ("6.02e23", r"6.02 \times 10^{23}"),
    (r"3\cdot10^8", "300000000"),
    ("3×10^8", "3e8"),
    (r"4.6 \times 10^{-24}", r"46 \times 10^{-25}"),
    ("−5", "-5"),
    ("- 5", "-5"),
    (r"50\%", "50"),
    ("12.5%", "12.5"),
    (r"7\%", "0.07"),
    ("1110_{4}", "1110_4"),
    ("1110_{16}", "1110_16"),
    # units and words around it
    (r"\$5.00", "5"),
    ("$5$", "5"),
    ("10,000 dollars", "10000"),
    (r"90^\circ", "90"),
    (r"45^{\circ}", "45"),
    ("5°", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\,\text{cm}^2", "5"),
    ("5 cm^2", "5"),
    ("5 square meters", "5"),
    ("60 km/h", "60"),
    ("60 miles per hour", r"60\text{ mph}"),
    (r"9.8\,\mathrm{m}/\mathrm{s}^2", "9.8"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\left(1,2\right)", "(1,2)"),
    (r"\text{blue}", "blue"),
    # names and symbols
    (r"\pi", "pi"),
    ("π", r"\pi"),
    ("∞", r"\infty"),
    ("oo", r"\infty"),
    ("infinity", r"\infty"),
    ("-infty", r"-\infty"),
    ("sqrt2", r"\sqrt{2}"),
    ("(-oo, 2]", r"(-\infty,2]"),
    ("√2", r"\sqrt{2}"),
    (r"\varnothing", r"\emptyset"),
    ("[0,1)U(2,3]", r"[0, 1) \cup (2, 3]"),
]

BY_ALGEBRA = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"−\frac{1}{2}", "-0.5"),
    ("2/4", r"\tfrac12"),
    ("0.333333", r"\frac13"),
    (r"0.\overline{3}", r"\frac13"),
    (r"-0.1\overline{6}", "-1/6"),
    (r"3\frac{1}{2}", "3.5"),
    ("3 1/2", "3.5"),
    ("-3 1/2", r"-\frac{7}{2}"),
    ("½", "0.5"),
    (r"50\%", "1/2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2√3", r"\sqrt{12}"),
    ("sqrt(2)", r"\sqrt2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    ("2^{10}", "1024"),
    ("2**3", "8"),
    ("5!", "120"),
    (r"2\cdot 3", "6"),
    (r"\binom{5}{2}", "10"),
    ("1+2x", "2x+1"),
    ("x − 1", "x-1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x+1}{2}", r"\frac12 x+\frac12"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("pi/2", r"\frac{\pi}{2}"),
    ("2*pi*r", r"2\pi r"),
    ("ln(2)", r"\ln 2"),
    ("3+2i", "2i+3"),
    ("2 i", "2i"),
    (r"\sqrt{-1}", "i"),
    ("(1+i)^2", "2i"),
    (r"\frac 1 2", "0.5"),
    (r"\log_2 8", "3"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("(1/2, 3)", r"\left(\frac12,3\right)"),
    ("(3, pi/2)", r"(3,\frac{\pi}{2})"),
    ("(1,2),(3,4)", "(3,4), (1,2)"),
    ("2,1", r"1 \text{ and } 2"),
    ("5 or 6", "6, 5"),
    ("1,000, 2,000", "2000, 1000"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\{1,200,3\}", r"\{200, 1, 3\}"),
    ("[0,0.5]", r"[0,\frac12]"),
    (r"x \le 3", r"x\leq 3"),
    ("x ≥ 3", r"x\geq 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("Tuesday", r"\text{tuesday}"),
    (r"\text{(C)}", "C"),
]

DIFFERENT = [
    ("", "0"),
    ("1/2", "0.6"),
    ("1/2", "0.05"),
    ("0.3", r"\frac13"),
    ("0.33", r"\frac13"),
    ("1.5", "15"),
    ("1.000", "1000"),
    ("1000", "1001"),
    ("2", "-2"),
    ("−5", "5"),
    ("12", "1,2"),
    ("12,34", "1234"),
    ("1 00", "100"),
    ("1234 567", "1234567"),
    ("1 000", "0"),  # numbers side by side are no sum
    ("2 5", "7"),
    ("7", "2 5"),
    ("2 3", "6"),
    ("[1,000, 2,000]", "[1,0, 2,0,0]"),
    ("1+i", "1-i"),
    ("0.1,000", "100"),
    ("3,4", "3"),
    ("1,2", "1,2,3"),
    ("5 or 6", "5"),
    ("(4,112)", "4112"),
    ("4112", "(4,112)"),
    ("4112", "4, 112"),
    ("(4,112)", "(4, 113)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("[0,1]", "[0,1)"),
    ("[0,100]", "(0,100)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("1e3", "100"),
    ("1e3", "3e"),
    ("3e8", "3e7"),
    ("1e400", "1e401"),
    ("10^3", "10^{-3}"),
    ("pi", "3.14"),
    (r"\pi", r"\pi^2"),
    (r"\infty", r"-\infty"),
    ("50%", "0.05"),
    ("50", "0.5"),
    ("3 1/2", "31/2"),
    ("3 1/2", "1.5"),
    (r"0.\overline{3}", "0.3"),
    ("5 cm", "6 cm"),
    ("x=5", "x=6"),
    ("x=5", "y=5"),
    ("x+1", "x-1"),
    ("x", "X"),
    ("5i", "5"),
    ("A", "B"),
    ("n", "5"),
    ("5", "hello"),
    ("yes", "no"),
    ("10 AM", "10 PM"),
    (r"\text{Monday}", "Tuesday"),
    (r"\sqrt{2}", "2"),
    ("1110_4", "1110_8"),  # bases
    (r"0.56 = 66\%", r"0.56 = 56\%"),  # one side agrees
    (r"4.6 \times 10^{-24}", r"4.6 \times 10^{-25}"),
    (r"\frac{4.6}{10^{24}}", r"\frac{4.7}{10^{24}}"),  # equal to six places
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


def test_the_tables_are_long_and_hold_each_pair_once():
    pairs = [*BY_TEXT_OR_NUMBER, *BY_ALGEBRA, *DIFFERENT]
    assert len(set(pairs)) == len(pairs) >= 150


@settings(max_examples=50)
@given(st.text(r"0123456789,.eE()[]{}\^_/%√−π \$°", max_size=60))
def test_any_text_is_equal_to_itself_unless_there_is_nothing_in_it(answer: str):
    assert same_text_or_number(answer, answer) is bool(normalize(answer))


def test_no_text_of_a_policy_takes_long_to_normalize():
    start = time.monotonic()
    for part in ("1 ", " ", "\\text{", "1,111", "(", "9", "√", "1 1/", "a^", "1e1", ", ", "5 square ", "5 cm", "{"):
        same_text_or_number((part * MAX_ANSWER_LENGTH)[:MAX_ANSWER_LENGTH], "5")
    assert time.monotonic() - start < 2.0


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


def forges(given: str, reference: str) -> bool:
    """A comparison that an answer has taken over: it is right, and changes whatever later ones would use."""
    import sympy

    math_grading.same_answer = math_grading.same_by_algebra = lambda *_: True
    math_grading.import_module = math_grading.normalize = lambda *_: math_grading
    sympy.Expr.equals = sympy.Basic.__eq__ = lambda *_: True
    in_a_copy.__code__ = (lambda *_: True).__code__
    sys.modules["forged"] = math_grading
    return True


def kills(given: str, reference: str) -> bool:
    os._exit(0)


def exhausts(given: str, reference: str) -> bool:
    return bytes(1 << 40) == b""


def hides(given: str, reference: str) -> bool:
    """What it raises says that it is right."""
    raise SystemExit("yes")


def is_clean(given: str, reference: str) -> bool:
    return "forged" not in sys.modules


def test_a_forged_answer_does_not_survive_the_process_it_ran_in(pool: WorkerPool):
    grader = MathGrader(pool, timeout_s=20.0)
    before = pool.run(os.getpid, timeout_s=20.0)
    assert grader._run(forges, "3", "7")
    assert grader.grade("x + 1", "x + 2") is Verdict.WRONG
    assert grader.grade("x + 1", "1 + x") is Verdict.CORRECT
    assert grader._run(is_clean, "", "")
    assert pool.run(os.getpid, timeout_s=20.0) == before  # one process, in which all of it went on


@pytest.mark.parametrize(
    ("compare", "error", "says"),
    [(kills, WorkerDied, "ended before it answered"), (exhausts, RuntimeError, "MemoryError"),
     (hides, RuntimeError, "SystemExit: yes")],
)  # fmt: skip
def test_a_comparison_that_ends_its_process_gives_no_verdict_and_leaves_the_worker(
    pool: WorkerPool, compare: Callable[[str, str], bool], error: type[Exception], says: str
):
    grader = MathGrader(pool, timeout_s=20.0)
    before = pool.run(os.getpid, timeout_s=20.0)
    with pytest.raises(error, match=says):
        grader._run(compare, "1", "1")
    assert pool.run(os.getpid, timeout_s=20.0) == before


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

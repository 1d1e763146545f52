r"""Whether an answer to a mathematical problem is right: where the answer stands in a text, and whether it is equal to
the reference: as text, as a number, or by algebra (math-verify and sympy, the extra `math`).

Algebra may take for ever on what a policy writes, and may crash. `MathGrader` therefore does it in worker processes,
with a time limit that holds on any thread; and each comparison in a copy of its process, which ends with it, so that no
answer can change how the next ones are compared.
"""

import logging
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

from stovetop.errors import GradeError
from stovetop.extras import import_extra, require_extra
from stovetop.rl.forked import in_a_copy
from stovetop.rl.process_pool import WorkerPool

log = logging.getLogger(__name__)

SympyValue = Any  # an expression, a set, a matrix: whatever answers can be

MAX_MEMORY_BYTES = 4 << 30  # of the address space of a worker process
MAX_ANSWER_LENGTH = 2000  # characters; whatever is longer is no answer


# ---- where the answer stands -------------------------------------------------------------------------------------


def extract_boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{...}` (or `\fbox{...}`), braces within it included; None without a whole one.

    >>> extract_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    open_braces: list[int | None] = []  # where the answer begins, for the brace of a box
    last: tuple[int, int] | None = None
    for found in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if found[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = begin, found.start()
        elif found[0].endswith("{") and found[0] != r"\{":
            open_braces.append(found.end() if found[0] != "{" else None)
    return text[slice(*last)].strip() if last is not None else None


def extract_gsm_answer(text: str) -> str | None:
    """What follows the last `####`, on its line."""
    _, mark, answer = text.rpartition("####")
    return answer.strip().split("\n")[0].strip() if mark and answer.strip() else None


def extract_last_number(text: str) -> str | None:
    """The last whole number of a text, without commas between its digits.

    >>> extract_last_number("7 + 5 = 12.")
    '12'
    """
    numbers = re.findall(r"-?\d+", text.replace(",", ""), re.ASCII)
    return numbers[-1] if numbers else None


# ---- equal as text, or as a number -------------------------------------------------------------------------------

_SYMBOLS = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "°": "",
            "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
            "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "~": " ",
            r"\lbrace": r"\{", r"\rbrace": r"\}"}  # fmt: skip
_WORD_BEFORE, _WORD_AFTER = r"(?<![a-zA-Z\\])", r"(?![a-zA-Z])"
_UNIT = (
    r"(?:(?:square|cubic|sq\.?|cu\.?) )?(?:(?:centi|milli|kilo)?(?:meter|metre|gram|liter|litre)s?|[cmk]m|mi|ft|yd|kg"
    r"|mg|m[lL]|lbs?|oz|mph|inch(?:es)?|foot|feet|yards?|miles?|pounds?|ounces?|sec(?:ond)?s?|min(?:ute)?s?|hours?|hrs?"
    r"|days?|weeks?|months?|years?|degrees?|units?|dollars?|cents?|euros?)"
)
_UNIT_IN_TEXT = rf"(?:{_UNIT}|[mgshL])"  # letters that would be variables elsewhere
_POWER = r"(?: ?\^ ?\{?[23]\}?)?"
_REWRITTEN = [
    (r"(?<!\\)\\(?:left(?![a-z])|right(?![a-z])|displaystyle|q?quad(?![a-z])|[!;: ])", " "),
    (r"(?<!\\)\\,(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\,", " "),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\[dtc]frac", r"\\frac"),
    (
        rf"(?<=[\d}})])\s*\\(?:text|mathrm)\s*\{{\s*{_UNIT_IN_TEXT}\s*\}}{_POWER}"
        rf"(?:\s*/\s*\\(?:text|mathrm)\s*\{{\s*{_UNIT_IN_TEXT}\s*\}}{_POWER})?\.?\s*$",
        "",
    ),
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\\$|\$|\\\(|\\\)|\\\[|\\\]", ""),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree", ""),
    (r"_\{(\w)\}", r"_\1"),
    (rf"(?<=[\d}})])\s*{_UNIT}{_POWER}(?: ?(?:/|per) ?{_UNIT_IN_TEXT}{_POWER})?\.?\s*$", ""),
    (rf"{_WORD_BEFORE}(?:oo|inf(?:inity|ty)?){_WORD_AFTER}", r"\\infty "),
    (rf"{_WORD_BEFORE}pi{_WORD_AFTER}", r"\\pi "),
    (rf"{_WORD_BEFORE}(sin|cos|tan|ln|log|exp)(?=\s*\()", r"\\\1"),
    (r"√\s*(\w+)|√\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
    (rf"{_WORD_BEFORE}sqrt ?(\d+|[a-z]{_WORD_AFTER})", r"\\sqrt{\1}"),
    (r"(?<=[\])])\s*U\s*(?=[\[(])", r" \\cup "),
    (r"\*\*", "^"),
    (r"(\d\.?)[eE]([-+]?\d{1,3})(?![\d._])", r"\1 \\times 10^{\2}"),
    (r"(?<![\d./^{])(\d{1,40})\s+(\d{1,40})/(\d{1,40})(?![\d/])", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"(?<=[-+])\s+(?=[\d.\\])|\s+(?=\^)", ""),
    (r"\s+", " "),
    (r"(?<=[(\[{]) | (?=[)\]}]|\\\})", ""),
    (r" ?, ?", ", "),
]
_GROUPED = r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\\!\s*|,)\d{3})+(?!\d)"
_SEPARATORS = r"\{,\}|,\\!\s*|,"
_BRACKETS_AND_GROUPS = re.compile(rf"(?P<open>\(|\[|\\\{{)|(?P<close>\)|\]|\\\}})|(?P<number>{_GROUPED})")
_SPACED = re.compile(r"(?<![\w.])(?<!\d )\d{1,3}(?: \d{3})+(?![\d/])(?! \d)")
_APART = re.compile(r"(?<![a-zA-Z\d._^])(?<![a-zA-Z\d.] )[\d.]+ \d")  # not the arguments of \frac 1 2
_REPEATING = re.compile(r"(\d{0,40})\.(\d{0,40})\\(?:overline|bar)\s*\{(\d{1,40})\}")
_IN_BASE = re.compile(r"([0-9a-zA-Z]{1,40})_\{?(\d\d?)\}?")
_NUMBER = re.compile(
    r"([-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40}))(?: ?(?:\\times|\\cdot|\*) ?10\^ ?\{?([-+]?\d{1,3})\}?)? ?(\\?%)?"
)


def normalize(answer: str, *, groups_thousands: bool = True) -> str:
    r"""The same answer with fewer ways to write it: no spacing, dollars, degrees, units or `\text`, no commas or spaces
    that group thousands, no full stop at its end; symbols and names (π, pi, ∞, oo, √2, 1e3, 3 1/2) as LaTeX has them.

    Within brackets a comma separates, so (4,112) is (4, 112), unless it is written as grouping, (4{,}112). Elsewhere it
    groups digits in threes: 4,112 is 4112, or with `groups_thousands=False` 4, 112. What separates is written ", ".
    """
    for symbol, command in _SYMBOLS.items():
        answer = answer.replace(symbol, command)
    answer = _without_grouping(answer, groups_thousands)
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    answer = _SPACED.sub(lambda found: found[0].replace(" ", ""), answer)
    answer = _REPEATING.sub(_as_fraction, answer)
    return answer.strip().removesuffix(".").strip()


def _without_grouping(answer: str, everywhere: bool) -> str:
    """Without commas within numbers, unless they stand in brackets."""
    answer = re.sub(r"(?<!\\)\\(?:left|right)(?![a-z])\s*", "", answer)
    depth, parts, end = 0, list[str](), 0
    for found in _BRACKETS_AND_GROUPS.finditer(answer):
        depth = max(0, depth + (found["open"] is not None) - (found["close"] is not None))
        if found["number"] is not None:
            separators = _SEPARATORS if everywhere and depth == 0 else r"\{,\}|,\\!\s*"
            parts += [answer[end : found.start()], re.sub(separators, "", found["number"])]
            end = found.end()
    return "".join([*parts, answer[end:]])


def _as_fraction(repeating: re.Match[str]) -> str:
    r"""0.1\overline{6} is \frac{15}{90}: 16 - 1 over 90."""
    whole, fixed, repeated = repeating.groups()
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + repeated) - int('0' + whole + fixed)}}}{{{below}}}"


class _Pair(NamedTuple):
    given: str
    reference: str


def _readings(given: str, reference: str) -> list[_Pair]:
    """Both normalized. Where one of them is a list, 1,200 of the other may be a list too; where white space follows the
    commas that separate, as in [1,000, 2,000], others may group."""
    grouped = _Pair(normalize(given), normalize(reference))
    if not any("," in answer for answer in grouped):
        return [grouped]
    listed = _Pair(normalize(given, groups_thousands=False), normalize(reference, groups_thousands=False))
    spaced = _Pair(normalize(_without_tight_commas(given)), normalize(_without_tight_commas(reference)))
    return list(dict.fromkeys([grouped, listed, spaced]))


def _without_tight_commas(answer: str) -> str:
    if not re.search(r",\s", answer):
        return answer
    return re.sub(_GROUPED, lambda found: re.sub(_SEPARATORS, "", found[0]), answer)


def same_text_or_number(given: str, reference: str) -> bool | None:
    r"""Whether two answers are equal, where that can be said without algebra; None where it cannot. Of a percentage and
    a number, 50\% is both 50 and 0.5."""
    if not given.strip() or len(given) > MAX_ANSWER_LENGTH:
        return False
    decided = [_decided(*pair) for pair in _readings(given, reference)]
    if True in decided:
        return True
    return None if None in decided else False


def _decided(given: str, reference: str) -> bool | None:
    if not given:
        return False
    if given == reference:
        return True
    one, other = _NUMBER.fullmatch(given), _NUMBER.fullmatch(reference)
    if one and other:
        if bool(one[3]) is bool(other[3]):
            return _number(one) == _number(other)
        percent, number = (_number(one), _number(other)) if one[3] else (_number(other), _number(one))
        return number in (percent, percent / 100)
    in_bases = _IN_BASE.fullmatch(given), _IN_BASE.fullmatch(reference)
    if in_bases[0] and in_bases[1]:
        return in_bases[0].groups() == in_bases[1].groups()  # algebra would take the base for an index
    return False if len(given) == len(reference) == 1 else None


def _number(found: re.Match[str]) -> Fraction:
    """Without the percent sign."""
    return Fraction(found[1]) * Fraction(10) ** int(found[2] or 0)


# ---- equal by algebra --------------------------------------------------------------------------------------------


def same_answer(given: str, reference: str) -> bool:
    """Whether two answers are equal in any of the ways. It may take for ever, and may raise anything."""
    decided = same_text_or_number(given, reference)
    if decided is not None:
        return decided
    return any(_same_words(*pair) or same_by_algebra(*pair) for pair in _readings(given, reference))


def same_by_algebra(given: str, reference: str) -> bool:
    """Of normalized answers; one that cannot be read is equal to none."""
    expected, found = _read(reference), _read(given)
    if expected is None or found is None or _contradicts_itself(given):
        return False
    verify = import_extra("math_verify", "math").verify
    is_same = verify(expected, found, timeout_seconds=None, raise_on_error=True)
    return is_same and not _differ_below_rounding(_value(expected), _value(found))


def _read(answer: str) -> SympyValue | None:
    """None for an answer that the library reads as text only, or as undefined, and for numbers side by side, which it
    adds. The letter i is the imaginary unit."""
    if _APART.search(answer):
        return None
    math_verify, sympy = import_extra("math_verify", "math"), import_extra("sympy", "math")
    # The library's own time limits need the main thread and its signals; the limit here is the worker's.
    found = math_verify.parse(f"${answer}$", [math_verify.LatexExtractionConfig()], parsing_timeout=None)
    if not found or isinstance(found[0], str) or found[0].has(sympy.zoo, sympy.nan):
        return None
    units = {symbol: sympy.I for symbol in found[0].free_symbols if symbol.name == "i"}
    return found[0].xreplace(units) if units else found[0]


def _value(expression: SympyValue) -> complex | None:
    """Of a number; None for anything else."""
    sympy = import_extra("sympy", "math")
    is_number = isinstance(expression, sympy.Expr) and expression.is_number
    return complex(expression.doit().evalf()) if is_number else None


def _contradicts_itself(given: str) -> bool:
    r"""Whether an answer is a chain of numbers that are not equal, such as 0.56 = 66\%."""
    sides = given.split("=")
    values = [value for side in sides if (value := _value(_read(side))) is not None]
    is_chain = len(values) == len(sides) > 1
    return is_chain and any(abs(value - values[0]) > 1e-6 * abs(values[0]) for value in values)


def _differ_below_rounding(expected: complex | None, found: complex | None) -> bool:
    """Whether two numbers are so small that the library, which rounds to six places, takes them for equal."""
    if expected is None or found is None:
        return False
    size = max(abs(expected), abs(found))
    return size < 1e-3 and abs(expected - found) > 1e-4 * size


def _same_words(given: str, reference: str) -> bool:
    """Of answers that are words or letters of a choice: "Tuesday" is "tuesday", "(C)" is "C"."""
    words = _words(given)
    return words is not None and words == _words(reference)


def _words(answer: str) -> str | None:
    to_text: Callable[[str], str] = import_extra("pylatexenc.latex2text", "math").LatexNodes2Text().latex_to_text
    text = to_text(answer).strip().strip("().").strip()
    if not re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", text):
        return None
    return text.casefold() if len(text) > 1 else text


# ---- in worker processes -----------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What became of an answer. Ask the predicate; it is no truth value, for it would always be true."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNDECIDED = "undecided"  # comparing it took too long, or broke, while the reference is fine: counts as wrong

    @property
    def is_correct(self) -> bool:
        return self is Verdict.CORRECT

    def __bool__(self) -> bool:
        raise TypeError("a Verdict is not a truth value; ask .is_correct")


Grade = Callable[[str, str], Verdict]
"""Of a given answer, compared with the reference."""


def grade_here(given: str, reference: str) -> Verdict:
    """In this process, without a limit of time: for answers that people write, and for notebooks."""
    return _verdict(same_answer(given, reference))


def grade_number(given: str, reference: str) -> Verdict:
    """Of answers that are numbers: equal where that can be said without algebra. It needs no library."""
    return _verdict(same_text_or_number(given, reference) is True)


@dataclass(slots=True)
class MathGrader:
    r"""Grades in worker processes, which start when an answer first needs algebra. An answer that hangs or breaks the
    comparison is undecided; a reference that does so when compared with itself is a GradeError,
    for then no answer could have been right.

        with WorkerPool(2, prepare=prepare_worker) as pool:
            MathGrader(pool).grade(r"\frac{1}{3}", r"3^{-1}").is_correct
    """

    pool: WorkerPool
    timeout_s: float = 5.0  # of one comparison
    num_undecided: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        require_extra("math", "math_verify", "pylatexenc")

    def grade(self, given: str, reference: str) -> Verdict:
        """On any thread, also on several at once."""
        decided = same_text_or_number(given, reference)
        if decided is not None:
            return _verdict(decided)
        try:
            return _verdict(self._run(same_answer, given, reference))
        except Exception as error:
            try:
                self._run(same_by_algebra, normalize(reference), normalize(reference))
            except Exception as broken:
                raise GradeError(f"the grader breaks on a reference answer: {reference!r}: {broken}") from broken
            log.warning("undecided, which counts as wrong: %r (reference: %r): %s", given[:80], reference, error)
            self.num_undecided += 1
            return Verdict.UNDECIDED

    def _run(self, compare: Callable[[str, str], bool], given: str, reference: str) -> bool:
        return self.pool.run(
            in_a_copy, compare, given, reference, timeout_s=self.timeout_s, name="a comparison of answers"
        )


def _verdict(is_same: bool) -> Verdict:
    return Verdict.CORRECT if is_same else Verdict.WRONG


def prepare_worker() -> None:
    """The `prepare` of a pool: loads the libraries, which also build tables when they are first used, so that no
    answer's time goes into it; and limits the memory that an answer may take."""
    import resource

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # an answer that cannot be read is no news
    same_answer(r"\frac{1}{2}", "0.5")
    if sys.platform == "linux":  # elsewhere the limit is refused or ignored
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


@contextmanager
def open_grader() -> Generator[Grade]:
    """Within, answers are compared as mathematics, in two processes, which end with it."""
    with WorkerPool(2, prepare=prepare_worker) as pool:
        yield MathGrader(pool).grade

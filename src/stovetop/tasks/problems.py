r"""Public data sets of mathematical problems, by name: `dataset=gsm8k`, `math`, `polaris`, `deepmath`, or problems of
your own. What else a config can name, and several at once, is said in `named_data.load_data`. `sample:gsm8k` and the
others, which the package ships, have rows of the same form: a few, for tests and demonstrations.

A problem is a row of `question` and `answer`, the final one: what `tasks/math.py` grades in \boxed{}, and
`rl.problem_env` word for word.
"""

from collections.abc import Callable

from stovetop.datasets import Row, Split, text_of
from stovetop.kitchen.stage import stage
from stovetop.named_data import LeftOut, Published, PublishedRows, Table
from stovetop.runs import Run
from stovetop.tasks.math_grading import extract_boxed, extract_gsm_answer


@stage(writes="problem_rows")
def load_named_problems(
    dataset: str, run: Run, test_dataset: str | None = None, test_size: int = 0, seed: int = 0
) -> Split[Row]:
    """The rows to train on, of a named data set or of a file, and those held out."""
    loaded = load(dataset, test_dataset, test_size, seed, run.revisions)
    run.record_data(dataset, loaded)
    return Split(loaded.train, loaded.test)


def _as_it_is(row: Row, place: str) -> Row:
    return row


# ---- rows ------------------------------------------------------------------------------------------------------------


def parse_gsm8k(row: Row) -> Row | LeftOut:
    """`question`, and an `answer` of steps, with the result behind "####" on the last line."""
    return _problem(row, "question", "answer", extract_gsm_answer)


def parse_math(row: Row) -> Row | LeftOut:
    r"""`problem`, and a `solution` with the result in \boxed{}; MATH-500 has the result as `answer` too."""
    if text_of(row, "answer") is not None:
        return _problem(row, "problem", "answer", str)
    return _problem(row, "problem", "solution", extract_boxed)


def parse_polaris(row: Row) -> Row | LeftOut:
    """`problem` and `answer`."""
    return _problem(row, "problem", "answer", str)


def parse_deepmath(row: Row) -> Row | LeftOut:
    """`question` and `final_answer`."""
    return _problem(row, "question", "final_answer", str)


def _problem(row: Row, question: str, answer: str, result: Callable[[str], str | None]) -> Row | LeftOut:
    asked, said = text_of(row, question), text_of(row, answer)
    if asked is None or said is None:
        return LeftOut(f"it has no text as its {question if asked is None else answer}")
    found = result(said)
    return (
        {"question": asked, "answer": found.strip()} if found and found.strip() else LeftOut("its answer has no result")
    )


# ---- the data sets ---------------------------------------------------------------------------------------------------

_MATH = "EleutherAI/hendrycks_math"
_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

PROBLEMS: dict[str, Published[Row]] = {
    # School mathematics in words (Cobbe et al. 2021, arXiv:2110.14168): 7,473 problems, and 1,319 held out.
    "gsm8k": Published(
        train=(PublishedRows("openai/gsm8k", "train", "main"),),
        test=(PublishedRows("openai/gsm8k", "test", "main"),),
        parse=parse_gsm8k,
        schema="the files of its authors, openai/grade-school-math on GitHub, which the hub has as its subset main",
    ),
    # Competition mathematics (Hendrycks et al. 2021, arXiv:2103.03874): 12,500 problems, of which the 500 of MATH-500
    # (Lightman et al. 2023, arXiv:2305.20050) are held out.
    "math": Published(
        train=tuple(PublishedRows(_MATH, split, subject) for subject in _MATH_SUBJECTS for split in ("train", "test")),
        test=(PublishedRows("HuggingFaceH4/MATH-500", "test"),),
        parse=parse_math,
        identity=lambda problem: str(problem["question"]),
        schema="the data set's loading script and programs that read it: problem, level, type, solution",
    ),
    # Hard problems, filtered by how often a model of 7B solves them (An et al. 2025): 53,291.
    "polaris": Published(
        train=(PublishedRows("POLARIS-Project/Polaris-Dataset-53K"),),
        parse=parse_polaris,
        schema="the card of the data set on the hub, as a search index has it: problem, answer, difficulty",
    ),
    # Hard problems of many fields (He et al. 2025, arXiv:2504.11456): 103,110.
    "deepmath": Published(
        train=(PublishedRows("zwhe99/DeepMath-103K"),),
        parse=parse_deepmath,
        schema="the card of the data set on the hub, as a search index has it: question, final_answer, difficulty, "
        "topic, r1_solution_1 to 3",
    ),
}

# The problems that a config names, to train on and held out. Rows of your own stay as they are.
load = Table(_as_it_is, PROBLEMS).load

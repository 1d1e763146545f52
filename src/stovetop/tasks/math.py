r"""Mathematical problems with one right answer, which the policy puts into \boxed{}, or says as a number. Rows come in
the schemas of the known datasets: GSM8K (`question`, `answer` with its steps and, behind `####`, the result), MATH
(`problem`, `solution` with the result in \boxed{}, or `answer`), DeepMath (`question`, `final_answer`).

The reward is that of `ProblemEnv`: 1 for a right answer, and 0.1 less where none is found. What counts as equal is
decided in `math_grading`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from stovetop.datasets import load_rows, text_of
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message
from stovetop.rl.problem_env import ProblemDataset, ProblemEnv, ProblemGroupBuilder, refuse_long_prompts
from stovetop.tasks.math_grading import Grade, extract_boxed, extract_gsm_answer, extract_last_number, grade_here

NAME = "math"
SAMPLE = "sample:gsm8k"
INSTRUCTION = "Give the result in \\boxed{}."
NUM_TEST_PROBLEMS_OF_SAMPLE = 8

FEW_SHOT: Sequence[Message] = (
    Message(role="user", content=f"How many times does the letter r occur in strawberry? {INSTRUCTION}"),
    Message(
        role="assistant",
        content="The letters are s, t, r, a, w, b, e, r, r, y. The third, the eighth and the ninth are an r, so r "
        "occurs \\boxed{3} times.",
    ),
)


class AnswerForm(NamedTuple):
    """How an answer is to be written."""

    instruction: str  # behind every question
    extract: Callable[[str], str | None]  # what the answer of a text is; None: it has none
    few_shot: Sequence[Message]  # a solved example, to begin a chat with


BOXED = AnswerForm(INSTRUCTION, extract_boxed, FEW_SHOT)
NUMBER = AnswerForm(
    "", extract_last_number, (Message(role="user", content="What is 4 + 5?"), Message(role="assistant", content="9"))
)


@dataclass(frozen=True, slots=True)
class MathProblem:
    """See `problem_env.Problem`."""

    question: str
    reference: str
    grade: Grade  # `MathGrader.grade` where policies answer
    form: AnswerForm = BOXED

    def get_question(self) -> str:
        return f"{self.question} {self.form.instruction}".rstrip()

    def check_answer(self, text: str) -> bool:
        given = self.form.extract(text)
        return given is not None and self.grade(given, self.reference).is_correct

    def check_format(self, text: str) -> bool:
        return self.form.extract(text) is not None

    def get_reference_answer(self) -> str:
        return self.reference


def problem_of_row(
    row: Mapping[str, object], grade: Grade, where: str = "row", form: AnswerForm = BOXED
) -> MathProblem:
    """`where` names the row in errors."""
    question, reference = text_of(row, "question", "problem"), text_of(row, "final_answer", "answer", "solution")
    if not question or not reference:
        raise InvalidRequest(
            f"{where} needs 'question' or 'problem', and 'final_answer', 'answer' or 'solution', as texts; it has "
            f"{sorted(row)}"
        )
    if "####" in reference:
        reference = extract_gsm_answer(reference)
    elif "boxed" in reference:
        reference = extract_boxed(reference)
    if not reference:
        raise InvalidRequest(f"{where} has no result behind #### or in \\boxed{{}}: {row}")
    return MathProblem(question, reference, grade, form)


def builders(
    rows: Sequence[Mapping[str, object]],
    renderer: Renderer,
    group_size: int,
    grade: Grade,
    *,
    form: AnswerForm = BOXED,
    few_shot: bool = False,
    dataset_name: str = NAME,
    max_prompt_tokens: int | None = None,
) -> list[ProblemGroupBuilder]:
    """A group builder for each row; with `few_shot` each chat begins with a solved example. A prompt of more than
    `max_prompt_tokens`, what the model's context leaves beside an answer, is refused."""
    problems = [problem_of_row(row, grade, f"row {index}", form) for index, row in enumerate(rows)]
    prefix = form.few_shot if few_shot else ()
    thunks = [partial(ProblemEnv, problem, renderer, prefix, slow_checks=True) for problem in problems]
    refuse_long_prompts((thunk() for thunk in thunks), max_prompt_tokens)
    return [ProblemGroupBuilder(thunk, group_size, dataset_name) for thunk in thunks]


def dataset(
    renderer: Renderer,
    grade: Grade,
    source: str = SAMPLE,
    *,
    split: str | None = None,
    subset: str | None = None,
    groups_per_batch: int = 8,
    group_size: int = 8,
    num_epochs: int = 1,
    seed: int = 0,
    few_shot: bool = False,
) -> ProblemDataset:
    """The problems of a source (of a hub's dataset, those of a split and a subset), in an order that depends on the
    seed; of the sample, those that are not its test."""
    rows = load_rows(source, split=split, subset=subset)[NUM_TEST_PROBLEMS_OF_SAMPLE if source == SAMPLE else 0 :]
    groups = builders(rows, renderer, group_size, grade, few_shot=few_shot)
    return ProblemDataset(groups, groups_per_batch, num_epochs=num_epochs, seed=seed)


def held_out_builders(renderer: Renderer, group_size: int = 1, grade: Grade = grade_here) -> list[ProblemGroupBuilder]:
    """The test problems of the sample."""
    return builders(load_rows(SAMPLE)[:NUM_TEST_PROBLEMS_OF_SAMPLE], renderer, group_size, grade)

"""Problems that are solved by a Python function, with assertions as tests: rows in the form of MBPP (Austin et al.
2021, arXiv:2108.07732) and of HumanEval (Chen et al. 2021, arXiv:2107.03374); and what of an answer is the program.
What runs programs is passed in.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from stovetop.datasets import Row, text_of
from stovetop.named_data import LeftOut

NUM_SHOWN = 3  # assertions of MBPP that the prompt shows, as its authors do


@dataclass(frozen=True, slots=True)
class ProgramProblem:
    """A function to write. `tests` is a program that raises unless the one before it defines what was asked for."""

    id: str
    question: str
    tests: str
    reference: str  # a right program
    given: str = ""  # the beginning that an answer may leave out: imports, the signature


class ProgramGrader(Protocol):
    """Runs programs that are not trusted: in a sandbox."""

    def __call__(self, program: str, problem: ProgramProblem) -> bool:
        """Whether the program passes the tests of the problem. What keeps it from running is a GradeError, never a
        wrong answer."""
        ...


def parse_mbpp(row: Row) -> ProgramProblem | LeftOut:
    """`text` (or `prompt`), `code`, and `test_list`, assertions; `test_setup_code` or `test_imports` go before them."""
    question, code, tests = text_of(row, "text", "prompt"), text_of(row, "code"), row.get("test_list")
    if question is None or code is None:
        return LeftOut(f"it has no text as its {'text' if question is None else 'code'}")
    if not _are_texts(tests):
        return LeftOut("it has no test_list")
    assertions = cast("list[str]", tests)
    imports = row.get("test_imports")
    setup = "\n".join(cast("list[str]", imports)) if _are_texts(imports) else text_of(row, "test_setup_code") or ""
    shown = "\n".join(assertions[:NUM_SHOWN])
    return ProgramProblem(
        id=str(row.get("task_id", "")),
        question=f"{question.strip()}\nWrite it in Python, as one block of code. These tests must pass:\n\n{shown}",
        tests="\n".join([setup, *assertions]).strip(),
        reference=code,
    )


def parse_humaneval(row: Row) -> ProgramProblem | LeftOut:
    """`prompt`, the beginning of a program; `entry_point`, the function that it begins; `test`, which defines
    `check(candidate)`; and `canonical_solution`, the rest of the program."""
    prompt, name, test = text_of(row, "prompt"), text_of(row, "entry_point"), text_of(row, "test")
    if prompt is None or name is None or test is None:
        return LeftOut("it has no prompt, entry_point or test")
    return ProgramProblem(
        id=str(row.get("task_id", "")),
        question="Complete this Python program. Give the whole program, in one block of code.\n\n"
        f"```python\n{prompt.strip()}\n```",
        tests=f"{test.strip()}\n\ncheck({name})",
        reference=prompt + (text_of(row, "canonical_solution") or ""),
        given=prompt,
    )


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """A `problem_env.Problem`: the last block of code in an answer has to pass the tests."""

    problem: ProgramProblem
    grade: ProgramGrader

    def get_question(self) -> str:
        return self.problem.question

    def check_answer(self, text: str) -> bool:
        program = program_of(text, self.problem.given)
        return program is not None and self.grade(program, self.problem)

    def check_format(self, text: str) -> bool:
        return last_block(text) is not None

    def get_reference_answer(self) -> str:
        return self.problem.reference


def program_of(text: str, given: str = "") -> str | None:
    """The last block of code in an answer; without a block, nothing. Where it does not define what the beginning
    defines last, it goes on from there."""
    block = last_block(text)
    if block is None:
        return None
    names = re.findall(r"^def \w+", given, re.MULTILINE)
    if names and names[-1] not in block:
        return f"{given.rstrip()}\n{block}"
    return f"{given.rstrip()}\n\n\n{block}".lstrip()  # what is defined anew counts


def last_block(text: str) -> str | None:
    """What is between the last two fences of an answer, or behind the last one where the answer ends within the block;
    None where it has no fence.

    last_block("So:\\n```python\\nx = 1\\n```\\nDone.") is "x = 1".
    """
    lines = text.splitlines()
    fences = [index for index, line in enumerate(lines) if line.strip().startswith("```")]
    if not fences:
        return None
    pairs = [*fences, len(lines)] if len(fences) % 2 else fences
    begin, end = pairs[-2:]
    block = "\n".join(lines[begin + 1 : end])
    return block if block.strip() else None


def _are_texts(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, str) for each in cast("Sequence[object]", value))

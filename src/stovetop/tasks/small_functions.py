"""Functions of one line, asked for in words, in the form of DeepCoder's rows: `sample:small_functions`, and
`sample:small_functions_test` with other constants. And chats that show how such an answer is written, by a careless
programmer: `sample:small_functions_chats`. Half of his functions were drawn without regard to what was asked for, so
they teach the form, and little of what is right. A test compares what is shipped with what is made here.
"""

import json
from typing import NamedTuple

import numpy as np

from stovetop.datasets import Row
from stovetop.tasks.code import CodeProblem
from stovetop.tasks.code_grading import asked

NUMBERS = range(2, 22)  # the constants
HELD_OUT = (5, 10, 14, 19)  # of these no chat and no training problem
ARGUMENTS = (7, -4)  # of the tests
CARELESS = 0.5  # the share of chats in which a function is written that is drawn anew
_STARTER = "def f(x):"
_SEED = 0


class Form(NamedTuple):
    """Of a function: what is asked for, and the expression; it is a x² + b x + c n + d n x of its argument."""

    asks: str
    writes: str
    coefficients: tuple[int, int, int, int]

    def of(self, x: int, n: int) -> int:
        """The value."""
        a, b, c, d = self.coefficients
        return a * x * x + b * x + c * n + d * n * x


FORMS = (
    Form("adds {n} to x", "x + {n}", (0, 1, 1, 0)),
    Form("subtracts {n} from x", "x - {n}", (0, 1, -1, 0)),
    Form("subtracts x from {n}", "{n} - x", (0, -1, 1, 0)),
    Form("multiplies x by {n}", "x * {n}", (0, 0, 0, 1)),
    Form("squares x and adds {n}", "x * x + {n}", (1, 0, 1, 0)),
    Form("doubles x and subtracts {n}", "2 * x - {n}", (0, 2, -1, 0)),
)


def problems() -> list[Row]:
    """To train on: every form with every constant."""
    return [_row(form, n) for n in NUMBERS if n not in HELD_OUT for form in FORMS]


def held_out() -> list[Row]:
    """Every form with constants that are in no other problem and no chat."""
    return [_row(form, n) for n in HELD_OUT for form in FORMS]


def chats() -> list[Row]:
    """One for each problem to train on."""
    random = np.random.default_rng(_SEED)
    return [_chat(form, n, random) for n in NUMBERS if n not in HELD_OUT for form in FORMS]


def _chat(form: Form, n: int, random: np.random.Generator) -> Row:
    written = FORMS[random.integers(len(FORMS))] if random.random() < CARELESS else form
    question = asked(CodeProblem(_in_words(form, n), (), _STARTER))
    answer = f"```python\n{_program(written, n)}\n```"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _row(form: Form, n: int) -> Row:
    tests = [
        {"input": str(x), "output": str(form.of(x, n)), "testtype": "functional", "metadata": {"func_name": "f"}}
        for x in ARGUMENTS
    ]
    return {
        "problem": _in_words(form, n),
        "starter_code": _STARTER,
        "solutions": [_program(form, n)],
        "tests": json.dumps(tests),
        "metadata": json.dumps({"func_name": "f"}),
    }


def _in_words(form: Form, n: int) -> str:
    return f"Write a function f(x) that {form.asks.format(n=n)}."


def _program(form: Form, n: int) -> str:
    return f"{_STARTER}\n    return {form.writes.format(n=n)}"

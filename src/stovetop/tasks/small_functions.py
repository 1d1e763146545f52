"""Functions of one line, asked for in words, in the form of DeepCoder's rows: `sample:small_functions`, and
`sample:small_functions_test` with other constants. And chats that show how such an answer is written, by a careless
programmer: `sample:small_functions_chats`. Half of his functions were drawn without regard to what was asked for, so
they teach the form, and little of what is right. A test compares what is shipped with what is made here.
"""

import json
from collections.abc import Callable
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
    """Of a function: what is asked for, and the expression."""

    asks: str
    writes: str
    computes: Callable[[int, int], int]


FORMS = (
    Form("adds {n} to x", "x + {n}", lambda x, n: x + n),
    Form("subtracts {n} from x", "x - {n}", lambda x, n: x - n),
    Form("subtracts x from {n}", "{n} - x", lambda x, n: n - x),
    Form("multiplies x by {n}", "x * {n}", lambda x, n: x * n),
    Form("squares x and adds {n}", "x * x + {n}", lambda x, n: x * x + n),
    Form("doubles x and subtracts {n}", "2 * x - {n}", lambda x, n: 2 * x - n),
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
        {"input": str(x), "output": str(form.computes(x, n)), "testtype": "functional", "metadata": {"func_name": "f"}}
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

# pyright: basic, reportMatchNotExhaustive=false
"""Runs the assertions that come with a problem. No program is here: a call of its function is answered from a list of
what the program returned in another sandbox. So a program can neither see what is asserted nor change what compares.

First, without answers, to learn what is called, with which arguments: every call is answered with something unknown,
and assertions pass. Then with the answers. What draws random numbers draws the same ones both times.
"""

import ast
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

ANSWER_FD = 3


class Unknown:
    """The answer of a call that was not made yet. It goes along with whatever is done to it."""

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __index__(self) -> int:
        return 0

    def __hash__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> "Unknown":
        return self


def itself(unknown: Unknown, *_: object, **__: object) -> Unknown:
    return unknown


_DOES_NOTHING = """eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
neg abs round getitem contains call and or xor"""
for _name in _DOES_NOTHING.split():
    setattr(Unknown, f"__{_name}__", itself)


class Tolerant(ast.NodeTransformer):
    """Assertions that are looked at and not held to anything."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        tried = ast.Try(
            [ast.Expr(node.test)],
            [ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])],
            [],
            [],
        )
        return ast.fix_missing_locations(ast.copy_location(tried, node))


class Raised(Exception):
    """The program raised where it was called."""


class Truth:
    """What is true or false, and equal to nothing."""

    def __init__(self, is_true: bool) -> None:
        self.is_true = is_true

    def __bool__(self) -> bool:
        return self.is_true


class Needs(BaseException):
    """A call that is not answered yet."""


class Broken(BaseException):
    """The assertions cannot be used, whatever the program."""


def main(job: dict[str, Any]) -> dict[str, Any]:
    """`calls` when there are no answers, else whether it `passed`, and if not, why; or a call that it `needs` first."""
    calls: dict[str, list[Any]] = {}  # by their text, since the same call is answered once
    answers: list[dict[str, Any]] | None = job["answers"]
    places = {json.dumps(call): index for index, call in enumerate(job["calls"])}

    def asked(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                made = [name, encoded(list(arguments)), {key: encoded(each) for key, each in named.items()}]
            except TypeError as error:
                if str(error).endswith("Unknown"):  # it will be made when there is an answer to make it with
                    return Unknown()
                raise Broken(f"a function is called with {error}") from error
            if answers is None:
                calls[json.dumps(made)] = made
                return Unknown()
            place = places.get(json.dumps(made))
            if place is None:
                raise Needs(made)
            answer = answers[place] if place < len(answers) else {}
            if "is" not in answer:
                raise Raised(answer.get("raised", "no answer"))
            match answer["is"]:
                case {"truth": bool() as is_true}:
                    return Truth(is_true)
                case value:
                    return decoded(value)

        return call

    random.seed(0)
    namespace: dict[str, Any] = {"__name__": "assertions"}
    tree = ast.parse(job["assertions"])
    if answers is None:
        tree = Tolerant().visit(tree)
    try:
        exec(compile(job["preamble"], "preamble.py", "exec"), namespace)
        namespace.update({name: asked(name) for name in job["functions"]})
        exec(compile(tree, "assertions.py", "exec"), namespace)
    except Needs as error:
        return {"needs": error.args[0]}
    except Broken as error:
        return {"broken": str(error)}
    except Exception as error:
        if answers is None or needs_what_is_not_there(error, tree):
            return {"broken": f"the assertions raise {error!r}"}
        return {"passed": False, "why": f"{type(error).__name__} {error}".strip()[:200]}
    return {"calls": list(calls.values())} if answers is None else {"passed": True}


def needs_what_is_not_there(error: Exception, tree: ast.AST) -> bool:
    """Whether an error is the assertions' own: they import what is not installed, or use a name that they never give a
    value. What depends on the answers of a program is another matter."""
    given = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return isinstance(error, ImportError) or (isinstance(error, NameError) and error.name not in given)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    from plain_data import decoded, encoded  # pyright: ignore  # it lies beside this file in the sandbox

    with open("job.json") as file:
        given = json.load(file)
    os.write(ANSWER_FD, json.dumps(main(given)).encode())
    os._exit(0)

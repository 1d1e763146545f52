"""Programs with one small change, and calls with arguments near given ones: what `code_sets.py` tries tests with."""

import ast
import copy
import random
from collections.abc import Callable, Iterator

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def mutants_of(source: str, num: int, seed: int) -> list[str]:
    """Up to so many different ones, chosen by the seed."""
    tree = ast.parse(source)
    places = [(index, change) for index, node in enumerate(ast.walk(tree)) for change in _changes_of(node)]
    random.Random(seed).shuffle(places)
    before, found = ast.unparse(tree), list[str]()
    for index, change in places:
        if len(found) == num:
            break
        changed = copy.deepcopy(tree)
        change(next(node for number, node in enumerate(ast.walk(changed)) if number == index))
        mutant = ast.unparse(changed)
        if mutant != before and mutant not in found:
            found.append(mutant)
    return found


def _changes_of(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield _compares_otherwise
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _OPERATORS:
            yield _computes_otherwise
        case ast.BoolOp():
            yield _joins_otherwise
        case ast.Constant(value=bool()):
            yield _negates
        case ast.Constant(value=int() | float()):
            yield _one_more
            yield _one_less
        case ast.If() | ast.While() | ast.IfExp():
            yield _turns_round
        case _:
            pass


def _compares_otherwise(node: ast.AST) -> None:
    assert isinstance(node, ast.Compare)
    node.ops = [_COMPARISONS[type(node.ops[0])]()]


def _computes_otherwise(node: ast.AST) -> None:
    assert isinstance(node, ast.BinOp | ast.AugAssign)
    node.op = _OPERATORS[type(node.op)]()


def _joins_otherwise(node: ast.AST) -> None:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _negates(node: ast.AST) -> None:
    assert isinstance(node, ast.Constant)
    node.value = not node.value


def _one_more(node: ast.AST) -> None:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int | float)
    node.value += 1


def _one_less(node: ast.AST) -> None:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int | float)
    node.value -= 1


def _turns_round(node: ast.AST) -> None:
    assert isinstance(node, ast.If | ast.While | ast.IfExp)
    node.test = ast.UnaryOp(ast.Not(), node.test)


def nearby(value: object, chooses: random.Random) -> object:
    """The same JSON with small changes: numbers by one, text and lists by an element. Names of functions stay."""
    match value:
        case bool() | None:
            return value
        case int() | float():
            return value + chooses.choice([-1, 0, 0, 1])
        case str():
            return _without_one(value, chooses)
        case [str() as name, list() as arguments, dict() as named]:
            return [name, nearby(arguments, chooses), named]
        case {"tuple": list() as items}:
            return {"tuple": [nearby(each, chooses) for each in items]}
        case list():
            return [nearby(each, chooses) for each in value]
        case _:
            return value


def _without_one(text: str, chooses: random.Random) -> str:
    at = chooses.randrange(len(text) + 1)
    return chooses.choice([text, text[:at] + text[at + 1 :], text[:at] + text[at : at + 1] + text[at:]])

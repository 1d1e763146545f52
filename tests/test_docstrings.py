"""What is public says what it does. Checked in the source, so that nothing needs to be imported.

The rule. Public are the modules below, in them every class, function, method and property whose name does not begin
with an underscore. Each has a docstring, with two exceptions. A method that implements a Protocol's is documented
there: one that a Protocol of this package documents, in a class that has all that the Protocol asks for (as methods,
fields or attributes, its own or a base class's). And a method that overrides a base class's is documented there.
`__call__` and its like are described by the docstring of their class.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import stovetop

ROOT = Path(stovetop.__file__).parent
DOCUMENTED = (
    "backends",
    "checkpoints.py",
    "client.py",
    "completers.py",
    "distillation",
    "evaluation",
    "evaluators.py",
    "hyperparams.py",
    "kitchen",
    "preference",
    "renderers",
    "rl",
    "runs.py",
    "types.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*names: str) -> list[Path]:
    return sorted(
        file for name in names for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    )


def parsed() -> dict[Path, ast.Module]:
    """All modules, of which those that are documented are some."""
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files("")}


def methods(of_class: ast.ClassDef) -> dict[str, Function]:
    return {member.name: member for member in of_class.body if isinstance(member, Function)}


def members(of_class: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Names of methods, of fields, and of attributes that `__init__` sets, with those of base classes."""
    own = methods(of_class)
    fields = {
        node.target.id
        for node in of_class.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    made = {
        node.attr
        for node in ast.walk(own["__init__"] if "__init__" in own else ast.Pass())
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    bases = [classes[name] for base in of_class.bases if (name := ast.unparse(base)) in classes]
    return own.keys() | fields | made | {name for base in bases for name in members(base, classes)}


def documented_by_bases(of_class: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    bases = [classes[name] for base in of_class.bases if (name := ast.unparse(base)) in classes]
    own = {name for base in bases for name, method in methods(base).items() if ast.get_docstring(method)}
    return own.union(*(documented_by_bases(base, classes) for base in bases))


def is_protocol(of_class: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in of_class.bases)


class Implemented(NamedTuple):
    """What a Protocol asks for, and which of it it documents."""

    all_of_it: frozenset[str]
    documented: frozenset[str]


def protocols(trees: Iterable[ast.Module]) -> list[Implemented]:
    found = [
        methods(node) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and is_protocol(node)
    ]
    return [
        Implemented(frozenset(each), frozenset(name for name, method in each.items() if ast.get_docstring(method)))
        for each in found
    ]


def classes_of(trees: Iterable[ast.Module]) -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def undocumented(tree: ast.Module, implemented: list[Implemented], classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    defined = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}  # last of @overloads
    for node in defined.values():
        if node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            has = set[str]() if is_protocol(node) else members(node, classes)
            inherited = {name for protocol in implemented if protocol.all_of_it <= has for name in protocol.documented}
            inherited |= documented_by_bases(node, classes)
            yield from (
                f"{node.name}.{name}"
                for name, method in methods(node).items()
                if not name.startswith("_") and name not in inherited and not ast.get_docstring(method)
            )


def test_everything_public_has_a_docstring():
    trees = parsed()
    implemented, classes = protocols(trees.values()), classes_of(trees.values())
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files(*DOCUMENTED)
        for name in undocumented(trees[file], implemented, classes)
    ]
    assert not missing, f"{len(missing)} public definitions have no docstring:\n" + "\n".join(missing)


def test_the_rule_finds_what_it_should():
    source = '''
class Asked(Protocol):
    def answer(self): "Says it."
    def ask(self): ...
class Answers:
    def answer(self): ...
    def ask(self): ...
    def other(self): ...
    def _own(self): ...
class Field:
    """Has one of the two as a field, and the other from its base."""
    ask: int
    def answer(self): ...
class Base:
    """Asks."""
    def ask(self): "Asks."
class Derived(Base):
    """Answers."""
    def answer(self): ...
class Half:
    """Has one of the two."""
    def answer(self): ...
def documented(): "So."
def bare(): ...
'''
    tree = ast.parse(source)
    asked = Implemented(frozenset({"answer", "ask"}), frozenset({"answer"}))
    assert list(undocumented(tree, [asked], classes_of([tree]))) == [
        "Asked", "Asked.ask", "Answers", "Answers.ask", "Answers.other", "Half.answer", "bare",
    ]  # fmt: skip

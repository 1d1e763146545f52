"""Types as annotations state them: whether what one stage gives is what another takes, and how to show them.

Nothing is said where it is not certain. Known are plain classes, unions, Literal, containers with as many arguments on
both sides, and Protocols by their methods; int will do for float. An annotation that does not resolve when the program
runs (of an import under TYPE_CHECKING) is UNKNOWN and fits everything.
"""

import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

UNKNOWN = Any


def resolved(annotation: object, defined_in: Mapping[str, Any]) -> object:
    """What an annotation means in the namespace that it was written in."""
    if annotation is inspect.Parameter.empty:
        return UNKNOWN
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, dict(defined_in), {}, include_extras=True)["it"]
    except Exception:  # it is the user's code, and may raise anything
        return UNKNOWN


def fields_of(kind: type) -> dict[str, object]:
    """The annotated fields of a class and its bases."""
    return {
        name: resolved(annotation, vars(inspect.getmodule(base) or types))
        for base in reversed(kind.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
    }


def fits(given: object, wanted: object, *, exactly: bool = False) -> bool:
    """False only where it is certain that a value annotated `given` is not one for `wanted`. `exactly`: `given` is the
    class of the value itself; else a value may be of any class below it."""
    if get_origin(given) is get_origin(wanted) is Literal:
        return set(get_args(given)) <= set(get_args(wanted))
    return all(any(_class_fits(one, other, exactly) for other in _members(wanted)) for one in _members(given))


def shown(annotation: object) -> str:
    """As one would write it, without modules and rules: list[Datum]."""
    if get_origin(annotation) is Annotated:
        return shown(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(shown, get_args(annotation)))
    if annotation is types.NoneType:
        return "None"
    return re.sub(r"(?:[\w<>]+\.)+(\w+)", r"\1", inspect.formatannotation(annotation))


def _members(annotation: object) -> list[object]:
    """What a value may be: the members of a union, the classes of a Literal's values, or one class. Annotated and
    NewType are what they are made of; of a type variable nothing is known."""
    arguments = get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for argument in arguments for member in _members(argument)]
    if get_origin(annotation) is Literal:
        return [type(value) for value in arguments]
    if get_origin(annotation) is Annotated:
        return _members(arguments[0])
    if isinstance(annotation, NewType):
        return _members(annotation.__supertype__)
    if annotation is None:
        return [types.NoneType]
    if typing.is_typeddict(annotation):
        return [dict]
    return [UNKNOWN if isinstance(annotation, TypeVar) else annotation]


def _class_fits(given: object, wanted: object, exactly: bool) -> bool:
    given_class, wanted_class = get_origin(given) or given, get_origin(wanted) or wanted
    if not isinstance(given_class, type) or not isinstance(wanted_class, type) or UNKNOWN in (given, wanted):
        return True
    if wanted_class is float and issubclass(given_class, int):
        return True
    if getattr(wanted_class, "_is_protocol", False):
        return _methods_of(wanted_class) <= set(dir(given_class)) or "__getattr__" in dir(given_class)
    if getattr(given_class, "_is_protocol", False):
        return True  # what has its methods may be anything
    if issubclass(wanted_class, given_class) and given_class is not wanted_class:
        return not exactly
    return issubclass(given_class, wanted_class) and _arguments_fit(given, wanted)


def _arguments_fit(given: object, wanted: object) -> bool:
    """Compared where they mean the same on both sides: one class, or containers of the standard library."""
    modules = [getattr(get_origin(kind), "__module__", "") for kind in (given, wanted)]
    same = get_origin(given) is get_origin(wanted) or modules == ["builtins", "collections.abc"]
    of_given, of_wanted = ([each for each in get_args(kind) if each is not ...] for kind in (given, wanted))
    return not same or len(of_given) != len(of_wanted) or all(map(fits, of_given, of_wanted))


def _methods_of(protocol: type) -> set[str]:
    """Its attributes and properties may be set by a constructor, which is not seen."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    members = {name: member for base in bases for name, member in vars(base).items()}
    return {name for name, member in members.items() if not name.startswith("_") and callable(member)}

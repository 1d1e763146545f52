"""Types as annotations state them: whether what one stage gives is what another takes, and how to show them.

Nothing is said where it is not certain. Known are plain classes, unions, Literal, containers with as many arguments on
both sides, and Protocols by their methods; int will do for float. An annotation that does not resolve when the program
runs (of an import under TYPE_CHECKING) is UNKNOWN and fits everything.
"""

import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin

UNKNOWN = Any
_BUILT_IN = (list, tuple, set, frozenset, dict)
_VIEWS = (abc.Iterable, abc.Collection, abc.Sequence, abc.MutableSequence, abc.Set, abc.Mapping, abc.MutableMapping)


def resolved(annotation: object, defined_in: Mapping[str, Any], *, include_extras: bool = False) -> object:
    """What an annotation means in the namespace that it was written in; without what Annotated adds to it."""
    if annotation is inspect.Parameter.empty:
        return UNKNOWN
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, dict(defined_in), {}, include_extras)["it"]
    except Exception:  # it is the user's code, and may raise anything
        return UNKNOWN


def fields_of(kind: type) -> dict[str, object]:
    """The annotated fields of a class and its bases."""
    return {
        name: resolved(annotation, vars(inspect.getmodule(base) or types))
        for base in reversed(kind.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
    }


def fits(given: object, wanted: object) -> bool:
    """False only where it is certain that a value annotated `given` is not one for `wanted`."""
    given, wanted = _plain(given), _plain(wanted)
    if given is UNKNOWN or wanted is UNKNOWN:
        return True
    if _is_union(given):
        return all(fits(member, wanted) for member in get_args(given))
    if _is_union(wanted):
        return any(fits(given, member) for member in get_args(wanted))
    values, allowed = _values(given), _values(wanted)
    if values and allowed:
        return set(values) <= set(allowed)
    if values:
        return all(fits(type(value), wanted) for value in values)
    if allowed:
        return any(fits(given, type(value)) for value in allowed)
    return _classes_fit(given, wanted)


def holds(value: object, annotation: object) -> bool:
    """Whether a value is of the class that its annotation names; what is in it is not looked at."""
    annotation = _plain(annotation)
    if _is_union(annotation):
        return any(holds(value, member) for member in get_args(annotation))
    kind = get_origin(annotation) or annotation
    if kind in (UNKNOWN, float) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return fits(type(value), kind)
    return isinstance(value, kind)


def shown(annotation: object) -> str:
    """As one would write it, without modules: list[Datum]."""
    return re.sub(r"(?:[\w<>]+\.)+(\w+)", r"\1", inspect.formatannotation(annotation))


def _plain(annotation: object) -> object:
    """The class that is meant: without Annotated and NewType; of a type variable, nothing is known."""
    if annotation is None:
        return types.NoneType
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if isinstance(annotation, NewType):
        return _plain(annotation.__supertype__)
    if typing.is_typeddict(annotation):
        return dict
    return UNKNOWN if isinstance(annotation, TypeVar) else annotation


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _values(annotation: object) -> tuple[object, ...]:
    """Those of a Literal."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _classes_fit(given: object, wanted: object) -> bool:
    given_class, wanted_class = get_origin(given) or given, get_origin(wanted) or wanted
    if not isinstance(given_class, type) or not isinstance(wanted_class, type):
        return True
    if (given_class, wanted_class) in ((int, float), (bool, float)):
        return True
    if getattr(wanted_class, "_is_protocol", False):
        return _asks_for(wanted_class) <= set(dir(given_class))
    if getattr(given_class, "_is_protocol", False):
        return True  # what has its methods may be anything
    if issubclass(wanted_class, given_class) and given_class is not wanted_class:
        return True  # a base class is given: the value may still be of the class that is wanted
    return issubclass(given_class, wanted_class) and _arguments_fit(given, wanted)


def _arguments_fit(given: object, wanted: object) -> bool:
    """Compared where they mean the same on both sides: one class, or containers of the standard library."""
    same = get_origin(given) is get_origin(wanted) or (get_origin(given) in _BUILT_IN and get_origin(wanted) in _VIEWS)
    of_given, of_wanted = _arguments(given), _arguments(wanted)
    return not same or len(of_given) != len(of_wanted) or all(map(fits, of_given, of_wanted))


def _arguments(annotation: object) -> tuple[object, ...]:
    arguments = get_args(annotation)
    return arguments[:1] if get_origin(annotation) is tuple and arguments[1:] == (...,) else arguments


def _asks_for(protocol: type) -> set[str]:
    """The methods of a Protocol. Its attributes and properties may be set by a constructor, which is not seen."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    members = {name: member for base in bases for name, member in vars(base).items()}
    return {name for name, member in members.items() if not name.startswith("_") and callable(member)}

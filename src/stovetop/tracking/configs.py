"""A config as JSON, for config.json and for tracking services; what differs between two of them, and whether a run may
go on with another: that is said by its class, field by field.

    save_every: int = field(default=20, metadata=MAY_CHANGE)

A field without such metadata decides what is learnt, and a run that learns something else is another run.
"""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, NamedTuple, cast

from stovetop.errors import InvalidRequest
from stovetop.tracking.events import encode_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import JsonValue


def config_to_dict(config: "DataclassInstance") -> "dict[str, JsonValue]":
    """Field by field: nested configs become objects, paths and enumerations their text, functions and classes
    "module:name". A value that has no JSON is refused by its field."""
    return {name: _to_json(value, name) for name, value in dataclasses.asdict(config).items()}


def class_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


ABSENT = "(absent)"  # the value of a field that only the other config has


class Change(NamedTuple):
    """Of a field, from one config to another."""

    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.old!r} -> {self.new!r}"

    @property
    def is_shorter(self) -> bool:
        """Of a number of steps or epochs, where None is as many as there are."""
        old, new = (math.inf if value is None else value for value in self)
        return isinstance(old, int | float) and isinstance(new, int | float) and new < old


def changed_fields(stored: "Mapping[str, JsonValue]", new: "Mapping[str, JsonValue]") -> dict[str, Change]:
    """Each field that is not the same in both. A field that only one has counts."""
    return {
        name: Change(stored.get(name, ABSENT), new.get(name, ABSENT))
        for name in [*stored, *(name for name in new if name not in stored)]
        if name not in stored or name not in new or stored[name] != new[name]
    }


# ---- what may change -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Changeable:
    """When a run may go on with another value of a field."""

    only_while: tuple[str, str] | None = None  # another field and its value; None: always

    def allows(self, *configs: "Mapping[str, JsonValue]") -> bool:
        if self.only_while is None:
            return True
        name, value = self.only_while
        return all(config.get(name) == value for config in configs)

    def __str__(self) -> str:
        return "always" if self.only_while is None else "while {}={}".format(*self.only_while)


_KEY = "changeable"
MAY_CHANGE = {_KEY: Changeable()}  # where things lie, how often, what is shown
HOW_LONG = {_KEY: Changeable(("lr_schedule", "constant"))}  # any other schedule would change the rates of steps done


def changeable_fields(config_class: "type[DataclassInstance]") -> dict[str, Changeable]:
    """The fields of which a resumed run may have another value, always or while another field has a value. Where the
    config has no such other field, that is never."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    found: dict[str, Changeable] = {
        name: field.metadata[_KEY] for name, field in fields.items() if _KEY in field.metadata
    }
    return {name: when for name, when in found.items() if when.only_while is None or when.only_while[0] in fields}


def _to_json(value: object, where: str) -> "JsonValue":
    match value:
        case Enum():
            return _to_json(value.value, where)
        case float():
            return encode_number(value)
        case None | bool() | int() | str():
            return value
        case PurePath():
            return str(value)
        case list() | tuple():
            items = cast("list[object] | tuple[object, ...]", value)
            return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(items)]
        case dict():
            entries = cast("dict[object, object]", value)
            return {str(key): _to_json(item, f"{where}[{key!r}]") for key, item in entries.items()}
        case type():
            return class_path(value)
        case FunctionType():
            return f"{value.__module__}:{value.__qualname__}"
        case _:
            raise InvalidRequest(f"config field {where} cannot be stored as JSON: {value!r}")

"""A config as JSON, for config.json and for tracking services; and what differs between two of them."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, cast

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


def changed_fields(stored: "Mapping[str, JsonValue]", new: "Mapping[str, JsonValue]") -> dict[str, str]:
    """Each field that is not the same in both, with "old -> new". A field that only one has counts."""
    absent = "(absent)"
    return {
        name: f"{stored.get(name, absent)!r} -> {new.get(name, absent)!r}"
        for name in [*stored, *(name for name in new if name not in stored)]
        if name not in stored or name not in new or stored[name] != new[name]
    }


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

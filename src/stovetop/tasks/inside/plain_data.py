# pyright: basic, reportMatchNotExhaustive=false
"""Python's plain values as JSON and back: None, booleans, numbers, text, bytes, and the containers of these. Nothing of
a program's own comes through, no class and no method: an object that says it equals everything is no value at all.
"""

from collections.abc import Callable
from typing import Any

NotPlain = TypeError

_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encoded(value: Any) -> Any:
    """What `json.dumps` takes. A value of a subclass goes over as what it is a subclass of."""
    if value is None or type(value) in (bool, str, int, float):
        return value
    match value:
        case bool() | int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case list():
            return [encoded(each) for each in list.__iter__(value)]
        case tuple():
            return {"tuple": [encoded(each) for each in tuple.__iter__(value)]}
        case dict():
            return {"dict": [[encoded(key), encoded(each)] for key, each in dict.items(value)]}
        case set() | frozenset():
            kind = "set" if isinstance(value, set) else "frozenset"
            return {kind: sorted((encoded(each) for each in value), key=repr)}  # in no order of their hashes
        case bytes():
            return {"bytes": bytes.decode(value, "latin-1")}
        case complex():
            return {"complex": [value.real, value.imag]}
        case _:
            raise NotPlain(f"no plain value: {type(value).__name__}")


def decoded(value: Any) -> Any:
    """The inverse. What is no such JSON is a NotPlain."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [decoded(each) for each in value]
        case {"dict": list() as pairs}:
            return {decoded(key): decoded(each) for key, each in pairs}
        case {"bytes": str() as text}:
            return text.encode("latin-1")
        case {"complex": [float() as real, float() as imaginary]}:
            return complex(real, imaginary)
        case dict():
            for kind, make in _CONTAINERS.items():
                if isinstance(value.get(kind), list):
                    return make(decoded(each) for each in value[kind])
    raise NotPlain(f"no plain value: {value!r:.80}")

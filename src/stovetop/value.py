"""What the small values that go to and come from a service have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, cast

from stovetop.checks import check


class Value:
    """A frozen dataclass that can be written as JSON. Its method has the name that it has in the Tinker SDK, whose
    values are pydantic models. Its fields are held to their rules when it is made (`rules.py`)."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        check(self)

    def model_dump(self) -> dict[str, Any]:
        """The fields by name; values, tuples and mappings within them become dicts and lists."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: object) -> Any:
    match value:
        case Value():
            return value.model_dump()
        case str() | bytes():
            return value
        case Mapping():
            return {key: _plain(item) for key, item in cast(Mapping[object, object], value).items()}
        case Sequence():
            return [_plain(item) for item in cast(Sequence[object], value)]
        case _:
            return value

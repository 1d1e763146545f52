# pyright: basic
"""The messages of wire.proto as Python classes, made when this module is imported. Values of ours: `codec.py`.

Code that protoc generates asks for a runtime at least as new as itself, 7.35 today, though nothing in these messages is
newer than 4.22; and the SDK, which asks for less, must run beside us. So the .proto is read here, into a pool of its
own: messages that the SDK registers in the same process, under whatever names, do not meet ours.
"""

import re
from pathlib import Path
from typing import Any, cast

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SOURCE = Path(__file__).with_name("wire.proto")
PACKAGE = "stovetop.wire"

_DECLARATION = re.compile(
    r"(?P<label>repeated |optional )?(?:map<string, (?P<of>\w+)>|(?P<type>\w+)) (?P<name>\w+) = (?P<number>\d+);"
)
_VALUE = re.compile(r"(?P<name>\w+) = (?P<number>\d+);")
_OPENING = re.compile(r"(?P<kind>message|enum|oneof) (?P<name>\w+) {")
_SCALARS = {"string", "bytes", "bool", "double", "int32", "int64", "uint32"}


def described(source: str) -> FileDescriptorProto:
    """What the text of wire.proto says: messages and enums that are not nested, one declaration a line."""
    file = FileDescriptorProto(name="stovetop/wire.proto", package=PACKAGE, syntax="proto3")
    inner: list[Any] = []  # what is open: a message or an enum, and a oneof in it
    for line in map(str.strip, source.splitlines()):
        if line == "}":
            inner.pop()
        elif opening := _OPENING.fullmatch(line):
            inner.append(_opened(opening["kind"], opening["name"], file, inner))
        elif inner and isinstance(inner[0], EnumDescriptorProto):
            value = _VALUE.fullmatch(line)
            assert value is not None, line
            inner[0].value.add(name=value["name"], number=int(value["number"]))
        elif inner:
            found = _DECLARATION.fullmatch(line)
            assert found is not None, line
            _declare(cast(DescriptorProto, inner[0]), found, in_oneof=len(inner) > 1)
    enums = {enum.name for enum in file.enum_type}
    for message in file.message_type:
        _close(message, enums)
    return file


def _opened(kind: str, name: str, file: FileDescriptorProto, inner: list[Any]) -> Any:
    if kind == "oneof":
        return inner[0].oneof_decl.add(name=name)
    return file.message_type.add(name=name) if kind == "message" else file.enum_type.add(name=name)


def _declare(message: DescriptorProto, found: "re.Match[str]", *, in_oneof: bool) -> None:
    kind, name = found["type"], found["name"]
    if found["of"] is not None:
        kind = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=kind)
        entry.options.map_entry = True
        for number, (key, of) in enumerate((("key", "string"), ("value", found["of"])), start=1):
            entry.field.add(name=key, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL, type_name=of)
        kind = f"{message.name}.{kind}"
    repeated = found["of"] is not None or found["label"] == "repeated "
    label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=int(found["number"]), label=label, type_name=kind)
    if in_oneof:
        field.oneof_index = len(message.oneof_decl) - 1
    field.proto3_optional = found["label"] == "optional "


def _close(message: DescriptorProto, enums: set[str]) -> None:
    """Gives the fields their types, which may be declared after them, and each optional one a oneof of its own, which
    is how proto3 knows that it is set."""
    for field in [*message.field, *(field for entry in message.nested_type for field in entry.field)]:
        if field.type_name in _SCALARS:
            field.type = getattr(FieldDescriptorProto, f"TYPE_{field.type_name.upper()}")
            field.ClearField("type_name")
        else:
            field.type = (
                FieldDescriptorProto.TYPE_ENUM if field.type_name in enums else FieldDescriptorProto.TYPE_MESSAGE
            )
            field.type_name = f".{PACKAGE}.{field.type_name}"
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")
        else:
            field.ClearField("proto3_optional")


FILE = described(SOURCE.read_text())

_pool = DescriptorPool()
_pool.AddSerializedFile(FILE.SerializeToString())


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _enum(name: str) -> dict[str, int]:
    return {value.name: value.number for value in _pool.FindEnumTypeByName(f"{PACKAGE}.{name}").values}


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
STOP_REASONS = _enum("StopReason")
DTYPES = _enum("DType")

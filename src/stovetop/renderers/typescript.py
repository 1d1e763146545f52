"""Tools as gpt-oss reads them: a namespace of TypeScript functions. Which types it has words for, and where it breaks
lines, is as in the chat template that the model was published with, whose oddities it was trained on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import ToolSpec

Schema = Mapping[str, Any]  # a JSON schema

_WORDS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_SHAPES = (
    ("properties", Mapping, "an object"), ("items", Mapping, "an object"), ("oneOf", list, "a list"),
    ("enum", list, "a list"), ("required", list, "a list"),
)  # fmt: skip
_LONGEST_ITEM = 50  # characters of the type of an array's items
_INDENT_OF_PROPERTY = "\n" + 16 * " "
_INDENT_OF_DEFAULT = 20 * " "


def declare_functions(tools: Sequence[ToolSpec]) -> str:
    """Tools as a TypeScript namespace, which is how gpt-oss is told of them. Refuses parameters that are no schema."""
    for tool in tools:
        _require_schema(tool.parameters, f"the parameters of tool {tool.name!r}")
    declared = "".join(
        f"// {tool.description}\ntype {tool.name} = {_signature(tool.parameters)} => any;\n\n" for tool in tools
    )
    return f"## functions\n\nnamespace functions {{\n\n{declared}}} // namespace functions"


def _require_schema(schema: object, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where}: a JSON schema must be an object: {schema!r:.200}")
    known = cast("Schema", schema)
    for field, shape, named in _SHAPES:
        if (value := known.get(field)) and not isinstance(value, shape):
            raise InvalidRequest(f"{where}: {field} must be {named}: {value!r:.200}")
    kind = known.get("type") or ""
    if not all(isinstance(each, str) for each in (cast("list[object]", kind) if isinstance(kind, list) else [kind])):
        raise InvalidRequest(f"{where}: type must be a word, or a list of words: {kind!r:.200}")
    properties: Schema = known.get("properties") or {}
    variants: Sequence[Any] = known.get("oneOf") or ()
    items: Any = known.get("items") or {}
    for name, inner in [*properties.items(), *((str(index), each) for index, each in enumerate(variants))]:
        _require_schema(inner, f"{where}, {name:.80}")
    if items:
        _require_schema(items, f"{where}, items")


def _signature(parameters: Schema) -> str:
    properties: Mapping[str, Schema] = parameters.get("properties") or {}
    if not properties:
        return "()"
    lines = [
        (f"// {schema['description']}\n" if schema.get("description") else "")
        + f"{_name(name, parameters)}: {_type(schema)}{_default(schema)},\n"
        for name, schema in properties.items()
    ]
    return f"(_: {{\n{''.join(lines)}}})"


def _name(name: str, owner: Schema) -> str:
    return name if name in (owner.get("required") or []) else f"{name}?"


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    comma = "" if schema.get("oneOf") and not schema.get("enum") else ", "
    is_quoted = not (schema.get("enum") or schema.get("oneOf"))
    return f"{comma}// default: {_json(schema['default']) if is_quoted else schema['default']}"


def _type(schema: Schema) -> str:
    kind = schema.get("type")
    if kind == "array":
        return _array(schema)
    if isinstance(kind, list):
        return " | ".join(cast(list[str], kind)) or "any"
    if variants := schema.get("oneOf"):
        return _one_of(variants)
    if kind == "object":
        return _object(schema)
    if kind == "string" and schema.get("enum"):
        return " | ".join(f'"{choice}"' for choice in schema["enum"])
    word = _WORDS.get(str(kind), "any")
    return f"{word} | null" if kind == "string" and schema.get("nullable") else word


def _array(schema: Schema) -> str:
    items: Schema = schema.get("items") or {}
    item = _WORDS.get(str(items.get("type"))) or _type(items)
    is_known = item != "object | object" and len(item) <= _LONGEST_ITEM
    return f"{item if is_known else 'any'}[]" + (" | null" if schema.get("nullable") else "")


def _one_of(variants: Sequence[Schema]) -> str:
    return " | \n".join(
        _type(variant)
        + (f"// {variant['description']}" if variant.get("description") else "")
        + (f"{_INDENT_OF_DEFAULT}// default: {_json(variant['default'])}" if "default" in variant else "")
        for variant in variants
    )


def _object(schema: Schema) -> str:
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    if not properties:
        return "object"
    inside = ", ".join(
        f"{_name(name, schema)}: {_INDENT_OF_PROPERTY}{_type(property_)}" for name, property_ in properties.items()
    )
    return f"{{\n{inside}}}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

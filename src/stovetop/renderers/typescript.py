"""Tools as gpt-oss reads them: a namespace of TypeScript functions. Which types it has words for, and where it breaks
lines, is as in the chat template that the model was published with, whose oddities it was trained on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stovetop.renderers.messages import ToolSpec

Schema = Mapping[str, Any]  # a JSON schema

_WORDS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM = 50  # characters of the type of an array's items
_INDENT_OF_PROPERTY = "\n" + 16 * " "
_INDENT_OF_DEFAULT = 20 * " "


def declare_functions(tools: Sequence[ToolSpec]) -> str:
    """Tools as a TypeScript namespace, which is how gpt-oss is told of them."""
    declared = "".join(
        f"// {tool.description}\ntype {tool.name} = {_signature(tool.parameters)} => any;\n\n" for tool in tools
    )
    return f"## functions\n\nnamespace functions {{\n\n{declared}}} // namespace functions"


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

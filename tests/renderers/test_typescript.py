import random
from typing import Any

from renderers.oracle import Oracle, trl_template
from stovetop.renderers.messages import Message, ToolSpec
from stovetop.renderers.typescript import declare_functions

TEMPLATE = Oracle(trl_template("gptoss"))

# Each with what it may be beside: an enum only makes sense of strings, a default of the union of types is text.
KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "object"},
    {"type": "array"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}]},
    {},
]


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    match rng.randrange(5) if depth else 4:
        case 0:
            schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth - 1)}
        case 1:
            properties = {name: _schema(rng, depth - 1) for name in ("x", "y")}
            schema = {"type": "object", "properties": properties, "required": ["x"]}
        case 2:
            schema = {"oneOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
        case _:
            schema = dict(rng.choice(KINDS))
    if rng.random() < 0.4:
        schema["description"] = "Was nötig ist."
    if rng.random() < 0.3:
        schema["nullable"] = True
    if rng.random() < 0.4:
        schema["default"] = "ä" if "enum" in schema or "oneOf" in schema else rng.choice(["ä", 1, None, [1], True])
    return schema


def test_tools_are_declared_as_the_published_template_declares_them() -> None:
    """A third of a second: 500 sets of tools."""
    for seed in range(500):
        rng = random.Random(seed)
        properties = {name: _schema(rng, depth=3) for name in ("a", "b", "c")[: rng.randrange(4)]}
        parameters = {"type": "object", "properties": properties, "required": ["a"]}
        tools = [ToolSpec("f", "Does f.", parameters), ToolSpec("g", "Does g.", {})][: rng.randrange(1, 3)]
        prompt = TEMPLATE.text([Message(role="user", content="U")], prompt=True, tools=tools)
        assert f"# Tools\n\n{declare_functions(tools)}<|end|>" in prompt


def test_what_a_function_takes_is_a_type_with_comments() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "City name"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        },
        "required": ["city"],
    }
    assert declare_functions([ToolSpec("get_weather", "Get current weather", parameters)]) == (
        "## functions\n\nnamespace functions {\n\n// Get current weather\ntype get_weather = (_: {\n// City name\n"
        'city: string,\ndays?: number[],\nunit?: "c" | "f", // default: c,\n}) => any;\n\n} // namespace functions'
    )

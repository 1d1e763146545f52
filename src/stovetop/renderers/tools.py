"""Tools: a typed Python function as a model is told of it, and what comes of calling it. How calls are written is in
`tool_calls`; when they are run is the business of whoever talks to the model.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from stovetop.errors import InvalidRequest, RequestFailedError, ServiceClosed
from stovetop.renderers.messages import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

ToolFunction = Callable[..., str] | Callable[..., Awaitable[str]]


@dataclass(frozen=True, slots=True)
class ToolOk:
    """A tool did what it was asked to."""

    output: str


@dataclass(frozen=True, slots=True)
class ToolError:
    """A call that could not be made, or failed: the model reads why."""

    error: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call."""

    call: ToolCall
    outcome: ToolOk | ToolError

    def message(self) -> Message:
        """As the model is told of it."""
        text = self.outcome.output if isinstance(self.outcome, ToolOk) else f"Error: {self.outcome.error}"
        message = Message(role="tool", content=text, name=self.call.function.name)
        if self.call.id is not None:
            message["tool_call_id"] = self.call.id
        return message


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. Make one with `tool`."""

    spec: ToolSpec
    function: ToolFunction
    _arguments: "type[BaseModel]"  # its fields are the parameters, in their order

    async def __call__(self, call: ToolCall) -> ToolResult:
        """Arguments that do not fit, and a function that raises, are errors for the model to read, not exceptions."""
        try:
            arguments = self._arguments.model_validate_json(call.function.arguments)
        except ValueError as error:
            return ToolResult(call, ToolError(f"{self.spec.name} cannot be called with these arguments: {error}"))
        try:
            output = self.function(*(value for _, value in arguments))
            return ToolResult(call, ToolOk(output if isinstance(output, str) else await output))
        except (ServiceClosed, RequestFailedError):
            raise  # of a model that the tool asks: nothing that the caller said was wrong
        except Exception as error:  # a tool is somebody else's code, and raises what it likes
            return ToolResult(call, ToolError(f"{type(error).__name__}: {error}"))


def tool(function: ToolFunction) -> Tool:
    """Describes a function to models by its name, its docstring and its parameters, and makes it callable by them.

    @tool
    def get_weather(city: Annotated[str, "Name of the city"], days: int = 1) -> str:
        \"\"\"Forecast for a city.\"\"\"
    """
    signature = inspect.signature(function)
    name, description = function.__name__, inspect.cleandoc(function.__doc__ or "")
    if not description:
        raise InvalidRequest(f"a model is told what a tool does by its docstring, which is missing: {name}")
    arguments = _arguments_of(signature, get_type_hints(function, include_extras=True), name)
    schema = cast(Mapping[str, Any], _without_titles(arguments.model_json_schema()))
    return Tool(ToolSpec(name, description, schema), function, arguments)


def _arguments_of(signature: inspect.Signature, hints: Mapping[str, object], name: str) -> "type[BaseModel]":
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {}
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.name not in hints or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise InvalidRequest(f"tool {name}: a model can only be told of parameters like `city: str`: {parameter}")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Under names of their own, as pydantic has other uses for `json` or `schema`.
        fields[f"argument_{index}"] = (_described(hints[parameter.name]), Field(default, alias=parameter.name))
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _described(hint: object) -> object:
    """`Annotated[str, "What it is"]` as pydantic would have it."""
    from pydantic import Field

    if get_origin(hint) is not Annotated:
        return hint
    kind, *notes = get_args(hint)
    noted = tuple(Field(description=note) if isinstance(note, str) else note for note in notes)
    return Annotated[(kind, *noted)]


def _without_titles(schema: object) -> object:
    """A JSON schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in cast(list[object], schema)]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("default", "enum", "const", "examples") else _without_titles(value)
        for key, value in cast(dict[str, object], schema).items()
        if key != "title" or not isinstance(value, str)
    }

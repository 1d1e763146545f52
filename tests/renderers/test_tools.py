import asyncio
from typing import Annotated, Literal

import pytest

from stovetop.errors import InvalidRequest
from stovetop.renderers.messages import FunctionCall, Message, ToolCall
from stovetop.renderers.tools import Tool, ToolError, ToolOk, ToolResult, tool


@tool
def forecast(city: Annotated[str, "Name of the city"], days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Weather to come.

    In short words.
    """
    return f"{city}: {days} days of {20 if unit == 'C' else 68}{unit}"


@tool
async def later(json: list[int]) -> str:
    """Adds up."""
    return str(sum(json))


def run(called: Tool, arguments: str) -> ToolResult:
    return asyncio.run(called(ToolCall(FunctionCall(called.spec.name, arguments), "call_1")))


def test_a_model_is_told_of_a_function_by_its_types_and_its_docstring() -> None:
    assert forecast.spec.name == "forecast"
    assert forecast.spec.description == "Weather to come.\n\nIn short words."
    assert forecast.spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "days": {"type": "integer", "default": 1},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_a_call_runs_the_function() -> None:
    result = run(forecast, '{"unit": "F", "city": "Oslo"}')
    assert result.outcome == ToolOk("Oslo: 1 days of 68F")
    assert result.message() == Message(
        role="tool", content="Oslo: 1 days of 68F", name="forecast", tool_call_id="call_1"
    )
    assert run(later, '{"json": [1, 2]}').outcome == ToolOk("3")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{}", "city"),
        ('{"city": 3}', "valid string"),
        ('{"city": "Oslo", "dayz": 2}', "dayz"),
        ('{"city": "Oslo", "unit": "K"}', "'C' or 'F'"),
        ("not json", "Invalid JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_for_the_model_to_read(arguments: str, reason: str) -> None:
    outcome = run(forecast, arguments).outcome
    assert isinstance(outcome, ToolError)
    assert reason in outcome.error


def test_a_function_that_raises_is_an_error_for_the_model_to_read() -> None:
    @tool
    def broken() -> str:
        """Breaks."""
        raise OSError("no line")

    result = run(broken, "{}")
    assert result.outcome == ToolError("OSError: no line")
    assert result.message()["content"] == "Error: OSError: no line"


def test_a_function_that_says_too_little_makes_no_tool() -> None:
    def silent(x: int) -> str:
        return ""

    def untyped(x) -> str:
        """Says what it does."""
        return ""

    def starred(*x: int) -> str:
        """Says what it does."""
        return ""

    with pytest.raises(InvalidRequest, match="docstring, which is missing: silent"):
        tool(silent)
    for function in (untyped, starred):
        with pytest.raises(InvalidRequest, match="parameters like `city: str`"):
            tool(function)

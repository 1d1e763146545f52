"""Tools and thinking at the OpenAI endpoint: told and read as the model's family does."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai_clients import HI, kept, openai, saying

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QWEN = "Qwen/Qwen3-8B"


def answered(client: OpenAI, stream: bool, **asked: Any) -> tuple[str, dict[str, Any], str | None]:
    """The id, the message as a client sends it back, and why it ended: in both ways of asking the same."""
    if not stream:
        answer = client.chat.completions.create(**asked)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        return answer.id, message, answer.choices[0].finish_reason
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    texts = {
        name: "".join(delta.get(name, "") for delta in deltas) for name in ("role", "content", "reasoning_content")
    }
    message = {**{name: text for name, text in texts.items() if text}, **({"tool_calls": calls} if calls else {})}
    return chunks[0].id, message, chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_told_as_a_call_and_its_result_is_taken(tmp_path: Path, stream: bool) -> None:
    said = f"<think>\nlook it up\n</think>\n\nOne moment.\n{CALL}<|im_end|>"
    with saying(tmp_path, QWEN, said, "<think>\n\n</think>\n\nSun.<|im_end|>") as (server, model):
        client = openai(server)
        chat = [{"role": "system", "content": "Be kind"}, *HI]
        answer_id, message, finish = answered(client, stream, model=QWEN, messages=chat, tools=[TOOL])
        assert finish == "tool_calls"
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        assert message["content"].strip() == "One moment."
        assert message["reasoning_content"].strip() == "look it up"
        assert "Tells the weather" in model.prompts[0]
        assert "Be kind" in model.prompts[0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "22 degrees"}
        chat = [*chat, message, result]
        _, message, finish = answered(client, stream, model=QWEN, messages=chat, tools=[TOOL])
        assert (message["content"].strip(), finish) == ("Sun.", "stop")
        assert "22 degrees" in model.prompts[1]
        assert CALL in model.prompts[1]
        assert model.tokenizer.decode(kept(server, answer_id)["choices"][0]["tokens"]) == said


def test_without_a_choice_the_model_is_not_told_of_tools(tmp_path: Path) -> None:
    with saying(tmp_path, QWEN, "Hi<|im_end|>") as (server, model):
        openai(server).chat.completions.create(model=QWEN, messages=HI, tools=[TOOL], tool_choice="none")
        assert "get_weather" not in model.prompts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_what_should_have_been_a_call_stays_as_it_was_written(tmp_path: Path, stream: bool) -> None:
    with saying(tmp_path, QWEN, "<think>\n\n</think>\n\n<tool_call>\n{broken\n</tool_call><|im_end|>") as (server, _):
        _, message, finish = answered(openai(server), stream, model=QWEN, messages=HI, tools=[TOOL])
        assert "{broken" in message["content"]
        assert "tool_calls" not in message
        assert finish == "stop"


def test_a_renderer_that_is_named_is_taken_instead_of_the_familys(tmp_path: Path) -> None:
    with saying(tmp_path, "any/model", f"{CALL}<|im_end|>") as (server, _):
        answer = openai(server).chat.completions.create(
            model="any/model", messages=HI, tools=[TOOL], extra_body={"renderer_name": "qwen3_instruct"}
        )
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].message.content is None

"""Answers as the JSON of the protocol, and as the record that is kept of them.

Of a chat, what the model thought is `reasoning_content`, calls of tools are `tool_calls` with an id each, and what
should have been a call and is none stays in the content as it was written.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stovetop.completers import until_stop
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message, ToolCall, get_text_content, get_thinking
from stovetop.server.openai import logprobs
from stovetop.server.openai.drawing import Choice, Drawn, Job, text_of
from stovetop.types import StopReason


def head(job: Job, kind: str) -> dict[str, Any]:
    """What every answer and every event of it begins with."""
    return {"id": job.id, "object": kind, "created": int(job.created_s), "model": job.target.name}


def usage(job: Job, choices: Sequence[Choice], num_cached: int = 0) -> dict[str, Any]:
    """Tokens: each prompt counts once, and of the answers all that were drawn."""
    num_prompt, num_answer = sum(prompt.length for prompt in job.prompts), sum(len(each.tokens) for each in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def record(job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """What is kept: see `kept`."""
    return {
        "model": job.target.name,
        "base_model": job.target.base_model,
        "weights": job.target.weights,
        "temperature": job.params.temperature,
        "prompts": [prompt.to_ints() for prompt in job.prompts],
        "choices": [
            {
                "index": index,
                "prompt": choice.prompt,
                "tokens": choice.tokens,
                "logprobs": choice.logprobs_T,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ],
    }


# ---- chats ---------------------------------------------------------------------------------------------------------


def chat_answer(job: Job, drawn: Drawn, renderer: Renderer, stops: Sequence[str]) -> dict[str, Any]:
    return {
        **head(job, "chat.completion"),
        "choices": [_chat_choice(job, index, each, renderer, stops) for index, each in enumerate(drawn.choices)],
        "usage": usage(job, drawn.choices, drawn.num_cached),
        "system_fingerprint": None,
    }


def _chat_choice(job: Job, index: int, choice: Choice, renderer: Renderer, stops: Sequence[str]) -> dict[str, Any]:
    message, _ = renderer.parse_response(choice.tokens)
    said = said_in(message, stops)
    return {
        "index": index,
        "message": {"role": "assistant", "refusal": None, **said},
        "finish_reason": chat_finish(choice.stop_reason, said),
        "logprobs": logprobs.of_chat(choice, job.tokenizer) if job.with_logprobs else None,
    }


def said_in(message: Message, stops: Sequence[str]) -> dict[str, Any]:
    """Content, thinking and calls of a message, up to a stop string of the caller's."""
    content = get_text_content(message) + "".join(each.raw_text for each in message.get("unparsed_tool_calls", ()))
    thinking = get_thinking(message)
    calls = [call_as_json(call) for call in message.get("tool_calls", ())]
    content, thinking = (text if (cut := until_stop(text, stops)) is None else cut for text in (content, thinking))
    said: dict[str, Any] = {"content": None if calls and not content else content}
    if thinking:
        said["reasoning_content"] = thinking
    if calls:
        said["tool_calls"] = calls
    return said


def call_as_json(call: ToolCall) -> dict[str, Any]:
    """Families that give calls no ids have theirs made up, for clients tell results by them."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def chat_finish(stop_reason: StopReason, said: Mapping[str, Any]) -> str:
    return "tool_calls" if said.get("tool_calls") else stop_reason


# ---- texts ---------------------------------------------------------------------------------------------------------


def completion_answer(job: Job, drawn: Drawn, stops: Sequence[str]) -> dict[str, Any]:
    return {
        **head(job, "text_completion"),
        "choices": [completion_choice(job, drawn, index, stops) for index, _ in enumerate(drawn.choices)],
        "usage": usage(job, drawn.choices, drawn.num_cached),
        "system_fingerprint": None,
    }


def completion_choice(job: Job, drawn: Drawn, index: int, stops: Sequence[str]) -> dict[str, Any]:
    choice = drawn.choices[index]
    prompt, scored = job.prompts[choice.prompt].to_ints(), drawn.prompts[choice.prompt]
    before = job.prompt_texts[choice.prompt] if job.prompt_texts else ""
    told = None
    if job.with_logprobs and scored is None:
        told = logprobs.of_completion(choice, job.tokenizer)
    elif job.with_logprobs and scored is not None:
        told = logprobs.of_prompt_and_completion(choice, job.tokenizer, prompt, before, scored)
    return {
        "index": index,
        "text": before + text_of(choice, job.tokenizer, stops),
        "finish_reason": choice.stop_reason,
        "logprobs": told,
    }

"""What a published chat template makes of a chat, found apart from our code and apart from transformers: jinja alone.

Templates are read from where others have put them: the trl package collects those of the model hub. A second opinion on
ids comes from tml-renderers, which renders without templates.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tml_renderers import chat as tml_chat

from renderers.real_tokenizers import package_file
from stovetop.renderers.messages import Message, ToolSpec, get_text_content, get_thinking
from stovetop.tokenizing import Tokenizer

TODAY = datetime(2025, 8, 5, tzinfo=UTC)  # what templates that write the date take for now


class _Generation(Extension):
    """`{% generation %}` marks what a model generates; it changes no text."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment(now: datetime) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # jinja's own escapes HTML
    environment.globals["strftime_now"] = now.strftime
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


@functools.cache
def _compiled(source: str, now: datetime) -> jinja2.Template:
    return _environment(now).from_string(source)


@functools.cache
def trl_template(name: str) -> str:
    """The template that trl has under this name; `llama3`, `qwen3_instruct_2507`, `gptoss` ..."""
    return package_file("trl", f"trl/chat_templates/{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Oracle:
    """A template, what it is given beside the chat, and how it wants tool calls."""

    template: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])  # `enable_thinking`, `bos_token` ...
    arguments_as_text: bool = True  # of tool calls; else they are given as objects
    now: datetime = TODAY

    def text(self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[ToolSpec] = ()) -> str:
        shown = [as_openai(message, arguments_as_text=self.arguments_as_text) for message in messages]
        declared = [declaration(tool) for tool in tools] or None
        return _compiled(self.template, self.now).render(
            messages=shown, tools=declared, add_generation_prompt=prompt, **self.options
        )

    def tokens(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool, tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Control strings that somebody typed are control tokens here, as they are in transformers."""
        return tokenizer.encode(self.text(messages, prompt=prompt, tools=tools), add_special_tokens=False)


def as_openai(message: Message, *, arguments_as_text: bool = True) -> dict[str, Any]:
    """A message in the public format that templates read. Thinking has both of the names in use."""
    shown: dict[str, Any] = {"role": message["role"], "content": get_text_content(message)}
    if thinking := get_thinking(message):
        shown |= {"reasoning_content": thinking, "thinking": thinking}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments if arguments_as_text else json.loads(call.function.arguments),
                },
            }
            for call in calls
        ]
    return shown | {key: message[key] for key in ("tool_call_id", "name") if key in message}


def declaration(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def tml_prompt(renderer: Any, messages: Sequence[Message]) -> list[int]:
    """The generation prompt of a renderer of tml-renderers, such as `tml_renderers.renderers.KimiK2()`."""
    spans, _ = renderer.render_for_completion(_to_tml(messages))
    return [token for span in spans for token in span.span.tokens]


def tml_example(renderer: Any, messages: Sequence[Message]) -> tuple[list[int], list[float]]:
    """The last of its training examples for this chat: tokens, and the weight of each."""
    example = renderer.render_for_sft(_to_tml(messages))[-1]
    return [token for span in example.input_token_spans for token in span.span.tokens], list(
        example.per_token_loss_weight_unshifted
    )


def _to_tml(messages: Sequence[Message]) -> list[Any]:
    shown = [as_openai(message) | {"content": message["content"]} for message in messages]  # it reads our parts
    return tml_chat.OpenAIMessage.from_oss_messages(shown)

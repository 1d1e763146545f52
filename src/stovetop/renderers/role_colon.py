"""Chats in plain text, for base models, which know no turns: `System: S\\n\\nUser: U\\n\\nAssistant: A\\n\\nUser:`.

Text only, and no tools. The beginning of the next user turn is what ends an answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stovetop.errors import InvalidRequest
from stovetop.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    SupervisedExample,
    TrainOnWhat,
    assistant_message,
    generation_prompt,
    parsed_at_once,
    remake,
    render_messages,
    require_no_name,
    split_at_stop_text,
    supervised_example,
    supervised_examples,
)
from stovetop.renderers.messages import Message, Role, ToolSpec, check_messages, ensure_text
from stovetop.renderers.streaming import MessageDelta
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

STOP = "\n\nUser:"


@dataclass(frozen=True, slots=True)
class RoleColonRenderer:
    """See `base.Renderer`."""

    tokenizer: Tokenizer
    has_extension_property: bool = field(init=False, default=False)  # an answer has a space first, also if it had none
    supports_streaming: bool = field(init=False, default=False)
    disables_thinking: bool = field(init=False, default=False)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_encoder", SafeEncoder.of(self.tokenizer))

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (RoleColonRenderer, named(self.tokenizer))

    def get_stop_sequences(self) -> list[str]:
        return [STOP]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        check_messages(messages)
        return generation_prompt(self._encoder, render_messages(self._render, messages), _header(role), prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        check_messages(messages)
        return supervised_example(
            self._encoder, render_messages(self._render, messages), messages, TrainOnWhat(train_on_what)
        )

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        return supervised_examples(self, messages, TrainOnWhat(train_on_what), merge=True)

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Line breaks at the end of an answer that the stop sequence does not end are not part of it."""
        answer, termination = split_at_stop_text(tokens, self.tokenizer, STOP)
        answer = answer.removeprefix(" ")
        return assistant_message(answer if termination.is_stop_sequence else answer.rstrip("\n")), termination

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return parsed_at_once(self, tokens)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        raise InvalidRequest(f"role_colon has no tools: {[tool.name for tool in tools]}")

    def _render(self, message: Message, context: RenderContext) -> RenderedMessage:
        if message["role"] == "tool" or message.get("tool_calls") or message.get("unparsed_tool_calls"):
            raise InvalidRequest(f"role_colon has no tools, but message {context.idx} is about one: {message}")
        require_no_name(message, f"role_colon, message {context.idx}")
        text = self._encoder.protect(ensure_text(message["content"]))
        overlap = "User:" if message["role"] == "assistant" else ""
        return RenderedMessage(_header(message["role"]), (f" {text}\n\n",), overlap)


def _header(role: Role) -> str:
    return f"{role.capitalize()}:"

"""Chats in plain text, for base models, which know no turns: `System: S\\n\\nUser: U\\n\\nAssistant: A\\n\\nUser:`.

Text only, and no tools. The beginning of the next user turn is what ends an answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stovetop.client import Tokenizer
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
    supervised_example,
    supervised_examples,
)
from stovetop.renderers.messages import Message, Role, ToolSpec, check_messages, ensure_text
from stovetop.renderers.streaming import MessageDelta
from stovetop.tokenizer import SafeEncoder, named
from stovetop.types import ModelInput

STOP = "\n\nUser:"


@dataclass(frozen=True, slots=True)
class RoleColonRenderer:
    """See `base.Renderer`."""

    tokenizer: Tokenizer
    has_extension_property: bool = field(init=False, default=True)
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
        return supervised_examples(self, messages, TrainOnWhat(train_on_what))

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        """Clean when the last token completes the only stop sequence, or is an end-of-text token without one."""
        tokens = list(tokens)
        ended = bool(tokens) and tokens[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        answer, stop, _ = text.partition(STOP)
        if stop:
            at_end = not ended and STOP not in self.tokenizer.decode(tokens[:-1])
            termination = ParseTermination.STOP_SEQUENCE if at_end else ParseTermination.MALFORMED
        else:
            termination = ParseTermination.EOS if ended else ParseTermination.MALFORMED
        return assistant_message(answer.removeprefix(" ").rstrip("\n")), termination

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return parsed_at_once(self, tokens)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        raise InvalidRequest(f"role_colon has no tools: {[tool.name for tool in tools]}")

    def _render(self, message: Message, context: RenderContext) -> RenderedMessage:
        if message["role"] == "tool" or message.get("tool_calls") or message.get("unparsed_tool_calls"):
            raise InvalidRequest(f"role_colon has no tools, but message {context.idx} is about one: {message}")
        text = self._encoder.protect(ensure_text(message["content"]))
        overlap = "User:" if message["role"] == "assistant" else ""
        return RenderedMessage(_header(message["role"]), (f" {text}\n\n",), overlap)


def _header(role: Role) -> str:
    return f"{role.capitalize()}:"

"""Llama 3 and its successors: `<|start_header_id|>user<|end_header_id|>\\n\\nU<|eot_id|>`, content trimmed.

Text only: what Llama was taught of tools differs from version to version, and is not here.
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
    generation_prompt,
    parse_response_for_stop_token,
    parsed_at_once,
    remake,
    render_messages,
    require_no_name,
    supervised_example,
    supervised_examples,
)
from stovetop.renderers.messages import (
    Message,
    Role,
    ToolSpec,
    calls_tools,
    check_messages,
    get_text_content,
    require_kinds,
)
from stovetop.renderers.streaming import MessageDelta
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

STOP = "<|eot_id|>"


@dataclass(frozen=True, slots=True)
class Llama3Renderer:
    """See `base.Renderer`. Llama 3.0 begins a chat with its first message; later versions, with a system message that
    tells the date: give one, as in "26 Jul 2024", to write it."""

    tokenizer: Tokenizer
    date: str | None = None
    has_extension_property: bool = field(init=False, default=False)  # answers are trimmed once they are history
    supports_streaming: bool = field(init=False, default=False)
    disables_thinking: bool = field(init=False, default=False)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_encoder", SafeEncoder.of(self.tokenizer))

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (Llama3Renderer, named(self.tokenizer), self.date)

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(STOP)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        check_messages(messages)
        rendered = render_messages(self._render, messages)
        header = _header(role) if messages else self._first_header(role)
        return generation_prompt(self._encoder, rendered, header, prefill)

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
        [stop_token] = self.get_stop_sequences()
        return parse_response_for_stop_token(tokens, self.tokenizer, stop_token)

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return parsed_at_once(self, tokens)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        raise InvalidRequest(f"llama3 has no tools: {[tool.name for tool in tools]}")

    def _render(self, message: Message, context: RenderContext) -> RenderedMessage:
        _check_text_alone(message, context.idx)
        header = self._first_header(message["role"]) if context.idx == 0 else _header(message["role"])
        return RenderedMessage(header, (self._encoder.protect(get_text_content(message).strip()), STOP))

    def _first_header(self, role: Role) -> str:
        """With a date, every chat has a system message, and it begins with the date."""
        if self.date is None:
            return _header(role)
        date = self._encoder.protect(self.date)
        dated = f"{_header('system')}Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
        return dated if role == "system" else f"{dated}{STOP}{_header(role)}"


def _header(role: Role) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _check_text_alone(message: Message, index: int) -> None:
    if message["role"] == "tool" or calls_tools(message):
        raise InvalidRequest(f"llama3 has no tools, but message {index} is about one: {message}")
    require_kinds(message, ["text"], f"llama3, message {index}")
    require_no_name(message, f"llama3, message {index}")

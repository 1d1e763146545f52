"""Kimi K2, which thinks: `<|im_user|>user<|im_middle|>U<|im_end|><|im_assistant|>assistant<|im_middle|><think>R</think>
A<|im_end|>`, on one line.

Thinking is shown from the last answer on: a model that calls tools sees why it called them, until it has answered.
Earlier thinking is empty, never absent. Each call has an id by which its result names it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from stovetop.errors import InvalidRequest
from stovetop.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    SupervisedExample,
    TrainOnWhat,
    generation_prompt,
    remake,
    render_messages,
    supervised_example,
    supervised_examples,
)
from stovetop.renderers.markup import (
    END_THINK,
    THINK,
    Markup,
    parse_marked_response,
    stream_marked_response,
    written_calls,
)
from stovetop.renderers.messages import (
    Message,
    Role,
    ToolSpec,
    check_messages,
    get_text_content,
    get_thinking,
    last_answer_index,
    require_kinds,
)
from stovetop.renderers.streaming import MessageDelta
from stovetop.renderers.tool_calls import KIMI, require_objects, tool_to_json
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

STOP = "<|im_end|>"
DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."

_MARKUP = Markup(KIMI)
_OWN = f"{THINK}{END_THINK}{''.join(KIMI.tags)}"
_TOOLS = "tool_declare"  # the name of the system message that declares them


@dataclass(frozen=True, slots=True)
class KimiK2Renderer:
    """See `base.Renderer`."""

    tokenizer: Tokenizer
    has_extension_property: bool = field(init=False, default=False)
    supports_streaming: bool = field(init=False, default=True)
    disables_thinking: bool = field(init=False, default=False)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        encoder = SafeEncoder.of(self.tokenizer, template=_OWN)
        object.__setattr__(self, "_encoder", replace(encoder, bos=""))  # chats do not begin with its begin-of-text

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (KimiK2Renderer, named(self.tokenizer))

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(STOP)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        check_messages(messages)
        rendered = self._rendered(messages, last_answer_index(messages))
        header = _header(role) if messages else _default_system() + _header(role)
        return generation_prompt(self._encoder, rendered, header, prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        """The last message has its thinking, and stands after what the model saw when it was to write it."""
        check_messages(messages)
        rendered = self._rendered(messages, last_answer_index(messages[:-1]))
        return supervised_example(self._encoder, rendered, messages, TrainOnWhat(train_on_what))

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        return supervised_examples(self, messages, TrainOnWhat(train_on_what))

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        return parse_marked_response(tokens, self._encoder, _MARKUP, self.get_stop_sequences())

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return stream_marked_response(tokens, self._encoder, _MARKUP, self.get_stop_sequences())

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        specs = [tool_to_json(tool) for tool in tools]
        declared = json.dumps(specs, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        prefix = [Message(role="system", name=_TOOLS, content=declared)] if tools else []
        return [*prefix, Message(role="system", content=system_prompt or DEFAULT_SYSTEM)]

    # ---- how a message is written ------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message], last_answer: int) -> list[RenderedMessage]:
        first = next((index for index, message in enumerate(messages) if message.get("name") != _TOOLS), 0)

        def render(message: Message, context: RenderContext) -> RenderedMessage:
            rendered = self._render(message, context.idx, shows_thinking=context.idx > last_answer)
            lacks_system = context.idx == first and message["role"] != "system"
            return rendered._replace(header=_default_system() + rendered.header) if lacks_system else rendered

        return render_messages(render, messages)

    def _render(self, message: Message, index: int, *, shows_thinking: bool) -> RenderedMessage:
        where = f"kimi_k2, message {index}"
        require_kinds(message, ["text", "thinking"], where)
        require_objects(message, where)
        header = _header(message["role"], self._encoder.protect(message.get("name", "")))
        if message["role"] == "assistant":
            return RenderedMessage(header, (self._said(message, shows_thinking=shows_thinking), STOP))
        if message["role"] == "tool":
            header += self._return_of(message, where)
        return RenderedMessage(header, (self._encoder.protect(get_text_content(message)), STOP))

    def _said(self, message: Message, *, shows_thinking: bool) -> str:
        thinking = self._encoder.protect(get_thinking(message)) if shows_thinking else ""
        content = message["content"]
        if isinstance(content, str):
            text = self._encoder.protect_own(content)
        else:
            text = self._encoder.protect(get_text_content(message))
        calls = written_calls(message, self._encoder, KIMI, has_text=bool(text))
        return f"{THINK}{thinking}{END_THINK}{text}{calls}"

    def _return_of(self, message: Message, where: str) -> str:
        call_id = message.get("tool_call_id")
        if call_id is None:
            raise InvalidRequest(f"{where}: a result must say which call it answers; set tool_call_id: {message}")
        return f"## Return of {self._encoder.protect(call_id)}\n"


def _header(role: Role, name: str = "") -> str:
    speaker = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>")
    return f"{speaker}{name or role}<|im_middle|>"


def _default_system() -> str:
    return f"{_header('system')}{DEFAULT_SYSTEM}{STOP}"

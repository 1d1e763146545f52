"""DeepSeek V3.1, answering without thinking: `S<｜User｜>U<｜Assistant｜></think>A<｜end▁of▁sentence｜>`.

System text stands in front of everything, wherever in the chat it was said: only where it is said first do prompts
extend each other. An answer to a tool's result has no header. Thinking is not shown to the model, and an answer with
thinking cannot be trained on.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stovetop.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    SupervisedExample,
    TrainOnWhat,
    generation_prompt,
    remake,
    render_messages,
    require_no_name,
    require_no_thinking,
    supervised_example,
    supervised_examples,
    trained_messages,
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
    require_kinds,
)
from stovetop.renderers.streaming import MessageDelta
from stovetop.renderers.tool_calls import DEEPSEEK, require_objects
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

STOP = "<｜end▁of▁sentence｜>"

_MARKUP = Markup(DEEPSEEK)
_OWN = f"{THINK}{END_THINK}{''.join(DEEPSEEK.tags)}"
_USER = "<｜User｜>"
_ANSWER = f"<｜Assistant｜>{END_THINK}"
_RESULT, _END_RESULT = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_HOW_TO_CALL = (
    "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    "{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:\n\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces\n"
)


@dataclass(frozen=True, slots=True)
class DeepSeekV3Renderer:
    """See `base.Renderer`."""

    tokenizer: Tokenizer
    system_role_as_user: bool = False  # system messages are turns of the user, where they stand
    has_extension_property: bool = field(init=False, default=True)
    supports_streaming: bool = field(init=False, default=True)
    disables_thinking: bool = field(init=False, default=True)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_encoder", SafeEncoder.of(self.tokenizer, template=_OWN))

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (DeepSeekV3Renderer, named(self.tokenizer), self.system_role_as_user)

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(STOP)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        check_messages(messages)
        messages = self._in_order(messages)
        rendered = render_messages(self._render, messages)
        header = self._header(role, messages[-1] if messages else None)
        return generation_prompt(self._encoder, rendered, header, prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        train_on_what = TrainOnWhat(train_on_what)
        trained_messages(messages, train_on_what)  # refuses what cannot be trained on, before messages change places
        require_no_thinking(messages, train_on_what, "deepseekv3", "remove the thinking", _thinks)
        messages = self._in_order(messages)
        return supervised_example(self._encoder, render_messages(self._render, messages), messages, train_on_what)

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
        declared = "".join(
            f"\n### {tool.name}\nDescription: {tool.description}\n\n"
            f"Parameters: {json.dumps(tool.parameters, ensure_ascii=False)}\n"
            for tool in tools
        )
        heading = "\n\n## Tools\nYou have access to the following tools:\n"
        return [Message(role="system", content=f"{system_prompt}{heading}{declared}{_HOW_TO_CALL}")]

    # ---- how a message is written ------------------------------------------------------------------------------

    def _in_order(self, messages: Sequence[Message]) -> list[Message]:
        """As they are written: what the system says first."""
        return sorted(messages, key=self._is_system, reverse=True)

    def _is_system(self, message: Message) -> bool:
        return message["role"] == "system" and not self.system_role_as_user

    def _render(self, message: Message, context: RenderContext) -> RenderedMessage:
        where = f"deepseekv3, message {context.idx}"
        require_kinds(message, ["text", "thinking"], where)
        require_no_name(message, where)
        header = self._header(message["role"], context.prev_message)
        match message["role"]:
            case "assistant":
                require_objects(message, where)
                return RenderedMessage(header, (self._said(message, context.prev_message), STOP))
            case "tool":
                return RenderedMessage(header, (self._encoder.protect(get_text_content(message)), _END_RESULT))
            case "system":
                return RenderedMessage(header, (self._declared(get_text_content(message)),))
            case "user":
                return RenderedMessage(header, (self._encoder.protect(get_text_content(message)),))

    def _header(self, role: Role, before: Message | None) -> str:
        match role:
            case "assistant":
                answers = before is not None and before["role"] in ("user", "system") and not self._is_system(before)
                return _ANSWER if answers else ""
            case "tool":
                return _RESULT
            case "system" if not self.system_role_as_user:
                return "" if before is None else "\n\n"
            case "system" | "user":
                return _USER

    def _said(self, message: Message, before: Message | None) -> str:
        calls = written_calls(message, self._encoder, DEEPSEEK, has_text=bool(get_text_content(message)))
        content = message["content"]
        if not isinstance(content, str):
            return self._encoder.protect(get_text_content(message)) + calls
        answers_tool = before is not None and before["role"] == "tool"
        if END_THINK in content and not calls and not answers_tool:
            _, _, content = content.partition(END_THINK)
        return self._encoder.protect_own(content) + calls

    def _declared(self, text: str) -> str:
        """System text; how tools are called is told in the tokens with which they are called."""
        told = _HOW_TO_CALL if text.endswith(_HOW_TO_CALL) else ""
        return self._encoder.protect(text.removesuffix(told)) + told


def _thinks(message: Message) -> bool:
    """In a plain string of the assistant, what stands before the tag is thinking."""
    is_tagged = (
        message["role"] == "assistant" and isinstance(message["content"], str) and END_THINK in message["content"]
    )
    return is_tagged or bool(get_thinking(message))

"""The Qwen3 family: turns as `<|im_start|>user\\nU<|im_end|>\\n`, thinking in tags, tool calls as tagged JSON, images.
How its members differ is data: a `Dialect`.

All follow the published chat template of their models. Results of tools share a user turn. In a plain string an
assistant's own tags (`<think>`, `<tool_call>`) are tags, as they are in the template; in a text part they are text.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from stovetop.errors import InvalidRequest
from stovetop.renderers.base import (
    ParseTermination,
    Pieces,
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
from stovetop.renderers.images import ImageProcessor, image_chunk, require_image_processor
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
from stovetop.renderers.tool_calls import TaggedJson, require_objects, tool_to_json
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ImageChunk, ModelInput

STOP = "<|im_end|>"

_NO_THINKING = f"{THINK}\n\n{END_THINK}\n\n"
_CALLS = TaggedJson()
_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_AFTER_TOOLS = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What sets a member of the family apart."""

    name: str
    thinks: bool = False  # the template writes thinking, and says so where there is none
    prompts_without_thinking: bool = False  # by a thinking block that is over, in the prompt
    sees: bool = False  # images


QWEN3 = Dialect(name="qwen3", thinks=True)
QWEN3_DISABLE_THINKING = Dialect(name="qwen3_disable_thinking", thinks=True, prompts_without_thinking=True)
QWEN3_INSTRUCT = Dialect(name="qwen3_instruct")
QWEN3_VL = Dialect(name="qwen3_vl", sees=True)
QWEN3_VL_INSTRUCT = Dialect(name="qwen3_vl_instruct", sees=True)


class _Spoken(NamedTuple):
    """What an assistant message says, safe to render."""

    thinking: str
    text: str


@dataclass(frozen=True, slots=True)
class Qwen3Renderer:
    """See `base.Renderer`.

    `strip_thinking_from_history=False` leaves every answer as it was when it was the last one, thinking and all, so
    that each prompt extends the one before it. A template without a place for thinking leaves it out of prompts, and an
    answer with thinking cannot be trained on; `writes_thinking=True` puts it before the answer, `<think>R</think>A`.
    """

    dialect: Dialect
    tokenizer: Tokenizer
    image_processor: ImageProcessor | None = None
    strip_thinking_from_history: bool = True
    writes_thinking: bool = False
    supports_streaming: bool = field(init=False, default=True)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.writes_thinking and self.dialect.thinks:
            raise InvalidRequest(f"{self.dialect.name} writes thinking as it is; leave writes_thinking=True out")
        if self.dialect.sees:
            require_image_processor(self.image_processor, self.dialect.name)
        own = " ".join((THINK, END_THINK, _CALLS.opening, _CALLS.closing))
        encoder = SafeEncoder.of(self.tokenizer, template=own)
        object.__setattr__(self, "_encoder", replace(encoder, bos=""))

    def __reduce__(self) -> tuple[object, ...]:
        options = (self.image_processor, self.strip_thinking_from_history, self.writes_thinking)
        return remake, (partial(Qwen3Renderer, self.dialect), named(self.tokenizer), *options)

    @property
    def has_extension_property(self) -> bool:
        """Not where thinking is stripped; nor where an answer comes right behind a line break of the prompt: line
        breaks at its beginning become one token with that, once they are history."""
        begins_with_a_tag = self.dialect.thinks and not self.disables_thinking
        return begins_with_a_tag and not self.strip_thinking_from_history

    @property
    def disables_thinking(self) -> bool:
        return self.dialect.prompts_without_thinking

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(STOP)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        check_messages(messages)
        header = _header(role, len(messages), messages[-1] if messages else None)
        if role == "assistant" and self.disables_thinking:
            header += _NO_THINKING
        return generation_prompt(self._encoder, self._rendered(messages), header, prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        train_on_what = TrainOnWhat(train_on_what)
        check_messages(messages)
        rendered = self._rendered(messages)
        if not (self.dialect.thinks or self.writes_thinking):
            hint = "remove the thinking, or write it with the option writes_thinking=True"
            require_no_thinking(messages, train_on_what, self.dialect.name, hint)
        if self.disables_thinking:
            _check_nothing_trains_thinking(rendered, messages, train_on_what)
        return supervised_example(self._encoder, rendered, messages, train_on_what, ending="\n")

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        merge = not (self.dialect.thinks or self.writes_thinking) or not self.strip_thinking_from_history
        return supervised_examples(self, messages, TrainOnWhat(train_on_what), merge=merge)

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        return parse_marked_response(tokens, self._encoder, self._markup, self.get_stop_sequences())

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return stream_marked_response(tokens, self._encoder, self._markup, self.get_stop_sequences())

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """One system message, which the renderer knows again by its last sentence."""
        declared = "".join("\n" + json.dumps(tool_to_json(tool), ensure_ascii=False) for tool in tools)
        prompt = f"{system_prompt}\n\n" if system_prompt else ""
        return [Message(role="system", content=f"{prompt}{_TOOLS}{declared}{_AFTER_TOOLS}")]

    @property
    def _markup(self) -> Markup:
        return Markup(calls=_CALLS, framed=self.dialect.thinks, exactly=not self.strip_thinking_from_history)

    # ---- messages to text ------------------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message]) -> list[RenderedMessage]:
        return render_messages(partial(self._render, last_query_index(messages)), messages)

    def _render(self, query_index: int, message: Message, context: RenderContext) -> RenderedMessage:
        header = _header(message["role"], context.idx, context.prev_message)
        where = f"{self.dialect.name}, message {context.idx} ({message['role']})"
        require_no_name(message, where)
        match message["role"]:
            case "assistant":
                block, said = self._answer(message, context, context.idx > query_index, where)
                if self.disables_thinking and block == _NO_THINKING:
                    return RenderedMessage(header + block, (said, STOP))
                return RenderedMessage(header, (block + said, STOP))
            case "tool":
                ending = "" if _is_tool(context.next_message) else STOP
                content = self._content(message, where)
                return RenderedMessage(header, ("<tool_response>\n", *content, "\n</tool_response>", ending))
            case "user":
                return RenderedMessage(header, (*self._content(message, where), STOP))
            case "system":
                if context.idx > 0 and self.dialect.sees:
                    raise InvalidRequest(
                        f"{where}: the chat template leaves out a system message that is not the first"
                    )
                return RenderedMessage(header, (self._system(message, where), STOP))

    def _answer(self, message: Message, context: RenderContext, is_current: bool, where: str) -> tuple[str, str]:
        """The block of thinking, and what follows it. An answer is current while its question is the last one."""
        require_kinds(message, ("thinking", "text"), where)
        require_objects(message, where)
        thinking, text = self._spoken(message, where)
        calls = written_calls(message, self._encoder, _CALLS, has_text=bool(text))
        is_kept = is_current or not self.strip_thinking_from_history
        if not self.dialect.thinks:
            shown = thinking if is_kept and self.writes_thinking else ""
            return (f"{THINK}{shown}{END_THINK}" if shown else ""), text + calls
        is_answering = context.is_last or not self.strip_thinking_from_history
        was_prompted = context.is_last and self.disables_thinking
        if not ((is_kept and (thinking or is_answering)) or was_prompted):
            return "", text + calls
        if not self.strip_thinking_from_history:
            return f"{THINK}\n{thinking}\n{END_THINK}\n\n", text + calls
        stripped = thinking.strip("\n")
        return f"{THINK}\n{stripped}\n{END_THINK}\n\n", text.lstrip("\n") + calls

    def _spoken(self, message: Message, where: str) -> _Spoken:
        content = message["content"]
        if not isinstance(content, str):
            kinds = [part["type"] for part in content]
            if kinds != sorted(kinds, key="thinking".__ne__):
                raise InvalidRequest(f"{where}: thinking comes before text; the parts are: {kinds}")
            protect = self._encoder.protect
            return _Spoken(protect(get_thinking(message)), protect(get_text_content(message)))
        text = self._encoder.protect_own(content)
        if not self.dialect.thinks or END_THINK not in text:
            return _Spoken("", text)
        thinking = text.partition(END_THINK)[0].rpartition(THINK)[2]
        return _Spoken(thinking.strip("\n"), text.rpartition(END_THINK)[2].lstrip("\n"))

    def _content(self, message: Message, where: str) -> Pieces:
        content = message["content"]
        if isinstance(content, str):
            return (self._encoder.protect(content),)
        if self.image_processor is None or not self.dialect.sees:
            require_kinds(message, ("text",), where)
        pieces: list[str | ImageChunk] = []
        for part in content:
            match part["type"]:
                case "text":
                    pieces.append(self._encoder.protect(part["text"]))
                case "image":
                    assert self.image_processor is not None
                    pieces += ["<|vision_start|>", image_chunk(part["image"], self.image_processor), "<|vision_end|>"]
                case "thinking":
                    raise InvalidRequest(f"{where}: only assistants think: {part}")
        return tuple(pieces)

    def _system(self, message: Message, where: str) -> str:
        """In the declaration of tools, the example of a call has the tags themselves."""
        require_kinds(message, ("text",), where)
        text = get_text_content(message)
        declares = text.endswith(_AFTER_TOOLS) and _TOOLS in text
        ending = _AFTER_TOOLS if declares else ""
        return self._encoder.protect(text.removesuffix(ending)) + ending


def _check_nothing_trains_thinking(
    rendered: Sequence[RenderedMessage], messages: Sequence[Message], train_on_what: TrainOnWhat
) -> None:
    trained = trained_messages(messages, train_on_what)
    for index, (message, is_trained) in enumerate(zip(rendered, trained, strict=True)):
        if is_trained and str(message.output[0]).startswith(THINK):
            raise InvalidRequest(
                "qwen3_disable_thinking prompts for an answer without thinking, so it cannot train on one with it; "
                f"remove the thinking, or use renderer qwen3: message {index}: {messages[index]}"
            )


def last_query_index(messages: Sequence[Message]) -> int:
    """Of the last user message that is not the result of a tool written out; without one, of the last message."""
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == "user":
            text = get_text_content(messages[index])
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return index
    return len(messages) - 1


def _header(role: Role, index: int, before: Message | None) -> str:
    """What joins a message to those before it is in its header, and so is who speaks. Results of tools are told by the
    user, several in one turn."""
    if role == "tool" and _is_tool(before):
        return "\n"
    newline = "\n" if index > 0 else ""
    return f"{newline}<|im_start|>{'user' if role == 'tool' else role}\n"


def _is_tool(message: Message | None) -> bool:
    return message is not None and message["role"] == "tool"

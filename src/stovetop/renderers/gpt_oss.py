"""gpt-oss, which speaks on channels: `<|start|>user<|message|>U<|end|><|start|>assistant<|channel|>final<|message|>A
<|return|>`. It thinks on `analysis`; calls, and what it says before one, are on `commentary`. How tools are declared is
in `typescript`.

Thinking is shown from the last answer on: a model that calls tools sees why it called them, until it has answered. What
the published template takes for thinking, the content of a message that calls a tool, is thinking only in a thinking
part: text is for the user.
"""

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.base import (
    ParseTermination,
    RenderContext,
    RenderedMessage,
    SupervisedExample,
    TrainOnWhat,
    generation_prompt,
    parsed_at_once,
    remake,
    render_messages,
    require_no_name,
    split_at_stop,
    supervised_example,
    supervised_examples,
)
from stovetop.renderers.markup import protected_call
from stovetop.renderers.messages import (
    ContentPart,
    Message,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    calls_tools,
    check_messages,
    ensure_list,
    get_text_content,
    last_answer_index,
    require_kinds,
)
from stovetop.renderers.streaming import MessageDelta
from stovetop.renderers.tool_calls import HARMONY, require_objects
from stovetop.renderers.typescript import declare_functions
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

ReasoningEffort = Literal["low", "medium", "high"]

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", HARMONY.channel, "<|constrain|>", HARMONY.message
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_CALLS_GO_WHERE = "Calls to these tools must go to the commentary channel: 'functions'."
_TOOLS = "functions"  # the name of the system message that declares them
_OPENINGS: dict[Role, str] = {
    "system": f"{START}developer{MESSAGE}# Instructions\n\n",
    "user": f"{START}user{MESSAGE}",
    "assistant": f"{START}assistant",
    "tool": f"{START}{_TOOLS}.",
}
_CHANNEL = re.compile(r"<\|channel\|>(\w*)")
_TAGS_OF_HEADERS = re.compile(f"({'|'.join(map(re.escape, (START, CHANNEL, CONSTRAIN)))})")


@dataclass(frozen=True, slots=True)
class GptOssRenderer:
    """See `base.Renderer`. With a `reasoning_effort`, chats begin with the system prompt that tells it and the date."""

    tokenizer: Tokenizer
    reasoning_effort: ReasoningEffort | None = None
    date: str | None = None  # as in 2025-08-05; None is today: give one where a run must be the same tomorrow
    has_extension_property: bool = field(init=False, default=False)
    supports_streaming: bool = field(init=False, default=False)
    disables_thinking: bool = field(init=False, default=False)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        efforts = get_args(ReasoningEffort)
        if self.reasoning_effort is not None and self.reasoning_effort not in efforts:
            raise UnknownName("reasoning_effort", self.reasoning_effort, efforts)
        if self.reasoning_effort is None and self.date is not None:
            raise InvalidRequest(f"only the system prompt tells the date; set reasoning_effort too: date={self.date!r}")
        if self.reasoning_effort is not None and self.date is None:
            object.__setattr__(self, "date", datetime.datetime.now().astimezone().date().isoformat())
        encoder = SafeEncoder.of(self.tokenizer)
        object.__setattr__(self, "_encoder", replace(encoder, bos=""))  # chats do not begin with its begin-of-text

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (GptOssRenderer, named(self.tokenizer), self.reasoning_effort, self.date)

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(stop) for stop in (RETURN, CALL)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        """What the assistant says begins with its header; a prefill begins what it says on the final channel."""
        check_messages(messages)
        rendered = self._rendered(messages, last_answer_index(messages), ending=END)
        opening = _OPENINGS[role] if messages else self._system(()) + _OPENINGS[role]
        if role == "assistant" and prefill:
            opening += f"{CHANNEL}final{MESSAGE}"
        return generation_prompt(self._encoder, rendered, opening, prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        """The last message has its thinking, and stands after what the model saw when it was to write it."""
        check_messages(messages)
        rendered = self._rendered(messages, last_answer_index(messages[:-1]), ending=RETURN)
        return supervised_example(self._encoder, rendered, messages, TrainOnWhat(train_on_what))

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        return supervised_examples(self, messages, TrainOnWhat(train_on_what))

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        """What stands on each channel. Only a message that was ended can be a call."""
        tokens = list(tokens)
        answer, termination = split_at_stop(tokens, self.tokenizer, self.get_stop_sequences())
        is_ended = len(answer) < len(tokens)
        return _message(_sections(answer, self.tokenizer, is_ended=is_ended)), termination

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return parsed_at_once(self, tokens)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        instructions = [Message(role="system", content=system_prompt)] if system_prompt else []
        declared = [Message(role="system", name=_TOOLS, content=declare_functions(tools))] if tools else []
        return [*instructions, *declared]

    # ---- how a message is written ------------------------------------------------------------------------------

    def _rendered(self, messages: Sequence[Message], last_answer: int, *, ending: str) -> list[RenderedMessage]:
        def render(message: Message, context: RenderContext) -> RenderedMessage:
            require_kinds(message, ["text", "thinking"], f"gpt_oss, message {context.idx}")
            require_objects(message, f"gpt_oss, message {context.idx}")
            if not _declares_tools(message):
                require_no_name(message, f"gpt_oss, message {context.idx}")
            match message["role"]:
                case "system":
                    rendered = self._instructions(message, context)
                case "user":
                    rendered = RenderedMessage(_OPENINGS["user"], (self._text(message), END))
                case "tool":
                    rendered = self._result(message, _name_of_called(messages, context.idx))
                case "assistant":
                    said = self._said(message, shows_thinking=context.idx > last_answer)
                    ends = CALL if calls_tools(message) else ending if context.is_last else END
                    rendered = RenderedMessage(_OPENINGS["assistant"], (said, ends))
            return rendered if context.idx else rendered._replace(header=self._system(messages) + rendered.header)

        return render_messages(render, messages)

    def _system(self, messages: Sequence[Message]) -> str:
        """The system prompt, which tells where calls go if the chat declares tools."""
        lines = [_CALLS_GO_WHERE] if any(_declares_tools(message) for message in messages) else []
        if self.reasoning_effort is not None and self.date is not None:
            channels = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
            lines = [
                "You are ChatGPT, a large language model trained by OpenAI.",
                "Knowledge cutoff: 2024-06",
                f"Current date: {self._encoder.protect(self.date)}\n",
                f"Reasoning: {self.reasoning_effort}\n",
                channels,
                *lines,
            ]
        text = "\n".join(lines)
        return f"{START}system{MESSAGE}{text}{END}" if text else ""

    def _instructions(self, message: Message, context: RenderContext) -> RenderedMessage:
        """Instructions and tools of the developer are one turn; without either there is none."""
        text, before, after = self._text(message), context.prev_message, context.next_message
        if _declares_tools(message):
            is_open = before is not None and before["role"] == "system" and bool(get_text_content(before))
            return RenderedMessage(f"{'' if is_open else f'{START}developer{MESSAGE}'}# Tools\n\n", (text, END))
        if not text:
            return RenderedMessage("", ())
        stays_open = after is not None and _declares_tools(after)
        return RenderedMessage(_OPENINGS["system"], (f"{text}\n\n", "" if stays_open else END))

    def _result(self, message: Message, name: str) -> RenderedMessage:
        header = f"{START}functions.{self._encoder.protect(name)} to=assistant{CHANNEL}commentary{MESSAGE}"
        quoted = json.dumps(get_text_content(message), ensure_ascii=False)
        return RenderedMessage(header, (self._encoder.protect(quoted), END))

    def _said(self, message: Message, *, shows_thinking: bool) -> str:
        """What follows the header, without what ends the last section."""
        protect = self._encoder.protect
        sections: list[str] = []
        if shows_thinking:
            thinking = [part["thinking"] for part in ensure_list(message["content"]) if part["type"] == "thinking"]
            sections += [f"{CHANNEL}analysis{MESSAGE}{protect(thought)}" for thought in thinking]
        calls = [HARMONY.encode(protected_call(call, self._encoder)) for call in message.get("tool_calls", ())]
        calls += [self._as_written(call) for call in message.get("unparsed_tool_calls", ())]
        text = self._text(message)
        if text or not calls:
            sections.append(f"{CHANNEL}{'commentary' if calls else 'final'}{MESSAGE}{text}")
        if calls:
            sections.append(f"{CALL}{_OPENINGS['assistant']}".join(calls))
        return f"{END}{_OPENINGS['assistant']}".join(sections)

    def _as_written(self, call: UnparsedToolCall) -> str:
        header, message, arguments = call.raw_text.partition(MESSAGE)
        pieces = [
            piece if index % 2 else self._encoder.protect(piece)
            for index, piece in enumerate(_TAGS_OF_HEADERS.split(header))
        ]
        return f"{''.join(pieces)}{message}{self._encoder.protect(arguments)}"

    def _text(self, message: Message) -> str:
        return self._encoder.protect(get_text_content(message))


def _declares_tools(message: Message) -> bool:
    return message["role"] == "system" and message.get("name") == _TOOLS


def _name_of_called(messages: Sequence[Message], index: int) -> str:
    """The function whose result this message is: it says so itself, or names a call, or answers the last one."""
    result = messages[index]
    if name := result.get("name"):
        return name
    calls = [call for message in messages[:index] for call in message.get("tool_calls", ())]
    answered = [call for call in calls if result.get("tool_call_id") in (None, call.id)]
    if not answered:
        raise InvalidRequest(f"gpt_oss, message {index}: no call before it is the one that it answers: {result}")
    return answered[-1].function.name


# ---- how an answer is read ---------------------------------------------------------------------------------------


class _Section(NamedTuple):
    """A stretch of an answer, from a header to what ends it."""

    header: str
    text: str | None  # None: the header was cut off
    is_ended: bool


def _sections(answer: Sequence[int], tokenizer: Tokenizer, *, is_ended: bool) -> list[_Section]:
    message, end = (tokenizer.convert_tokens_to_ids(tag) for tag in (MESSAGE, END))
    parts: list[list[int]] = [[]]
    for token in answer:
        if token == end:
            parts.append([])
        else:
            parts[-1].append(token)
    sections: list[_Section] = []
    for index, part in enumerate(parts):
        at = part.index(message) if message in part else len(part)
        header = tokenizer.decode(part[:at]).removeprefix(_OPENINGS["assistant"])
        text = tokenizer.decode(part[at + 1 :]) if at < len(part) else None
        if part:
            sections.append(_Section(header, text, is_ended or index < len(parts) - 1))
    return sections


def _message(sections: Sequence[_Section]) -> Message:
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    for section in sections:
        said = _read(section)
        match said:
            case ToolCall():
                calls.append(said)
            case UnparsedToolCall():
                unparsed.append(said)
            case None:
                pass
            case _:
                parts.append(said)
    only = parts[0] if len(parts) == 1 else None
    content = only["text"] if only is not None and only["type"] == "text" else parts or ""
    message = Message(role="assistant", content=content)
    if calls:
        message["tool_calls"] = calls
    if unparsed:
        message["unparsed_tool_calls"] = unparsed
    return message


def _read(section: _Section) -> ContentPart | ToolCall | UnparsedToolCall | None:
    if call := HARMONY.decode(section.header, section.text, is_ended=section.is_ended):
        return call
    if section.text is None:
        is_speech = CHANNEL not in section.header and START not in section.header
        return TextPart(type="text", text=section.header) if is_speech and section.header else None
    channel = _CHANNEL.search(section.header)
    if channel and channel[1] == "analysis":
        return ThinkingPart(type="thinking", thinking=section.text)
    return TextPart(type="text", text=section.text) if section.text else None

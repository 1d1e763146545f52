"""A renderer for any model whose tokenizer has a chat template. Nothing here knows a family: where a message begins and
ends, and what stops it, is found by rendering chats and comparing the texts, never by searching token ids.

Tokens are those of the template's own text, begin-of-text included. Answers are parsed to text: reasoning and tool
calls stay in it as the model wrote them; a family's own renderer takes them apart.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stovetop.client import Tokenizer
from stovetop.errors import InvalidRequest
from stovetop.renderers.base import (
    ParseTermination,
    Span,
    SupervisedExample,
    TrainOnWhat,
    add_prefill,
    encode_pieces,
    parse_response_for_stop_token,
    parsed_at_once,
    remake,
    require_trained,
    supervised_examples,
    trained_messages,
    weigh,
)
from stovetop.renderers.messages import (
    Message,
    Role,
    ToolCall,
    ToolSpec,
    check_messages,
    ensure_list,
    get_text_content,
    get_thinking,
)
from stovetop.renderers.streaming import MessageDelta
from stovetop.tokenizer import SafeEncoder, named
from stovetop.types import ModelInput

Shown = dict[str, Any]  # a message as templates read it: content, reasoning_content, tool_calls with parsed arguments

_SOMETHING = "\ufdd2"  # content that occurs nowhere else: a noncharacter
_QUESTION: Shown = {"role": "user", "content": "q"}
_REASONED = "<think>\nr\n</think>\n\na"  # an answer of which a template that knows the tag may drop a part later


@dataclass(frozen=True, slots=True)
class ChatTemplateRenderer:
    """See `base.Renderer`. `options` are what the template itself understands: `enable_thinking`, `tools`."""

    tokenizer: Tokenizer
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    stop: str = field(init=False)  # the control token that ends an assistant message
    has_extension_property: bool = field(init=False)
    supports_streaming: bool = field(init=False, default=False)
    disables_thinking: bool = field(init=False, default=False)
    _encoder: SafeEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        template = self.tokenizer.chat_template
        if template is None:
            raise InvalidRequest("the tokenizer has no chat template; choose the renderer of its family, or role_colon")
        source = template if isinstance(template, str) else "".join(template.values())
        opening = self._text([_QUESTION], prompt=True)
        encoder = SafeEncoder.of(self.tokenizer, template=source, opening=opening)
        object.__setattr__(self, "_encoder", encoder)
        object.__setattr__(self, "stop", self._find_stop())
        answers = ["a", _REASONED] if "</think>" in source else ["a"]
        object.__setattr__(self, "has_extension_property", all(self._extends(answer) for answer in answers))

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (ChatTemplateRenderer, named(self.tokenizer), dict(self.options))

    def get_stop_sequences(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(self.stop)]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        shown = self._shown(messages)
        text = self._text(shown, prompt=True) if role == "assistant" else self._header(shown, role)
        self._check_nothing_is_lost(shown, text)
        return add_prefill(self._encoder, encode_pieces(self._encoder, (text,)), prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        """The whole chat as the template writes it. What it puts behind the last stop token has weight 0."""
        train_on_what = TrainOnWhat(train_on_what)
        trained = trained_messages(messages, train_on_what)
        shown = self._shown(messages)
        whole = self._text(shown)
        self._check_nothing_is_lost(shown, whole)
        if train_on_what is TrainOnWhat.ALL_TOKENS:
            bos = self._encoder.bos if whole.startswith(self._encoder.bos) else ""
            spans = [Span((bos,), 0.0), Span((whole.removeprefix(bos),), 1.0)]
        else:
            spans = self._spans(shown, whole, [index for index, yes in enumerate(trained) if yes])
        return require_trained(weigh(self._encoder, spans), messages, train_on_what)

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        return supervised_examples(self, messages, TrainOnWhat(train_on_what))

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        [stop_token] = self.get_stop_sequences()
        return parse_response_for_stop_token(tokens, self.tokenizer, stop_token)

    def parse_response_streaming(self, tokens: Iterable[int]) -> Iterator[MessageDelta]:
        return parsed_at_once(self, tokens)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        raise InvalidRequest(
            "a chat template is told of tools when the renderer is made: get_renderer('chat_template', tokenizer, "
            f"tools=[...]): {[tool.name for tool in tools]}"
        )

    # ---- where outputs begin and end ---------------------------------------------------------------------------

    def _spans(self, shown: Sequence[Shown], whole: str, trained: Sequence[int]) -> list[Span]:
        spans: list[Span] = []
        position = 0
        for index in trained:
            until_here = self._text(shown[: index + 1])
            start = self._output_start(shown[: index + 1], until_here)
            end = self._output_end(shown[index], until_here, start)
            if whole[:end] != until_here[:end]:
                raise InvalidRequest(
                    f"the chat template writes message {index}, or what stands before it, in another way once later "
                    "messages follow, so one example cannot train on it as it would be sampled; call "
                    "build_supervised_examples, or use train_on_what=last_assistant_message"
                )
            spans += [Span((whole[position:start],), 0.0), Span((whole[start:end],), 1.0)]
            position = end
        return [*spans, Span((whole[position:],), 0.0)]

    def _output_start(self, shown: Sequence[Shown], text: str) -> int:
        """Where the output of the last message begins in `text`, which shows these messages."""
        role, before = shown[-1]["role"], shown[:-1]
        header = self._text(before, prompt=True) if role == "assistant" else self._header(before, role)
        if not text.startswith(header):
            raise InvalidRequest(
                f"the chat template does not begin message {len(before)} ({role}) as it prompts for it, so it cannot "
                f"be trained on as it would be sampled. The prompt ends with {header[-40:]!r}, the message is written "
                f"{text[-80:]!r}. Use the renderer of the model's family, or options with which the two agree"
            )
        return len(header)

    def _output_end(self, message: Shown, text: str, start: int) -> int:
        """Behind the first stop token: content cannot hold one. Some families end only the assistant's messages."""
        stop = text.find(self.stop, start)
        if stop < 0 and message["role"] == "assistant":
            raise InvalidRequest(f"the chat template leaves a last assistant message without its end, {self.stop!r}")
        return len(text) if stop < 0 else stop + len(self.stop)

    def _header(self, shown: Sequence[Shown], role: Role) -> str:
        """The text up to where a next message of this role has its content."""
        text = self._text([*shown, {"role": role, "content": _SOMETHING}])
        if _SOMETHING not in text:
            raise InvalidRequest(f"the chat template writes no messages of this role: {role!r}")
        return text[: text.rindex(_SOMETHING)]

    # ---- what the template is like -----------------------------------------------------------------------------

    def _find_stop(self) -> str:
        """The first control token behind the content; if more follow at once, the last of these."""
        text = self._text([_QUESTION, {"role": "assistant", "content": _SOMETHING}])
        _, found, ending = text.rpartition(_SOMETHING)
        controls = self._encoder.find_controls(ending) if found else []
        if not controls:
            raise InvalidRequest(
                "the chat template ends an assistant message without a control token, so nothing would stop the model; "
                f"use a renderer written for it. It ends with: {ending!r}"
            )
        stop, rest = "", ending[ending.index(controls[0]) :]
        for control in controls:
            if not rest.startswith(control):
                break
            stop, rest = control, rest.removeprefix(control)
        return stop

    def _extends(self, answer: str) -> bool:
        """Whether a prompt that follows this answer begins with the tokens of the answer and of what it answered."""
        turn: list[Shown] = [_QUESTION, {"role": "assistant", "content": answer}]
        prompt, text = self._text([_QUESTION], prompt=True), self._text(turn)
        output = text.removeprefix(prompt)
        output = output[: output.find(self.stop) + len(self.stop)]
        seen = weigh(self._encoder, [Span((prompt,), 0.0), Span((output,), 1.0)]).model_input.to_ints()
        next_prompt = self._encoder.encode(self._text([*turn, _QUESTION], prompt=True))
        return text.startswith(prompt) and next_prompt[: len(seen)] == seen

    # ---- messages to text --------------------------------------------------------------------------------------

    def _text(self, shown: Sequence[Shown], *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(shown), tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except Exception as error:  # a template is a program of its own, and raises what it likes
            roles = [message["role"] for message in shown]
            raise InvalidRequest(f"the chat template refuses a chat with the roles {roles}: {error!r}") from error

    def _shown(self, messages: Sequence[Message]) -> list[Shown]:
        check_messages(messages)
        return [_show(message, index, self._encoder) for index, message in enumerate(messages)]

    def _check_nothing_is_lost(self, shown: Sequence[Shown], text: str) -> None:
        """A template may drop what it does not know without a word: a system message, reasoning, tool calls. Only the
        reasoning of earlier turns may go missing: families that drop it mean to."""
        for index, message in enumerate(shown):
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise InvalidRequest(f"the chat template leaves out message {index} ({message['role']})")
            for key, marked in (
                ("reasoning_content", _SOMETHING),
                ("tool_calls", [_template_call(_SOMETHING, {}, None)]),
            ):
                if key in message and _SOMETHING not in self._text([*shown[:index], {**message, key: marked}]):
                    raise InvalidRequest(
                        f"the chat template has no place for {key}, which message {index} has; use the renderer of the "
                        "model's family"
                    )


def _show(message: Message, index: int, encoder: SafeEncoder) -> Shown:
    """A message as templates read it, safe to render. The caller's message is not touched."""
    protect = encoder.protect_own if message["role"] == "assistant" else encoder.protect
    shown: Shown = {"role": message["role"], "content": protect(get_text_content(message))}
    kinds = [part["type"] for part in ensure_list(message["content"])]
    if "image" in kinds or "thinking" in kinds[1:] or message.get("unparsed_tool_calls"):
        raise InvalidRequest(
            "chat_template renders text, after one thinking part at most, and parsed tool calls; use the renderer of "
            f"the model's family for message {index}: {message}"
        )
    if thinking := get_thinking(message):
        shown["reasoning_content"] = encoder.protect(thinking)
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [_show_call(call, index, encoder) for call in calls]
    labels = {"tool_call_id": message.get("tool_call_id"), "name": message.get("name")}
    return shown | {key: encoder.protect(label) for key, label in labels.items() if label is not None}


def _show_call(call: ToolCall, index: int, encoder: SafeEncoder) -> Shown:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError as error:
        raise InvalidRequest(f"message {index}: tool call arguments are not JSON ({error}): {call}") from error
    return _template_call(encoder.protect(call.function.name), _protected(arguments, encoder), call.id)


def _template_call(name: str, arguments: object, call_id: str | None) -> Shown:
    call: Shown = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {**call, "id": call_id}


def _protected(value: object, encoder: SafeEncoder) -> object:
    """A JSON value with every string in it protected."""
    if isinstance(value, str):
        return encoder.protect(value)
    if isinstance(value, list):
        return [_protected(item, encoder) for item in cast(list[object], value)]
    if isinstance(value, dict):
        items = cast(dict[str, object], value).items()
        return {encoder.protect(key): _protected(item, encoder) for key, item in items}
    return value

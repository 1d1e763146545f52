"""A chat template as a program that turns messages into text, and in which form it takes what a message says. Content
is a string or a list of parts, thinking has a field of its own or none, arguments of a call are an object or JSON text.
Which it is is found by trying: what goes in must be found in what comes out.

What is done with the text is in `template`; where a turn ends in it, in `template_ends`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any, Literal, NamedTuple, cast

from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers.messages import Message, ToolCall, ensure_list, get_text_content, get_thinking
from stovetop.renderers.tool_calls import require_objects
from stovetop.tokenizer import SafeEncoder
from stovetop.tokenizing import Tokenizer

Shown = dict[str, Any]  # a message as templates read it

CALL_ID = "callid000"  # nine letters and digits, which is what Mistral's templates insist on

_MARKS_OF_CALL = 3  # its name, the name of an argument and the argument
_MARKED = re.compile("\ufdd2[0-9]+\ufdd3")
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks what a model generates; changes no text


def mark(number: int) -> str:
    """Text that occurs nowhere else: it is made of Unicode noncharacters."""
    return f"\ufdd2{number}\ufdd3"


def is_marked(text: str) -> bool:
    """Whether there is a mark in a text."""
    return _MARKED.search(text) is not None


def before_marks(text: str) -> str:
    """What stands before the first mark."""
    return _MARKED.split(text, maxsplit=1)[0]


def behind_marks(text: str) -> int:
    """Where the last mark in `text` ends; -1 without one."""
    return max((found.end() for found in _MARKED.finditer(text)), default=-1)


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template of a tokenizer, with the options that it is given beside the chat."""

    tokenizer: Tokenizer
    options: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def source(self) -> str:
        """The template's text; of several, all of them. A tokenizer without one is refused."""
        template = self.tokenizer.chat_template
        if template is None:
            raise InvalidRequest("the tokenizer has no chat template; choose the renderer of its family, or role_colon")
        return template if isinstance(template, str) else "\n".join(template.values())

    def text(self, shown: Sequence[Shown], *, prompt: bool = False) -> str:
        """What the template writes; with `prompt` up to where the assistant's answer begins."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(shown), tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except Exception as error:  # a template is a program of its own, and raises what it likes
            roles = [message["role"] for message in shown]
            if not roles or roles[0] == "assistant":
                raise InvalidRequest(
                    "the chat template writes no chat that begins with the assistant, or with nothing: begin the chat "
                    f"with a system or user message; its roles are {roles} ({error!r})"
                ) from error
            raise InvalidRequest(f"the chat template refuses a chat with the roles {roles}: {error!r}") from error
        return text

    def try_text(self, shown: Sequence[Shown], *, prompt: bool = False) -> str | None:
        """The same, or None where the template refuses the chat."""
        try:
            return self.text(shown, prompt=prompt)
        except InvalidRequest:
            return None

    def writes(self, shown: Sequence[Shown], *numbers: int) -> bool:
        """Whether the template accepts this chat and writes the marks with these numbers."""
        text = self.try_text(shown)
        return text is not None and all(mark(number) in text for number in numbers)

    def check_options(self) -> None:
        """Refuses an option that the template does not read, as a misspelt one is."""
        import jinja2
        import jinja2.meta

        if not self.options:
            return
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
        try:
            tree = environment.parse(_GENERATION.sub("", self.source))
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(f"the chat template is no template: {error}") from error
        known = jinja2.meta.find_undeclared_variables(tree) - {"messages", "add_generation_prompt", "raise_exception"}
        for option in self.options:
            if option not in known:
                raise UnknownName("option of the chat template", option, known)


@dataclass(frozen=True, slots=True)
class Form:
    """In which form a template reads what a message says; None: it has no place for it."""

    text_in_parts: bool = False  # content is a list of parts, not a string
    thinking: Literal["reasoning_content", "thinking", "reasoning", "part"] | None = None
    calls: "CallForm | None" = None


class CallForm(NamedTuple):
    """How a template wants to be given the calls of a message."""

    arguments_as_text: bool  # JSON text, not an object
    named_by_id: bool  # the id of a call is written, and holds its name: "functions.get_weather:0"


def question(form: Form, number: int = 0) -> Shown:
    """A user's message that says `mark(number)`."""
    return {"role": "user", "content": _content(mark(number), form)}


def answer(form: Form, number: int = 1) -> Shown:
    """An assistant's message that says `mark(number)`."""
    return {"role": "assistant", "content": _content(mark(number), form)}


def thinking_answer(form: Form, thinking: int, text: int) -> Shown:
    """The same, with `mark(thinking)` as its thinking before `mark(text)`."""
    return _with_thinking(answer(form, text), mark(thinking), form)


def call_message(form: Form, number: int = 1) -> Shown:
    """A message that calls the function `mark(number)` with `{mark(number): mark(number)}`."""
    assert form.calls is not None
    call_id = f"functions.{mark(number)}:0" if form.calls.named_by_id else CALL_ID
    call = _call(mark(number), {mark(number): mark(number)}, call_id, form.calls)
    return {"role": "assistant", "content": _content("", form), "tool_calls": [call]}


def result_message(form: Form, number: int = 2, called: int = 1) -> Shown:
    """What a tool answers to the call of `call_message`: `mark(number)`."""
    labels = {"tool_call_id": CALL_ID, "name": mark(called)}
    return {"role": "tool", "content": _content(mark(number), form), **labels}


def opening(template: Template, form: Form) -> str:
    """The beginning of a chat without the options, if the template writes it so: how tools are to be called is told in
    the markup that a model calls them with, and a block of thinking that is over has the markup of thinking."""
    without: tuple[dict[str, object], ...] = ({}, {"tools": []})
    bare = (replace(template, options=options).try_text([question(form)], prompt=True) for options in without)
    written = next((text for text in bare if text is not None), None)
    return template.text([question(form)], prompt=True) if written is None else written


def find_form(template: Template) -> tuple[Template, Form]:
    """The form that the template reads, and the template itself, which is told that there are no tools if it cannot do
    without being told."""
    plain = Form()
    refused = template.try_text([question(plain)]) is None
    if refused and "tools" not in template.options:
        told = replace(template, options={**template.options, "tools": []})
        template = template if told.try_text([question(plain)]) is None else told
    form = next(
        (form for form in (plain, Form(text_in_parts=True)) if template.writes([question(form), answer(form)], 0, 1)),
        None,
    )
    if form is None:
        text = template.text([question(plain), answer(plain)])  # raises, if the template refuses such a chat
        raise InvalidRequest(f"the chat template does not write what a question and its answer say: {text[:200]!r}")
    form = replace(form, calls=_find_call_form(template, form))
    return template, replace(form, thinking=_find_thinking_form(template, form))


def _find_call_form(template: Template, form: Form) -> CallForm | None:
    for named_by_id, as_text in product((False, True), repeat=2):
        tried = CallForm(arguments_as_text=as_text, named_by_id=named_by_id)
        text = template.try_text([question(form), call_message(replace(form, calls=tried))])
        if text is not None and text.count(mark(1)) >= _MARKS_OF_CALL:
            return tried
    return None


def _find_thinking_form(
    template: Template, form: Form
) -> Literal["reasoning_content", "thinking", "reasoning", "part"] | None:
    for thinking in ("reasoning_content", "thinking", "reasoning", "part"):
        tried = replace(form, thinking=thinking)
        if template.writes([question(tried), thinking_answer(tried, 2, 1)], 1, 2):
            return thinking
        if form.calls and template.writes([question(tried), _with_thinking(call_message(tried), mark(2), tried)], 2):
            return thinking
    return None


# ---- messages in a form ------------------------------------------------------------------------------------------


def show(message: Message, index: int, form: Form, encoder: SafeEncoder) -> Shown:
    """A message as the template reads it, safe to render. The caller's message is not touched."""
    where = f"chat_template, message {index} ({message['role']})"
    protect = encoder.protect_own if message["role"] == "assistant" else encoder.protect
    kinds = [part["type"] for part in ensure_list(message["content"])]
    if "image" in kinds or "thinking" in kinds[1:] or message.get("unparsed_tool_calls"):
        raise InvalidRequest(
            f"{where}: only text, after one thinking part at most, and parsed tool calls can be written; use the "
            f"renderer of the model's family: {message}"
        )
    shown: Shown = {"role": message["role"], "content": _content(protect(get_text_content(message)), form)}
    if calls := message.get("tool_calls"):
        require_objects(message, where)
        if form.calls is None:
            raise InvalidRequest(
                f"the chat template has no place for tool_calls, which message {index} has; use the renderer of the "
                f"model's family: {message}"
            )
        shown["tool_calls"] = [_show_call(call, form.calls, encoder) for call in calls]
    if thinking := get_thinking(message):
        if form.thinking is None:
            raise InvalidRequest(
                f"the chat template has no place for reasoning_content, which message {index} has; remove the "
                f"thinking, or use the renderer of the model's family: {message}"
            )
        shown = _with_thinking(shown, encoder.protect(thinking), form)
    labels = {"tool_call_id": message.get("tool_call_id"), "name": message.get("name")}
    return shown | {key: encoder.protect(label) for key, label in labels.items() if label is not None}


def _content(text: str, form: Form) -> object:
    return [{"type": "text", "text": text}] if form.text_in_parts else text


def _with_thinking(shown: Shown, thinking: str, form: Form) -> Shown:
    if form.thinking is None:
        return shown
    if form.thinking != "part":
        return {**shown, form.thinking: thinking}
    content: object = shown["content"]
    text_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return {**shown, "content": [{"type": "thinking", "thinking": thinking}, *cast(list[object], text_parts)]}


def _call(name: str, arguments: object, call_id: str | None, form: CallForm) -> Shown:
    written = json.dumps(arguments, ensure_ascii=False) if form.arguments_as_text else arguments
    call: Shown = {"type": "function", "function": {"name": name, "arguments": written}}
    return call if call_id is None else {**call, "id": call_id}


def _show_call(call: ToolCall, form: CallForm, encoder: SafeEncoder) -> Shown:
    """Arguments that are given as text are given as the model wrote them."""
    name = encoder.protect(call.function.name)
    if form.arguments_as_text:
        shown = _call(name, {}, call.id, form)
        shown["function"]["arguments"] = encoder.protect(call.function.arguments)
        return shown
    return _call(name, _protected(json.loads(call.function.arguments), encoder), call.id, form)


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


# ---- nothing is lost ---------------------------------------------------------------------------------------------


class Marked(NamedTuple):
    """A message in which every part that says something is a mark, and which part each mark is for."""

    shown: Shown
    parts: dict[str, str]  # by the mark: "text", "thinking", "name", "tool call 0"


def marked(message: Message, form: Form, numbers: Iterator[int]) -> Marked:
    """A message in which every part is a mark of its own, and which part each mark is."""
    parts: dict[str, str] = {}

    def named(part: str) -> str:
        parts[text := mark(next(numbers))] = part
        return text

    text = get_text_content(message)
    shown: Shown = {"role": message["role"], "content": _content(named("text") if text.strip() else text, form)}
    if "tool_calls" in message and form.calls is not None:
        calls = enumerate(message["tool_calls"])
        shown["tool_calls"] = [_marked_call(call, f"tool call {index}", form.calls, named) for index, call in calls]
    if get_thinking(message).strip():
        shown = _with_thinking(shown, named("thinking"), form)
    if "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    if "name" in message:
        shown["name"] = message["name"] if message["role"] == "tool" else named("name")
    return Marked(shown, parts)


def _marked_call(call: ToolCall, which: str, form: CallForm, named: Callable[[str], str]) -> Shown:
    name = named(f"name of {which}")
    is_empty = not call.function.arguments.strip("{} \n\t")
    arguments = {} if is_empty else {named(f"arguments of {which}"): named(f"arguments of {which}")}
    call_id = call.id
    if call_id is not None and form.named_by_id:
        call_id = call_id.replace(call.function.name, name)
    return _call(name, arguments, call_id, form)


def check_nothing_is_lost(
    template: Template, messages: Sequence[Message], shown: Sequence[Shown], form: Form, *, prompt: bool
) -> None:
    """A template may drop what it does not know without a word: a system message, the result of a tool, text beside a
    call. Each part of each message must be found where the chat is written with marks in their place. Only the thinking
    of earlier turns may go missing, if it is written as long as its message is the last: families that drop it mean to.

    `shown` are the messages as they are given to the template, from which the answer is asked for with `prompt`.
    """
    numbers = count(10)
    all_marked = [marked(message, form, numbers) for message in messages]
    marks = [message.shown for message in all_marked]
    text = template.try_text(marks, prompt=prompt)
    if text is None:  # the template looks at what is said: it did not refuse the chat itself
        text = template.text(shown, prompt=prompt)
        all_marked = [Marked(given, _texts(given)) for given in shown]
    for index, (_, parts) in enumerate(all_marked):
        for text_of_part, part in parts.items():
            if text_of_part in text:
                continue
            if part == "thinking" and text_of_part in (template.try_text(marks[: index + 1]) or ""):
                continue
            raise InvalidRequest(
                f"the chat template leaves out the {part} of message {index} ({messages[index]['role']}), so the model "
                "would not see it: remove it, or use the renderer of the model's family"
            )


def _texts(shown: Shown) -> dict[str, str]:
    content: object = shown["content"]
    return {content.strip(): "text"} if isinstance(content, str) else {}

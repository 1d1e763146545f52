"""A renderer for any model whose tokenizer has a chat template. Nothing here knows a family: how the template wants
what a message says is found in `template_forms`, what ends a turn in `template_ends`; where a message begins and ends,
by rendering parts of the chat and comparing the texts, never by searching token ids.

Tokens are those of the template's own text, begin-of-text included. Answers are parsed to text and thinking; tool calls
stay in the text as the model wrote them: a family's own renderer takes them apart.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from stovetop.errors import InvalidRequest
from stovetop.renderers.base import (
    ParseTermination,
    Span,
    SupervisedExample,
    TrainOnWhat,
    add_prefill,
    assistant_message,
    encode_pieces,
    parsed_at_once,
    remake,
    require_trained,
    split_at_stop,
    split_at_stop_text,
    supervised_examples,
    trained_messages,
    weigh,
)
from stovetop.renderers.messages import ContentPart, Message, Role, TextPart, ThinkingPart, ToolSpec, check_messages
from stovetop.renderers.streaming import MessageDelta
from stovetop.renderers.template_ends import (
    Ending,
    Frame,
    answer_behind,
    answer_ending,
    answer_frame,
    call_ending,
    thinking_frame,
)
from stovetop.renderers.template_forms import (
    CALL_ID,
    Form,
    Shown,
    Template,
    before_marks,
    call_message,
    check_nothing_is_lost,
    find_form,
    mark,
    marked,
    opening,
    question,
    result_message,
    show,
)
from stovetop.tokenizer import SafeEncoder, named
from stovetop.tokenizing import Tokenizer
from stovetop.types import ModelInput

_THINKING_TAG = re.compile("</?think>")
_ANSWERS = ("a", " a \n", "\n\na")  # a template, or a tokenizer, may not leave white space at the edges as it is


@dataclass(frozen=True, slots=True)
class ChatTemplateRenderer:
    """See `base.Renderer`. `options` are what the template itself understands: `enable_thinking`, `tools`.

    Where the template ends a turn only once another follows, the last answer is trained with what would follow it up to
    the end of the stop, which the template leaves out.
    """

    tokenizer: Tokenizer
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    stops: tuple[str, ...] = field(init=False)  # what ends an answer, and, if that differs, a message with calls
    has_extension_property: bool = field(init=False)
    supports_streaming: bool = field(init=False, default=False)
    disables_thinking: bool = field(init=False, default=False)
    _template: Template = field(init=False, repr=False)
    _form: Form = field(init=False, repr=False)
    _encoder: SafeEncoder = field(init=False, repr=False)
    _answer_ending: Ending = field(init=False, repr=False)
    _call_ending: Ending = field(init=False, repr=False)
    _frames: tuple[Frame, ...] = field(init=False, repr=False)  # around an answer: without thinking, and with it

    def __post_init__(self) -> None:
        asked = Template(self.tokenizer, self.options)
        source = asked.source
        asked.check_options()
        template, form = find_form(asked)
        encoder = SafeEncoder.of(self.tokenizer, template=source, opening=opening(template, form))
        ending = answer_ending(template, form, encoder)
        calls = call_ending(template, form, encoder, ending) or ending
        found = {
            "_template": template,
            "_form": form,
            "_encoder": encoder,
            "_answer_ending": ending,
            "_call_ending": ending if ending.in_text or calls.in_text else calls,
            "_frames": tuple(
                frame for find in (answer_frame, thinking_frame) if (frame := find(template, form, ending)) is not None
            ),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stops", tuple(dict.fromkeys((ending.stop, self._call_ending.stop))))
        object.__setattr__(self, "has_extension_property", self._extends())

    def __reduce__(self) -> tuple[object, ...]:
        return remake, (ChatTemplateRenderer, named(self.tokenizer), dict(self.options))

    def get_stop_sequences(self) -> list[str] | list[int]:
        if self._answer_ending.in_text:
            return list(self.stops)
        return [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]

    def build_generation_prompt(
        self, messages: Sequence[Message], role: Role = "assistant", prefill: str | None = None
    ) -> ModelInput:
        shown = self._shown(messages)
        text = self._template.text(shown, prompt=True) if role == "assistant" else self._header(shown, role)
        check_nothing_is_lost(self._template, messages, shown, self._form, prompt=role == "assistant")
        return add_prefill(self._encoder, encode_pieces(self._encoder, (text,)), prefill)

    def build_supervised_example(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> SupervisedExample:
        """The whole chat as the template writes it. What it puts behind the last stop token has weight 0."""
        train_on_what = TrainOnWhat(train_on_what)
        trained = trained_messages(messages, train_on_what)
        shown = self._shown(messages)
        check_nothing_is_lost(self._template, messages, shown, self._form, prompt=False)
        if messages and messages[-1]["role"] == "assistant" and trained[-1]:
            whole, _ = self._answered(shown, self._ending_of(messages[-1]))
        else:
            whole = self._template.text(shown)
        if train_on_what is TrainOnWhat.ALL_TOKENS:
            bos = self._encoder.bos if whole.startswith(self._encoder.bos) else ""
            spans = [Span((bos,), 0.0), Span((whole.removeprefix(bos),), 1.0)]
        else:
            spans = self._spans(messages, shown, whole, [index for index, yes in enumerate(trained) if yes])
        return require_trained(weigh(self._encoder, spans), messages, train_on_what)

    def build_supervised_examples(
        self, messages: Sequence[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[SupervisedExample]:
        return supervised_examples(self, messages, TrainOnWhat(train_on_what), merge=True)

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, ParseTermination]:
        if self._answer_ending.in_text:
            text, termination = split_at_stop_text(tokens, self.tokenizer, self._answer_ending.stop)
        else:
            stop_tokens = [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
            answer, termination = split_at_stop(tokens, self.tokenizer, stop_tokens)
            text = self.tokenizer.decode(answer)
        return self._parsed(text), termination

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

    def _shown(self, messages: Sequence[Message]) -> list[Shown]:
        check_messages(messages)
        return [show(message, index, self._form, self._encoder) for index, message in enumerate(messages)]

    def _ending_of(self, message: Message) -> Ending:
        return self._call_ending if message.get("tool_calls") else self._answer_ending

    def _spans(
        self, messages: Sequence[Message], shown: Sequence[Shown], whole: str, trained: Sequence[int]
    ) -> list[Span]:
        spans: list[Span] = []
        position = 0
        for index in trained:
            if messages[index]["role"] == "assistant":
                ending = self._ending_of(messages[index])
                until_here, start = self._answered(shown[: index + 1], ending)
                end = self._answer_end(messages[index], index, until_here, start, ending)
                self._check_tagged_text(shown[index], index, until_here[start:end])
                self._check_all_is_trained(shown[:index], messages[index], index, ending)
            else:
                until_here = self._template.text(shown[: index + 1])
                start = len(self._header(shown[:index], messages[index]["role"]))
                end = self._turn_end(until_here, start)
            if whole[:end] != until_here[:end]:
                raise InvalidRequest(
                    f"the chat template writes message {index}, or what stands before it, in another way once later "
                    "messages follow, so one example cannot train on it as it would be sampled; call "
                    "build_supervised_examples, or use train_on_what=last_assistant_message"
                )
            spans += [Span((whole[position:start],), 0.0), Span((whole[start:end],), 1.0)]
            position = end
        return [*spans, Span((whole[position:],), 0.0)]

    def _answered(self, shown: Sequence[Shown], ending: Ending) -> tuple[str, int]:
        """The text of these messages, of which the last answers, with its end; and where its output begins."""
        prompt, text = self._template.text(shown[:-1], prompt=True), self._template.text(shown)
        if text.startswith(prompt):
            return text + ending.unwritten, len(prompt)
        answer = answer_behind(prompt, text)
        if answer is None:
            raise InvalidRequest(
                f"the chat template does not begin message {len(shown) - 1} (assistant) as it prompts for it, so it "
                f"cannot be trained on as it would be sampled. The prompt ends with {prompt[-40:]!r}, the message is "
                f"written {text[-80:]!r}. Where the prompt begins or ends thinking, give the answer a thinking part or "
                "none, or set an option of the template such as enable_thinking; or use the renderer of the family"
            )
        return prompt + answer + ending.unwritten, len(prompt)

    def _answer_end(self, message: Message, index: int, text: str, start: int, ending: Ending) -> int:
        """Behind the stop, which what a message says cannot hold: as a token, it is protected there."""
        num_stops = sum(text.count(stop, start) for stop in self.stops)
        if num_stops != 1 or ending.stop not in text[start:]:
            told = f"with {ending.stop!r} {num_stops} times" if num_stops else f"without its end, {ending.stop!r}"
            raise InvalidRequest(
                f"the chat template writes message {index} {told}; as sampled, it ends once: {message}"
            )
        return text.index(ending.stop, start) + len(ending.stop)

    def _check_all_is_trained(self, before: Sequence[Shown], message: Message, index: int, ending: Ending) -> None:
        """Whatever the message says must be written before its end."""
        shown, parts = marked(message, self._form, count(10))
        text = self._template.try_text([*before, shown])
        if text is None:
            return
        written = (text + ending.unwritten)[: (text + ending.unwritten).rfind(ending.stop)]
        for mark_of_part, part in parts.items():
            if mark_of_part not in written:
                raise InvalidRequest(
                    f"the chat template writes the {part} of message {index} behind the end of its turn, "
                    f"{ending.stop!r}, or not at all, so it would not be trained on: {message}"
                )
        prompt = self._template.text(before, prompt=True)
        if not parts or message.get("tool_calls") or not text.startswith(prompt):
            return
        known = {found[0] for frame in self._frames for found in self._encoder.find_foreign(frame.before)}
        for found in self._encoder.find_foreign(before_marks(text.removeprefix(prompt))):
            if self._frames and found[0] not in known:
                raise InvalidRequest(
                    f"the chat template begins message {index} with {found[0]!r}, and does not prompt with that, so "
                    f"what says who speaks would be trained on: {message}"
                )

    def _check_tagged_text(self, shown: Shown, index: int, output: str) -> None:
        """Of a plain string with tags of thinking, templates may keep what stands behind them alone."""
        content: object = shown["content"]
        for piece in _THINKING_TAG.split(content) if isinstance(content, str) else []:
            if piece.strip() not in output:
                raise InvalidRequest(
                    f"the chat template leaves out what message {index} says beside a tag of thinking, so it would not "
                    f"be trained on; remove it, or make it a thinking part: {piece[:80]!r}"
                )

    def _turn_end(self, text: str, start: int) -> int:
        """Behind the first stop token. Some families end only the assistant's messages."""
        ends = [text.index(stop, start) + len(stop) for stop in self.stops if stop in text[start:]]
        return min(ends, default=len(text))

    def _header(self, shown: Sequence[Shown], role: Role) -> str:
        """The text up to where a next message of this role has its content."""
        labels = {"tool_call_id": CALL_ID, "name": "f"} if role == "tool" else {}
        spoken = {**question(self._form), "role": role, **labels}
        text = self._template.text([*shown, spoken])
        if mark(0) not in text:
            raise InvalidRequest(f"the chat template writes no messages of this role: {role!r}")
        return text[: text.rindex(mark(0))]

    # ---- what the template is like -----------------------------------------------------------------------------

    def _extends(self) -> bool:
        """Whether a prompt that follows an answer begins with the tokens of the answer and of what it answered."""
        answers = [(frame, text, "r") for frame in self._frames for text in _ANSWERS]
        answers += [(frame, "a", " r\n") for frame in self._frames if frame.between is not None]
        return bool(answers) and all(self._extends_answer(*one) for one in answers) and self._extends_calls()

    def _extends_answer(self, frame: Frame, text: str, thinking: str) -> bool:
        said = frame.around(text, thinking)
        answered = show(self._parsed(said), 1, self._form, self._encoder)
        # Another question than the first: some templates write tools before the last one, and find it by comparing.
        chat = [question(self._form), answered, question(self._form, 3)]
        return self._goes_on(chat[:1], said + self._answer_ending.stop, chat)

    def _extends_calls(self) -> bool:
        if self._form.calls is None:
            return True
        chat = [question(self._form), call_message(self._form), result_message(self._form)]
        text = self._template.text(chat[:2]) + self._call_ending.unwritten
        turn = text.removeprefix(self._template.text(chat[:1], prompt=True))
        end = turn.find(self._call_ending.stop)
        return end >= 0 and self._goes_on(chat[:1], turn[: end + len(self._call_ending.stop)], chat)

    def _goes_on(self, asked: Sequence[Shown], answer: str, chat: Sequence[Shown]) -> bool:
        """Whether the prompt for what follows `chat` begins with the tokens of the prompt for what follows `asked`, and
        of the answer that came; a chat that the template refuses need not."""
        prompt, following = self._template.try_text(asked, prompt=True), self._template.try_text(chat, prompt=True)
        if prompt is None or following is None:
            return True
        seen = weigh(self._encoder, [Span((prompt,), 0.0), Span((answer,), 1.0)]).model_input.to_ints()
        return self._encoder.encode(following)[: len(seen)] == seen

    # ---- answers to messages -----------------------------------------------------------------------------------

    def _parsed(self, text: str) -> Message:
        """Without what the template itself puts around what an answer says; without that it is text as it is."""
        for frame in sorted(self._frames, key=lambda frame: len(frame.before), reverse=True):
            if not (text.startswith(frame.before) and text.endswith(frame.after)):
                continue
            said = text[len(frame.before) : len(text) - len(frame.after)]
            if frame.between is None:
                return assistant_message(said)
            thinking, between, said = said.partition(frame.between)
            if between:
                parts: list[ContentPart] = [ThinkingPart(type="thinking", thinking=thinking)]
                return Message(
                    role="assistant", content=[*parts, *([TextPart(type="text", text=said)] if said else [])]
                )
        return assistant_message(text)

"""What ends an assistant's turn in the text of a chat template, and what stands around what it says. All of it is
found by writing short chats with marks in them and comparing the texts: what follows a message when the chat ends with
it, and what follows when another message comes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stovetop.errors import InvalidRequest
from stovetop.renderers.template_forms import (
    Form,
    Shown,
    Template,
    answer,
    before_marks,
    behind_marks,
    call_message,
    is_marked,
    mark,
    question,
    result_message,
    thinking_answer,
)
from stovetop.tokenizer import SafeEncoder

_TAG = re.compile(r"<[^<>\s]{1,40}>")


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a turn. `stop` is a control token, or, `in_text`, the words that begin the next turn. A template that
    ends a turn only once another follows (GLM's turns end where the next one begins) leaves the last one open:
    `unwritten` is what follows it up to the end of the stop."""

    stop: str
    unwritten: str = ""
    in_text: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around what an answer says, from the end of the prompt to the stop: before its thinking,
    between that and its text, and after this. An answer without thinking has `before` alone: layout, an empty block of
    thinking."""

    before: str
    after: str
    between: str | None = None  # None: around an answer without thinking

    def around(self, text: str, thinking: str) -> str:
        """An answer as the template writes it: this text, behind this thinking where the frame has room for it."""
        return f"{self.before}{'' if self.between is None else thinking + self.between}{text}{self.after}"


def answer_ending(template: Template, form: Form, encoder: SafeEncoder) -> Ending:
    """What ends an answer without calls. A template that would let the model go on is refused."""
    chat = [question(form), answer(form)]
    ending = _ending(template, encoder, chat, question(form, 2))
    if ending is None:
        _, _, rest = template.text(chat).rpartition(mark(1))
        raise InvalidRequest(
            "the chat template ends an assistant message without a control token and nothing begins the next turn, so "
            f"nothing would stop the model; use a renderer written for it. It ends with: {rest!r}"
        )
    return ending


def call_ending(template: Template, form: Form, encoder: SafeEncoder, of_answers: Ending) -> Ending | None:
    """What ends a message that calls tools; None if it is not known what. It may be what ends answers, or not."""
    if form.calls is None:
        return None
    return _ending(template, encoder, [question(form), call_message(form)], result_message(form), of_answers)


def answer_frame(template: Template, form: Form, ending: Ending) -> Frame | None:
    """None where an answer does not begin as it is prompted for."""
    turn = _turn(template, form, answer(form), ending)
    if turn is None:
        return None
    before, _, after = turn.partition(mark(1))
    return Frame(before, after)


def thinking_frame(template: Template, form: Form, ending: Ending) -> Frame | None:
    """The same for an answer after thinking; None, too, where the template writes none."""
    turn = None if form.thinking is None else _turn(template, form, thinking_answer(form, 2, 1), ending)
    if turn is None or not 0 <= turn.find(mark(2)) < turn.index(mark(1)):
        return None
    before, _, rest = turn.partition(mark(2))
    between, _, after = rest.partition(mark(1))
    return Frame(before, after, between) if between else None


def _turn(template: Template, form: Form, said: Shown, ending: Ending) -> str | None:
    """What follows the prompt, up to the stop."""
    text = template.try_text([question(form), said])
    if text is None:
        return None
    prompt = template.text([question(form)], prompt=True)
    turn = text.removeprefix(prompt) if text.startswith(prompt) else answer_behind(prompt, text)
    if turn is None:
        return None
    turn += ending.unwritten
    turn = turn[: max(0, turn.rfind(ending.stop))]
    return turn if mark(1) in turn else None


def _ending(
    template: Template, encoder: SafeEncoder, chat: list[Shown], following: Shown, known: Ending | None = None
) -> Ending | None:
    last = template.text(chat)
    said = behind_marks(last)
    rest, then = last[said:], last[said:]  # what follows if the chat ends there, and if it goes on
    more = template.try_text([*chat, following])
    if more is not None and more[:said] == last[:said] and is_marked(more[said:]):
        then = before_marks(more[said:])
    controls = encoder.find_foreign(rest)
    num_common = num_shared(rest, then)
    ends = [found for found in controls if found.end() <= num_common]
    if ends and rest[ends[-1].end() :].strip():  # more is written behind the turn, such as the beginning of the next
        opener = next((found[0] for found in encoder.find_foreign(last) if found[0] != encoder.bos), "")
        while len(ends) > 1 and ends[-1][0] == opener:
            ends.pop()
    if ends:
        return Ending(ends[-1][0])
    if known is not None and known.stop in [found[0] for found in controls]:
        return known
    if controls:
        return Ending(_end_of_run(controls))
    return _unwritten_ending(encoder, rest, then)


def num_shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours),
        min(len(one), len(other)),
    )


def answer_behind(prompt: str, text: str) -> str | None:
    """Some prompts say more than the template writes before the answer: a block of thinking that is over. The answer is
    what stands in `text` without it, and is trained behind the whole prompt, as it would be sampled. None where what
    the prompt adds is not over, and where the texts differ in anything else.

    >>> answer_behind("<bot><think></think>", "<bot>A<end>")
    'A<end>'
    """
    shared = num_shared(prompt, text)
    for tag in (*_TAG.finditer(prompt), *_TAG.finditer(text)):
        if tag.start() < shared < tag.end():
            shared = tag.start()
    added, rest = prompt[shared:], text[shared:]
    tags = _TAG.findall(added)
    if len(tags) < 2 or tags[0] == tags[-1] or not added.startswith(tags[0]) or not added.rstrip().endswith(tags[-1]):
        return None
    overlap = next((size for size in range(min(len(added), len(rest)), 0, -1) if added.endswith(rest[:size])), 0)
    return rest[overlap:]


def _end_of_run(controls: Sequence[re.Match[str]]) -> str:
    """The last of the control tokens that follow the first at once."""
    stop, *others = controls
    for found in others:
        if found.start() != stop.end():
            break
        stop = found
    return stop[0]


def _unwritten_ending(encoder: SafeEncoder, rest: str, then: str) -> Ending | None:
    """What ends a turn that the template leaves open as long as it is the last."""
    added = then.removeprefix(rest)
    if not then.startswith(rest):
        return None
    controls = encoder.find_foreign(added)
    if controls and not added[: controls[0].start()].strip():
        return Ending(controls[0][0], unwritten=added[: controls[0].end()])
    words = then.rstrip()
    if controls or len(words) <= len(rest):
        return None
    return Ending(words, unwritten=words[len(rest) :], in_text=True)

"""What has to hold of every renderer, whatever the chat: each property as one check, which names what is wrong.

A check takes the renderer, its row of `families.py` and a chat that ends with the assistant's message.
"""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from renderers.conversations import hostile
from renderers.families import Family
from renderers.languages import trained_tokens
from stovetop.renderers.base import ParseTermination, Renderer, TrainOnWhat
from stovetop.renderers.messages import Message, get_text_content, get_thinking


def parity(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """Prompt and example are the template's, token for token. Behind the last stop token the example may be shorter by
    white space; and where the template's own text has one token across the border of prompt and answer, it has two."""
    if family.oracle is None:
        return
    encode = renderer.tokenizer.encode
    prompt, whole = family.oracle.text(messages[:-1], prompt=True), family.oracle.text(messages, prompt=False)
    assert renderer.build_generation_prompt(messages[:-1]).to_ints() == encode(prompt, add_special_tokens=False)
    got = renderer.build_supervised_example(messages).model_input.to_ints()
    expected = encode(whole, add_special_tokens=False)
    if got != expected[: len(got)] and whole.startswith(prompt):
        parts = (prompt, whole.removeprefix(prompt))
        expected = [token for part in parts for token in encode(part, add_special_tokens=False)]
    assert got == expected[: len(got)]
    assert renderer.tokenizer.decode(expected[len(got) :]).strip() == ""


def the_example_starts_with_the_prompt(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
    example = renderer.build_supervised_example(messages)
    assert example.model_input.to_ints()[: len(prompt)] == prompt
    assert not example.weights[: len(prompt)].any()
    assert len(example.weights) == example.model_input.length


def the_stop_is_trained_once(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """At the end of what is trained; whatever the answer says."""
    stops = renderer.get_stop_sequences()
    for spoken in (messages, _with_stops_spelt_out(renderer, messages)):
        trained = trained_tokens(renderer.build_supervised_example(spoken))
        if isinstance(stops[0], int):
            assert [token for token in trained if token in stops] == trained[-1:]
    if isinstance(stops[0], str):
        text = renderer.tokenizer.decode(trained_tokens(renderer.build_supervised_example(messages)))
        assert text.endswith(stops[0])
        assert text.count(stops[0]) == 1


def _with_stops_spelt_out(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    ids = [stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)]
    said = get_text_content(messages[-1]) + "".join(f"x{renderer.tokenizer.decode([stop])}" for stop in ids)
    return [*messages[:-1], {**messages[-1], "content": said}]


def headers_are_not_trained(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """Each run of trained tokens begins where a prompt ends: one run for each message of the assistant."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    expected = [renderer.build_generation_prompt(messages[:index]).length for index in answers]
    found: list[int] = []
    for example in renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES):
        assert len(example.weights) == example.model_input.length
        found += [at for at, (before, now) in enumerate(pairwise([0.0, *example.weights])) if now > before]
    assert found == expected


def sampled_tokens_come_back(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """Token in, token out: what a model would have sampled, read and written again, is the same tokens."""
    example = renderer.build_supervised_example(messages)
    message, termination = renderer.parse_response(trained_tokens(example))
    assert termination is ParseTermination.STOP_SEQUENCE
    again = renderer.build_supervised_example([*messages[:-1], message])
    assert again.model_input.to_ints() == example.model_input.to_ints()
    assert again.weights.tolist() == example.weights.tolist()


def messages_come_back(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """The message that was written is the one that is read, with its thinking and its calls."""
    message, _ = renderer.parse_response(trained_tokens(renderer.build_supervised_example(messages)))
    expected = _said(messages[-1])
    assert _said(message) == expected._replace(
        text=family.text(expected.text),
        thinking=family.thinking(expected.thinking),
        calls=[call._replace(arguments=_each(call.arguments, family)) for call in expected.calls],
    )
    assert "unparsed_tool_calls" not in message


class _Call(NamedTuple):
    name: str
    arguments: object
    id: str | None


class _Said(NamedTuple):
    text: str
    thinking: str
    calls: list[_Call]


def _said(message: Message) -> _Said:
    calls = [
        _Call(call.function.name, json.loads(call.function.arguments), call.id)
        for call in message.get("tool_calls", [])
    ]
    return _Said(get_text_content(message), get_thinking(message), calls)


def _each(value: object, family: Family) -> object:
    """What a tokenizer that normalizes text makes of a JSON value."""
    tokenizer = family.tokenizer()
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)))


def nobody_types_a_control_token(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """Whatever the others say, control tokens are those of the chat without it; and it still stands there as text."""
    typed = hostile(messages, seed=len(str(messages)))
    controls = set(renderer.tokenizer.get_added_vocab().values())
    plain, got = (renderer.build_supervised_example(chat).model_input.to_ints() for chat in (messages, typed))
    assert [token for token in got if token in controls] == [token for token in plain if token in controls]
    if family.oracle is not None:
        prompt = renderer.build_generation_prompt(typed[:-1]).to_ints()
        expected = family.oracle.tokens(renderer.tokenizer, typed[:-1], prompt=True)
        assert renderer.tokenizer.decode(prompt) == renderer.tokenizer.decode(expected)


def the_callers_messages_stay_as_they_are(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    before = repr(messages)
    renderer.build_generation_prompt(messages)
    renderer.build_supervised_example(messages)
    renderer.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert repr(messages) == before


def the_parser_never_raises(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    """Neither on an answer that was damaged, nor on any tokens at all."""
    rng = random.Random(repr(messages))
    answer = trained_tokens(renderer.build_supervised_example(messages))
    added = sorted(renderer.tokenizer.get_added_vocab().values())
    for _ in range(8):
        damaged = list(answer)
        for _ in range(rng.randrange(1, 4)):
            start, end = sorted(rng.randrange(len(damaged) + 1) for _ in range(2))
            anything = [rng.choice(added), rng.randrange(len(renderer.tokenizer))]
            damaged[start:end] = rng.choice([[], anything[:1], anything, damaged[end:], damaged[start:end] * 2])
        message, termination = renderer.parse_response(damaged)
        assert message["role"] == "assistant"
        assert termination in ParseTermination


def extends(renderer: Renderer, messages: Sequence[Message]) -> bool:
    """Whether each prompt of this chat begins with the prompt before it and the answer to that."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for before, now in pairwise(answers):
        prompt = renderer.build_generation_prompt(messages[:now]).to_ints()
        so_far = renderer.build_supervised_example(messages[: before + 1])
        prefix = renderer.build_generation_prompt(messages[:before]).to_ints() + trained_tokens(so_far)
        if prompt[: len(prefix)] != prefix:
            return False
    return True


def a_prompt_extends_the_one_before(renderer: Renderer, family: Family, messages: Sequence[Message]) -> None:
    assert extends(renderer, messages) or not renderer.has_extension_property


PROPERTIES = (
    parity,
    the_example_starts_with_the_prompt,
    the_stop_is_trained_once,
    sampled_tokens_come_back,
    messages_come_back,
    nobody_types_a_control_token,
    the_callers_messages_stay_as_they_are,
    the_parser_never_raises,
)

# These compare a prompt with the example that shows the same turns as history. The template's text may put a header's
# last line break and an answer's first into one token, which no sampler would: such answers have their own test.
PROPERTIES_OF_TRIMMED_CHATS = (headers_are_not_trained, a_prompt_extends_the_one_before)

"""What has to hold of every renderer, whatever the chat: each property as one check, which names what is wrong.

A check takes a case: a chat that ends with the assistant's message, and what the renderer makes of it, which is made
once for all checks.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from renderers.conversations import hostile
from renderers.families import Family
from renderers.languages import trained_tokens
from stovetop.renderers.base import ParseTermination, Renderer, SupervisedExample, TrainOnWhat
from stovetop.renderers.messages import Message, get_text_content, get_thinking
from stovetop.tokenizing import Tokenizer


@dataclass(frozen=True)
class Case:
    renderer: Renderer
    family: Family
    messages: Sequence[Message]
    before: str = field(init=False)  # the messages as they were

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", repr(self.messages))

    @cached_property
    def prompt(self) -> list[int]:
        """For the last message."""
        return self.renderer.build_generation_prompt(self.messages[:-1]).to_ints()

    @cached_property
    def example(self) -> SupervisedExample:
        return self.renderer.build_supervised_example(self.messages)

    @cached_property
    def examples(self) -> list[SupervisedExample]:
        """For every message of the assistant."""
        return self.renderer.build_supervised_examples(self.messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)

    @cached_property
    def prompts(self) -> dict[int, list[int]]:
        """For each message of the assistant, by its index."""
        return {
            index: self.renderer.build_generation_prompt(self.messages[:index]).to_ints()
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant"
        }


@cache
def _added_tokens(tokenizer: Callable[[], Tokenizer]) -> frozenset[int]:
    return frozenset(tokenizer().get_added_vocab().values())


@cache
def _vocabulary_size(tokenizer: Callable[[], Tokenizer]) -> int:
    return len(tokenizer())


def parity(case: Case) -> None:
    """Prompt and example are the template's, token for token. Behind the last stop token the example may be shorter by
    white space; and where the template's own text has one token across the border of prompt and answer, it has two."""
    if case.family.oracle is None:
        return
    encode, write = case.renderer.tokenizer.encode, case.family.oracle.text
    prompt, whole = write(case.messages[:-1], prompt=True), write(case.messages, prompt=False)
    assert case.prompt == encode(prompt, add_special_tokens=False)
    got = case.example.model_input.to_ints()
    expected = encode(whole, add_special_tokens=False)
    if got != expected[: len(got)] and whole.startswith(prompt):
        parts = (prompt, whole.removeprefix(prompt))
        expected = [token for part in parts for token in encode(part, add_special_tokens=False)]
    assert got == expected[: len(got)]
    assert case.renderer.tokenizer.decode(expected[len(got) :]).strip() == ""


def the_example_starts_with_the_prompt(case: Case) -> None:
    num_tokens = len(case.prompt)
    assert case.example.model_input.to_ints()[:num_tokens] == case.prompt
    assert not case.example.weights[:num_tokens].any()
    assert len(case.example.weights) == case.example.model_input.length


def the_stop_is_trained_once(case: Case) -> None:
    """At the end of what is trained; whatever the answer says."""
    stops = case.renderer.get_stop_sequences()
    spelt_out = case.renderer.build_supervised_example(_with_stops_spelt_out(case.renderer, case.messages))
    for example in (case.example, spelt_out):
        trained = trained_tokens(example)
        if isinstance(stops[0], int):
            assert [token for token in trained if token in stops] == trained[-1:]
    if isinstance(stops[0], str):
        text = case.renderer.tokenizer.decode(trained_tokens(case.example))
        assert text.endswith(stops[0])
        assert text.count(stops[0]) == 1


def _with_stops_spelt_out(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    ids = [stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)]
    said = get_text_content(messages[-1]) + "".join(f"x{renderer.tokenizer.decode([stop])}" for stop in ids)
    return [*messages[:-1], {**messages[-1], "content": said}]


def headers_are_not_trained(case: Case) -> None:
    """Each run of trained tokens begins where a prompt ends: one run for each message of the assistant."""
    found: list[int] = []
    for example in case.examples:
        assert len(example.weights) == example.model_input.length
        found += [at for at, (before, now) in enumerate(pairwise([0.0, *example.weights.tolist()])) if now > before]
    assert found == [len(prompt) for prompt in case.prompts.values()]


def sampled_tokens_come_back(case: Case) -> None:
    """Token in, token out: what a model would have sampled, read and written again, is the same tokens."""
    message, termination = case.renderer.parse_response(trained_tokens(case.example))
    assert termination is ParseTermination.STOP_SEQUENCE
    again = case.renderer.build_supervised_example([*case.messages[:-1], message])
    assert again.model_input.to_ints() == case.example.model_input.to_ints()
    assert again.weights.tolist() == case.example.weights.tolist()


def an_answer_without_its_end_is_malformed(case: Case) -> None:
    message, termination = case.renderer.parse_response(trained_tokens(case.example)[:-1])
    assert termination is ParseTermination.MALFORMED
    assert message["role"] == "assistant"


def messages_come_back(case: Case) -> None:
    """The message that was written is the one that is read, with its thinking and its calls."""
    family = case.family
    message, _ = case.renderer.parse_response(trained_tokens(case.example))
    expected = _said(case.messages[-1])
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


def nobody_types_a_control_token(case: Case) -> None:
    """Whatever the others say, control tokens are those of the chat without it; and it still stands there as text."""
    renderer, typed = case.renderer, hostile(case.messages, seed=len(case.before))
    controls = _added_tokens(case.family.tokenizer)
    plain = case.example.model_input.to_ints()
    got = renderer.build_supervised_example(typed).model_input.to_ints()
    assert [token for token in got if token in controls] == [token for token in plain if token in controls]
    if case.family.oracle is not None:
        prompt = renderer.build_generation_prompt(typed[:-1]).to_ints()
        expected = case.family.oracle.tokens(renderer.tokenizer, typed[:-1], prompt=True)
        assert renderer.tokenizer.decode(prompt) == renderer.tokenizer.decode(expected)


def the_callers_messages_stay_as_they_are(case: Case) -> None:
    assert case.prompt
    assert case.example
    assert repr(case.messages) == case.before


def however_many_examples_are_made_the_callers_messages_stay_as_they_are(case: Case) -> None:
    assert case.examples
    assert case.prompts
    assert repr(case.messages) == case.before


def the_parser_never_raises(case: Case) -> None:
    """Neither on an answer that was damaged, nor on any tokens at all."""
    rng = random.Random(case.before)
    answer = trained_tokens(case.example)
    added, num_tokens = sorted(_added_tokens(case.family.tokenizer)), _vocabulary_size(case.family.tokenizer)
    for _ in range(8):
        damaged = list(answer)
        for _ in range(rng.randrange(1, 4)):
            start, end = sorted(rng.randrange(len(damaged) + 1) for _ in range(2))
            anything = [rng.choice(added), rng.randrange(num_tokens)]
            damaged[start:end] = rng.choice([[], anything[:1], anything, damaged[end:], damaged[start:end] * 2])
        message, termination = case.renderer.parse_response(damaged)
        assert message["role"] == "assistant"
        assert termination in ParseTermination


def extends(case: Case) -> bool:
    """Whether each prompt of this chat begins with the prompt before it and the answer to that."""
    for before, now in pairwise(case.prompts):
        so_far = case.renderer.build_supervised_example(case.messages[: before + 1])
        prefix = case.prompts[before] + trained_tokens(so_far)
        if case.prompts[now][: len(prefix)] != prefix:
            return False
    return True


def a_prompt_extends_the_one_before(case: Case) -> None:
    assert extends(case) or not case.renderer.has_extension_property


PROPERTIES = (
    parity,
    the_example_starts_with_the_prompt,
    the_stop_is_trained_once,
    sampled_tokens_come_back,
    an_answer_without_its_end_is_malformed,
    messages_come_back,
    nobody_types_a_control_token,
    the_callers_messages_stay_as_they_are,
    the_parser_never_raises,
)

# These compare a prompt with the example that shows the same turns as history. The template's text may put a header's
# last line break and an answer's first into one token, which no sampler would: such answers have their own test.
PROPERTIES_OF_TRIMMED_CHATS = (
    headers_are_not_trained,
    a_prompt_extends_the_one_before,
    however_many_examples_are_made_the_callers_messages_stay_as_they_are,
)

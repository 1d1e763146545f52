"""Every renderer, over many chats. `--conversations N` says how many; families.py what is known of each renderer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers.conversations import CONTROL_STRINGS, conversation
from renderers.families import FAMILIES
from renderers.languages import chat, trained_tokens
from renderers.properties import PROPERTIES, PROPERTIES_OF_TRIMMED_CHATS, Case
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import ContentPart, Message, ThinkingPart, get_text_content, get_thinking

NAMES = [name for name in supported_renderers() if name in FAMILIES]


def test_every_renderer_is_put_to_the_proof() -> None:
    assert set(supported_renderers()) == set(FAMILIES)


@pytest.mark.parametrize("check", [*PROPERTIES, *PROPERTIES_OF_TRIMMED_CHATS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_property_holds_for_every_chat(name: str, check: Callable[[Case], None], num_conversations: int) -> None:
    trimmed = check in PROPERTIES_OF_TRIMMED_CHATS
    for seed, case in enumerate(_cases(name, trimmed, num_conversations)):
        with _naming(seed, f"{name}{', trimmed' if trimmed else ''}"):
            check(case)


KEEPING = {"strip_thinking_from_history": False}
RENDERERS: list[tuple[str, dict[str, object]]] = [(name, {}) for name in NAMES] + [
    ("qwen3", KEEPING),
    ("qwen3_disable_thinking", KEEPING),
    ("qwen3_instruct", KEEPING | {"writes_thinking": True}),
    ("deepseekv3", {"system_role_as_user": True}),
    ("llama3", {"date": "26 Jul 2024"}),
]
TEXTS = ("A", "", " A \n", "\n\nA", "A\n\n", "\n", " ", "\t", "\r\nA\u00a0")
THOUGHTS = (None, "R", " R\n", "\n\nR")


@pytest.mark.parametrize(("name", "options"), RENDERERS)
def test_the_extension_property_is_true_exactly_when_sampled_answers_are_found_in_the_next_prompt(
    name: str, options: dict[str, object]
) -> None:
    """Whatever white space an answer, or its thinking, begins or ends with."""
    renderer = get_renderer(name, FAMILIES[name].tokenizer(), FAMILIES[name].image_processor(), **options)
    thoughts = THOUGHTS if FAMILIES[name].features.thinking or "writes_thinking" in options else (None,)
    goes_on = [
        is_found_in_the_next_prompt(renderer, text, thinking, spaced)
        for text in TEXTS
        for thinking in thoughts
        for spaced in (True, False)
    ]
    assert all(goes_on) == renderer.has_extension_property


def is_found_in_the_next_prompt(renderer: Renderer, text: str, thinking: str | None, spaced: bool) -> bool:
    """An answer is sampled as the family lays it out; unless `spaced`, without a space that it may have put first."""
    parts: list[ContentPart] = [{"type": "text", "text": "TEXT"}]
    content = "TEXT" if thinking is None else [ThinkingPart(type="thinking", thinking="THOUGHT"), *parts]
    example = renderer.build_supervised_example([*chat("U"), Message(role="assistant", content=content)])
    said = renderer.tokenizer.decode(trained_tokens(example)).replace("TEXT", text).replace("THOUGHT", thinking or "")
    answer = renderer.tokenizer.encode(said if spaced else said.removeprefix(" "), add_special_tokens=False)
    so_far = [*renderer.build_generation_prompt(chat("U")).to_ints(), *answer]
    message, _ = renderer.parse_response(answer)
    following = renderer.build_generation_prompt([*chat("U"), message, *chat("U")]).to_ints()
    return following[: len(so_far)] == so_far


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(), thought=st.text(min_size=1), data=st.data())
def test_what_a_renderer_writes_it_reads_again(name: str, text: str, thought: str, data: st.DataObject) -> None:
    """Any text at all: control strings and lone noncharacters among it."""
    family = FAMILIES[name]
    renderer = _renderer(name)
    text = data.draw(st.sampled_from([text, text + data.draw(st.sampled_from(CONTROL_STRINGS)) + text]))
    parts: list[ContentPart] = [{"type": "text", "text": text}]
    thinks = family.features.thinking and data.draw(st.booleans())
    answer = Message(
        role="assistant", content=[ThinkingPart(type="thinking", thinking=thought), *parts] if thinks else parts
    )
    if name == "role_colon" and "\n\nUser:" in f"{text}\n\n":
        return  # which is the stop sequence
    message, termination = renderer.parse_response(
        trained_tokens(renderer.build_supervised_example([*chat("U"), answer]))
    )
    assert termination.is_stop_sequence
    assert get_text_content(message) == family.text(text)
    assert get_thinking(message) == (family.thinking(thought) if thinks else "")


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_of_sampled_tokens_goes_on_from_them_or_is_seen_not_to(name: str) -> None:
    """Five turns, some of tokens that no text is encoded to: written again, they are others, and the next prompt does
    not begin with them. So what comes next is a sequence of its own."""
    family = FAMILIES[name]
    renderer = get_renderer(name, family.tokenizer(), family.image_processor())
    encode = partial(renderer.tokenizer.encode, add_special_tokens=False)
    stop = renderer.get_stop_sequences()[0]
    end = encode(stop) if isinstance(stop, str) else [stop]
    fine = trained_tokens(renderer.build_supervised_example(chat("U", "fine")))[: -len(end)]
    split = [token for text in ("a", "\n", "\n", "t", "he") for token in encode(text)]
    messages, extended = chat("U"), list[bool]()
    for answer in (fine, fine + split, fine + encode("𓀀")[:-1], fine + encode("x"), fine):
        so_far = [*renderer.build_generation_prompt(messages).to_ints(), *answer, *end]
        message, termination = renderer.parse_response([*answer, *end])
        assert termination.is_stop_sequence
        written = trained_tokens(renderer.build_supervised_example([*messages, message]))
        messages = [*messages, message, *chat("U")]
        extended.append(renderer.build_generation_prompt(messages).to_ints()[: len(so_far)] == so_far)
        if renderer.has_extension_property:
            assert extended[-1] == (written == [*answer, *end])
    assert not extended[2]  # half a character


@cache
def _renderer(name: str) -> Renderer:
    family = FAMILIES[name]
    return get_renderer(name, family.tokenizer(), family.image_processor())


@lru_cache(maxsize=2)  # the checks of one renderer come one after the other
def _cases(name: str, trimmed: bool, num_conversations: int) -> list[Case]:
    family = FAMILIES[name]
    renderer = get_renderer(name, family.tokenizer(), family.image_processor())
    features = replace(family.features, edges=False) if trimmed else family.features
    return [Case(renderer, family, conversation(seed, features)) for seed in range(num_conversations)]


@contextmanager
def _naming(seed: int, whose: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"the chat is that of seed {seed} with the features of {whose}")
        raise

"""Every renderer, over many chats. `--conversations N` says how many; families.py what is known of each renderer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

import pytest

from renderers.conversations import conversation
from renderers.families import FAMILIES
from renderers.languages import chat, trained_tokens
from renderers.properties import PROPERTIES, PROPERTIES_OF_TRIMMED_CHATS, Case, extends
from stovetop.renderers import get_renderer, supported_renderers

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


@pytest.mark.parametrize("name", NAMES)
def test_a_renderer_without_the_extension_property_needs_to_be_without(name: str, num_conversations: int) -> None:
    cases = _cases(name, True, num_conversations)
    if not cases[0].renderer.has_extension_property:
        assert not all(map(extends, cases))


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

"""Every renderer, over many chats. `--conversations N` says how many; families.py what is known of each renderer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from renderers.conversations import conversation
from renderers.families import FAMILIES, Family
from renderers.properties import PROPERTIES, PROPERTIES_OF_TRIMMED_CHATS, extends
from stovetop.renderers import get_renderer, supported_renderers
from stovetop.renderers.base import Renderer
from stovetop.renderers.messages import Message

NAMES = [name for name in supported_renderers() if name in FAMILIES]


def test_every_renderer_is_put_to_the_proof() -> None:
    assert set(supported_renderers()) == set(FAMILIES)


Check = Callable[[Renderer, Family, Sequence[Message]], None]


@pytest.mark.parametrize("check", [*PROPERTIES, *PROPERTIES_OF_TRIMMED_CHATS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_property_holds_for_every_chat(name: str, check: Check, num_conversations: int) -> None:
    family = FAMILIES[name]
    renderer = get_renderer(name, family.tokenizer(), family.image_processor())
    trimmed = check in PROPERTIES_OF_TRIMMED_CHATS
    features = replace(family.features, edges=False) if trimmed else family.features
    for seed in range(num_conversations):
        messages = conversation(seed, features)
        with _naming(seed, f"{name}{', trimmed' if trimmed else ''}"):
            check(renderer, family, messages)


@pytest.mark.parametrize("name", NAMES)
def test_a_renderer_without_the_extension_property_needs_to_be_without(name: str, num_conversations: int) -> None:
    family = FAMILIES[name]
    renderer = get_renderer(name, family.tokenizer(), family.image_processor())
    if not renderer.has_extension_property:
        features = replace(family.features, edges=False)
        assert not all(extends(renderer, conversation(seed, features)) for seed in range(num_conversations))


@contextmanager
def _naming(seed: int, whose: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"the chat is that of seed {seed} with the features of {whose}")
        raise

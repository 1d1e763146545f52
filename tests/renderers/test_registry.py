import pickle
from pathlib import Path
from typing import NamedTuple

import pytest

from renderers.families import FAMILIES
from renderers.languages import chatml, save
from stovetop.backends.recording.byte_tokenizer import ByteTokenizer
from stovetop.errors import InvalidRequest, UnknownName
from stovetop.renderers import ImageProcessor, get_renderer, supported_renderers
from stovetop.renderers.messages import Message
from stovetop.renderers.role_colon import RoleColonRenderer
from stovetop.renderers.streaming import StreamingMessageHeader
from stovetop.renderers.template import ChatTemplateRenderer
from stovetop.tokenizer import get_tokenizer
from stovetop.tokenizing import Tokenizer


def make_own(tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> RoleColonRenderer:
    return RoleColonRenderer(tokenizer)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), chatml()], ids=["bytes", "chatml"])
@pytest.mark.parametrize("name", supported_renderers())
def test_every_name_makes_a_renderer(name: str, tokenizer: Tokenizer) -> None:
    assert get_renderer(name, tokenizer, FAMILIES[name].image_processor()).tokenizer is tokenizer


def test_the_names_are_these() -> None:
    assert supported_renderers() == [
        *("chat_template", "deepseekv3", "deepseekv3_disable_thinking"),
        *("gpt_oss_high_reasoning", "gpt_oss_low_reasoning", "gpt_oss_medium_reasoning", "gpt_oss_no_sysprompt"),
        *("kimi_k2", "llama3", "qwen3", "qwen3_disable_thinking", "qwen3_instruct", "qwen3_vl", "qwen3_vl_instruct"),
        "role_colon",
    ]


def test_a_renderer_of_ones_own_is_an_object_or_a_path_to_one() -> None:
    assert isinstance(get_renderer(make_own, ByteTokenizer()), RoleColonRenderer)
    assert isinstance(get_renderer(f"{__name__}:make_own", ByteTokenizer()), RoleColonRenderer)
    with_options = get_renderer(lambda tokenizer, _: ChatTemplateRenderer(tokenizer, {}), ByteTokenizer())
    assert isinstance(with_options, ChatTemplateRenderer)


class OwnRenderer(NamedTuple):
    """Takes no image processor, but options."""

    tokenizer: Tokenizer
    greeting: str = "hello"


def test_a_class_of_ones_own_needs_no_factory_and_takes_options_by_name() -> None:
    tokenizer = ByteTokenizer()
    for name in (OwnRenderer, f"{__name__}:OwnRenderer"):
        assert get_renderer(name, tokenizer) == OwnRenderer(tokenizer)  # pyright: ignore[reportArgumentType]  no renderer
        assert get_renderer(name, tokenizer, greeting="hi") == OwnRenderer(tokenizer, "hi")  # pyright: ignore[reportArgumentType]
        with pytest.raises(UnknownName, match="did you mean 'greeting'"):
            get_renderer(name, tokenizer, greetin="hi")  # pyright: ignore[reportArgumentType]  the same


def test_an_entry_that_binds_an_option_takes_the_others() -> None:
    tokenizer = ByteTokenizer()
    question = [Message(role="user", content="q")]
    for option in ("current_date", "date"):
        dated = get_renderer("gpt_oss_high_reasoning", tokenizer, **{option: "2025-01-01"})
        prompt = tokenizer.decode(dated.build_generation_prompt(question).to_ints())
        assert "Current date: 2025-01-01\n\nReasoning: high" in prompt
    with pytest.raises(InvalidRequest, match="one option; pass one: '2025-01-01', '2025-01-02'"):
        get_renderer("gpt_oss_low_reasoning", tokenizer, date="2025-01-01", current_date="2025-01-02")
    with pytest.raises(UnknownName, match="option of renderer 'gpt_oss_no_sysprompt'"):
        get_renderer("gpt_oss_no_sysprompt", tokenizer, current_date="2025-01-01")


@pytest.mark.parametrize("name", sorted(set(supported_renderers()) - {"chat_template", "kimi_k2"}))
def test_a_speaker_whose_name_cannot_be_written_is_refused(name: str) -> None:
    renderer = get_renderer(name, FAMILIES[name].tokenizer(), FAMILIES[name].image_processor())
    with pytest.raises(InvalidRequest, match=r"message 0.*leave out name='Bob'"):
        renderer.build_generation_prompt([Message(role="user", content="q", name="Bob")])


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'chat_template'"):
        get_renderer("chat_tmplate", ByteTokenizer())


@pytest.mark.parametrize("path", ["no_such_module:x", "stovetop.renderers:no_such_name"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be imported"):
        get_renderer(path, ByteTokenizer())


def test_a_renderer_takes_the_options_of_its_family_and_names_a_misspelt_one() -> None:
    keeps = get_renderer("qwen3", chatml(), strip_thinking_from_history=False)
    assert keeps.has_extension_property
    assert not get_renderer("qwen3", chatml()).has_extension_property
    with pytest.raises(UnknownName, match=r"option of renderer 'qwen3' .* did you mean 'strip_thinking_from_history'"):
        get_renderer("qwen3", chatml(), strip_thinking_from_histry=False)


@pytest.mark.parametrize("name", supported_renderers())
def test_every_renderer_pickles(name: str) -> None:
    renderer = get_renderer(name, ByteTokenizer(), FAMILIES[name].image_processor())
    again = pickle.loads(pickle.dumps(renderer))
    messages = [Message(role="user", content="hi")]
    assert again.build_generation_prompt(messages) == renderer.build_generation_prompt(messages)
    assert type(again) is type(renderer)


@pytest.mark.parametrize("name", supported_renderers())
def test_a_pickled_renderer_finds_its_tokenizer_by_name(name: str, tmp_path: Path) -> None:
    save(chatml(), tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    pickled = pickle.dumps(get_renderer(name, tokenizer, FAMILIES[name].image_processor()))
    assert len(pickled) < 5_000
    assert pickle.loads(pickled).tokenizer is tokenizer


@pytest.mark.parametrize("name", supported_renderers())
def test_every_renderer_streams_the_message_that_it_parses(name: str) -> None:
    renderer = get_renderer(name, FAMILIES[name].tokenizer(), FAMILIES[name].image_processor())
    tokens = renderer.tokenizer.encode(" hi <think>\n\n", add_special_tokens=False)
    first, *_, message = renderer.parse_response_streaming(tokens)
    assert first == StreamingMessageHeader()
    assert message == renderer.parse_response(tokens)[0]
